"""Reproductions of the results of the paper (Fu et al., 2024, arXiv 2402.02057), one command each.

    python -m benchmarks.paper ablation --data DIR    run a study; --help lists all of them
    python -m benchmarks.paper ablation --page        rewrite its page from the committed records
    python -m benchmarks.paper settings --data DIR    vary one setting at a time, including rejected ones

Run it in the repository's root folder. A study measures and writes one record per completion
(docs/results/records/NAME.jsonl.gz). Its page and plot are computed from these records alone. The page shows the
paper's values alongside ours and lists what differs.
"""
