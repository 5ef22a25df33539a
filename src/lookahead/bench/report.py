"""Results computed from records: figures by workload and method, and a table of them on the terminal.

Definitions, the same for every method:
    rate        tokens after the prefill, divided by the seconds of the steps
    speed-up    rate divided by that of plain decoding, from totals
    95 %        interval of the speed-up: resampled prompts (bootstrap), each with all its turns and repeats
    runs        range of the speed-up over repeats, each from its own totals
    S           tokens per step, the mean over all steps (equation 6 of the paper; the bonus token counts)
    prompt      tokens of the prompts, divided by the seconds of the prefills
    slower      sequences that took more than 1.02 and more than 1.1 times as long as plain decoding, and the largest
                ratio, in the first repeat; plain decoding's own second repeat shows the noise
    loop-free   sequences whose plain completion contains no eight tokens twice: repetition favours n-grams
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .methods import PLAIN
from .record import Record, describe, was_busy

NAN = float("nan")


@dataclass(slots=True)
class Figures:
    """One method, in one state, on one set of prompts. A figure without data is NaN."""

    texts: int = 0  # records
    tokens: int = 0  # generated in the first repeat
    rate: float = NAN  # tokens per second, median over repeats
    rate_low: float = NAN  # the slowest repeat
    rate_high: float = NAN  # the fastest repeat
    total: float = NAN  # speed-up of totals
    low: float = NAN  # its 95 % interval over prompts
    high: float = NAN
    total_low: float = NAN  # speed-up of the repeat in which it is smallest; NaN without a second repeat
    total_high: float = NAN  # of the one in which it is largest
    s_steps: float = NAN  # compression ratio S
    rows: float = NAN  # per step
    prompt_rate: float = NAN  # prompt tokens per second of the prefills
    equal: int = 0  # completions equal to plain decoding
    compared: int = 0
    timed: int = 0  # sequences of the first repeat that are timed against plain decoding
    slower: int = 0  # those that took over 1.02 times as long
    much_slower: int = 0  # over 1.1 times
    worst: float = NAN  # the longest
    rate_all: float = NAN  # tokens per second over all repeats, of which ``total`` is the ratio


@dataclass(slots=True)
class Line:
    """A method in one state on a workload."""

    workload: str
    method: str
    state: str
    all: Figures
    over_hf: float = NAN  # rate over that of transformers' greedy generate, if it was measured
    failed: str = ""  # why another library did not decode some or all of the prompts

    @property
    def label(self) -> str:
        """The method, and its state if it keeps state."""
        return f"{self.method} ({self.state})" if self.state else self.method

    def facts(self) -> dict[str, Any]:
        """Its fields; ``failed`` only if the method failed."""
        return {name: value for name, value in asdict(self).items() if name != "failed" or value}


@dataclass(slots=True)
class Summary:
    """Lines by workload, the number of skipped prompts, completions that differ from plain decoding, and totals.

    The totals are lines over all workloads, then over the sequences without loops, each unless it would be the same
    as another.
    """

    lines: list[Line]
    skipped: dict[str, int]
    unequal: list[Record]
    totals: list[Line]


# ------------------------------------------------------------------------------------------------ figures


def _text_of(record: Record) -> tuple[Any, ...]:
    temperature = record["options"]["temperature"]
    return record["workload"], record["prompt"], record["turn"], record["repeat"], temperature


def _tokens_of_steps(records: Iterable[Record]) -> int:
    return sum(record["new_tokens"] - record["prefill_tokens"] for record in records)


def _rate(records: Sequence[Record]) -> float:
    seconds = sum(record["decode_seconds"] for record in records)
    return _tokens_of_steps(records) / seconds if seconds else NAN


def _prompt_rate(records: Sequence[Record]) -> float:
    seconds = sum(record["prefill_seconds"] for record in records)
    return sum(record["prompt_tokens"] for record in records) / seconds if seconds else NAN


def plain_of(records: Iterable[Record]) -> dict[tuple[Any, ...], Record]:
    """Plain decoding's record for each (workload, prompt, turn, repeat, temperature)."""
    return {_text_of(record): record for record in records if record["method"] == PLAIN}


def figures(records: Sequence[Record], plain: dict[tuple[Any, ...], Record]) -> Figures:
    """Summarise the records of one method in one state.

    Args:
        records: the records, without skipped prompts.
        plain: the result of ``plain_of``.
    """
    if not records:
        return Figures()
    # The rate of each repeat.
    steps = sum(record["steps"] for record in records) or NAN
    repeats = defaultdict(list)
    for record in records:
        repeats[record["repeat"]].append(record)
    rates = [rate for rate in map(_rate, repeats.values()) if not math.isnan(rate)] or [NAN]
    # A one-token completion has no step, and so no speed.
    pairs = [(r, plain[_text_of(r)]) for r in records if r["steps"] and _text_of(r) in plain]
    pairs = [(ours, theirs) for ours, theirs in pairs if theirs["steps"]]
    compared = [record["equal"] for record in records if record["equal"] is not None]
    low, high = interval(pairs)
    total_low, total_high = over_repeats(pairs)
    times = _times(records, plain)
    return Figures(
        texts=len(records),
        tokens=sum(record["new_tokens"] for record in records if not record["repeat"]),
        rate=median(rates),
        rate_low=min(rates),
        rate_high=max(rates),
        total=_speed_up(pairs),
        low=low,
        high=high,
        total_low=total_low,
        total_high=total_high,
        s_steps=_tokens_of_steps(records) / steps,
        rows=NAN
        if any(record["rows"] is None for record in records)
        else sum(r["rows"] for r in records) / steps,
        prompt_rate=_prompt_rate(records),
        equal=sum(compared),
        compared=len(compared),
        timed=len(times),
        slower=sum(time > 1.02 for time in times),
        much_slower=sum(time > 1.1 for time in times),
        worst=max(times, default=NAN),
        rate_all=_rate(records),
    )


def _speed_up(pairs: Sequence[tuple[Record, Record]]) -> float:
    """The speed-up of totals over (record, plain decoding's record); NaN without pairs."""
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    return _rate(ours) / _rate(theirs)


def over_repeats(pairs: Sequence[tuple[Record, Record]]) -> tuple[float, float]:
    """The smallest and the largest speed-up of a repeat over (record, plain decoding's record of the same repeat).

    NaN without a second repeat.
    """
    repeats: dict[int, list[tuple[Record, Record]]] = defaultdict(list)
    for pair in pairs:
        repeats[pair[0]["repeat"]].append(pair)
    each = [_speed_up(some) for some in repeats.values()]
    return (min(each), max(each)) if len(each) > 1 else (NAN, NAN)


def interval(pairs: Sequence[tuple[Record, Record]]) -> tuple[float, float]:
    """The 95 % interval of the speed-up over (record, plain decoding's record), by resampling prompts 1,000 times."""
    prompts: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0] * 4)
    for pair in pairs:
        sums = prompts[pair[0]["workload"], pair[0]["prompt"]]
        for place, record in enumerate(pair):
            sums[2 * place] += _tokens_of_steps([record])
            sums[2 * place + 1] += record["decode_seconds"]
    if len(prompts) < 2:
        return NAN, NAN
    chance = Random(0)
    each = list(prompts.values())
    ratios = []
    for _ in range(1000):
        tokens, seconds, plain_tokens, plain_seconds = map(
            sum, zip(*chance.choices(each, k=len(each)), strict=True)
        )
        ratios.append(tokens / seconds / (plain_tokens / plain_seconds))
    ratios.sort()
    return ratios[25], ratios[974]


def _times(records: Sequence[Record], plain: dict[tuple[Any, ...], Record]) -> list[float]:
    """Seconds per token of each sequence of the first repeat, relative to plain decoding.

    For plain decoding itself, its second repeat relative to its first.
    """
    times = []
    for record in records:
        first = plain.get((*_text_of(record)[:3], 0, *_text_of(record)[4:]))
        wanted = 1 if record["method"] == PLAIN else 0
        if record["repeat"] == wanted and first is not None and record["steps"] and first["steps"]:
            times.append(_rate([first]) / _rate([record]))
    return times


def _failure(records: Sequence[Record]) -> str:
    """Why a method failed, and how many of its prompts it had decoded; "" if it did not fail."""
    failed = [record for record in records if record.get("failed")]
    if not failed:
        return ""
    done = len(records) - len(failed)
    return f"{failed[0]['skipped']}" + (f" ({done} of {len(records)} decoded)" if done else "")


def summarise(records: Iterable[Record]) -> Summary:
    """Summarise the records of one setup, by workload, method and state, each in the order of first appearance."""
    # Leave out prompts that do not fit, but keep a line for a method that failed.
    records = list(records)
    measured = [record for record in records if "skipped" not in record]
    too_long = [record for record in records if "skipped" in record and not record.get("failed")]
    left_out = dict.fromkeys((r["workload"], r["prompt"], r["turn"]) for r in too_long)
    plain = plain_of(measured)
    groups: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        if "skipped" not in record or record.get("failed"):
            groups[record["workload"], record["method"], record["state"]].append(record)
    lines = [
        Line(*names, figures([r for r in group if "skipped" not in r], plain), failed=_failure(group))
        for names, group in groups.items()
    ]
    # Rates relative to transformers' greedy generate.
    theirs = {line.workload: line.all.rate for line in lines if line.method == "hf-greedy"}
    for line in lines:
        line.over_hf = line.all.rate / theirs.get(line.workload, NAN)
    # The order of the methods rotates from prompt to prompt; the first prompt's order is used for all.
    workloads, methods = ([group[column] for group in groups] for column in (0, 1))
    lines.sort(key=lambda line: (workloads.index(line.workload), methods.index(line.method), line.state))
    skipped = Counter(workload for workload, *_ in left_out)
    unequal = [r for r in measured if r["equal"] is False]
    return Summary(lines, dict(skipped), unequal, _totals(measured, plain, methods))


def loop_free_records(records: Sequence[Record]) -> list[Record]:
    """The records of the sequences whose completion by plain decoding has no loop."""
    kept = [record for record in records if "skipped" not in record]
    without_loop = {_text_of(r)[:3] for r in kept if r["method"] == PLAIN and r.get("loop_free", False)}
    return [record for record in kept if _text_of(record)[:3] in without_loop]


def _totals(
    measured: Sequence[Record], plain: dict[tuple[Any, ...], Record], methods: Sequence[str]
) -> list[Line]:
    """The totals of ``Summary``, in the order of ``methods``."""
    ordered = sorted(measured, key=lambda record: methods.index(record["method"]))
    count = len({key[:3] for key in plain})
    parts = []
    if len({record["workload"] for record in measured}) > 1:
        parts.append((f"all {count} sequences", ordered))
    loop_free = loop_free_records(ordered)
    free = len({key[:3] for key in plain_of(loop_free)})
    if 0 < free < count:
        parts.append((f"the {free} loop-free of {count}", loop_free))
    lines = []
    for name, part in parts:
        groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
        for record in part:
            groups[record["method"], record["state"]].append(record)
        lines += [Line(name, *names, figures(group, plain)) for names, group in groups.items()]
    return lines


# ------------------------------------------------------------------------------------------------- tables


def number(value: float, digits: int = 2) -> str:
    """A number for display; a dash for NaN."""
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def between(low: float, high: float, digits: int = 2) -> str:
    """An interval for display; one dash if it is unknown, as that over a single prompt."""
    return "–" if math.isnan(low) or math.isnan(high) else f"{low:.{digits}f}–{high:.{digits}f}"


OVER_HF = "vs hf-greedy"
#: Columns that a terminal of fewer than ``WIDE`` characters has no room for.
WIDE = 100
LEFT_OUT = ("min–max", "rows/step")
#: heading -> text of a line
COLUMNS: dict[str, Callable[[Line], str]] = {
    "equal": lambda x: x.failed or (f"{x.all.equal}/{x.all.compared}" if x.all.compared else "n/a"),
    "tokens/s": lambda x: number(x.all.rate, 1),
    "min–max": lambda x: (
        "–" if x.all.rate_low == x.all.rate_high else between(x.all.rate_low, x.all.rate_high, 0)
    ),
    "speed-up": lambda x: number(x.all.total),
    "95 %": lambda x: "–" if x.method == PLAIN else between(x.all.low, x.all.high),
    OVER_HF: lambda x: number(x.over_hf),
    "S": lambda x: number(x.all.s_steps),
    "rows/step": lambda x: number(x.all.rows, 1),
    "slower": lambda x: (
        "–" if math.isnan(x.all.worst) else f"{x.all.slower}, {x.all.much_slower}, {x.all.worst:.2f}"
    ),
}
LEGEND = (
    "equal: completions, in all repeats, that equal plain decoding's. tokens/s: after the prefill, median over "
    "repeats. speed-up: of totals, over plain decoding. 95 %: its interval over prompts, resampled 1,000 times; the "
    "noise of the machine shows in the range over repeats instead. S: tokens per step. tokens: generated in the "
    "first repeat. prompt tokens/s: of the prefills. slower: number of sequences that took more than 1.02 and more "
    "than 1.1 times as long as with plain decoding, and the largest ratio, in the first repeat (for plain: its "
    "second repeat against its first). loop-free: plain decoding repeats no eight tokens. cold, warm: without and "
    "with the state of earlier prompts."
)


def columns(lines: Sequence[Line]) -> dict[str, Callable[[Line], str]]:
    """The columns that the lines have data for."""
    compared = any(not math.isnan(line.over_hf) for line in lines)
    return {name: text for name, text in COLUMNS.items() if name != OVER_HF or compared}


def unequal_text(record: Record) -> str:
    """A line about an unequal completion: its speed, where it diverges, and how close the two logits are there."""
    gap = record["logit_gap"]
    near = f", where the two logits are {gap:.2g} apart" if gap is not None else ""
    method = f"{record['method']} {record['state']}".strip()
    return (
        f"{record['workload']}/{record['prompt']} turn {record['turn']}: {method} at "
        f"{number(_rate([record]), 1)} tokens/s is not equal from token {record['first_divergence']} on{near}"
    )


def _terminal_table(title: str, lines: list[Line], width: int) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    table.add_column("method", overflow="fold", min_width=min(24, max(len(line.label) for line in lines)))
    # Here tokens/s is over all repeats, so that the speed-up is the ratio of what is shown.
    shown = columns(lines) | {"tokens/s": lambda x: number(x.all.rate_all, 1)}
    cells = {name: text for name, text in shown.items() if width >= WIDE or name not in LEFT_OUT}
    for heading in cells:
        folded = re.sub(r" |(?<=[-/])", "\n", heading)
        table.add_column(folded, justify="right", vertical="bottom", no_wrap=True)
    for line in lines:
        style = "red" if line.failed or line.all.equal < line.all.compared else None
        row = ["failed" if line.failed and name == "equal" else text(line) for name, text in cells.items()]
        table.add_row(line.label, *row, style=style)
    return table


def notes_of(summary: Summary, records: Sequence[Record]) -> list[str]:
    """Notes about skipped prompts, unequal completions and a busy machine."""
    left_out = [
        f"{count} prompts of {workload} were skipped, because the context is too short."
        for workload, count in summary.skipped.items()
    ]
    # Repeats of a completion usually diverge at the same token, so only the first of these is described.
    keys = ("workload", "prompt", "turn", "method", "state", "first_divergence")
    first = {tuple(record[key] for key in keys): record for record in reversed(summary.unequal)}
    unequal = [unequal_text(record) for record in reversed(first.values())]
    return [*left_out, *unequal, *filter(None, [was_busy(records)])]


def show(records: Sequence[Record]) -> None:
    """Print a table per workload, what the columns mean, and notes."""
    summary = summarise(records)
    console = Console(highlight=False)
    shown = [*summary.lines, *summary.totals]
    for workload in dict.fromkeys(line.workload for line in shown):
        lines = [line for line in shown if line.workload == workload]
        texts = max(line.all.texts for line in lines)
        console.print(_terminal_table(f"{workload}: {texts} completions per method", lines, console.width))
    console.print(LEGEND.replace("median over repeats", "over all repeats"), style="dim", markup=False)
    failures = [f"{x.workload}: {x.label} failed: {x.failed}" for x in summary.lines if x.failed]
    for note in [*failures, *notes_of(summary, records)]:
        console.print(note, style="red", markup=False, soft_wrap=True)
    console.print(describe(records[-1]), style="dim", markup=False)
