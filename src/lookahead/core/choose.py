"""The target's own token under a row: what a drafter never decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from .target import Scores
from .tree import TokenTree


@runtime_checkable
class Choose(Protocol):
    """One sequence's choice of tokens; a class that names this one as its base inherits ``overlap``."""

    def __call__(self, scores: Scores, node: int) -> int:
        """The target's own token under ``node``. Asked exactly once per emitted token, in order.

        ``node`` is 0 for the first token of every step.
        """
        ...

    def overlap(self, tree: TokenTree) -> None:
        """Called between the launch of a step and the first read of its logits, as ``Drafter.overlap`` is."""
        return None


class ChooseBy(Choose):
    """A plain function as a ``Choose``."""

    def __init__(self, function: Callable[[Scores, int], int]) -> None:
        self._function = function

    def __call__(self, scores: Scores, node: int) -> int:
        return self._function(scores, node)


class Greedy(Choose):
    """The token with the largest logit."""

    def __call__(self, scores: Scores, node: int) -> int:
        return scores.best(node)


greedy = Greedy()


def as_choose(choose: Choose | Callable[[Scores, int], int]) -> Choose:
    """``choose`` itself, or a plain function made one."""
    return choose if isinstance(choose, Choose) else ChooseBy(choose)
