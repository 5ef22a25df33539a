"""``lookahead demo``: four completions, streamed with one colour per step, and a table of speeds."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from shutil import which
from textwrap import shorten
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from .. import Plain
from ..core import SettingsError
from ..options import LoadOptions
from ..text.prompts import chat_prompt
from .adapter import with_options
from .console import diverged, note
from .generate import print_text
from .shared import load_model, read_text

if TYPE_CHECKING:
    from ..core import Result
    from ..llm import LLM

#: The prompts included in the package.
PROMPTS = Path(__file__).parent / "demo_prompts"
#: Runs of each prompt with each drafter, if both together take at most ``SHORT`` seconds. A single run of a third of
#: a second mostly measures other load: plain decoding of one prompt ran at 233 and 376 tokens/s in two demos.
ROUNDS = 3
SHORT = 3.0


@with_options(only=("path_or_id", "dtype", "device", "threads"))
def demo(
    *,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A folder of prompts, one text file each. [default: four included prompts]",
            metavar="DIR",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens per completion.", min=2)] = 128,
    load: LoadOptions,
) -> None:
    """Show the speed-up: completions with one colour per step, and speeds alongside plain decoding."""
    # Read the prompts before the model is loaded.
    folder = prompts or PROMPTS
    files = sorted(path for path in folder.glob("[!.]*") if path.is_file())
    if not files:
        raise SettingsError(f"--prompts must be a folder of text files, got {folder}")
    texts = {path: read_text(path, "--prompts") for path in files}
    empty = [path.name for path, text in texts.items() if not text.strip()]
    if empty:
        raise SettingsError(f"the text files of --prompts must not be empty, but {empty[0]} is")
    # Load, compile, count the base table and measure the cost curve before anything is timed.
    note("loading the model")
    start = perf_counter()
    llm = load_model(load)
    from ..drafters.adaptive import base_files  # imports numpy
    from ..drafters.prepare import LONGEST_WAIT

    if base_files.is_building():
        note("counting what follows what in text of models, once for this tokenizer: ten to twenty seconds")
        base_files.wait_for_tables(LONGEST_WAIT)
    if base_files.is_building():
        note("other programs use the processor: decoding without what is counted until it is there")
    for drafter in (None, Plain()):
        llm.generate(list(range(5, 37)), max_new_tokens=16, ignore_eos=True, drafter=drafter)
    note(f"{llm.name} in {llm.dtype}: ready after {perf_counter() - start:.1f} s")
    # Stream each completion once, then time it with both drafters.
    rows = []
    equal = []
    for path, text in texts.items():
        typer.echo(typer.style(f"\n{path.stem}: {shorten(text.strip().splitlines()[0], 78)}", bold=True))
        ids = llm.encode(chat_prompt([{"role": "user", "content": text}], llm.tokenizer))
        run = partial(llm.run, [ids], max_new_tokens=max_new_tokens)
        color = sys.stdout.isatty()
        ours = [print_text(run(), color)]
        plain = []
        # Plain decoding is streamed to the null device, so that it also has the overhead of streaming.
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            plain.append(print_text(run(drafter=Plain()), color, nowhere))
            while len(ours) < ROUNDS and ours[0].seconds + plain[0].seconds < SHORT:
                ours.append(print_text(run(), color, nowhere))
                plain.append(print_text(run(drafter=Plain()), color, nowhere))
        equal.append(all(result.tokens == ours[0].tokens for result in ours + plain))
        rows.append((path.stem, max(ours, key=_speed), max(plain, key=_speed)))
    # The table, and the commands to try next.
    _print_table(llm, rows, equal)
    program = "lookahead" if which("lookahead") else f"{os.path.relpath(sys.executable)} -m lookahead"
    note(
        f"Next: {program} chat (a conversation), {program} serve (a page that shows both side by side), or "
        f"{program} bench --workload prompts.jsonl (the speed-up on your own prompts)"
    )
    raise typer.Exit(diverged(llm, equal))


def _speed(result: Result) -> float:
    """Tokens per second after the prefill."""
    seconds = result.seconds - result.stats.seconds["prefill"]
    return (len(result.tokens) - 1) / max(seconds, 1e-9)


def _print_table(llm: LLM, rows: Sequence[tuple[str, Result, Result]], equal: Sequence[bool]) -> None:
    """Speeds of plain decoding and of the model's drafter, and the speed-up."""
    table = Table(box=None, pad_edge=False, title="\ntokens per second", title_justify="left")
    headings = ("", "plain", "adaptive", "speed-up", "tokens\nper pass", "equal")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for (name, ours, plain), same in zip(rows, equal, strict=True):
        fast, slow = _speed(ours), _speed(plain)
        gain = f"{fast / slow:.2f}" if slow else "–"  # a one-token completion has no speed
        cells = [f"{slow:.1f}", f"{fast:.1f}", gain, f"{ours.stats.compression_ratio:.2f}"]
        table.add_row(name, *cells, "yes" if same else "no")
    console = Console(highlight=False)
    console.print(table)
    # The conditions of the measurement.
    from ..bench.record import describe, environment, was_busy

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    path = rows[0][1].stats.path
    record = environment() | {"model": llm.name, "dtype": llm.dtype, "path": path, "load": load}
    how = f"Without the prefill; of short completions, the fastest of {ROUNDS} runs"
    console.print(f"\n{describe(record)}. {how}. equal: same tokens as plain decoding.")
    console.print(was_busy([record]), style="red")
