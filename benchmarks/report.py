"""The page of a measurement: what ``lookahead bench`` prints, in Markdown with a plot, and its figures as JSON."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lookahead.bench.record import Record, describe, was_busy
from lookahead.bench.report import (
    LEGEND,
    Summary,
    columns,
    figures,
    notes_of,
    number,
    plain_of,
    show,
    summarise,
)
from lookahead.records import finite

from .origin import require_one_origin
from .plots import COLOURS, label, new_figure, save


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A Markdown table; the first ``texts`` columns are left-aligned, the others right-aligned."""
    rules = ["---"] * texts + ["---:"] * (len(headings) - texts)
    return "\n".join("| " + " | ".join(row) + " |" for row in [headings, rules, *rows])


def markdown(summary: Summary) -> str:
    """The lines as a Markdown table, which has room for more columns than a terminal."""
    cells = columns(summary.lines) | {
        "tokens": lambda x: str(x.all.tokens),
        "prompt tokens/s": lambda x: number(x.all.prompt_rate, 0),
    }
    rows = [
        [x.workload, f"`{x.label}`", *(text(x).replace("|", "\\|") for text in cells.values())]
        for x in [*summary.lines, *summary.totals]
    ]
    return markdown_table(["workload", "method", *cells], rows, texts=2)


def speeds(summary: Summary) -> Any:
    """A bar per method and workload, with a line that spans the repeats. Bars with unequal completions are labelled
    and hatched."""
    lines = [line for line in summary.lines if not math.isnan(line.all.rate)]
    several = len({line.workload for line in lines}) > 1
    names = list(dict.fromkeys(line.label for line in lines))
    labels = []
    figure, axes = new_figure(7.0, 1.2 + 0.3 * len(lines))
    for y, line in enumerate(lines):
        x = line.all
        all_equal = line.all.equal == line.all.compared
        shade = COLOURS[names.index(line.label) % len(COLOURS)]
        axes.barh(y, x.rate, 0.72, color=shade, edgecolor="white", hatch=None if all_equal else "///")
        axes.plot([x.rate_low, x.rate_high], [y, y], color="#888888", linewidth=1.2)
        end = (x.rate_high, y)
        axes.annotate(f"{x.rate:.0f}", end, (4, 0), textcoords="offset points", va="center", fontsize=8)
        unequal = "" if all_equal else f", {x.equal} of {x.compared} equal"
        labels.append(f"{line.workload}: " * several + line.label + unequal)
    axes.set_yticks(range(len(lines)), labels)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.margins(x=0.1)
    axes.grid(False, axis="y")
    title = "Speed by method" + ("" if several or not lines else f", {lines[0].workload}")
    label(axes, title, "tokens per second (line: range over repeats)", legend=False)
    return figure


def page_of(records: Sequence[Record], command: str) -> tuple[str, dict[str, Any]]:
    """The report in Markdown without its figure, and its numbers as JSON values.

    Raises:
        SettingsError: the records come from several machines, commits, dtypes or versions.
    """
    require_one_origin(records)
    summary = summarise(records)
    where = describe(records[-1])
    lines = [f"`{command}`", "", f"{where}.", "", LEGEND, "", markdown(summary), ""]
    facts: dict[str, Any] = {"command": command, "where": where, "busy": was_busy(records)}
    facts |= {"figures": [line.facts() for line in summary.lines]}
    facts |= {"totals": [line.facts() for line in summary.totals]}
    measured = [record for record in records if "skipped" not in record]
    plain = plain_of(measured)
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in measured:
        groups[record["method"]].append(record)
    for line in summary.lines:
        groups.setdefault(line.method, [])  # one that failed on every prompt has no figures
    facts["overall"] = {name: asdict(figures(group, plain)) for name, group in groups.items()}
    return "\n".join([*lines, *notes_of(summary, records)]) + "\n", finite(facts)


def write_report(records: Sequence[Record], out: Path, command: str, draw: bool = True) -> None:
    """Print the tables; write ``summary.md``, its figures as ``summary.json``, and the plot.

    Args:
        draw: whether to draw the plot, which needs matplotlib.
    """
    show(records)
    text, facts = page_of(records, command)
    (out / "summary.md").write_text(text, encoding="utf-8")
    facts["keys"] = [record["key"] for record in records]  # the folder may have records of other runs
    (out / "summary.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if draw and any(record.get("steps") for record in records):
        save(speeds(summarise(records)), out / "tokens-per-second", facts["where"])


def command_line(words: list[str] | None = None, program: str = "lookahead") -> str:
    """The command as typed, for reports, with absolute paths shortened to their last part."""
    shown = [program]
    for word in sys.argv[1:] if words is None else words:
        name, equals, value = word.rpartition("=")
        short = f"{name}{equals}{Path(value).name}" if value.startswith(("/", "~")) else word
        shown.append(shlex.quote(short))
    return " ".join(shown)
