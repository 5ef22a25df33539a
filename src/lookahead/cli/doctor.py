"""``lookahead doctor``: this machine, this installation, a model, and its start-up time."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..core import SettingsError
from ..options import DRAFTERS, LoadOptions
from ..records import as_line
from ..text.prompts import has_chat_template
from ..threads import thread_count
from .adapter import with_options
from .shared import Json, load_model

if TYPE_CHECKING:
    from ..llm import LLM

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "numpy",
    "typer",
    "rich",
    "triton",
    "matplotlib",
    "llama-cpp-python",
)


@with_options()
def doctor(*, as_json: Json = False, load: LoadOptions) -> None:
    """Show versions, devices, instruction sets, whether a model can evaluate token trees, and the start-up time."""
    llm, seconds = timed_start(load)
    report: dict[str, dict[str, Any]] = {
        "versions": versions(),
        "machine": machine(),
        "model": _model(llm),
        "weight_cache": _weight_cache(),
        "remembered": _remembered(),
        "seconds_of_a_start": seconds,
    }
    if as_json:
        typer.echo(as_line(report), nl=False)
        return
    console = Console(highlight=False)
    for title, section in report.items():
        table = Table(
            title=title.replace("_", " "),
            title_justify="left",
            title_style="bold",
            box=None,
            show_header=False,
        )
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for key, value in section.items():
            table.add_row(key.replace("_", " "), Text(_plain(value)))
        console.print(table)
        console.print()


def timed_start(load: LoadOptions) -> tuple[LLM, dict[str, float]]:
    """Load a model and generate a few tokens, as ``lookahead generate`` does.

    Returns:
        The model, and the seconds of each part of the start, in order. The first tokens include one-off work: kernels
        are compiled or read from their cache, and steps are timed.
    """
    seconds: dict[str, float] = {}
    since_start = _process_seconds()
    if since_start is not None:
        seconds["interpreter and command line"] = since_start
    last = perf_counter()

    def done(part: str) -> None:
        nonlocal last
        seconds[part], last = perf_counter() - last, perf_counter()

    from .. import load as loading  # noqa: F401

    done("import lookahead")
    llm = load_model(load)
    done("load the model")
    for part in ("first 8 tokens", "next 8 tokens"):
        llm.generate(list(range(5, 13)), max_new_tokens=8, ignore_eos=True)
        done(part)
    return llm, {part: round(value, 3) for part, value in seconds.items()}


def _process_seconds() -> float | None:
    """Seconds since this process was started; None if the system does not provide this."""
    try:
        # Field 22 of /proc/self/stat, in clock ticks since boot; the name in field 2 may contain spaces.
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None


def versions() -> dict[str, str | None]:
    """Installed versions; None for a package that is not installed."""
    # An interrupted installation leaves a package without a name.
    there = {
        package.name.lower().replace("_", "-"): package.version
        for package in metadata.distributions()
        if package.name
    }
    own = {"lookahead": __version__, "python": platform.python_version()}
    return own | {name: there.get(name) for name in PACKAGES}


def machine() -> dict[str, Any]:
    """Processor, instruction sets, threads, memory in GiB, accelerators."""
    from ..bench.record import machine
    from ..hf.device import gpus

    return machine() | {
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": thread_count(),
        "accelerators": [f"cuda:{index} {name}" for index, name in enumerate(gpus())],
    }


def _model(llm: LLM) -> dict[str, Any]:
    target = llm.target()
    return {
        "name": llm.name,
        "class": llm.model.description.partition(",")[0],
        "parameters": llm.parameter_count,
        "dtype": llm.dtype,
        "device": llm.model.device,
        "attention": llm.model.attention,
        "context": llm.context,
        "vocabulary": llm.vocabulary,
        "end_tokens": sorted(llm.eos),
        "tokenizer": type(llm.tokenizer).__name__ if llm.tokenizer is not None else llm.tokenizer_error,
        "chat_template": has_chat_template(llm.tokenizer),
        "probe": llm.model.probe.mode,
        "probe_reason": llm.model.probe.reason,
        "path": target.path,
        "path_reason": target.reason,
        "guarantee": target.guarantee,
        "drafters": list(DRAFTERS),
        "base_table": _base_table(llm),
    }


def _weight_cache() -> dict[str, Any]:
    """The folder of packed weights, and how much is in it."""
    from ..cpu import weight_cache

    files = weight_cache.kept()
    return {
        "folder": str(weight_cache.folder()),
        "in_use": weight_cache.is_on(),
        "files": len(files),
        "gb": sum(each.size for each in files) / 1e9,
        "gb_at_most": weight_cache.LIMIT / 1e9,
    }


def _remembered() -> dict[str, Any]:
    """The folder of remembered answers, and how much is in it."""
    from ..drafters.adaptive import remembered

    files = remembered.kept()
    size = sum(file.stat().st_size for file in files) / 1e6
    return {"folder": str(remembered.folder()), "files": [file.name for file in files], "mb": size}


def _base_table(llm: LLM) -> str:
    """The table that the adaptive drafter uses, or why there is none and how to get one."""
    from ..drafters.adaptive.base_files import cannot_build, is_current, key_of, read_table

    try:
        table = read_table(key_of(llm.model), llm.vocabulary)
    except SettingsError as error:
        table, missing = None, str(error)
    else:
        missing = cannot_build(llm.tokenizer) or "one is counted when the model is loaded"
    if table is None:
        return f"none ({missing}); lookahead learn makes a better one"
    corpus = "the corpus" if is_current(table) else "a part of the corpus or an earlier one"
    return f"{table.path}, from {f'{table.learned:,} tokens' if table.learned else corpus}"


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) and value > 9999 else str(value)
