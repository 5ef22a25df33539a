"""``lookahead tune``: measure and save the step times by which the adaptive drafter chooses its rows."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..core import SettingsError
from ..options import LoadOptions
from .adapter import Json, load_model, numbers, with_options


@with_options()
def tune(
    *,
    rows: Annotated[str, typer.Option(help="Numbers of rows to measure.")] = "1,2,4,8,16,24,32,48,64,96,128",
    contexts: Annotated[str, typer.Option(help="Numbers of tokens before the step.")] = "64,512,1536",
    batches: Annotated[str, typer.Option(help="Numbers of sequences that share the step.")] = "1,2,4",
    repeats: Annotated[int, typer.Option(help="Steps per point; the fastest counts.")] = 7,
    as_json: Json = False,
    load: LoadOptions,
) -> None:
    """Time steps of many sizes and keep the times, for --drafter adaptive.

    Without this command, adaptive measures a few points when it is first used. In both cases it continues to learn.
    """
    counts, lengths = numbers(rows, "--rows"), numbers(contexts, "--contexts")
    sequences = numbers(batches, "--batches")
    if 1 not in counts:
        raise SettingsError("--rows must contain 1, which is plain decoding")
    if repeats < 1:
        raise SettingsError(f"--repeats must be at least 1, got {repeats}")
    llm = load_model(load)
    if llm.probe.mode == "plain":
        raise SettingsError(
            f"this model decodes one row at a time, so there is nothing to tune: {llm.probe.reason}"
        )

    measured: dict[tuple[int, int, int], float] = {}

    def keep(batch: int, context: int, count: int, seconds: float) -> None:
        measured[batch, context, count] = round(seconds * 1e3, 3)

    path = llm.tune(counts, lengths, sequences, repeats, keep)
    if path is None:
        raise SettingsError(f"--contexts must have a length that fits the model, got {contexts}")
    if as_json:
        names = ("batch", "context", "rows", "ms")
        points = [dict(zip(names, (*sizes, ms), strict=True)) for sizes, ms in measured.items()]
        typer.echo(json.dumps({"model": llm.name, "file": str(path), "points": points}))
        return
    table = Table("sequences", "context", *map(str, counts), title=f"{llm.name}: ms per step, by rows")
    for batch, context in sorted({sizes[:2] for sizes in measured}):
        table.add_row(str(batch), str(context), *(f"{measured[batch, context, n]:.2f}" for n in counts))
    Console().print(table)
    typer.echo(f"kept in {path}")
