"""The results of the paper (Fu et al., 2024, arXiv 2402.02057) measured again, each by one command.

    python -m benchmarks.paper ablation --data DIR    one of the studies that --help names
    python -m benchmarks.paper ablation --page        the page again, from the committed records
    python -m benchmarks.paper settings --data DIR    S by one setting at a time, with settings that were tried

run in the repository's folder. A study measures, writes its records by text (docs/results/records/NAME.jsonl.gz), and
computes its page and plot from these records alone: the paper's value beside each of ours, and what differs.
"""
