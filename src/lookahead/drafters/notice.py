"""Notices about drafting for the user of a program, which are no warnings."""

from rich.console import Console


def notice(line: str) -> None:
    """Print a line to stderr."""
    Console(stderr=True, highlight=False).print(
        f"lookahead: {line}", style="dim", markup=False, soft_wrap=True
    )
