"""What is said while a model is made ready: on a terminal, on stderr, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console


@contextmanager
def said_where_slow(text: str, seconds: float = 2.0) -> Iterator[None]:
    """One line, once the block has taken this long."""
    console = Console(stderr=True, highlight=False)
    timer = Timer(seconds, console.print, [text], {"style": "dim"})
    timer.daemon = True
    if console.is_terminal:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
