"""``lookahead generate``: one prompt, streamed, or a file of prompts, one JSON line each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import SettingsError
from . import options as opt
from .console import note
from .records import Writer, trace_line

if TYPE_CHECKING:
    from ..engine import LLM, Result

app = typer.Typer(add_completion=False)
#: Foreground colours in turn, for the tokens of one step each (readable on dark and light ground).
COLORS = ("\x1b[34m", "\x1b[33m", "\x1b[36m", "\x1b[35m", "\x1b[32m")
RESET = "\x1b[0m"


@app.command()
def generate(
    model: opt.Model = None,
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
    max_new_tokens: opt.MaxNewTokens = 128,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = False,
    method: opt.Method = None,
    lookahead: opt.Triple = None,
    window_size: opt.WindowSize = None,
    ngram_size: opt.NgramSize = None,
    guess_set_size: opt.GuessSetSize = None,
    preset: opt.Preset = None,
    max_rows: opt.MaxRows = None,
    sources: opt.Sources = None,
    no_budget: opt.NoBudget = False,
    warm: opt.Warm = None,
    temperature: opt.Temperature = 0.0,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    no_repeat_ngram_size: opt.NoRepeatNgramSize = None,
    seed: opt.Seed = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = None,
    threads: opt.Threads = None,
    parallel_timeout: opt.ParallelTimeout = None,
    revision: opt.Revision = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode plainly too: equal or not, steps, seconds.")
    ] = False,
    color: Annotated[bool, typer.Option("--color", help="The tokens of one step share a colour.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write every step (tree, path, tokens) as a JSON line.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the text.")] = False,
) -> None:
    """Complete a prompt, or every prompt of a file. The text is the model's own, whatever the method."""
    _check_source(prompt, prompt_file, input_)
    flags = {
        "--output": output is not None, "--resume": resume, "--overwrite": overwrite,
        "--batch-size": batch_size != 1,
    }  # fmt: skip
    _check_flags(input_ is not None, flags, as_json, color)
    if compare and method == "autoregressive":
        raise SettingsError("--compare sets a method beside plain decoding; --method autoregressive is that")
    method, config = opt.settings(
        method, lookahead, window_size, ngram_size, guess_set_size, preset, max_rows, sources, no_budget, warm
    )
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
        "min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed, "stop": stop or None,
        "no_repeat_ngram_size": no_repeat_ngram_size, "ignore_eos": ignore_eos,
    }  # fmt: skip
    keywords = {
        "dtype": dtype, "device": device, "threads": threads, "revision": revision,
        "trust_remote_code": trust_remote_code, "method": method, "config": config,
        "parallel_timeout": parallel_timeout,
    }  # fmt: skip
    opt.follow(model, **keywords)
    if input_ is not None:
        from .batch import run_batch

        status = run_batch(
            lambda: opt.load_model(model, **keywords),
            input_, output, resume, overwrite, batch_size, compare, trace, options, warm,
        )  # fmt: skip
        raise typer.Exit(status)
    text = prompt if prompt is not None else opt.read_text(prompt_file, "--prompt-file")  # type: ignore[arg-type]
    check_options(options, text)
    with tracing(trace) as writer:
        llm = opt.load_model(model, **keywords)
        with opt.warm_pool(llm, warm) as kept:
            raise typer.Exit(_one(llm, text, options | kept, compare, color, writer, as_json))


def check_options(options: dict[str, Any], prompt: str | None = None) -> None:
    """Refuse what cannot be honoured before a model is loaded."""
    from ..engine import Options

    Options.of(options)
    if prompt == "":
        raise SettingsError("the prompt must not be empty, got an empty text")


def _check_source(prompt: str | None, prompt_file: Path | None, input_: Path | None) -> None:
    sources = {"--prompt": prompt, "--prompt-file": prompt_file, "--input": input_}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        raise SettingsError(
            "exactly one of --prompt, --prompt-file and --input must be given, "
            + (f"got {' and '.join(given)}" if given else "got none")
        )


def _check_flags(batch: bool, flags: dict[str, bool], as_json: bool, color: bool) -> None:
    """Refuse options that do not go together, by name."""
    for name, given in flags.items():
        if given and not batch:
            raise SettingsError(f"{name} goes with --input, which is not given")
    if flags["--resume"] and flags["--overwrite"]:
        raise SettingsError("--resume and --overwrite cannot be given together; use one of them")
    if flags["--resume"] and not flags["--output"]:
        raise SettingsError("--resume goes on with an --output, which is not given")
    if color and (batch or as_json):
        raise SettingsError(f"--color and {'--input' if batch else '--json'} cannot be given together")
    if batch and as_json:
        raise SettingsError("--json and --input cannot be given together; --input writes JSON lines anyway")


@contextmanager
def tracing(path: Path | None, append: bool = False) -> Iterator[Writer | None]:
    """The writer of ``--trace``, or None."""
    if path is None:
        yield None
        return
    writer = Writer(path, append)
    try:
        yield writer
    finally:
        writer.close()


def _one(
    llm: LLM,
    prompt: str,
    options: dict[str, Any],
    compare: bool,
    color: bool,
    trace: Writer | None,
    as_json: bool,
) -> int:
    """Stream one text to stdout; the exit status."""
    if compare:
        from ..engine.compare import warm_up

        warm_up(llm, prompt)
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
    comparison = None
    if compare:
        from ..engine.compare import compare as compare_with_plain

        comparison = compare_with_plain(llm, result, prompt, **options)
    if as_json:
        record = {"prompt": prompt} | as_record(result) | {"stats": result.stats.as_dict()}
        if comparison is not None:
            record["compare"] = comparison.as_dict()
        typer.echo(json.dumps(record, ensure_ascii=False))
    else:
        note(summary(llm, result))
        if comparison is not None:
            note(verdict(llm, comparison), "green" if comparison.equal else "red")
    return diverged(llm, [] if comparison is None else [comparison])


def as_record(result: Result) -> dict[str, Any]:
    """A result in the words of the batch form; steps are forward passes after the prefill."""
    from ..engine.compare import seconds

    record = {
        "output_ids": result.tokens,
        "text": result.text,
        "new_tokens": len(result.tokens),
        "steps": result.stats.steps,
        "rows": result.stats.rows,
        "seconds": seconds(result),
        "finish_reason": result.finish_reason,
    }
    return record if result.seed is None else record | {"seed": result.seed}


def summary(llm: LLM, result: Result) -> str:
    """One line: tokens, steps, speed."""
    from ..engine.compare import seconds

    stats, spent = result.stats, seconds(result)
    seed = "" if result.seed is None else f" · seed {result.seed}"
    return (
        f"{stats.new_tokens} tokens in {stats.steps} steps ({stats.compression_ratio:.2f} a step) · "
        f"{spent:.2f} s · {stats.new_tokens / max(spent, 1e-9):.1f} tokens/s · "
        f"{result.finish_reason}{seed} · {llm.method} · {_dtype(llm)}"
        + (f" · {stats.path} path" if stats.path else "")
    )


def verdict(llm: LLM, comparison: Any) -> str:
    """One line: equal or not, steps and seconds of both."""
    as_dict = comparison.as_dict()
    cost = (
        f"steps {as_dict['steps']} against {as_dict['plain_steps']} · "
        f"seconds {as_dict['seconds']:.2f} against {as_dict['plain_seconds']:.2f} ({comparison.speedup:.2f}x)"
    )
    if comparison.equal:
        return f"equal to plain decoding · {cost}"
    return (
        f"NOT equal to plain decoding from token {comparison.first_divergence} on, where the two best "
        f"logits are {comparison.gap:.3g} apart ({_dtype(llm)}) · {cost}"
    )


def diverged(llm: LLM, comparisons: list[Any]) -> int:
    """Exit status: 1 where a full-precision run is not equal; in short formats near ties may flip."""
    import torch

    full = llm.model.dtype in (torch.float32, torch.float64)
    return int(full and any(not comparison.equal for comparison in comparisons))


def _dtype(llm: LLM) -> str:
    return str(llm.model.dtype).removeprefix("torch.")
