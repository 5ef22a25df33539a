"""Messages of the library on stderr."""

from __future__ import annotations

from rich.console import Console


def say(line: str) -> None:
    """Print a line to stderr."""
    Console(stderr=True, highlight=False).print(
        f"lookahead: {line}", style="dim", markup=False, soft_wrap=True
    )
