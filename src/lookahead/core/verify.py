"""The walk: autoregressive decoding that reads its logits from a table computed ahead.

The drafter never chooses a token. ``choose`` is asked once per emitted token, in order, with the row whose
true prefix is the text so far; so the output is a function of (target, prompt, seed) and not of the draft.
"""

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


#: The token with the largest logit.
greedy = ChooseBy(lambda scores, node: scores.best(node))


def as_choose(choose: Choose | Callable[[Scores, int], int]) -> Choose:
    """``choose`` itself, or a plain function made one."""
    return choose if isinstance(choose, Choose) else ChooseBy(choose)


def verify(
    tree: TokenTree, choose: Callable[[int], int], finished: Callable[[int], bool] | None = None
) -> tuple[list[int], list[int]]:
    """Walk the tree from the root while a child bears the target's own token.

    Args:
        tree: the rows that were evaluated.
        choose: the target's own token under a row.
        finished: told of every token as it is emitted; True ends the walk there.

    Returns:
        (path, tokens): the rows to commit, root first, and the tokens emitted; as many of the one as of
        the other, the last token being the bonus token, which has no row yet.
    """
    path, tokens = [0], []
    while True:
        token = choose(path[-1])
        tokens.append(token)
        if finished is not None and finished(token):
            return path, tokens
        child = tree.child(path[-1], token)
        if child is None or not tree.needs_logits[child]:
            return path, tokens
        path.append(child)
