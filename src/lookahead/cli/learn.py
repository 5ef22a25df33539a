"""``lookahead learn``: build a table from a model's own output, for the adaptive drafter."""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ..engine.prompts import has_chat_template
from ..options import LoadOptions
from .adapter import with_options
from .console import Interrupted, note, stderr
from .shared import Json, load_model

#: Default minutes if neither minutes nor tokens are given.
MINUTES = 10.0
#: Seconds between progress lines if stderr is not a terminal.
LINES = 60.0


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

    if minutes is None and tokens is None:
        minutes = MINUTES
    goal = Goal(None if minutes is None else 60 * minutes, tokens)
    llm = load_model(load)
    learner = Learner(llm, output)
    if not has_chat_template(llm.tokenizer):
        note("this model has no chat template, so it continues short texts")
    if learner.folder.tokens:
        note(f"continuing after {learner.folder.tokens:,} tokens of earlier runs")
    interrupted = False
    try:
        with _Shown() as shown:
            learner.write(goal, shown)
    except KeyboardInterrupt:
        interrupted = True
        note("interrupted: building the table from the text so far (Ctrl-C again to skip)", "yellow")
    try:
        table = learner.build()
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; {learner.folder.tokens:,} tokens are kept, and another run continues"
        ) from None
    if as_json:
        figures = {"file": str(table.path), "tokens": table.learned, "contexts": table.contexts}
        typer.echo(json.dumps({"model": llm.name, **figures, "interrupted": interrupted}))
        return
    one, two, three = (f"{count:,}" for count in table.contexts)
    typer.echo(
        f"{table.learned:,} tokens: what follows {one} single tokens, {two} pairs and {three} triples\n"
        f"saved to {table.path}"
    )


class _Shown:
    """Shows progress: a bar on a terminal, else one line per minute."""

    def __init__(self) -> None:
        columns = BarColumn(20), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
        self._bar = Progress(*columns, console=stderr(), transient=True, disable=not stderr().is_terminal)
        self._task = self._bar.add_task("", total=1.0)
        self._last = monotonic()

    def __enter__(self) -> _Shown:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, share: float, tokens: int, seconds: float) -> None:
        text = f"{tokens:,} tokens, {tokens / max(seconds, 1e-9):.0f} tokens/s"
        self._bar.update(self._task, completed=min(share, 1.0), description=text)
        if self._bar.disable and monotonic() - self._last > LINES:
            self._last = monotonic()
            left = seconds / max(share, 1e-9) - seconds
            note(f"{text}, {100 * share:.0f} %, {left / 60:.1f} minutes left")
