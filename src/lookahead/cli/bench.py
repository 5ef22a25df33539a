"""`lookahead bench [MODEL]`: measure, plot, and step costs.

The words after ``bench`` are a model or one of the commands below; what is no command is a model.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from .. import METHODS
from ..core import SettingsError
from ..engine.options import MACHINE, LoadOptions, Options
from .console import note, stderr
from .options import numbers, quiet, takes

if TYPE_CHECKING:
    from ..bench.model import ModelUnderTest

MEASURE = "run"


class ModelOrCommand(TyperGroup):
    """A first word that is no command, or none at all, is the measurement."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [MEASURE, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=ModelOrCommand, add_completion=False, pretty_exceptions_enable=False)

Out = Annotated[Path, typer.Option(help="Folder for records, tables and pictures.", metavar="DIR")]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder that holds data sets by name.", metavar="DIR", rich_help_panel="Prompts"),
]
Steps = Annotated[
    str,
    typer.Option(
        "--path", help="What evaluates our steps.", metavar="auto|cpu|transformers", rich_help_panel=MACHINE
    ),
]
MORE = (
    "Also: lookahead bench plot DIR and lookahead bench step-cost [MODEL]. Records are kept as they are made; "
    "after an interrupt the same command goes on where it was."
)


def _load(load: LoadOptions, path: str, dtype: str, draft_model: str | None = None) -> ModelUnderTest:
    from ..bench import load_model

    quiet()
    name = None if load.path_or_id is None else str(load.path_or_id)
    device = None if load.device is None else str(load.device)
    return load_model(name, dtype, load.threads, draft_model, device, path)


def command_line() -> str:
    """The command as it was typed, for pages that others read: of an absolute path only the last part."""
    words = ["lookahead"]
    for word in sys.argv[1:]:
        name, equals, value = word.rpartition("=")
        shown = f"{name}{equals}{Path(value).name}" if value.startswith(("/", "~")) else word
        words.append(shlex.quote(shown))
    return " ".join(words)


@app.command(MEASURE, hidden=True, epilog=MORE)
@takes(
    only=("path_or_id", "dtype", "device", "threads", "max_new_tokens", "temperature", "top_k", "seed"),
    dtype="float32",
    seed=0,
)
def measure(
    *,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="humaneval, gsm8k, mbpp, mt-bench, classeval, spec-bench, xsum, cnn-dailymail, stdlib, "
            "NAME=FILE, or a JSON-lines file of prompts or messages. Several times for several. [default: stdlib]",
            metavar="NAME|FILE",
            rich_help_panel="Prompts",
        ),
    ] = None,
    data: Data = None,
    limit: Annotated[
        int, typer.Option(help="Prompts per workload; 0 for all.", min=0, rich_help_panel="Prompts")
    ] = 8,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="hf-greedy, hf-sample, hf-prompt-lookup, hf-assisted, "
            + ", ".join(METHODS)
            + ", or lookahead:W,N,G; a list, or several times. [default: all that need nothing more]",
            metavar="LIST",
        ),
    ] = None,
    draft_model: Annotated[str | None, typer.Option(help="For hf-assisted.", metavar="MODEL")] = None,
    out: Out = Path("bench"),
    repeats: Annotated[int, typer.Option(help="Every prompt so many times.", min=1)] = 3,
    warm: Annotated[bool, typer.Option(help="Measure methods that keep state warm, too.")] = True,
    resume: Annotated[bool, typer.Option(help="Go on with the records that DIR holds.")] = True,
    spec_bench: Annotated[
        bool, typer.Option("--spec-bench", help="Write Spec-Bench's answer files, too.")
    ] = False,
    options: Options,
    load: LoadOptions,
    path: Steps = "auto",
) -> None:
    """Measure decoding methods side by side on the same prompts: does it pay on this machine, with this model?"""
    from ..bench import Records, RunOptions, default_methods, load_workload, run, split_methods
    from ..bench.methods import make_methods
    from ..bench.report import write_report

    seed = options.seed or 0
    run_options = RunOptions(
        options.max_new_tokens, options.temperature, options.top_k or 0, seed, repeats, warm
    )
    names = split_methods(method) if method else default_methods()
    prompts = [
        prompt for name in workload or ["stdlib"] for prompt in load_workload(name, limit or None, seed, data)
    ]
    loaded = _load(load, path, str(load.dtype), draft_model)
    for name in names:
        make_methods(name, loaded)  # a wrong name is an error before anything is measured
    records = Records(out)
    if not resume and records.path.exists():
        raise SettingsError(
            f"{records.path} is there already; choose another --out, or leave out --no-resume"
        )
    try:
        with Bar() as bar:
            result = run(names, prompts, loaded, run_options, records, bar.update)
    except KeyboardInterrupt:
        note(
            f"{len(records.read())} finished records are in {records.path}; the same command goes on from there"
        )
        raise
    write_report(result, out, command_line(), spec_bench)


class Bar:
    """A progress bar on stderr with the time left."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            BarColumn(20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=stderr(),
            transient=True,
        )
        self._task = self._progress.add_task("")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def update(self, done: int, total: int, what: str) -> None:
        """Show that ``done`` of ``total`` are finished and ``what`` comes next."""
        self._progress.update(self._task, completed=done, total=total, description=what)


@app.command("plot")
def plot_records(
    folder: Annotated[
        Path, typer.Argument(help="A folder that `lookahead bench --out` wrote.", metavar="DIR")
    ],
    out: Annotated[Path | None, typer.Option(help="Where the pictures go; DIR itself if not given.")] = None,
) -> None:
    """Draw the records of a folder: speed, step time by rows, acceptance by position."""
    from ..bench.pictures import plot

    written, others = plot(folder, out)
    for path in written:
        typer.echo(path)
    if others:
        note(
            f"note: {others} records of {folder} were made under another setup than the newest and are left out"
        )


@app.command("step-cost")
@takes(only=("path_or_id", "device", "threads"))
def step_cost(
    *,
    dtype: Annotated[
        str, typer.Option(help="One or several, with commas between.", rich_help_panel=MACHINE)
    ] = "float32,bfloat16",
    contexts: Annotated[str, typer.Option(help="Committed tokens, with commas between.")] = "128,512,1024",
    rows: Annotated[str, typer.Option(help="k, with commas between.")] = "1,2,4,8,16,32,64,128,256",
    out: Out = Path("bench"),
    load: LoadOptions,
    path: Steps = "auto",
) -> None:
    """Measure t(k), the time of a step of k rows, with the physical floor beside it."""
    import json

    from ..bench import step_cost as cost
    from ..bench.pictures import save
    from ..bench.record import describe

    records = []
    with Bar() as bar:
        for one in dtype.split(","):
            loaded = _load(load, path, one.strip())
            records += cost.measure(
                loaded, numbers(contexts, "--contexts"), numbers(rows, "--rows"), bar.update
            )
    if not records:
        raise SettingsError(
            "no context and number of rows fit this model; give smaller --contexts and --rows"
        )
    out.mkdir(parents=True, exist_ok=True)
    with (out / "step-cost.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    lines = cost.findings(records)
    page = [f"`{command_line()}`", "", describe(records[0]), "", cost.table(records), "", *lines, ""]
    (out / "step-cost.md").write_text("\n".join(page), encoding="utf-8")
    save(cost.figure(records), out / "step-cost", describe(records[0]))
    typer.echo("\n".join(page[2:]))
