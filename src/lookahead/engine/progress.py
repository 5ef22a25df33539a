"""Messages about preparatory work that takes long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from time import monotonic

from rich.console import Console


def say(line: str) -> None:
    """Print a line to stderr."""
    Console(stderr=True, highlight=False).print(
        f"lookahead: {line}", style="dim", markup=False, soft_wrap=True
    )


@contextmanager
def notice_if_slow(text: str, seconds: float = 2.0, always: bool = False) -> Iterator[None]:
    """Print a line to stderr if the block takes long, and another line when it finishes.

    Args:
        text: what the block does.
        seconds: time after which the first line is printed.
        always: whether to print even if stderr is not a terminal.
    """
    console = Console(stderr=True, highlight=False)
    begin, printed = monotonic(), []

    def say(line: str) -> None:
        printed.append(line)
        console.print(line, style="dim", markup=False, soft_wrap=True)

    timer = Timer(seconds, say, [f"lookahead: {text} ..."])
    timer.daemon = True
    if console.is_terminal or always:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if printed:
            say(f"lookahead: done after {monotonic() - begin:.0f} s")
