"""What the loop needs of a model. Adapters fulfil it; ``lookahead.testing.FakeTarget`` is the smallest one.

A slot is a place for one sequence, numbered by the loop. A target keeps, per slot, the keys and values of
the committed tokens and, between ``forward`` and ``commit``, the pending rows of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .tree import TokenTree

#: What drafting may change in a text, by the path that evaluates steps.
PROMISES = {
    "cpu": "bit-equal by construction",
    "plain": "bit-equal by construction",
    "exact": "bit-equal, as checked at load",
    "transformers": "equal up to rounding",
    "cuda-graph": "equal up to rounding",
}


class Scores(Protocol):
    """The target's logits at the rows of one tree that need logits."""

    def best(self, node: int) -> int:
        """The token with the largest logit under ``node``. Raises NumericalError on NaN."""
        ...

    def row(self, node: int) -> Any:
        """The logits under ``node``, shape (V,), in the target's own array type."""
        ...

    def top(self, nodes: Sequence[int], k: int) -> tuple[Any, Any]:
        """The k best tokens of every given row and their log-odds against its best, for drafters that learn.

        Returns:
            (ids, log-odds), both n x k (fewer columns where V < k), best first; numpy arrays or nested
            lists. Log-odds are logit minus largest logit, so the first column is 0.
        """
        ...


class Target(Protocol):
    """The model being accelerated.

    Attributes:
        path: what evaluates steps, as statistics name it; "" where there is nothing to tell apart.
        reason: one line for people: why this path was taken.
        vocabulary: V.
    """

    path: str
    reason: str
    vocabulary: int

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> Sequence[Scores]:
        """Evaluate and commit whole prompts, each into its slot. Node 0 of the scores is the last token.

        Raises:
            OutOfMemory: it did not fit.
        """
        ...

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> Sequence[Scores]:
        """One forward pass over a list of (slot, tree).

        Raises:
            OutOfMemory: it did not fit; nothing has changed and fewer rows may be tried.
        """
        ...

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Keep the rows of each slot's path (root first) and forget the other pending rows."""
        ...

    def release(self, slot: int) -> None:
        """Free a slot."""
        ...

    def depth_limit(self, slot: int) -> int:
        """The deepest node that this slot's next tree may have; 0 allows the root alone.

        A model's maximum positions bound it, and so does a point where the model computes positions anew.
        """
        ...
