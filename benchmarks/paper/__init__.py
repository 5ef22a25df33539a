"""The paper's laboratory (Fu et al., 2024, arXiv 2402.02057): its tables and figures again, each by one command.

    python -m benchmarks.paper scaling-law | ablation | sampling-quality | end-to-end | parallel | settings

run in the repository's folder. Each but the last measures, draws its figure and writes a page: the command, the
machine, the commit, the table, and in plain words what differs from the paper. The last one prints S by one setting
at a time, with the settings that lost.
"""
