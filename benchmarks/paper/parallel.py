"""Figures 6 and 7 of the paper: S and the rows of each rank with lookahead parallelism, from one process.

The steps of real decoding are recorded, and their trees are sharded as R ranks would shard them, including the rows
that ranks recompute. The widest shard determines the time of a step on R ranks. Strong scaling increases W and G with
R: more ranks evaluate a larger window in the same time, and S grows with the logarithm of the window (section 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from statistics import fmean
from time import perf_counter
from typing import Any

from lookahead.bench.methods import Drafted, ModelUnderTest, Outcome, RunOptions, make_request
from lookahead.bench.record import Record
from lookahead.bench.report import number
from lookahead.core import Request, Stats, Target, TokenTree, decode
from lookahead.drafters import Lookahead, as_drafter
from lookahead.hf.facts import ModelFacts
from lookahead.parallel.shard import shard
from lookahead.parallel.wire import FRAME

from ..report import markdown_table
from .committed import Head
from .study import Page, Study, model_and_machine, only_first_turns

RANKS = (1, 2, 4, 8)
BASE = (15, 5, 15)
#: Workloads of figures 6 and 7.
WORKLOADS = ("mt-bench", "humaneval", "classeval")
#: Figures 6 and 7, 7B, FlashAttention on both sides: workload -> ranks -> speed-up over autoregressive decoding.
PAPER = {
    "mt-bench": {1: "1.8"},
    "humaneval": {1: "2.7 to 2.8", 8: "3.9 to 4.0"},
    "classeval": {1: "2.7 to 2.8", 8: "3.9 to 4.0"},
}
#: S counts as flat if it grows by less than this factor from the fewest ranks to the most.
FLAT_S = 1.05


@dataclass(frozen=True, slots=True)
class Shares:
    """The trees of one completion sharded over R ranks; means over its steps.

    Attributes:
        ranks: R.
        rows: rows of the whole tree.
        widest: rows of the widest shard including recomputed rows.
        evaluated: rows of all ranks together.
        recomputed: rows per rank that are evaluated again because another rank had evaluated them.
        bytes: bytes exchanged per step by all ranks together.
        widths: rows of the widest shard of every step.
    """

    ranks: int
    rows: float
    widest: float
    evaluated: float
    recomputed: float
    bytes: float
    widths: list[int]


def share_out(steps: Sequence[tuple[TokenTree, Sequence[int]]], ranks: int) -> Shares:
    """Shard the steps (tree, path) of one completion over R ranks.

    A rank that did not evaluate a node of the accepted path recomputes it in the next step.
    """
    missing = [0] * ranks
    widths: list[int] = []
    evaluated: list[int] = []
    recomputed: list[float] = []
    sent: list[int] = []
    for tree, path in steps:
        cut = shard(tree, ranks, missing)
        rows = [len(own) + count for own, count in zip(cut.rows, missing, strict=True)]
        widths.append(max(rows))
        evaluated.append(sum(rows))
        recomputed.append(sum(missing) / ranks)
        missing = [sum(node not in own for node in path) for own in map(set, cut.rows)]
        sent.append(
            sum(
                _bytes(3 + len(cut.rows[r])) + _bytes(4 + cut.owner.count(r)) + _bytes(3 + len(path))
                for r in range(1, ranks)
            )
        )
    if not widths:
        return Shares(ranks, 0, 0, 0, 0, 0, [])
    whole = fmean(len(tree) for tree, _ in steps)
    return Shares(ranks, whole, fmean(widths), fmean(evaluated), fmean(recomputed), fmean(sent), widths)


def record(
    target: Target, prompts: Sequence[Sequence[int]], config: Any, new_tokens: int, eos: frozenset[int]
) -> list[list[tuple[TokenTree, list[int]]]]:
    """Decode each prompt with lookahead. Returns (tree, path) of every step, by prompt."""
    sequences = []
    for prompt in prompts:
        drafter = as_drafter(config)
        updates = decode(target, [Request(prompt, drafter, new_tokens, eos=eos)])
        sequences.append([(step.tree, step.path) for step in updates if step.tree is not None])
    return sequences


class Sharded(Drafted):
    """Lookahead whose trees are sharded after decoding; the records contain the sizes of the shards.

    Args:
        drafter: its (W, N, G) name the method.
        ranks: numbers of ranks to shard for.
    """

    def __init__(self, drafter: Lookahead, ranks: Sequence[int]) -> None:
        super().__init__(drafter, str(drafter), "cold")
        self.ranks = tuple(ranks)
        self.settings = self.settings | {"ranks": list(self.ranks)}

    def decode(self, model: ModelUnderTest, prompt: Sequence[int], options: RunOptions) -> Outcome:
        # Decode and keep the trees.
        outcome = Outcome([], Stats(), 0, 0.0)
        steps = []
        last = perf_counter()
        for update in decode(model.target, [make_request(model, prompt, self.drafter, options)]):
            now = perf_counter()
            if update.tree is None:
                sequence = update.sequence
                outcome = Outcome(sequence.tokens, sequence.stats, len(update.tokens), now - last)
            else:
                steps.append((update.tree, update.path))
                outcome.step_tokens.append(len(update.tokens))
                outcome.step_rows.append(update.rows)
                outcome.step_seconds.append(now - last)
            last = now

        # Shard them for each number of ranks, which is not timed.
        for ranks in self.ranks:
            shares = share_out(steps, ranks)
            outcome.stats.drafter[f"shards_{ranks}"] = {
                "recomputed": round(shares.recomputed, 4),
                "bytes": round(shares.bytes, 1),
                "widths": {str(width): count for width, count in sorted(Counter(shares.widths).items())},
            }
        return outcome


def triple_of(ranks: int) -> tuple[int, int, int]:
    """(W, N, G) for this number of ranks; W and G grow with it."""
    return BASE[0] * ranks, BASE[1], BASE[2] * ranks


def measure(study: Study) -> tuple[list[Record], dict[str, Any]]:
    """Measure lookahead with the (W, N, G) of each number of ranks.

    Only the first turns of conversations are decoded.
    """
    prompts = study.first_turns(10, WORKLOADS)
    methods = [Sharded(Lookahead(*triple_of(r)), RANKS if r == 1 else (r,)) for r in RANKS]
    records = study.run(methods, prompts, replace(study.options, warm=False))
    return records, {"kv_bytes": _kv_bytes(study.model)}


@dataclass(frozen=True, slots=True)
class Scaling:
    """One workload on R ranks.

    Attributes:
        s: S with W and G multiplied by R ("grown").
        rows: rows of a step with the grown settings.
        widest: rows of the widest shard with the grown settings.
        recomputed: recomputed rows per rank with the grown settings.
        bytes: bytes exchanged per step with the grown settings.
        fixed_widest: rows of the widest shard with (15, 5, 15).
    """

    s: float
    rows: float
    widest: float
    recomputed: float
    bytes: float
    fixed_widest: float


def scaling(records: Sequence[Record], ranks: int) -> Scaling:
    """One workload on R ranks.

    Args:
        records: the records of the workload.
        ranks: R.
    """
    grown, base = (
        [r for r in records if r["method"] == f"lookahead:{w},{n},{g}" and "skipped" not in r]
        for w, n, g in (triple_of(ranks), BASE)
    )

    def s_of(texts: Sequence[Record]) -> float:
        return sum(r["new_tokens"] - 1 for r in texts) / max(1, sum(r["steps"] for r in texts))

    def shards(texts: Sequence[Record]) -> list[dict[str, Any]]:
        return [r["drafter"][f"shards_{ranks}"] for r in texts]

    def widest(texts: Sequence[Record]) -> float:
        counts = [(int(w), count) for x in shards(texts) for w, count in x["widths"].items()]
        return sum(w * count for w, count in counts) / max(1, sum(count for _, count in counts))

    steps = max(1, sum(r["steps"] for r in grown))
    recomputed, sent = (
        sum(x[name] * r["steps"] for x, r in zip(shards(grown), grown, strict=True)) / steps
        for name in ("recomputed", "bytes")
    )
    return Scaling(
        s=s_of(grown),
        rows=sum(r["rows"] for r in grown) / steps,
        widest=widest(grown),
        recomputed=recomputed,
        bytes=sent,
        fixed_widest=widest(base),
    )


def page(head: Head, records: Sequence[Record]) -> Page:
    """Compute the page from the records."""
    workloads = list(dict.fromkeys(r["workload"] for r in records if "skipped" not in r))
    found = {
        (w, ranks): scaling([r for r in records if r["workload"] == w], ranks)
        for w in workloads
        for ranks in RANKS
    }

    # The table.
    headings = [
        "workload",
        "ranks",
        "W, N, G",
        "S",
        "rows",
        "widest shard, grown",
        "widest shard, (15, 5, 15)",
    ]
    headings += ["recomputed rows per rank", "bytes per step", "the paper's speed-up (7B)"]
    rows = [
        [
            workload,
            str(ranks),
            ", ".join(map(str, triple_of(ranks))),
            number(x.s),
            number(x.rows, 0),
            number(x.widest, 1),
            number(x.fixed_widest, 1),
            number(x.recomputed),
            number(x.bytes, 0),
            PAPER.get(workload, {}).get(ranks, "–"),
        ]
        for (workload, ranks), x in found.items()
    ]

    # The text: what was measured and what was computed, then the differences from the paper.
    body = [
        markdown_table(headings, rows),
        "",
        "**Measured**: S and rows, in one process. **Computed** from the measured steps: shards, recomputed rows, "
        "bytes (of all ranks together), means over steps. No speed-up was measured on several devices. Sending keys "
        f"and values instead of computing missing rows again would take {head['kv_bytes'] or 'more'} bytes per row.",
    ]
    differs = [
        model_and_machine(head, records),
        *differences({w: {ranks: found[w, ranks].s for ranks in RANKS} for w in workloads}),
        *only_first_turns(records),
        "One process decodes and the shards are those that R ranks would get; the paper measures 1 to 8 A100, with "
        "FlashAttention on both sides. There tensor and pipeline parallelism slow a single text down (0.71 to 0.82).",
    ]

    title = "Lookahead parallelism (figures 6 and 7)"
    facts = [{"workload": w, "ranks": r, **_as_dict(x)} for (w, r), x in found.items()]
    return Page(title, body, differs, facts)


def _as_dict(x: Scaling) -> dict[str, float]:
    return {name: getattr(x, name) for name in Scaling.__slots__}


def differences(ratios: Mapping[str, Mapping[int, float]]) -> list[str]:
    """A sentence for each workload on how S grows with the window.

    Args:
        ratios: workload -> ranks -> S.
    """
    sentences = []
    for workload, by_ranks in ratios.items():
        first = by_ranks[min(by_ranks)]
        last = by_ranks[max(by_ranks)]
        change = f"from {first:.2f} on {min(by_ranks)} rank to {last:.2f} on {max(by_ranks)}"
        theirs = "the paper's throughput grows with them"
        single, most = (PAPER.get(workload, {}).get(ranks) for ranks in (min(by_ranks), max(by_ranks)))
        if single and most:
            theirs = (
                f"in the paper the speed-up is {single} on {min(by_ranks)} rank and {most} on {max(by_ranks)}"
            )
        if first and last / first < FLAT_S:
            sentences.append(
                f"On {workload}, S hardly grows with the window ({change}), so a larger window gains nothing there, "
                f"and more ranks help only by sharing the rows of (15, 5, 15); {theirs}."
            )
        else:
            growth = 100 * (last / first - 1) if first else nan
            sentences.append(f"On {workload} S grows by {growth:.0f} % with the window ({change}); {theirs}.")
    return sentences


def _kv_bytes(model: ModelUnderTest) -> int | None:
    """Bytes of the keys and values of one row; None if the target does not report them."""
    facts = getattr(model.target, "facts", None)
    if isinstance(facts, ModelFacts):
        item = facts.dtype.itemsize
        return int(
            sum(shape[0] * (shape[1] + shape[2]) * item for shape in facts.shapes if shape is not None)
        )
    storage = getattr(getattr(model.target, "cache", None), "storage", ())
    return storage[0].nbytes // storage[0].shape[2] if len(storage) else None  # axis 2: rows


def _bytes(rows: int) -> int:
    """Bytes of a message about this many rows, each of which takes at most 12 bytes in JSON."""
    return max(FRAME, 12 * rows)
