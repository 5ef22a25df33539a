"""The cost of vLLM's interface in S for adaptive: from trees down to short chains from text alone.

    python -m benchmarks.chain_s MODEL --data DIR --limit 3 --tokens 48

vLLM accepts chains only. Each line removes one more feature, in our own engine. Every step drafts (no budget), and
what is learned from one sequence serves the next. S is tokens per pass after the prompt, independent of times. Prints
a table, which ``benchmarks.vllm`` also puts on its page.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import lookahead
from lookahead.core import Drafter
from lookahead.drafters import Adaptive, PromptLookup
from lookahead.drafters.adaptive.settings import SOURCES
from lookahead.drafters.adaptive.state import AdaptiveState

from .datasets import SETS, load_workload
from .report import markdown_table

#: Rows of a tree, and of the longest chain.
ROWS = 64


def variants(drafted: int) -> dict[str, Drafter]:
    """The drafters by name; the last ones draft at most this many tokens."""
    whole = Adaptive(rows=ROWS, sources=tuple(SOURCES))
    short = replace(whole, chain=True, rows=drafted + 1)
    return {
        f"trees of {ROWS} rows": whole,
        f"chains of up to {ROWS - 1} tokens": replace(whole, chain=True),
        f"chains of up to {drafted} tokens": short,
        "the same, from text alone": replace(short, sources=("suffix", "corpus")),
        f"prompt lookup of {drafted} tokens": PromptLookup(5, drafted),
    }


def rows_of(model: str, dtype: str, data: Path, limit: int, tokens: int, drafted: int) -> list[list[str]]:
    """Cells of each variant: its name, S by data set, and S over all of them.

    Args:
        model: a file or a folder.
        dtype: dtype of the weights.
        data: folder of the data sets.
        limit: prompts of each data set.
        tokens: new tokens per prompt.
        drafted: maximum tokens of a short chain.
    """
    llm = lookahead.load(model, dtype=dtype)
    sets = {name: load_workload(name, limit, data=data) for name in SETS}
    rows = []
    for name, drafter in variants(drafted).items():
        if isinstance(drafter, Adaptive):
            drafter = replace(drafter, state=AdaptiveState(drafter))
        emitted = dict.fromkeys(SETS, 0)
        steps = dict.fromkeys(SETS, 0)
        for number in range(limit):  # alternate between data sets, as requests to a server would
            for workload in SETS:
                prompt = sets[workload][number].tokens(llm.tokenizer)
                stats = llm.generate(prompt, max_new_tokens=tokens, drafter=drafter).stats
                emitted[workload] += stats.new_tokens - 1
                steps[workload] += stats.steps
        each = (f"{emitted[workload] / steps[workload]:.2f}" for workload in SETS)
        rows.append([name, *each, f"{sum(emitted.values()) / sum(steps.values()):.2f}"])
    return rows


def table(rows: Sequence[Sequence[str]]) -> str:
    """The cells of ``rows_of`` as a Markdown table."""
    return markdown_table(["S", *SETS, "all"], rows)


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
    print(table(rows_of(**vars(arguments))))


if __name__ == "__main__":
    main()
