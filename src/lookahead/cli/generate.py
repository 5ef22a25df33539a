"""``lookahead generate``: completes one prompt, streamed, or a file of prompts, one JSON line each."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from .. import Adaptive, Plain
from ..core import SettingsError
from ..options import DraftOptions, LoadOptions, MemoryOptions, Options
from ..records import as_line
from .adapter import with_options
from .batch import as_message, run_batch, settings_of
from .console import as_record, compared, diverged, is_follower, note, summary
from .shared import dismiss, load_model, read_text
from .task import Task

if TYPE_CHECKING:
    from ..core import Result
    from ..llm import LLM, Updates

#: Foreground colours, one per step in rotation (readable on dark and light backgrounds).
COLORS = ("\x1b[34m", "\x1b[33m", "\x1b[36m", "\x1b[35m", "\x1b[32m")
RESET = "\x1b[0m"


@with_options(without=())
def generate(
    *, task: Task, options: Options, draft: DraftOptions, memory: MemoryOptions, load: LoadOptions
) -> None:
    """Complete a prompt, or every prompt of a file. The output is the model's own with every drafter."""
    drafter = draft.resolve()
    if task.compare and isinstance(drafter, Plain):
        raise SettingsError(
            "--compare compares a drafter with plain decoding, so --drafter plain has nothing to compare"
        )
    if task.trace is not None:
        check_trace(task.trace, task.overwrite)
    if is_follower():  # only rank 0 reads and writes; the others serve it from here on
        load_model(load, drafter)
    if task.input is not None:
        start = partial(load_model, load, drafter, memory)
        settings = settings_of(options, draft, load)
        leave = partial(dismiss, load)
        raise typer.Exit(run_batch(task, start, leave, options.keywords(), settings))
    text = task.prompt
    if text is None:
        text = read_text(task.prompt_file or Path("-"), "--prompt-file")
    if not text:
        raise SettingsError("the prompt must not be empty, got an empty string")
    llm = load_model(load, drafter, memory)
    raise typer.Exit(_one(llm, text, task, options.keywords()))


def check_trace(path: Path, overwrite: bool) -> None:
    """Reject an unusable trace file before loading a model.

    Raises:
        SettingsError: the file's folder does not exist, or the file would be replaced without --overwrite.
    """
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise SettingsError(f"--trace must be a file in a folder that exists, got {path}")
    if path.is_file() and path.stat().st_size and not overwrite:
        raise SettingsError(
            f"--trace must not replace {path}, which is not empty; give --overwrite to replace it"
        )


def recorded(updates: Updates, path: Path | None, llm: LLM) -> Updates:
    """Yield the same updates, after writing each to a trace."""
    if path is None:
        yield from updates
        return
    from ..trace import TraceWriter

    with TraceWriter(path, llm) as trace:
        for update in updates:
            trace.write(update)
            yield update


def print_text(updates: Updates, color: bool, file: IO[str] | None = None) -> Result:
    """Stream one completion to a file or to stdout; with ``color``, in one colour per step.

    Raises:
        LookaheadError: the error that ended decoding early; the text up to it is shown.
    """
    result: Result | None = None
    for number, update in enumerate(updates):
        result = update.result
        if update.piece:
            start, end = (COLORS[number % len(COLORS)], RESET) if color else ("", "")
            # With color=False, typer would remove colour codes that belong to the completion.
            typer.echo(f"{start}{update.piece}{end}", file, nl=False, color=True)
    typer.echo(file=file)
    assert result is not None
    return result.checked()


def _one(llm: LLM, text: str, task: Task, options: dict[str, Any]) -> int:
    """Stream one completion to stdout. Returns the exit status."""
    from . import compare as comparing

    prompt = as_message(text) if task.chat else text
    if task.compare:  # so that neither measurement includes one-off work
        for drafter in (None, Plain()):
            llm.generate(prompt, max_new_tokens=8, drafter=drafter)
    # The completion.
    updates = recorded(llm.run([prompt], **options), task.trace, llm)
    if task.json:
        *_, last = updates
        assert last.result is not None
        result = last.result.checked()
    else:
        result = print_text(updates, task.color)
    # The same completion by plain decoding, with the seed that was drawn.
    comparison = None
    if task.compare:
        again = comparing.plainly(result.seed, options)
        if task.json:
            plain = llm.generate(prompt, **again)
        else:  # streamed like the first one, because printing between steps evicts the caches
            with open(os.devnull, "w", encoding="utf-8") as nowhere:
                plain = print_text(llm.run([prompt], **again), task.color, nowhere)
        comparison = comparing.compare(llm, result, plain)
    # The report: a record on stdout, or a line on stderr.
    if task.json:
        record = {"prompt": text} | as_record(result) | {"stats": result.stats.as_dict()}
        if comparison is not None:
            record["compare"] = comparison.as_dict()
        typer.echo(as_line(record), nl=False)
    else:
        note(summary(llm, result))
        if comparison is not None:
            note(compared(llm, comparison), "green" if comparison.equal else "red")
    if task.trace is not None and isinstance(llm.drafter, Adaptive):
        note(
            f"lookahead show {task.trace} shows the trees of the adaptive drafter; with --drafter 5,4,5 a trace "
            "shows the window and the n-gram pool"
        )
    return diverged(llm, [comparison is None or comparison.equal])
