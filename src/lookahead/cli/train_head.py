"""``lookahead train-head``: train a light head for a model on the model's own output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..drafters import Plain
from ..learning.train_settings import TrainSettings
from ..options import LoadOptions
from .adapter import with_options
from .console import Interrupted, LongProgress, note
from .shared import Json, load_model, note_text


@with_options()
def train_head(
    *,
    tokens: Annotated[
        int, typer.Option(help="Train on this many tokens of the model's own output, earlier runs included.")
    ] = 1_000_000,
    settings: TrainSettings,
    output: Annotated[
        Path | None, typer.Option(help="The head's file. [default: a file that head=auto finds]")
    ] = None,
    as_json: Json = False,
    load: LoadOptions,
) -> None:
    """Train a light head for a model: a small network that guesses its next tokens, for --drafter adaptive:head=auto.

    The model generates text, its hidden states over this text are computed, and the head is trained on both. It needs
    no data and does not affect the output. Ctrl-C interrupts any stage; the same command continues it.
    """
    from ..hf.device import require_transformers

    require_transformers("train-head")
    from ..learning.head_learner import HeadLearner

    llm = load_model(load, Plain())
    learner = HeadLearner(llm, tokens, settings, output, note)
    note_text(llm, learner.texts.tokens)
    try:
        with LongProgress() as progress:

            def show(stage: str, done: int, total: int, left: float | None, loss: float | None) -> None:
                text = f"{stage}: {min(done, total):,} of {total:,}"
                text += "" if loss is None else f", loss {loss:.2f}"
                progress.show(done / max(total, 1), text, left, stage)

            head = learner.run(show)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; progress is saved in {learner.folder}, and the same command continues"
        ) from None
    about = dict(head.about)
    if as_json:
        typer.echo(json.dumps({"model": llm.name, "file": str(learner.output), **about}))
        return
    for level, shares in enumerate(about["accuracy"], 1):
        best = ", ".join(f"{100 * share:.0f} %" for share in shares)
        typer.echo(f"level {level}: the next held-out token is among the top 1, 2, 4, 8 guesses in {best}")
    megabytes = learner.output.stat().st_size / 1e6
    typer.echo(
        f"trained on {about['tokens']:,} tokens in {about['seconds']} s; saved to {learner.output} "
        f"({megabytes:.1f} MB)"
    )
    kept = sum(file.stat().st_size for file in learner.folder.iterdir()) / 1e6
    note(f"{learner.folder} has {kept:,.0f} MB for further training and can be deleted")
