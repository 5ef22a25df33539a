"""``lookahead tune``: measure and save the cost curve that the adaptive drafter uses to choose its rows."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..core import SettingsError
from ..options import LoadOptions
from .adapter import with_options
from .console import note
from .shared import Json, load_model, numbers


@with_options()
def tune(
    *,
    rows: Annotated[
        str, typer.Option(help="Rows of one sequence to measure.")
    ] = "1,2,3,4,6,8,12,16,24,32,48,64",
    contexts: Annotated[str, typer.Option(help="Committed tokens before the step.")] = "64,512",
    batches: Annotated[str, typer.Option(help="Numbers of single-row sequences.")] = "4,16,64",
    repeats: Annotated[int, typer.Option(help="Steps per point; the faster half counts.")] = 8,
    as_json: Json = False,
    load: LoadOptions,
) -> None:
    """Measure the cost of steps of many sizes, and save the curve for --drafter adaptive.

    Without this command, a few points are measured when a model is first used on a machine, and by two later runs;
    then runs read the curve from disk.
    """
    # Check the options before the model is loaded.
    counts, lengths = numbers(rows, "--rows"), numbers(contexts, "--contexts")
    sequences = numbers(batches, "--batches")
    if 1 not in counts:
        raise SettingsError("--rows must contain 1, which is plain decoding")
    if max(counts) == 1:
        raise SettingsError(
            "--rows must contain a number above 1, as in 1,4,16, to measure the cost of more rows"
        )
    if repeats < 1:
        raise SettingsError(f"--repeats must be at least 1, got {repeats}")
    llm = load_model(load)
    if not llm.model.probe.drafts:
        raise SettingsError(
            f"this model decodes one row at a time, so there is nothing to tune: {llm.model.probe.reason}"
        )

    # Measure, and keep every point for the report.
    measured: dict[tuple[int, int, int], float] = {}

    def keep(batch: int, context: int, count: int, seconds: float) -> None:
        measured[batch, context, count] = round(seconds * 1e3, 3)

    try:
        path = llm.tune(counts, lengths, sequences, repeats, keep)
    except OSError as error:
        raise SettingsError(
            f"the cost curve is saved in the cache folder, which is not writable ({error}); set XDG_CACHE_HOME"
        ) from None
    # Report: one JSON object, or a table with one line per number of rows.
    if as_json:
        names = ("batch", "context", "rows", "ms")
        points = [dict(zip(names, (*sizes, ms), strict=True)) for sizes, ms in measured.items()]
        typer.echo(json.dumps({"model": llm.name, "file": str(path) if path else None, "points": points}))
    else:
        sizes = sorted({size[:2] for size in measured})
        heads = [f"{batch} x {context}" for batch, context in sizes]
        table = Table("rows", *heads, title=f"{llm.name}: ms per step, by sequences x context")
        for n in counts:
            found = [measured.get((*size, n)) for size in sizes]
            table.add_row(str(n), *("" if ms is None else f"{ms:.2f}" for ms in found))
        Console().print(table)
    if path is None:
        note(
            "not saved: repeated steps took unequal times, so other work was running; run it again on an idle machine"
        )
        raise typer.Exit(1)
    if not as_json:
        typer.echo(f"saved to {path}")
