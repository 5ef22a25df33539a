"""``lookahead generate``: one prompt, streamed, or a file of prompts, one JSON line each."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from ..core import SettingsError
from ..engine.options import DraftOptions, LoadOptions, Options
from .batch import run_batch
from .console import as_record, compared, diverged, is_follower, note, summary
from .options import Task, load_model, read_text, takes, warm_pool

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..engine.results import Result, Updates

#: Foreground colours in rotation, for the tokens of one step each (readable on dark and light ground).
COLORS = ("\x1b[34m", "\x1b[33m", "\x1b[36m", "\x1b[35m", "\x1b[32m")
RESET = "\x1b[0m"


@takes(without=())
def generate(*, task: Task, options: Options, draft: DraftOptions, load: LoadOptions) -> None:
    """Complete a prompt, or every prompt of a file. The text is the model's own, whatever the method."""
    if task.compare and draft.method == "autoregressive":
        raise SettingsError("--compare sets a method beside plain decoding; --method autoregressive is that")
    method, config = draft.resolve()
    if is_follower():  # rank 0 alone reads and writes; the others work for it from here on
        load_model(load, method, config)
    if task.input is not None:
        start = partial(load_model, load, method, config)
        raise typer.Exit(run_batch(task, start, options.keywords(), draft.warm))
    text = task.prompt
    if text is None:
        text = read_text(task.prompt_file or Path("-"), "--prompt-file")
    if not text:
        raise SettingsError("the prompt must not be empty, got an empty text")
    llm = load_model(load, method, config)
    with warm_pool(llm, draft.warm) as kept:
        raise typer.Exit(_one(llm, text, task, options.keywords() | kept))


def show(updates: Updates, color: bool, file: IO[str] | None = None) -> Result:
    """Stream one text to a file or to stdout, the tokens of one step in one colour if so asked.

    Raises:
        LookaheadError: what ended it early; what was there is shown.
    """
    result: Result | None = None
    for number, update in enumerate(updates):
        result = update.result
        if update.piece:
            start, end = (COLORS[number % len(COLORS)], RESET) if color else ("", "")
            typer.echo(f"{start}{update.piece}{end}", file, nl=False, color=color)
    typer.echo(file=file)
    assert result is not None
    if result.error is not None:
        raise result.error
    return result


def _one(llm: LLM, prompt: str, task: Task, options: dict[str, Any]) -> int:
    """Stream one text to stdout; the exit status."""
    from ..engine import compare as comparing

    if task.compare:  # neither of the two is to pay for what happens once in a process
        for method in (None, "autoregressive"):
            llm.generate(prompt, max_new_tokens=8, method=method)
    result = llm.generate(prompt, **options) if task.json else show(llm.run([prompt], **options), task.color)
    comparison = None
    if task.compare:
        again = comparing.plainly(result.seed, options)
        if task.json:
            plain = llm.generate(prompt, **again)
        else:  # as streamed as the other: what is printed between two steps leaves cold caches to the next one
            with open(os.devnull, "w") as nowhere:
                plain = show(llm.run([prompt], **again), task.color, nowhere)
        comparison = comparing.compare(llm, result, plain)
    if task.json:
        record = {"prompt": prompt} | as_record(result) | {"stats": result.stats.as_dict()}
        if comparison is not None:
            record["compare"] = comparison.as_dict()
        typer.echo(json.dumps(record, ensure_ascii=False))
    else:
        note(summary(llm, result))
        if comparison is not None:
            note(compared(llm, comparison), "green" if comparison.equal else "red")
    return diverged(llm, [comparison is None or comparison.equal])
