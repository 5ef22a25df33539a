"""``lookahead demo``: prompts of a folder, streamed in colours by step, then one table of speeds."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from textwrap import shorten
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..core import SettingsError
from ..engine.options import LoadOptions
from .console import diverged, note
from .generate import show
from .options import load_model, read_text, takes

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..engine.results import Result

#: New tokens that transformers' generate is timed with: enough for its speed, at a sixth of ours or less.
REFERENCE_TOKENS = 32


@takes(only=("path_or_id", "dtype", "device", "threads"))
def demo(
    *,
    prompts: Annotated[Path, typer.Option(help="Folder of prompts, a text file each.", metavar="DIR")] = Path(
        "examples/prompts"
    ),
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of each text.", min=2)] = 128,
    load: LoadOptions,
) -> None:
    """Show what it is for: texts in colours by step, and their speed beside plain decoding and transformers."""
    files = sorted(path for path in prompts.glob("*") if path.is_file())
    if not files:
        raise SettingsError(f"--prompts must be a folder of text files, got {prompts}")
    note("loading the model; the first time in a dtype its code is compiled, which takes about nine seconds")
    start = perf_counter()
    llm = load_model(load)
    for method in (None, "autoregressive"):  # what happens once in a process: compiled code, and step times
        llm.generate(list(range(5, 37)), max_new_tokens=16, ignore_eos=True, method=method)
    note(f"{llm.name} in {llm.dtype}: ready after {perf_counter() - start:.1f} s")
    rows, equal = [], []
    for path in files:
        text = read_text(path, "--prompts")
        chat = getattr(llm.tokenizer, "chat_template", None)
        ids = llm.encode([{"role": "user", "content": text}] if chat else text)
        typer.echo(typer.style(f"\n{path.stem}: {shorten(text.splitlines()[0], 78)}", bold=True))
        run, color = partial(llm.run, [ids], max_new_tokens=max_new_tokens), sys.stdout.isatty()
        ours = show(run(), color)
        with open(os.devnull, "w") as nowhere:  # as streamed as the other
            plain = show(run(method="autoregressive"), color, nowhere)
        equal.append(ours.tokens == plain.tokens)
        rows.append((path.stem, ours, plain, _reference_speed(llm, ids)))
    _table(llm, rows, equal)
    raise typer.Exit(diverged(llm, equal))


def _speed(result: Result) -> float:
    """Tokens per second after the prefill, as for every method."""
    seconds = result.seconds - result.stats.seconds["prefill"]
    return (len(result.tokens) - 1) / max(seconds, 1e-9)


def _reference_speed(llm: LLM, ids: list[int]) -> float:
    """That of ``model.generate`` of transformers."""
    from ..bench import ModelUnderTest, RunOptions, make_methods

    model = ModelUnderTest.of(llm)
    (method,) = make_methods("hf-greedy", model)
    outcome = method.decode(model, ids, RunOptions(REFERENCE_TOKENS))
    return len(outcome.step_seconds) / max(sum(outcome.step_seconds), 1e-9)


def _table(llm: LLM, rows: list[tuple[str, Result, Result, float]], equal: list[bool]) -> None:
    """Speeds, and what adaptive gains."""
    table = Table(box=None, pad_edge=False, title="\ntokens per second", title_justify="left")
    headings = (
        "",
        "transformers",
        "ours,\nplain",
        "ours,\nadaptive",
        "over\nplain",
        "tokens\nper pass",
        "equal",
    )
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for (name, ours, plain, reference), same in zip(rows, equal, strict=True):
        fast, slow = _speed(ours), _speed(plain)
        gain = f"{fast / slow:.2f}" if slow else "–"  # a text of one token says nothing of speed
        cells = [f"{reference:.1f}", f"{slow:.1f}", f"{fast:.1f}", gain]
        table.add_row(name, *cells, f"{ours.stats.compression_ratio:.2f}", "yes" if same else "no")
    console = Console(highlight=False)
    console.print(table)
    from ..bench.record import describe, environment, was_busy

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    record = environment() | {
        "model": llm.name, "dtype": llm.dtype, "path": rows[0][1].stats.path, "load": load,
    }  # fmt: skip
    console.print(
        f"\n{describe(record)}. Without the prefill. transformers: its generate, {REFERENCE_TOKENS} tokens. "
        "equal: adaptive's text is plain decoding's, token for token."
    )
    console.print(was_busy([record]), style="red")
