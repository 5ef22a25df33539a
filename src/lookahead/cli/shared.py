"""Shared by several commands: loading a model, adaptive's state, input files, lists of numbers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core import Drafter, SettingsError
from ..options import LoadOptions, MemoryOptions
from ..text.prompts import has_chat_template
from .console import note, ranks

if TYPE_CHECKING:
    from ..llm import LLM

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def load_model(load: LoadOptions, drafter: Drafter | None = None, memory: MemoryOptions | None = None) -> LLM:
    """``lookahead.load`` without transformers' progress bars and log lines.

    Args:
        load: how to load the model.
        drafter: the default drafter.
        memory: whether it remembers answers; None for not.

    Raises:
        SettingsError: --parallel-timeout without torchrun, the model cannot be loaded, or the drafter cannot
            remember.
    """
    if load.parallel_timeout is not None and ranks() == 1:
        raise SettingsError("--parallel-timeout only applies under torchrun; omit it otherwise")
    from ..hf.load import quiet
    from ..loading import load_with

    quiet()
    llm = load_with(replace(load, drafter=drafter, parallel="lookahead" if ranks() > 1 else None))
    if memory is not None and memory.remember:
        from ..drafters.adaptive.remembered import remembering

        llm.drafter = remembering(llm.drafter, llm.model)
    return llm


def note_text(llm: LLM, tokens: int) -> None:
    """Say what the model's own text starts from, and how many tokens of it there are from earlier runs."""
    if not has_chat_template(llm.tokenizer):
        note("this model has no chat template, so it continues short openings")
    if tokens:
        note(f"continuing after {tokens:,} tokens of earlier runs")


def dismiss(load: LoadOptions) -> None:
    """End the other ranks if no model was needed."""
    if ranks() > 1:
        from ..loading import dismiss_ranks

        dismiss_ranks(load)


def check_stdin() -> None:
    """Raise SettingsError if stdin is closed."""
    if sys.stdin is None:
        raise SettingsError("stdin must be open, but it is closed; redirect it from a file or from /dev/null")


def read_bytes(path: Path, option: str) -> bytes:
    """The contents of a file; "-" is stdin.

    Raises:
        SettingsError: the file cannot be read.
    """
    if str(path) == "-":
        check_stdin()
    try:
        return typer.get_binary_stream("stdin").read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{option} must be a readable file, got {path} ({error.strerror})") from None


def read_text(path: Path, option: str) -> str:
    """The contents of a UTF-8 text file; "-" is stdin.

    Raises:
        SettingsError: the file cannot be read, or is not UTF-8.
    """
    try:
        return read_bytes(path, option).decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{option} must be UTF-8 text; {path} is not (byte {error.start}); convert it first"
        ) from None


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers separated by commas, sorted, without duplicates.

    Raises:
        SettingsError: a part is not a whole number of at least 1.
    """
    try:
        parsed = sorted({int(part) for part in text.split(",")})
    except ValueError:
        parsed = []
    if not parsed or parsed[0] < 1:
        raise SettingsError(f"{option} must be whole numbers of at least 1, as in 1,4,16; got {text!r}")
    return parsed
