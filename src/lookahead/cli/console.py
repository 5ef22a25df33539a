"""Command output: lines on stderr, records as JSON, and the exit status of a comparison."""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from ..core.target import BIT_EQUAL, CHECKED

if TYPE_CHECKING:
    from ..core import Result, Stats
    from ..llm import LLM
    from .compare import Comparison


class Interrupted(Exception):
    """Ctrl-C, with a message for the user."""


def stderr() -> Console:
    """A console on the current stderr."""
    return Console(stderr=True, highlight=False)


def is_follower() -> bool:
    """Whether torchrun started this process as a rank other than 0."""
    return ranks() > 1 and os.environ["RANK"] != "0"


def ranks() -> int:
    """Number of processes started by torchrun; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def note(text: str, style: str = "dim") -> None:
    """Print one line without wrapping or markup. Other ranks than 0 print only errors (red)."""
    if style == "red" or not is_follower():
        stderr().print(" ".join(text.split()), style=style, markup=False, soft_wrap=True)


def problem(text: str) -> None:
    """Print an error as one red line."""
    note(f"error: {text}", "red")


def progress_bar() -> Progress:
    """A progress bar with the remaining time and the next item, if stderr is a terminal."""
    item = TextColumn("{task.description}", markup=False)
    columns = BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), item
    return Progress(*columns, console=stderr(), transient=True, disable=not stderr().is_terminal)


class LongProgress:
    """Progress of long work: a bar on a terminal, else a line every ``LINES`` seconds. A context manager."""

    #: Seconds between lines.
    LINES = 30.0

    def __init__(self) -> None:
        columns = BarColumn(20), TaskProgressColumn(), TextColumn("{task.description}", markup=False)
        self._bar = Progress(*columns, console=stderr(), transient=True, disable=not stderr().is_terminal)
        self._task: Any = self._bar.add_task("", total=1.0)
        self._stage = ""
        self._last = monotonic()

    def __enter__(self) -> LongProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, share: float, text: str, left: float | None, stage: str = "") -> None:
        """Show the progress.

        Args:
            share: the part of the work, or of its stage, that is done.
            text: what has been done so far.
            left: remaining seconds; None if unknown.
            stage: the name of the stage; a new one is shown immediately.
        """
        share = min(share, 1.0)
        minutes = "" if left is None else f", {max(left, 0) / 60:.1f} minutes left"
        self._bar.update(self._task, completed=share, description=text + minutes)
        if self._bar.disable and (stage != self._stage or monotonic() - self._last > self.LINES):
            self._stage = stage
            self._last = monotonic()
            note(f"{text}, {100 * share:.0f} %{minutes}")


def as_record(result: Result) -> dict[str, Any]:
    """A result as an output record. Steps are forward passes after the prefill."""
    record = {
        "output_ids": result.tokens,
        "text": result.text,
        "new_tokens": len(result.tokens),
        "steps": result.stats.steps,
        "rows": result.stats.rows,
        "seconds": result.seconds,
        "finish_reason": result.finish_reason,
    }
    return record if result.seed is None else record | {"seed": result.seed}


def summary(llm: LLM, result: Result) -> str:
    """One line: tokens, steps, speed."""
    stats = result.stats
    words = [
        _steps(stats),
        f"{result.seconds:.2f} s",
        f"{stats.new_tokens / max(result.seconds, 1e-9):.1f} tokens/s",
        result.finish_reason,
        "" if result.seed is None else f"seed {result.seed}",
        str(llm.drafter),
        llm.dtype,
        stats.path and f"{stats.path} path",
    ]
    return " · ".join(filter(None, words))


def _steps(stats: Stats) -> str:
    """Tokens and steps. The first token comes from the prefill and belongs to no step."""
    if not stats.steps:
        return f"{stats.new_tokens} tokens"
    return (
        f"{stats.new_tokens} tokens, {stats.new_tokens - 1} of them in {stats.steps} steps "
        f"({stats.compression_ratio:.2f} per step)"
    )


def compared(llm: LLM, comparison: Comparison) -> str:
    """One line: whether the completions are equal, and the steps and seconds of both."""
    ours, plain = comparison.ours, comparison.plain
    cost = (
        f"steps {ours.stats.steps} vs {plain.stats.steps} · seconds {ours.seconds:.2f} vs "
        f"{plain.seconds:.2f} ({plain.seconds / max(ours.seconds, 1e-9):.2f}x)"
    )
    if comparison.equal:
        return f"equal to plain decoding · {cost}"
    return (
        f"NOT equal to plain decoding from token {comparison.first_divergence} on, where the two best "
        f"logits are {comparison.gap:.3g} apart ({llm.dtype}) · {cost}"
    )


def diverged(llm: LLM, equal: Sequence[bool], same_path: bool = True) -> int:
    """Exit status: 1 if completions differ although the path promises equal bits, or computes in 32 bits or more.

    On other paths in 16 bits, rounding may resolve near ties differently.

    Args:
        same_path: whether the completions were compared with those of the same path.
    """
    if all(equal):
        return 0
    guaranteed = same_path and llm.target().guarantee in (BIT_EQUAL, CHECKED)
    return int(guaranteed or not llm.model.probe.half)
