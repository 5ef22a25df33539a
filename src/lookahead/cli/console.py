"""Lines for people on stderr; stdout is kept for results."""

from __future__ import annotations

import os

from rich.console import Console


class Interrupted(Exception):
    """Ctrl-C, with what there is to say about it."""


def stderr() -> Console:
    """A console on the stderr of this moment."""
    return Console(stderr=True, highlight=False)


def is_follower() -> bool:
    """Whether torchrun started this process to work for rank 0."""
    return os.environ.get("RANK", "0") != "0"


def note(text: str, style: str = "dim") -> None:
    """One line, never wrapped, with no markup of its own. Only rank 0 says how things go."""
    if style != "red" and is_follower():
        return
    stderr().print(" ".join(text.split()), style=style, markup=False, soft_wrap=True)


def problem(text: str) -> None:
    """An error in one red line."""
    note(f"error: {text}", "red")
