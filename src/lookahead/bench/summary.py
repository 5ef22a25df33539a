"""What the records say: median and spread, speed-up, compression ratio, equality. Reads records only.

Definitions, the same for every method:
    rate        tokens after the prefill, over the seconds of the steps
    speed-up    rate over that of plain decoding, of totals
    S           tokens per step, the mean over all steps (the paper's S, bonus token included)
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .methods import PLAIN
from .record import Record

NAN = float("nan")


@dataclass(slots=True)
class Figures:
    """One method, in one state, on one set of prompts. A figure that cannot be had is NaN."""

    texts: int = 0  # records
    rate: float = NAN  # tokens per second, median over repeats; then least and largest
    rate_low: float = NAN
    rate_high: float = NAN
    total: float = NAN  # speed-up of totals
    s_steps: float = NAN  # compression ratio
    rows: float = NAN  # per step
    equal: int = 0  # texts equal to plain decoding
    compared: int = 0


@dataclass(slots=True)
class Line:
    """A method in one state on a workload."""

    workload: str
    method: str
    state: str
    all: Figures
    over_hf: float = NAN  # rate over that of Hugging Face's greedy generate, where it was measured

    @property
    def label(self) -> str:
        """The method, and its state where it keeps one."""
        return f"{self.method} ({self.state})" if self.state else self.method


@dataclass(slots=True)
class Summary:
    """Lines, prompts left out by workload, and the texts that are not equal to plain decoding."""

    lines: list[Line]
    skipped: dict[str, int]
    unequal: list[Record]


def _text_of(record: Record) -> tuple[Any, ...]:
    heat = record["options"]["temperature"]
    return record["workload"], record["prompt"], record["turn"], record["repeat"], heat


def _decoded(records: Iterable[Record]) -> int:
    """Tokens after the prefill."""
    return sum(record["new_tokens"] - record["prefill_tokens"] for record in records)


def _rate(records: Sequence[Record]) -> float:
    seconds = sum(record["decode_seconds"] for record in records)
    return _decoded(records) / seconds if seconds else NAN


def plain_of(records: Iterable[Record]) -> dict[tuple[Any, ...], Record]:
    """Plain decoding's record for each (workload, prompt, turn, repeat, temperature)."""
    return {_text_of(record): record for record in records if record["method"] == PLAIN}


def figures(records: Sequence[Record], plain: dict[tuple[Any, ...], Record]) -> Figures:
    """Sum up the records of one method in one state.

    Args:
        records: none of them skipped.
        plain: as ``plain_of`` gives it.
    """
    if not records:
        return Figures()
    steps = sum(record["steps"] for record in records) or NAN
    repeats = defaultdict(list)
    for record in records:
        repeats[record["repeat"]].append(record)
    rates = [rate for rate in map(_rate, repeats.values()) if not math.isnan(rate)] or [NAN]
    # A text of one token has no step: it says nothing of speed.
    pairs = [(r, plain[_text_of(r)]) for r in records if r["steps"] and _text_of(r) in plain]
    pairs = [(ours, theirs) for ours, theirs in pairs if theirs["steps"]]
    compared = [record["equal"] for record in records if record["equal"] is not None]
    return Figures(
        texts=len(records),
        rate=median(rates),
        rate_low=min(rates),
        rate_high=max(rates),
        total=_rate([pair[0] for pair in pairs]) / _rate([pair[1] for pair in pairs]),
        s_steps=_decoded(records) / steps,
        rows=sum(record["rows"] for record in records) / steps,
        equal=sum(compared),
        compared=len(compared),
    )


def summarise(records: Iterable[Record]) -> Summary:
    """Sum up records of one setup, by workload, method and state, each in the order of first appearance."""
    records = list(records)
    measured = [record for record in records if "skipped" not in record]
    left_out = dict.fromkeys((r["workload"], r["prompt"], r["turn"]) for r in records if "skipped" in r)
    plain = plain_of(measured)
    groups: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in measured:
        groups[record["workload"], record["method"], record["state"]].append(record)
    lines = [Line(*names, figures(group, plain)) for names, group in groups.items()]
    theirs = {line.workload: line.all.rate for line in lines if line.method == "hf-greedy"}
    for line in lines:
        line.over_hf = line.all.rate / theirs.get(line.workload, NAN)
    # The methods of a prompt come in rotating order; that of the first prompt is kept for all.
    workloads, methods = ([group[place] for group in groups] for place in (0, 1))
    lines.sort(key=lambda line: (workloads.index(line.workload), methods.index(line.method), line.state))
    skipped = Counter(workload for workload, *_ in left_out)
    return Summary(lines, dict(skipped), [r for r in measured if r["equal"] is False])


def number(value: float, digits: int = 2) -> str:
    """For people; a dash where there is none."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


#: heading -> text of a line
COLUMNS: dict[str, Callable[[Line], str]] = {
    "equal": lambda x: f"{x.all.equal}/{x.all.compared}" if x.all.compared else "n/a",
    "tokens/s": lambda x: number(x.all.rate, 1),
    "min–max": lambda x: f"{number(x.all.rate_low, 0)}–{number(x.all.rate_high, 0)}",
    "speed-up": lambda x: number(x.all.total),
    "vs hf-greedy": lambda x: number(x.over_hf),
    "S": lambda x: number(x.all.s_steps),
    "rows/step": lambda x: number(x.all.rows, 1),
}
LEGEND = (
    "equal: texts equal to plain decoding. tokens/s: median over repeats. speed-up over plain decoding: of totals. "
    "S: tokens per step. cold, warm: without and with the state of the "
    "earlier prompts."
)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Markdown; the first ``texts`` columns are words, the others numbers."""
    rules = ["---"] * texts + ["---:"] * (len(headings) - texts)
    return "\n".join("| " + " | ".join(row) + " |" for row in [headings, rules, *rows])


def markdown(summary: Summary) -> str:
    """The lines as a Markdown table."""
    rows = [[x.workload, f"`{x.label}`", *(text(x) for text in COLUMNS.values())] for x in summary.lines]
    return markdown_table(["workload", "method", *COLUMNS], rows, texts=2)


def unequal_text(record: Record) -> str:
    """One text that differs: its speed and, with it, where it differs and how near a tie the model was there."""
    gap = record["logit_gap"]
    near = f", where the two logits are {gap:.2g} apart" if gap is not None else ""
    return (
        f"{record['workload']}/{record['prompt']} turn {record['turn']}: {record['method']} {record['state']} at "
        f"{number(_rate([record]), 1)} tokens/s is not equal from token {record['first_divergence']} on{near}"
    )
