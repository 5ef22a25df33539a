"""Jacobi decoding (paper, Algorithm 1): a block of guesses iterated to its fixed point.

The m unknown tokens of a block solve y_i = argmax p(y | y_<i, x). Every step evaluates all of them at once
from the previous iterate. At least the first unfixed token becomes right in each step, so a block takes at
most m steps; it takes fewer where guesses turn out right early.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..core.drafter import UNLIMITED_ROWS, Drafter
from ..core.errors import SettingsError
from ..core.target import Scores
from ..core.tree import TokenTree


class JacobiDrafter(Drafter):
    """A chain of m - 1 guesses under the root; with the root's own row that makes m unknowns a block.

    Args:
        block: m, at least 2.
        vocabulary: V, where guesses are drawn when the prompt is too short; 0 uses the prompt alone.
        seed: of the generator of first guesses.
    """

    def __init__(self, block: int = 16, vocabulary: int = 0, seed: int = 0) -> None:
        if block < 2:
            raise SettingsError(f"a Jacobi block must have at least 2 tokens, got {block}")
        self.block = block
        self._vocabulary = vocabulary
        self._seed = seed

    def reset(self, prompt: Sequence[int], first: int, eos: frozenset[int]) -> None:
        self._random = random.Random(self._seed)
        self._source = [t for t in prompt if t not in eos] or [prompt[-1]]
        self._last = first
        self._iterations = 0
        self._converged: list[int] = []
        self._guesses = self._fresh()

    def _fresh(self) -> list[int]:
        return [self._random.choice(self._source) for _ in range(self.block - 1)]

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS) -> TokenTree:
        tree = TokenTree(self._last)
        tree.add_candidate(self._guesses[: min(max_depth, max_rows - 1)])
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        self._last = tokens[-1]
        self._iterations += 1
        # Rows under the first wrong guess hold the next iterate of what is still unknown.
        self._guesses = [scores.best(node) for node in range(len(tokens), len(tree))]
        if not self._guesses:
            self._converged.append(self._iterations)
            self._iterations = 0
            self._guesses = self._fresh()

    def stats(self) -> dict[str, float]:
        """Blocks that reached their fixed point, and the mean number of iterations they took."""
        blocks = len(self._converged)
        return {
            "converged_blocks": blocks,
            "iterations_per_block": sum(self._converged) / blocks if blocks else 0.0,
        }
