"""What a run leaves behind: the table on the terminal, the same as Markdown, the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .pictures import plot
from .record import describe, was_busy
from .summary import LEGEND, Record, markdown, summarise, tables, unequal_text


def finish(records: Sequence[Record], out: Path, command: str, spec_bench: bool = False) -> None:
    """Print the tables, and write ``summary.md``, the pictures and, if asked for, Spec-Bench's rows."""
    from rich.console import Console

    summary = summarise(records)
    console = Console(highlight=False)
    for table in tables(summary):
        console.print(table)
    console.print(LEGEND, style="dim", markup=False)
    for record in summary.unequal:
        console.print(unequal_text(record), style="red", markup=False, soft_wrap=True)
    busy = was_busy(records)
    if busy:
        console.print(busy, style="red", markup=False)
    lines = [f"`{command}`", "", describe(records[-1]) + ".", "", markdown(summary), "", LEGEND, ""]
    lines += [
        f"{n} prompts of {name} were left out: the context is too short."
        for name, n in summary.skipped.items()
    ]
    lines += [busy, *(unequal_text(record) for record in summary.unequal)]
    (out / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    written = [out / "summary.md"]
    if any(record.get("steps") for record in records):
        written += plot(out)[0]
    if spec_bench:
        from .spec_bench import write_answers

        written += write_answers(records, out)
    console.print(
        f"{describe(records[-1])}\nrecords, summary and {len(written) - 1} pictures: {out}",
        style="dim",
        markup=False,
    )
