"""What a run leaves behind: the tables on the terminal, the same as Markdown, the pictures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .pictures import plot
from .record import Record, describe, was_busy
from .summary import COMPRESSION, LEGEND, SPEED, Line, Summary, markdown, summarise, unequal_text


def tables(summary: Summary) -> Iterator[Any]:
    """Two rich tables per workload, speed with equality and compression; a line of text where all was left out."""
    for workload in dict.fromkeys([line.workload for line in summary.lines] + list(summary.skipped)):
        lines = [line for line in summary.lines if line.workload == workload]
        left_out = summary.skipped.get(workload, 0)
        title = f"{workload}: {max((line.all.texts for line in lines), default=0)} texts per method"
        title += f", {left_out} prompts left out because the context is too short" if left_out else ""
        if lines:
            yield _table(title, SPEED, lines)
            yield _table("", COMPRESSION, lines)
        else:
            yield title


def _table(title: str, columns: dict[str, Callable[[Line], str]], lines: list[Line]) -> Any:
    from rich import box
    from rich.table import Table

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


def write_report(records: Sequence[Record], out: Path, command: str, spec_bench: bool = False) -> None:
    """Print the tables, and write ``summary.md``, the pictures and, if asked for, Spec-Bench's rows."""
    from rich.console import Console

    summary, console = summarise(records), Console(highlight=False)
    for table in tables(summary):
        console.print(table)
    console.print(LEGEND, style="dim", markup=False)
    warnings = [*(unequal_text(record) for record in summary.unequal), *filter(None, [was_busy(records)])]
    for warning in warnings:
        console.print(warning, style="red", markup=False, soft_wrap=True)
    lines = [f"`{command}`", "", describe(records[-1]) + ".", "", markdown(summary), "", LEGEND, ""]
    lines += [
        f"{n} prompts of {name} were left out: the context is too short."
        for name, n in summary.skipped.items()
    ]
    (out / "summary.md").write_text("\n".join([*lines, *warnings]) + "\n", encoding="utf-8")
    written = [out / "summary.md"]
    if any(record.get("steps") for record in records):
        written += plot(out)[0]
    if spec_bench:
        from .spec_bench import write_answers

        written += write_answers(records, out)
    where = f"{describe(records[-1])}\nrecords, summary and {len(written) - 1} pictures: {out}"
    console.print(where, style="dim", markup=False)
