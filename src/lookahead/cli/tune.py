"""``lookahead tune``: measure the step times that the adaptive method chooses its rows by, and keep them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..core import SettingsError
from ..engine.options import LoadOptions
from .options import Json, load_model, numbers, takes

ROWS, CONTEXTS, BATCHES = "1,2,4,8,16,24,32,48,64,96,128", "64,512,1536", "1,2,4"


@takes()
def tune(
    *,
    rows: Annotated[str, typer.Option(help="Rows of a step to measure.")] = ROWS,
    contexts: Annotated[str, typer.Option(help="Lengths of the text before it.")] = CONTEXTS,
    batches: Annotated[str, typer.Option(help="Sequences that share the step.")] = BATCHES,
    repeats: Annotated[int, typer.Option(help="Steps per point; the median counts.")] = 7,
    as_json: Json = False,
    load: LoadOptions,
) -> None:
    """Time steps of many sizes and keep the times, for --method adaptive.

    Without it the method measures a few points when it is used first, and goes on learning either way.
    """
    sizes = {
        name: numbers(text, name)
        for name, text in (("--rows", rows), ("--contexts", contexts), ("--batches", batches))
    }
    if 1 not in sizes["--rows"]:
        raise SettingsError("--rows must contain 1, which is plain decoding")
    if repeats < 1:
        raise SettingsError(f"--repeats must be at least 1, got {repeats}")
    llm = load_model(load)
    if llm.probe.mode != "tree":
        raise SettingsError(
            f"this model decodes one row at a time, so there is nothing to tune: {llm.probe.reason}"
        )
    from ..engine.states import keep_step_times

    points: list[dict[str, Any]] = []

    def note(batch: int, context: int, count: int, seconds: float) -> None:
        points.append({"batch": batch, "context": context, "rows": count, "ms": round(seconds * 1e3, 3)})

    path = keep_step_times(
        llm.model, llm.target(), sizes["--rows"], sizes["--contexts"], sizes["--batches"], repeats, note
    )
    if path is None:
        raise SettingsError("--contexts must hold a length that the model can take, got " + contexts)
    if as_json:
        typer.echo(json.dumps({"model": llm.name, "file": str(path), "points": points}))
    else:
        _show(llm.name, path, points, sizes["--rows"])


def _show(name: str, path: Any, points: list[dict[str, Any]], rows: list[int]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("sequences", "context", *map(str, rows), title=f"{name}: ms per step, by rows")
    for batch, context in sorted({(point["batch"], point["context"]) for point in points}):
        found = {p["rows"]: p["ms"] for p in points if (p["batch"], p["context"]) == (batch, context)}
        table.add_row(str(batch), str(context), *(f"{found[count]:.2f}" for count in rows))
    console = Console()
    console.print(table)
    console.print(f"kept in {path}", soft_wrap=True)
