"""``lookahead tune``: measure and save the cost curve that the adaptive drafter uses to choose its rows."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table

from ..core import SettingsError
from ..drafters import Plain
from ..options import LoadOptions
from .adapter import with_options
from .console import note
from .shared import Json, load_model


@with_options()
def tune(*, as_json: Json = False, load: LoadOptions) -> None:
    """Measure the cost of steps of several rows again, and save the curve for --drafter adaptive.

    Without this command, the curve is measured when a model is first used on a machine; then runs read it from disk.
    """
    llm = load_model(load, Plain())
    if not llm.model.probe.drafts:
        raise SettingsError(
            f"this model decodes one row at a time, so there is nothing to tune: {llm.model.probe.reason}"
        )
    curve, file = llm.tune()
    costs = {context: dict(points) for context, points in curve.rows.items()}
    if as_json:
        facts = {"model": llm.name, "file": str(file) if file else None, "drafting": curve.drafting}
        typer.echo(json.dumps(facts | {"costs": costs}))
    else:
        table = Table(
            "rows", *map(str, costs), title=f"{llm.name}: plain passes per pass, by tokens of context"
        )
        for rows in sorted({rows for points in costs.values() for rows in points}):
            table.add_row(
                str(rows), *(f"{points[rows]:.2f}" if rows in points else "" for points in costs.values())
            )
        Console().print(table)
    if file is None:
        note(
            "not saved: equal steps took unequal times, so other work was running; run it again on an idle machine"
        )
        raise typer.Exit(1)
    if not as_json:
        typer.echo(f"saved to {file}")
