"""The interface of a target, the model being accelerated. ``lookahead.testing.FakeTarget`` is the smallest example.

A slot holds one sequence; the loop numbers the slots. A target keeps, per slot, the keys and values of
the committed tokens and, between ``forward`` and ``commit``, the pending rows of the tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from .tree import TokenTree

#: The promises of targets: how a sequence with drafting compares with plain decoding on the same target.
BIT_EQUAL = "bit-equal by construction"
CHECKED = "bit-equal, as checked at load"
#: Rounding depends on the number of rows in a step, so a near tie may be resolved differently.
UP_TO_ROUNDING = "equal up to rounding"


class Scores(Protocol):
    """The target's logits at the rows of one tree that need logits."""

    def best(self, node: int) -> int:
        """The token with the largest logit under ``node``. Raises NumericalError on NaN."""
        ...

    def row(self, node: int) -> Any:
        """The logits under ``node``, shape (V,), in the target's own array type."""
        ...

    def top(self, nodes: Sequence[int], k: int) -> tuple[Any, Any]:
        """The k best tokens of each given row and their log-odds against its best token, for drafters that learn.

        Returns:
            (ids, log-odds), both n x k (n x V if V < k), best first, as numpy arrays or nested lists. Log-odds are
            logit minus largest logit, so the first column is 0.
        """
        ...

    def hidden(self, node: int) -> Any:
        """What the output matrix reads under ``node``: the last layer's row after the final norm.

        Returns:
            (hidden,) float32, a numpy array. None if the tree did not ask for it (``TokenTree.needs_hidden``), or if
            the target does not give hidden states.
        """
        ...


class Target(Protocol):
    """The model being accelerated.

    Attributes:
        path: how steps are evaluated, as in ``targets.paths``; "" for targets without a model.
        promise: how a sequence compares with plain decoding: one of the constants above, or "" if it is not known.
        reason: why this path was chosen, in one line.
        vocabulary: V.
        captures: whether the second step of each size captures a graph, so that only later ones show its time; a
            target without this attribute does not.
    """

    path: str
    promise: str
    reason: str
    vocabulary: int

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> Sequence[Scores]:
        """Evaluate and commit whole prompts, each in its slot. Node 0 of the scores is the last token.

        Raises:
            OutOfMemory: the pass did not fit in memory.
        """
        ...

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> Sequence[Scores]:
        """One forward pass over a list of (slot, tree).

        Raises:
            OutOfMemory: the pass did not fit in memory. Nothing has changed, so fewer rows may be tried.
        """
        ...

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Keep the rows of each slot's path (root first) and drop the other pending rows."""
        ...

    def release(self, slot: int) -> None:
        """Free a slot."""
        ...

    def depth_limit(self, slot: int) -> int:
        """The largest depth of a node in this slot's next tree; 0 allows the root alone.

        It is limited by the model's last position, and by a length at which the model changes its rotary positions.
        """
        ...


@runtime_checkable
class CachingTarget(Target, Protocol):
    """A target that keeps finished sequences for prompts with the same beginning (``engine.prefix_cache``).

    Attributes:
        reused: for each slot in use, the number of tokens of its prompt that were reused.
    """

    reused: Mapping[int, int]

    def known(self, prompt: Sequence[int]) -> int:
        """The number of tokens of a prompt that would be reused."""
        ...
