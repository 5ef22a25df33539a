"""What can go wrong between ranks; every message names the rank."""

from __future__ import annotations

from ..core import LookaheadError


class RankError(LookaheadError):
    """A rank died, did not answer in time, or failed; decoding cannot go on.

    Attributes:
        rank: the rank at fault.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class DivergenceError(RankError):
    """A rank holds other tokens or computes other logits than rank 0."""


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of an error's message, at most ``most`` characters."""
    return (str(error).splitlines() or [""])[0][:most]
