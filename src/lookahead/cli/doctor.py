"""``lookahead doctor``: what this machine and this installation are, and what the probe says of a model."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import METHODS, __version__
from ..core.target import PROMISES
from ..engine.options import LoadOptions
from .options import Json, load_model, takes

if TYPE_CHECKING:
    from ..engine.llm import LLM

PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "numba", "typer", "rich",
    "triton", "matplotlib",
)  # fmt: skip


@takes()
def doctor(*, as_json: Json = False, load: LoadOptions) -> None:
    """Versions, devices, instruction sets, and whether a model can take token trees."""
    llm = load_model(load)
    report: dict[str, dict[str, Any]] = {"versions": versions(), "machine": machine(), "model": _model(llm)}
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False))
        return
    console = Console(highlight=False)
    for title, section in report.items():
        table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for key, value in section.items():
            table.add_row(key.replace("_", " "), Text(_plain(value)))
        console.print(table)
        console.print()


def versions() -> dict[str, str | None]:
    """Installed versions; None for an optional package that is not there."""
    there = {package.name.lower().replace("_", "-"): package.version for package in metadata.distributions()}
    own = {"lookahead": __version__, "python": platform.python_version()}
    return own | {name: there.get(name) for name in PACKAGES}


def machine() -> dict[str, Any]:
    """Processor, instruction sets, threads, memory in GiB, accelerators."""
    import torch

    from ..bench.record import machine

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    devices = [f"cuda:{i} {gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for i, gpu in enumerate(gpus)]
    return machine() | {
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "onednn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        "accelerators": devices + ["mps"] * torch.backends.mps.is_available(),
    }


def _model(llm: LLM) -> dict[str, Any]:
    target = llm.target()
    return {
        "name": llm.name,
        "class": type(llm.model).__name__,
        "parameters": sum(p.numel() for p in llm.model.parameters()),
        "dtype": llm.dtype,
        "device": str(llm.model.device),
        "attention": llm.model.config._attn_implementation,
        "context": llm.context,
        "vocabulary": llm.vocabulary,
        "end_tokens": sorted(llm.eos),
        "tokenizer": type(llm.tokenizer).__name__ if llm.tokenizer is not None else llm.tokenizer_error,
        "chat_template": bool(getattr(llm.tokenizer, "chat_template", None)),
        "probe": llm.probe.mode,
        "probe_reason": llm.probe.reason,
        "path": target.path,
        "path_reason": target.reason,
        "promise": PROMISES.get(target.path, ""),
        "methods": list(METHODS),
    }


def _plain(value: Any) -> str:
    if value is None:
        return "not there"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) and value > 9999 else str(value)
