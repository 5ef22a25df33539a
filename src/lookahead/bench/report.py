"""What a run leaves behind: the tables on the terminal, the same as Markdown, the pictures."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from .pictures import plot
from .record import Record, describe, was_busy
from .summary import COMPRESSION, LEGEND, SPEED, Line, markdown, summarise, unequal_text


def _table(title: str, columns: dict[str, Callable[[Line], str]], lines: list[Line]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    table.add_column("method", overflow="fold", min_width=min(24, max(len(line.label) for line in lines)))
    for heading in columns:
        folded = re.sub(r" |(?<=[-/])", "\n", heading)
        table.add_column(folded, justify="right", vertical="bottom", no_wrap=True)
    for line in lines:
        style = "red" if line.all.equal < line.all.compared else None
        table.add_row(line.label, *(text(line) for text in columns.values()), style=style)
    return table


def write_report(records: Sequence[Record], out: Path, command: str) -> None:
    """Print two tables per workload (speed with equality, compression); write ``summary.md`` and the pictures."""
    summary, console = summarise(records), Console(highlight=False)
    for workload in dict.fromkeys(line.workload for line in summary.lines):
        lines = [line for line in summary.lines if line.workload == workload]
        texts = max(line.all.texts for line in lines)
        console.print(_table(f"{workload}: {texts} texts per method", SPEED, lines))
        console.print(_table("", COMPRESSION, lines))
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
    pictures = plot(out)[0] if any(record.get("steps") for record in records) else []
    text = f"{where}\nrecords, summary and {len(pictures)} pictures: {out}"
    console.print(text, style="dim", markup=False)
