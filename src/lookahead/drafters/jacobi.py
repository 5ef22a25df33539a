"""Jacobi decoding (paper, Algorithm 1): a block of guesses iterated to its fixed point.

The m unknown tokens of a block solve y_i = argmax p(y | y_<i, x). Every step evaluates all that are unknown at
once from the previous iterate. At least the first of them becomes right in each step and is emitted, so a block
takes at most m steps; it takes fewer where guesses turn out right early. Then a new block begins.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..core import UNLIMITED_ROWS, Drafter, Scores, SettingsError, TokenTree


class JacobiDrafter(Drafter):
    """A chain of guesses under the root; row i gives token i + 1 of what is left of the block.

    Args:
        block: m, at least 2.
        seed: of the generator of first guesses, which are tokens of the prompt.
    """

    def __init__(self, block: int = 16, seed: int = 0) -> None:
        if block < 2:
            raise SettingsError(f"a Jacobi block must have at least 2 tokens, got {block}")
        self.block = block
        self._seed = seed

    def reset(self, prompt: Sequence[int], first: int, eos: frozenset[int]) -> None:
        self._random = random.Random(self._seed)
        self._source = [t for t in prompt if t not in eos] or [prompt[-1]]
        self._last = first
        self._converged: list[int] = []
        self._begin_block()

    def _begin_block(self) -> None:
        self._unknown = self.block
        self._iterations = 0
        # The last unknown token is no input to the others, so it needs no guess.
        self._guesses = [self._random.choice(self._source) for _ in range(self.block - 1)]

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS) -> TokenTree:
        tree = TokenTree(self._last)
        tree.add_candidate(self._guesses[: min(max_depth, max_rows - 1)])
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        self._last = tokens[-1]
        self._iterations += 1
        self._unknown -= len(tokens)
        if self._unknown == 0:
            self._converged.append(self._iterations)
            self._begin_block()
            return
        # Rows from the first wrong guess on hold the next iterate; guesses that had no row stay as they were.
        needed = self._unknown - 1
        rows = range(len(tokens), min(len(tree), len(tokens) + needed))
        self._guesses = [scores.best(node) for node in rows] + self._guesses[len(tree) :]
        del self._guesses[needed:]

    def stats(self) -> dict[str, float]:
        """Blocks that reached their fixed point, and the iterations they took: on the mean and at most."""
        blocks = len(self._converged)
        return {
            "converged_blocks": blocks,
            "iterations_per_block": sum(self._converged) / blocks if blocks else 0.0,
            "most_iterations": max(self._converged, default=0),
        }
