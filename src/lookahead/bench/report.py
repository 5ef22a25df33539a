"""What a run leaves behind: the tables on the terminal, the same as Markdown, the picture."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..core.records import finite
from .pictures import COLOURS, label, new_figure, save
from .record import Record, describe, environment, was_busy
from .summary import COLUMNS, LEGEND, Line, Summary, markdown, summarise, unequal_text


def _table(title: str, lines: list[Line]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    table.add_column("method", overflow="fold", min_width=min(24, max(len(line.label) for line in lines)))
    for heading in COLUMNS:
        folded = re.sub(r" |(?<=[-/])", "\n", heading)
        table.add_column(folded, justify="right", vertical="bottom", no_wrap=True)
    for line in lines:
        style = "red" if line.all.equal < line.all.compared else None
        table.add_row(line.label, *(text(line) for text in COLUMNS.values()), style=style)
    return table


def speeds(summary: Summary) -> Any:
    """A bar per method and workload; the line spans the repeats. Unequal texts are named and hatched."""
    lines = [line for line in summary.lines if line.all.rate == line.all.rate]
    several = len({line.workload for line in lines}) > 1
    names = list(dict.fromkeys(line.label for line in lines))
    labels = []
    figure, axes = new_figure(7.0, 1.2 + 0.3 * len(lines))
    for place, line in enumerate(lines):
        figures, same = line.all, line.all.equal == line.all.compared
        shade = COLOURS[names.index(line.label) % len(COLOURS)]
        axes.barh(place, figures.rate, 0.72, color=shade, edgecolor="white", hatch=None if same else "///")
        axes.plot([figures.rate_low, figures.rate_high], [place, place], color="#888888", linewidth=1.2)
        end = (figures.rate_high, place)
        axes.annotate(f"{figures.rate:.0f}", end, (4, 0), textcoords="offset points", va="center", fontsize=8)
        unequal = "" if same else f", {figures.equal} of {figures.compared} equal"
        labels.append(f"{line.workload}: " * several + line.label + unequal)
    axes.set_yticks(range(len(lines)), labels)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.margins(x=0.1)
    axes.grid(False, axis="y")
    title = "Speed by method" + ("" if several or not lines else f", {lines[0].workload}")
    label(axes, title, "tokens per second (line: range over repeats)", legend=False)
    return figure


def write_report(records: Sequence[Record], out: Path, command: str) -> None:
    """Print a table per workload; write ``summary.md``, its figures as ``summary.json``, and the picture."""
    summary, console = summarise(records), Console(highlight=False)
    for workload in dict.fromkeys(line.workload for line in summary.lines):
        lines = [line for line in summary.lines if line.workload == workload]
        texts = max(line.all.texts for line in lines)
        console.print(_table(f"{workload}: {texts} texts per method", lines))
    console.print(LEGEND, style="dim", markup=False)
    notes = [
        f"{n} prompts of {w} were left out: the context is too short." for w, n in summary.skipped.items()
    ]
    notes += [*map(unequal_text, summary.unequal), *filter(None, [was_busy(records)])]
    for line in notes:
        console.print(line, style="red", markup=False, soft_wrap=True)
    where = describe(records[-1])
    page = [f"`{command}`", "", f"{where}.", "", markdown(summary), "", LEGEND, "", *notes]
    (out / "summary.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    facts: dict[str, Any] = {"command": command, "where": where, "busy": was_busy(records)}
    facts |= {"figures": [asdict(line) for line in summary.lines]}
    (out / "summary.json").write_text(json.dumps(finite(facts), indent=1) + "\n", encoding="utf-8")
    if any(record.get("steps") for record in records):
        save(speeds(summary), out / "tokens-per-second", where)
    console.print(f"{where}\nrecords, summary and picture: {out}", style="dim", markup=False)


def write_served(
    rounds: list[Record],
    table: str,
    served: tuple[str, str],
    against: str | None,
    threads: int,
    out: Path,
    command: str,
) -> None:
    """The page ``serve.md`` of a load test, and its figures as ``serve.json``.

    Args:
        rounds: as records, with the machine's load after each. table: the same as Markdown.
        served: the model's name, and what the server says of its version and dtype.
        against: what was measured as "other". threads: of the server.
    """
    here = environment() | {"threads": threads, "model": served[0], "dtype": served[1].rpartition("-")[2]}
    where, busy = describe(here), was_busy([one | here for one in rounds])
    notes = [
        f"{where}.",
        "Greedy; all texts of our methods equal plain decoding's, or nothing were reported. Times are medians of the "
        "requests, tokens/s those of all clients together.",
        f"other: {against}; its arithmetic is its own, so its texts may differ." if against else "",
        busy,
    ]
    text = "\n\n".join(["# The server under load", f"`{command}`", *filter(None, notes), table])
    out.mkdir(parents=True, exist_ok=True)
    (out / "serve.md").write_text(f"{text}\n", encoding="utf-8")
    facts = {"command": command, "where": where, "busy": busy, "figures": rounds}
    (out / "serve.json").write_text(json.dumps(finite(facts), indent=1) + "\n", encoding="utf-8")
