"""``lookahead generate``: one prompt, streamed, or a file of prompts, one JSON line each."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..core import SettingsError
from ..engine.options import DraftOptions, LoadOptions, Options
from .batch import run_batch
from .console import as_record, compared, diverged, is_follower, note, summary
from .options import Task, load_model, read_text, takes, warm_pool

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..engine.results import Result

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


def _one(llm: LLM, prompt: str, task: Task, options: dict[str, Any]) -> int:
    """Stream one text to stdout; the exit status."""
    from ..engine import compare as comparing

    if task.compare:  # neither of the two is to pay for what happens once in a process
        for method in (None, "autoregressive"):
            llm.generate(prompt, max_new_tokens=8, method=method)
    result: Result | None = None
    for number, update in enumerate(llm.run([prompt], **options)):
        result = update.result
        if update.piece and not task.json:
            color = COLORS[number % len(COLORS)] if task.color else ""
            typer.echo(f"{color}{update.piece}{RESET if color else ''}", nl=False, color=task.color)
            sys.stdout.flush()
    assert result is not None
    if not task.json:
        typer.echo()
    if result.error is not None:
        raise result.error
    comparison = None
    if task.compare:
        plain = comparing.decode_plainly(llm, prompt, result.seed, options)
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
