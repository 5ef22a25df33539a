"""``lookahead generate``: one prompt, streamed, or a file of prompts, one JSON line each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import SettingsError
from ..core.records import RecordWriter
from ..engine.drafting import DraftOptions
from ..engine.options import LoadOptions, Options
from .batch import run_batch
from .console import note
from .options import Json, follow, load_model, read_text, takes, warm_pool
from .output import as_record, compared, diverged, summary, tracing
from .records import trace_line

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..engine.results import Result

#: Foreground colours in rotation, for the tokens of one step each (readable on dark and light ground).
COLORS = ("\x1b[34m", "\x1b[33m", "\x1b[36m", "\x1b[35m", "\x1b[32m")
RESET = "\x1b[0m"


@takes(without=())
def generate(
    *,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the prompt from a file, as it is; - is stdin.")
    ] = None,
    input_: Annotated[
        Path | None,
        typer.Option("--input", help='JSON lines of {"id", "prompt"} or {"id", "input_ids"}; - is stdin.'),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the results of --input go; without it to stdout.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an --output begun before.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an --output that exists.")] = False,
    batch_size: Annotated[int, typer.Option(help="Prompts of --input that share forward passes.")] = 1,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode plainly too: equal or not, steps, seconds.")
    ] = False,
    color: Annotated[bool, typer.Option("--color", help="The tokens of one step share a colour.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write every step (tree, path, tokens) as a JSON line.")
    ] = None,
    as_json: Json = False,
    options: Options,
    draft: DraftOptions,
    load: LoadOptions,
) -> None:
    """Complete a prompt, or every prompt of a file. The text is the model's own, whatever the method."""
    one_of(("--prompt", prompt), ("--prompt-file", prompt_file), ("--input", input_))
    with_input = {
        "--output": output is not None, "--resume": resume, "--overwrite": overwrite,
        "--batch-size": batch_size != 1,
    }  # fmt: skip
    _check_flags(input_ is not None, with_input, as_json, color)
    if compare and draft.method == "autoregressive":
        raise SettingsError("--compare sets a method beside plain decoding; --method autoregressive is that")
    method, config = draft.resolve()
    follow(load, method, config)
    if input_ is not None:
        status = run_batch(
            lambda: load_model(load, method, config),
            input_, output, resume, overwrite, batch_size, compare, trace, options.keywords(), draft.warm,
        )  # fmt: skip
        raise typer.Exit(status)
    text = prompt if prompt is not None else read_text(prompt_file or Path("-"), "--prompt-file")
    if not text:
        raise SettingsError("the prompt must not be empty, got an empty text")
    with tracing(trace) as writer:
        llm = load_model(load, method, config)
        with warm_pool(llm, draft.warm) as kept:
            raise typer.Exit(_one(llm, text, options.keywords() | kept, compare, color, writer, as_json))


def one_of(*sources: tuple[str, Any]) -> None:
    """Refuse more or fewer than one of these options."""
    given = [name for name, value in sources if value is not None]
    if len(given) != 1:
        *names, last = (name for name, _ in sources)
        raise SettingsError(
            f"exactly one of {', '.join(names)} and {last} must be given, "
            + (f"got {' and '.join(given)}" if given else "got none")
        )


def _check_flags(batch: bool, with_input: dict[str, bool], as_json: bool, color: bool) -> None:
    """Refuse options that do not go together, by name."""
    for name, given in with_input.items():
        if given and not batch:
            raise SettingsError(f"{name} goes with --input, which is not given")
    if with_input["--resume"] and with_input["--overwrite"]:
        raise SettingsError("--resume and --overwrite cannot be given together; use one of them")
    if with_input["--resume"] and not with_input["--output"]:
        raise SettingsError("--resume goes on with an --output, which is not given")
    if color and (batch or as_json):
        raise SettingsError(f"--color and {'--input' if batch else '--json'} cannot be given together")
    if batch and as_json:
        raise SettingsError("--json and --input cannot be given together; --input writes JSON lines anyway")


def _one(
    llm: LLM,
    prompt: str,
    options: dict[str, Any],
    compare: bool,
    color: bool,
    trace: RecordWriter | None,
    as_json: bool,
) -> int:
    """Stream one text to stdout; the exit status."""
    from ..engine import compare as comparing

    if compare:
        comparing.warm_up(llm, prompt)
    result: Result | None = None
    for number, update in enumerate(llm.run([prompt], **options)):
        result = update.result
        if trace is not None and update.step is not None:
            trace.write(trace_line(None, update.step, update.piece))
        if update.piece and not as_json:
            piece = f"{COLORS[number % len(COLORS)]}{update.piece}{RESET}" if color else update.piece
            typer.echo(piece, nl=False, color=color)
            sys.stdout.flush()
    assert result is not None
    if not as_json:
        typer.echo()
    if result.error is not None:
        raise result.error
    comparison = comparing.compare(llm, result, prompt, **options) if compare else None
    if as_json:
        record = {"prompt": prompt} | as_record(result) | {"stats": result.stats.as_dict()}
        if comparison is not None:
            record["compare"] = comparison.as_dict()
        typer.echo(json.dumps(record, ensure_ascii=False))
    else:
        note(summary(llm, result))
        if comparison is not None:
            note(compared(llm, comparison), "green" if comparison.equal else "red")
    return diverged(llm, [] if comparison is None else [comparison])
