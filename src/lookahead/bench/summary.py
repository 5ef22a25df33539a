"""What the records say: median and spread, speed-up, compression ratio, equality. Reads records only.

Definitions, the same for every method:
    rate        tokens after the prefill, over the seconds of the steps
    speed-up    rate over that of plain decoding: of totals, and per prompt (geometric mean and median)
    S steps     tokens per step, the mean over all steps (the paper's S, bonus token included)
    S passes    all new tokens over all forward passes, the prefill counted as one
    loop-free   the prompts whose plain text has no repeated 8-gram
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median
from typing import Any

from .methods import PLAIN

Record = dict[str, Any]
NAN = float("nan")


@dataclass(slots=True)
class Figures:
    """One method, in one state, on one set of prompts. A figure that cannot be had is NaN.

    Attributes:
        texts: records; steps, tokens, passes: sums over them.
        rate, rate_low, rate_high: tokens per second: median, least and largest over repeats.
        total: speed-up of totals. per_prompt, typical: geometric mean and median of the speed-up per prompt.
        s_steps, s_passes: compression ratio.
        rows: rows per step.
        prefill: median seconds of a prefill.
        equal, compared: texts equal to plain decoding, of how many.
    """

    texts: int = 0
    rate: float = NAN
    rate_low: float = NAN
    rate_high: float = NAN
    total: float = NAN
    per_prompt: float = NAN
    typical: float = NAN
    s_steps: float = NAN
    s_passes: float = NAN
    rows: float = NAN
    prefill: float = NAN
    equal: int = 0
    compared: int = 0


@dataclass(slots=True)
class Line:
    """A method on a workload: all prompts and the loop-free ones, cold (or stateless) and warm."""

    workload: str
    method: str
    cold: Figures = field(default_factory=Figures)
    cold_loop_free: Figures = field(default_factory=Figures)
    warm: Figures | None = None
    warm_loop_free: Figures | None = None
    over_hf: float = NAN  # rate over that of Hugging Face's greedy generate, where it was measured


@dataclass(slots=True)
class Summary:
    """Lines, prompts left out by reason, and the texts that are not equal to plain decoding."""

    lines: list[Line]
    skipped: dict[str, int]
    unequal: list[Record]


def _where(record: Record) -> tuple[Any, ...]:
    heat = record["options"]["temperature"]
    return record["workload"], record["prompt"], record["turn"], record["repeat"], heat


def _rate(records: Iterable[Record]) -> float:
    records = list(records)
    seconds = sum(record["decode_seconds"] for record in records)
    return sum(map(_decoded, records)) / seconds if seconds else NAN


def _decoded(record: Record) -> int:
    return int(record["new_tokens"] - record["prefill_tokens"])


def plain_of(records: Iterable[Record]) -> dict[tuple[Any, ...], Record]:
    """Plain decoding's record for each (workload, prompt, turn, repeat, temperature)."""
    return {_where(record): record for record in records if record["method"] == PLAIN}


def figures(records: Sequence[Record], plain: dict[tuple[Any, ...], Record]) -> Figures:
    """Sum up the records of one method in one state.

    Args:
        records: none of them skipped.
        plain: plain decoding's record for each (workload, prompt, turn, repeat, temperature).
    """
    if not records:
        return Figures()
    steps = sum(record["steps"] for record in records)
    repeats = defaultdict(list)
    for record in records:
        repeats[record["repeat"]].append(record)
    rates = [rate for rate in map(_rate, repeats.values()) if not math.isnan(rate)]
    # A text of one token has no step: it says nothing of speed.
    pairs = [
        (record, plain[_where(record)])
        for record in records
        if _where(record) in plain and record["steps"] and plain[_where(record)]["steps"]
    ]
    ratios = [_rate([a]) / _rate([b]) for a, b in pairs]
    compared = [record for record in records if record["equal"] is not None]
    return Figures(
        texts=len(records),
        rate=median(rates) if rates else NAN,
        rate_low=min(rates, default=NAN),
        rate_high=max(rates, default=NAN),
        total=_rate(a for a, _ in pairs) / _rate(b for _, b in pairs) if pairs else NAN,
        per_prompt=geometric_mean(ratios) if ratios else NAN,
        typical=median(ratios) if ratios else NAN,
        s_steps=sum(map(_decoded, records)) / steps if steps else NAN,
        s_passes=sum(record["new_tokens"] for record in records) / (steps + len(records)),
        rows=sum(record["rows"] for record in records) / steps if steps else NAN,
        prefill=median(record["prefill_seconds"] for record in records),
        equal=sum(record["equal"] for record in compared),
        compared=len(compared),
    )


def summarise(records: Iterable[Record]) -> Summary:
    """Sum up records of one setup, by workload and method, each in the order of first appearance."""
    records = list(records)
    skipped: dict[str, int] = defaultdict(int)
    for where in dict.fromkeys((r["workload"], r["prompt"], r["turn"]) for r in records if "skipped" in r):
        skipped[where[0]] += 1
    measured = [record for record in records if "skipped" not in record]
    plain = plain_of(measured)
    lines: dict[tuple[str, str], Line] = {}
    groups: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in measured:
        groups[record["workload"], record["method"], record["state"]].append(record)
    for (workload, method, state), group in groups.items():
        line = lines.setdefault((workload, method), Line(workload, method))
        straight = [r for r in group if plain.get(_where(r), r)["loop_free"]]
        if state == "warm":
            line.warm, line.warm_loop_free = figures(group, plain), figures(straight, plain)
        else:
            line.cold, line.cold_loop_free = figures(group, plain), figures(straight, plain)
    for line in lines.values():
        theirs = lines.get((line.workload, "hf-greedy"))
        if theirs is not None:
            line.over_hf = line.cold.rate / theirs.cold.rate
    # The methods of a prompt come in rotating order; that of the first prompt is kept for all.
    workloads, methods = (
        list(dict.fromkeys(names)) for names in list(zip(*groups, strict=True))[:2] or ([], [])
    )
    ordered = sorted(lines.values(), key=lambda x: (workloads.index(x.workload), methods.index(x.method)))
    return Summary(ordered, dict(skipped), [r for r in measured if r["equal"] is False])


def number(value: float, digits: int = 2) -> str:
    """For people; a dash where there is none."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def _equal(cold: Figures, warm: Figures | None) -> str:
    both = [cold, warm] if warm is not None else [cold]
    compared = sum(figures.compared for figures in both)
    return f"{sum(figures.equal for figures in both)}/{compared}" if compared else "n/a"


#: heading -> text of a line: what is said of speed, and of the compression ratio
SPEED: dict[str, Callable[[Line], str]] = {
    "equal": lambda x: _equal(x.cold, x.warm),
    "tokens/s": lambda x: number(x.cold.rate, 1),
    "min–max": lambda x: f"{number(x.cold.rate_low, 0)}–{number(x.cold.rate_high, 0)}",
    "speed-up": lambda x: number(x.cold.total),
    "per prompt": lambda x: number(x.cold.per_prompt),
    "median": lambda x: number(x.cold.typical),
    "warm": lambda x: number(x.warm.total) if x.warm else "",
    "loop-free": lambda x: number(x.cold_loop_free.total),
}
COMPRESSION: dict[str, Callable[[Line], str]] = {
    "speed vs hf-greedy": lambda x: number(x.over_hf),
    "S steps": lambda x: number(x.cold.s_steps),
    "S passes": lambda x: number(x.cold.s_passes),
    "S warm": lambda x: number(x.warm.s_steps) if x.warm else "",
    "S loop-free": lambda x: number(x.cold_loop_free.s_steps),
    "loop-free texts": lambda x: f"{x.cold_loop_free.texts}/{x.cold.texts}",
    "rows/step": lambda x: number(x.cold.rows, 1),
    "prefill ms": lambda x: number(x.cold.prefill * 1e3, 1),
}
LEGEND = (
    "tokens/s: median over repeats. speed-up: of totals; per prompt: geometric mean and median of the ratio. "
    "warm: with the state of the earlier prompts. loop-free: prompts whose plain text has no repeated 8-gram. "
    "equal: texts, cold and warm, equal to plain decoding. S steps: tokens per step; "
    "S passes: the prefill counted as a pass."
)


def unequal_text(record: Record) -> str:
    """One text that differs: its speed and, with it, where it differs and how near a tie the model was there."""
    gap = record["logit_gap"]
    near = f", where the two logits are {gap:.2g} apart" if gap is not None else ""
    rate = number(_rate([record]), 1)
    return (
        f"{record['workload']}/{record['prompt']} turn {record['turn']}: {record['method']} "
        f"{record['state']} at {rate} tokens/s is not equal from token {record['first_divergence']} on{near}"
    )


def markdown(summary: Summary, workload: str | None = None) -> str:
    """The table as Markdown, all workloads or one."""
    lines = [line for line in summary.lines if workload in (None, line.workload)]
    columns = SPEED | COMPRESSION
    heads = ["workload", "method", *columns]
    rows = [heads, ["---"] * 2 + ["---:"] * len(columns)]
    rows += [[x.workload, f"`{x.method}`", *(text(x) for text in columns.values())] for x in lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def tables(summary: Summary) -> list[Any]:
    """Two rich tables per workload, speed with equality and compression, and lines of text."""
    made: list[Any] = []
    for workload in dict.fromkeys([line.workload for line in summary.lines] + list(summary.skipped)):
        lines = [line for line in summary.lines if line.workload == workload]
        left_out = summary.skipped.get(workload, 0)
        title = f"{workload}: {max((line.cold.texts for line in lines), default=0)} texts per method"
        title += f", {left_out} prompts left out because the context is too short" if left_out else ""
        if lines:
            made += [_table(title, SPEED, lines), _table("", COMPRESSION, lines)]
        else:
            made.append(title)
    return made


def _table(title: str, columns: dict[str, Callable[[Line], str]], lines: list[Line]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    table.add_column("method", overflow="fold", min_width=min(24, max(len(line.method) for line in lines)))
    for heading in columns:
        table.add_column(
            re.sub(r" |(?<=[-/])", "\n", heading), justify="right", vertical="bottom", no_wrap=True
        )
    for line in lines:
        bad = any(f is not None and f.equal < f.compared for f in (line.cold, line.warm))
        table.add_row(line.method, *(text(line) for text in columns.values()), style="red" if bad else None)
    return table
