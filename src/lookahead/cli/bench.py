"""``lookahead bench [MODEL]``: is drafting faster on this machine, with this model? Also step times by rows.

The first word after ``bench`` is one of the commands below or a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from ..core import SettingsError
from ..options import DRAFTERS, OF_LLAMA_CPP, LoadOptions, MachineOptions, Options
from ..records import check_writable
from .adapter import with_options
from .command import Command
from .console import LongProgress, note, progress_bar
from .shared import numbers

if TYPE_CHECKING:
    from ..bench import ModelUnderTest, Prompt

MEASURE = "run"


class ModelOrCommand(TyperGroup):
    """Runs the measurement if no command is given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [MEASURE, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ModelOrCommand,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure decoding methods side by side: is drafting faster here? See also: bench step-cost.",
)

Out = Annotated[Path, typer.Option(help="Folder for the records.", metavar="DIR")]
Steps = Annotated[
    str,
    typer.Option(
        "--path",
        help="The path that evaluates steps.",
        metavar="auto|cpu|transformers",
        rich_help_panel=MachineOptions.GROUP,
    ),
]
MORE = (
    "See also: lookahead bench step-cost [MODEL]. Each record is written as soon as it is measured; "
    "after an interrupt, the same command continues."
)
WORKLOADS = (
    "A JSON-lines file whose rows have prompt or turns, or stdlib: functions of Python's standard library. "
    "Repeat the option for several workloads. [default: stdlib]"
)
METHOD = (
    f"{', '.join(DRAFTERS)}, or lookahead:W,N,G (window columns, n-gram size, candidates); a list, or repeat. "
    "[default: every method]"
)


def _load(load: LoadOptions, path: str, **more: Any) -> ModelUnderTest:
    from ..bench import load_model
    from ..hf.load import quiet

    quiet()
    return load_model(**(load.keywords() | more), path=path)


@contextmanager
def progress() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar, or lines in a log; call it with (finished, total, the next item)."""
    with progress_bar() as bar:
        task = bar.add_task("")
        last = monotonic()

        def show(done: int, total: int, what: str) -> None:
            nonlocal last
            bar.update(task, completed=done, total=total, description=what)
            if bar.disable and monotonic() - last > LongProgress.LINES:
                last = monotonic()
                note(f"{done} of {total}, now {what}")

        yield show


@app.command(MEASURE, cls=Command, hidden=True, epilog=MORE)
@with_options(
    only=(
        *("path_or_id", "dtype", "device", "threads", "max_new_tokens", "temperature", "top_k", "seed"),
        *("engine", *OF_LLAMA_CPP),
    ),
    seed=0,
)
def measure(
    *,
    workload: Annotated[list[str] | None, typer.Option(help=WORKLOADS, metavar="NAME|FILE")] = None,
    limit: Annotated[int, typer.Option(help="Prompts per workload; 0 for all, 64 of stdlib.", min=0)] = 8,
    method: Annotated[list[str] | None, typer.Option(help=METHOD, metavar="LIST")] = None,
    out: Out = Path("bench"),
    repeats: Annotated[int, typer.Option(help="How often each prompt is decoded.", min=1)] = 3,
    warm: Annotated[bool, typer.Option(help="Also measure warm: with the state of earlier prompts.")] = True,
    options: Options,
    load: LoadOptions,
    path: Steps = "auto",
) -> None:
    """Measure decoding methods on the same prompts: is drafting faster on this machine, with this model?"""
    from ..bench import Records, RunOptions, default_methods, load_workload, make_methods, run, split_methods
    from ..bench.report import show

    check_writable(out, f"--out {out}", "give another folder")
    seed = options.seed or 0
    top_k = options.top_k or 0
    run_options = RunOptions(options.max_new_tokens, options.temperature, top_k, seed, repeats, warm)
    names = split_methods(method) if method else default_methods()
    prompts: list[Prompt] = []
    for file in workload or ["stdlib"]:
        new = load_workload(file, limit or None, seed)
        if any(prompt.workload == new[0].workload for prompt in prompts):  # records tell them apart by it
            raise SettingsError(
                f"each --workload must have a different name, got {new[0].workload!r} twice; rename one of the files "
                "or leave it out"
            )
        prompts += new
    loaded = _load(load, path)
    for name in names:
        make_methods(name, loaded)  # reject an invalid name before measuring anything
    records = Records(out)
    earlier = {record["key"] for record in records.read()}
    try:
        with progress() as told:
            result = run(names, prompts, loaded, run_options, records, told)
    except KeyboardInterrupt:
        note(f"{records.path} has {len(records.read())} finished records; the same command continues")
        raise
    reused = sum(record["key"] in earlier for record in result)
    if reused:
        note(
            f"{reused} of {len(result)} completions were measured earlier; to measure them again, remove "
            f"{records.path} or give another --out"
        )
    show(result)
    note(f"the records are in {records.path}")


@app.command("step-cost", cls=Command)
@with_options(only=("path_or_id", "device", "threads"))
def step_cost(
    *,
    dtype: Annotated[
        str,
        typer.Option(
            help="auto, float32, bfloat16 or float16, separated by commas; auto keeps the weights of a quantized "
            "GGUF file packed, and other models in their own dtype.",
            metavar="LIST",
            rich_help_panel=MachineOptions.GROUP,
        ),
    ] = "auto",
    contexts: Annotated[
        str, typer.Option(help="Committed tokens, separated by commas.", metavar="LIST")
    ] = "128,512,1024",
    rows: Annotated[
        str, typer.Option(help="Rows per step, separated by commas.", metavar="LIST")
    ] = "1,2,4,8,16,32,64,128,256",
    out: Out = Path("bench"),
    load: LoadOptions,
    path: Steps = "auto",
) -> None:
    """Measure t(k), the time of a step of k rows."""
    from ..bench import step_cost as cost
    from ..bench.record import describe
    from ..gguf.file import open_model
    from ..hf.load import dtype_name
    from ..loading import find

    # Check the options before a model is loaded.
    check_writable(out, f"--out {out}", "give another folder")
    sizes = (numbers(contexts, "--contexts"), numbers(rows, "--rows"))
    names = [dtype_name(name.strip()) for name in dtype.split(",")]
    path_of_model = find(load).path if set(names) != {"auto"} else None
    quantized = (
        path_of_model is not None and path_of_model.is_file() and open_model(path_of_model).is_quantized
    )
    # Load and measure the model once per dtype. The records are written after each, to survive an interrupt.
    records = []
    with progress() as show:
        for name in names:
            if name != "auto" and quantized:
                note(
                    f"--dtype {name} measures decoded weights; omit --dtype to measure the packed ones on a CPU"
                )
            records += cost.measure(_load(load, path, dtype=name), *sizes, show)
            cost.write_records(records, out)
    if not records:
        raise SettingsError(
            "no context and number of rows fit this model; give smaller --contexts and --rows"
        )
    Console(highlight=False).print(cost.table(records))
    note(f"{describe(*records)}; the records are in {out}")
