"""What vLLM's interface costs adaptive in S: from trees with a window down to short chains from text alone.

    python -m benchmarks.chain_s MODEL --data DIR --limit 3 --tokens 48

vLLM takes chains only. Each line takes something more away, in our own engine. Every step drafts (no budget), and
what is learned of one text serves the next. S is tokens per pass after the prompt; it depends on no times. Prints a
table.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import lookahead
from lookahead.bench.report import markdown_table
from lookahead.core import Drafter
from lookahead.drafters import Adaptive, PromptLookup
from lookahead.drafters.adaptive.settings import SOURCES
from lookahead.drafters.adaptive.state import AdaptiveState

from .datasets import SETS, load_workload


def variants(drafted: int) -> dict[str, Drafter]:
    """Name -> drafter; the last ones draft at most this many tokens."""
    whole = Adaptive(budget=False, sources=tuple(SOURCES))
    short = replace(whole, chain=True, max_rows=drafted + 1)
    return {
        f"trees of {whole.max_rows} rows, with the window": whole,
        "without the window": replace(whole, window_size=0),
        f"chains of up to {whole.max_rows - 1} tokens": replace(whole, chain=True),
        f"chains of up to {drafted} tokens": short,
        "the same, from text alone": replace(short, sources=("suffix", "corpus")),
        f"prompt lookup of {drafted} tokens": PromptLookup(5, drafted),
    }


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=3, help="prompts of each data set")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--drafted", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args(words)
    llm = lookahead.load(arguments.model, dtype=arguments.dtype)
    sets = {name: load_workload(name, arguments.limit, data=arguments.data) for name in SETS}
    rows = []
    for name, drafter in variants(arguments.drafted).items():
        if isinstance(drafter, Adaptive):
            drafter = replace(drafter, state=AdaptiveState(drafter))
        tokens, steps = dict.fromkeys(SETS, 0), dict.fromkeys(SETS, 0)
        for number in range(arguments.limit):  # prompts of one set come at different times, as in a server
            for workload in SETS:
                prompt = sets[workload][number].tokens(llm.tokenizer)
                stats = llm.generate(prompt, max_new_tokens=arguments.tokens, drafter=drafter).stats
                tokens[workload] += stats.new_tokens - 1
                steps[workload] += stats.steps
        each = (f"{tokens[workload] / steps[workload]:.2f}" for workload in SETS)
        rows.append([name, *each, f"{sum(tokens.values()) / sum(steps.values()):.2f}"])
    print(markdown_table(["S", *SETS, "all"], rows))


if __name__ == "__main__":
    main()
