"""``lookahead learn``: build a table from a model's own output, for the adaptive drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..drafters import Plain
from ..options import LoadOptions
from .adapter import with_options
from .console import Interrupted, LongProgress, note
from .shared import Json, load_model, note_text

#: Default minutes if neither minutes nor tokens are given.
MINUTES = 10.0


@with_options()
def learn(
    *,
    minutes: Annotated[float | None, typer.Option(help="Generate for this long. [default: 10]")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Stop at this many tokens, earlier runs included.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The table's file. [default: a file that every command finds]")
    ] = None,
    as_json: Json = False,
    load: LoadOptions,
) -> None:
    """Let a model generate text, and record which tokens follow which, for --drafter adaptive.

    It needs no data and no training. Ctrl-C stops generating and builds the table from the text so far; another run
    continues.
    """
    from ..learning.table_learner import Goal, Learner

    # The goal, and the text of earlier runs.
    if minutes is None and tokens is None:
        minutes = MINUTES
    goal = Goal(None if minutes is None else 60 * minutes, tokens)
    llm = load_model(load, Plain())
    learner = Learner(llm, output)
    note_text(llm, learner.folder.tokens)
    # Generate until the goal or an interrupt, then build the table from all text.
    interrupted = False
    try:
        with LongProgress() as progress:

            def show(share: float, tokens: int, seconds: float, left: float | None) -> None:
                speed = tokens / max(seconds, 1e-9)
                progress.show(share, f"{tokens:,} tokens, {speed:.0f} tokens/s", left)

            learner.write(goal, show)
    except KeyboardInterrupt:
        interrupted = True
        note("interrupted: building the table from the text so far (Ctrl-C again to skip)", "yellow")
    try:
        table = learner.build()
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; {learner.folder.tokens:,} tokens are kept, and another run continues"
        ) from None
    # Report.
    if as_json:
        figures = {"file": str(table.path), "tokens": table.learned, "contexts": table.contexts}
        typer.echo(json.dumps({"model": llm.name, **figures, "interrupted": interrupted}))
        return
    one, two, three = (f"{count:,}" for count in table.contexts)
    typer.echo(
        f"{table.learned:,} tokens: what follows {one} single tokens, {two} pairs and {three} triples\n"
        f"saved to {table.path}"
    )
