"""Verification: autoregressive decoding that reads its logits from rows that were computed in advance.

The drafter never chooses a token. ``choose`` is called once per emitted token, in order, with the row whose path is
the sequence so far, so the output is a function of (target, prompt, seed) and not of the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from .errors import NumericalError
from .target import Scores
from .tree import TokenTree


@runtime_checkable
class Choose(Protocol):
    """How one sequence chooses tokens. Subclasses inherit a no-op ``overlap``."""

    def __call__(self, scores: Scores, node: int) -> int:
        """The target's own token under ``node``. Called exactly once per emitted token, in order.

        ``node`` is 0 for the first token of every step.
        """
        ...

    def overlap(self, tree: TokenTree) -> None:
        """Called between the launch of a step and the first read of its logits, like ``DraftState.overlap``."""
        return None


class ChooseBy(Choose):
    """Wraps a plain function as a ``Choose``."""

    def __init__(self, function: Callable[[Scores, int], int]) -> None:
        self._function = function

    def __call__(self, scores: Scores, node: int) -> int:
        return self._function(scores, node)


#: The token with the largest logit.
greedy = ChooseBy(lambda scores, node: scores.best(node))


def as_choose(choose: Choose | Callable[[Scores, int], int]) -> Choose:
    """``choose``, wrapped if it is a plain function."""
    return choose if isinstance(choose, Choose) else ChooseBy(choose)


def verify(
    tree: TokenTree, choose: Callable[[int], int], finished: Callable[[int], bool] | None = None
) -> tuple[list[int], list[int]]:
    """Walk down the tree from the root while a child has the target's own token.

    Args:
        tree: the rows that were evaluated.
        choose: returns the target's own token under a row.
        finished: called with every emitted token; True ends the walk.

    Returns:
        (path, tokens): the rows to commit, root first, and the emitted tokens. Both have the same length: the last
        token is the bonus token, which has no row yet. See the example in ``core.loop``.

    Raises:
        NumericalError: no token can be chosen under the root.
    """
    path = [0]
    tokens = list[int]()
    while True:
        try:
            token = choose(path[-1])
        except NumericalError:
            if not tokens:
                raise
            return path[:-1], tokens  # the row is evaluated again as the next root
        tokens.append(token)
        if finished is not None and finished(token):
            return path, tokens
        child = tree.child(path[-1], token)
        if child is None or not tree.needs_logits[child]:
            return path, tokens
        path.append(child)
