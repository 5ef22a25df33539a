"""`lookahead bench [MODEL]`: measure, and step costs.

The words after ``bench`` are a model or one of the commands below; what is no command is a model.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from .. import METHODS
from ..core import SettingsError
from ..engine.options import MACHINE, LoadOptions, Options
from .console import note, progress_bar
from .options import numbers, quiet, takes

if TYPE_CHECKING:
    from ..bench import ModelUnderTest

MEASURE = "run"


class ModelOrCommand(TyperGroup):
    """A first word that is no command, or none at all, is the measurement."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [MEASURE, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=ModelOrCommand, add_completion=False, pretty_exceptions_enable=False)

Out = Annotated[Path, typer.Option(help="Folder for records, tables and pictures.", metavar="DIR")]
Steps = Annotated[
    str,
    typer.Option(
        "--path", help="What evaluates our steps.", metavar="auto|cpu|transformers", rich_help_panel=MACHINE
    ),
]
MORE = (
    "Also: lookahead bench step-cost [MODEL]. Records are kept as they are made; "
    "after an interrupt the same command goes on where it was."
)
WORKLOADS = (
    "humaneval, gsm8k, mbpp, mt-bench, classeval, spec-bench, xsum, cnn-dailymail, stdlib, NAME=FILE, or a "
    "JSON-lines file of prompts. Several times for several. [default: stdlib]"
)
METHOD = (
    f"hf-greedy, hf-sample, hf-prompt-lookup, {', '.join(METHODS)}, or lookahead:W,N,G; a list, or several times. "
    "[default: hf-greedy, hf-prompt-lookup, and all of ours]"
)


def _load(load: LoadOptions, path: str, **more: Any) -> ModelUnderTest:
    from ..bench import load_model

    quiet()
    return load_model(**(load.keywords() | more), path=path)


def command_line(words: list[str] | None = None, program: str = "lookahead") -> str:
    """The command as it was typed, for pages that others read: of an absolute path only the last part."""
    shown = [program]
    for word in sys.argv[1:] if words is None else words:
        name, equals, value = word.rpartition("=")
        short = f"{name}{equals}{Path(value).name}" if value.startswith(("/", "~")) else word
        shown.append(shlex.quote(short))
    return " ".join(shown)


@contextmanager
def progress() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar that is told (finished, in all, what comes next)."""
    with progress_bar() as bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


@app.command(MEASURE, hidden=True, epilog=MORE)
@takes(
    only=("path_or_id", "dtype", "device", "threads", "max_new_tokens", "temperature", "top_k", "seed"),
    dtype="float32",
    seed=0,
)
def measure(
    *,
    workload: Annotated[list[str] | None, typer.Option(help=WORKLOADS, metavar="NAME|FILE")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of data sets by name.", metavar="DIR")] = None,
    limit: Annotated[int, typer.Option(help="Prompts per workload; 0 for all.", min=0)] = 8,
    method: Annotated[list[str] | None, typer.Option(help=METHOD, metavar="LIST")] = None,
    out: Out = Path("bench"),
    repeats: Annotated[int, typer.Option(help="Every prompt so many times.", min=1)] = 3,
    warm: Annotated[bool, typer.Option(help="Measure methods that keep state warm, too.")] = True,
    options: Options,
    load: LoadOptions,
    path: Steps = "auto",
) -> None:
    """Measure decoding methods side by side on the same prompts: does it pay on this machine, with this model?"""
    from ..bench import Records, RunOptions, default_methods, load_workload, make_methods, run, split_methods
    from ..bench.report import write_report

    seed, top_k = options.seed or 0, options.top_k or 0
    run_options = RunOptions(options.max_new_tokens, options.temperature, top_k, seed, repeats, warm)
    names = split_methods(method) if method else default_methods()
    workloads = workload or ["stdlib"]
    prompts = [prompt for name in workloads for prompt in load_workload(name, limit or None, seed, data)]
    loaded = _load(load, path)
    for name in names:
        make_methods(name, loaded)  # a wrong name is an error before anything is measured
    records = Records(out)
    try:
        with progress() as told:
            result = run(names, prompts, loaded, run_options, records, told)
    except KeyboardInterrupt:
        note(
            f"{len(records.read())} finished records are in {records.path}; the same command goes on from there"
        )
        raise
    write_report(result, out, command_line())


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
    """Measure t(k), the time of a step of k rows."""
    from ..bench import step_cost as cost

    sizes, records = (numbers(contexts, "--contexts"), numbers(rows, "--rows")), []
    with progress() as told:
        for one in dtype.split(","):
            records += cost.measure(_load(load, path, dtype=one.strip()), *sizes, told)
    if not records:
        raise SettingsError(
            "no context and number of rows fit this model; give smaller --contexts and --rows"
        )
    typer.echo(cost.write_report(records, out, command_line()))


@app.command("serve")
@takes(only=("path_or_id", "dtype", "device", "threads", "max_new_tokens"), max_new_tokens=64)
def serve(
    *,
    url: Annotated[
        str | None, typer.Option(help="A server that runs; without it one is started for MODEL.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Another OpenAI-compatible server to measure beside it; llamacpp:FILE starts llama.cpp's.",
            metavar="URL|llamacpp:FILE",
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Of the server.", envvar="LOOKAHEAD_API_KEY")] = None,
    clients: Annotated[str, typer.Option(help="At once, with commas between.")] = "1,4,16,64",
    method: Annotated[str, typer.Option(help="Beside plain decoding, with commas between.")] = "adaptive",
    requests: Annotated[int, typer.Option(help="Of a round, times the clients; 12 at least.", min=1)] = 3,
    repeats: Annotated[int, typer.Option(help="Rounds; methods take turns.", min=1)] = 3,
    workload: Annotated[str, typer.Option(help="Prompts.", metavar="NAME|FILE")] = "stdlib",
    out: Annotated[
        Path | None, typer.Option(help="Folder for serve.md and serve.json.", metavar="DIR")
    ] = None,
    options: Options,
    load: LoadOptions,
) -> None:
    """Measure a server under load: time to the first token, time per token, throughput, drafting on and off."""
    from ..bench import load_workload
    from ..bench.record import machine
    from ..bench.report import write_served
    from ..server import load_test

    prompts = [prompt.turns[0] for prompt in load_workload(workload, 32)]
    methods = [load_test.PLAIN, *(name.strip() for name in method.split(","))]
    kind, _, file = (against or "").partition(":")
    threads = load.keywords().get("threads") or machine()["cores"]
    # Servers that are started here end, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with ExitStack() as servers:
        address = url or servers.enter_context(load_test.started(load.keywords()))
        other = against
        if kind == "llamacpp":
            other = servers.enter_context(load_test.started_llamacpp(file, threads))
        rounds = load_test.measure(
            {name: address for name in methods} | ({load_test.OTHER: other} if other else {}),
            prompts,
            numbers(clients, "--clients"),
            options.max_new_tokens,
            requests,
            repeats,
            api_key,
            lambda one: note(f"{one.clients} clients, {one.method}: {one.throughput:.1f} tokens/s"),
        )
    table = load_test.table(rounds)
    typer.echo(table)
    if out is not None:
        records = [one.as_dict() for one in rounds]
        beside = (
            f"llama.cpp's server (llama-cpp-python) on {Path(file).name}" if kind == "llamacpp" else against
        )
        write_served(records, table, rounds[0].served, beside, threads, out, command_line())
