"""Jacobi decoding (paper, Algorithm 1): a block of guesses iterated to its fixed point.

The m unknown tokens of a block solve y_i = argmax p(y | y_<i, x). Every step computes all unknown tokens in parallel
from the previous iterate. At least the first of them is then correct and is emitted, so a block takes at most m
steps, and fewer if later guesses are correct. Then a new block begins.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..core import UNLIMITED_ROWS, Drafter, DraftState, Scores, Start, TokenTree
from ..core.target import best_or_nan
from .checks import check_whole, text_form
from .window import fill_tokens


@dataclass(frozen=True)
class Jacobi(Drafter):
    """Jacobi decoding without an n-gram pool.

    Attributes:
        block_size: m, the tokens of a block and the rows of its first step, 1 to 512. 1 is plain decoding.
        max_jacobi_iterations: largest number of steps per block. After that, the block is abandoned and a new block
            of m guesses starts at its first unknown token. None for no limit.
        seed: seed of the initial guesses, which are random tokens of the prompt. It changes the draft, never the
            output.

    Raises:
        SettingsError: a value out of range.
    """

    block_size: int = 16
    max_jacobi_iterations: int | None = None
    seed: int = 0

    name = "jacobi"

    def __post_init__(self) -> None:
        check_whole(self, "block_size", 1, 512)
        check_whole(self, "seed", 0)
        if self.max_jacobi_iterations is not None:
            check_whole(self, "max_jacobi_iterations", 1)

    def __str__(self) -> str:
        return text_form(self.name, self)

    @property
    def max_step_rows(self) -> int:
        return self.block_size

    def start(self, sequence: Start) -> DraftState:
        return JacobiDraftState(self, sequence)


class JacobiDraftState(DraftState):
    """A chain of guesses under the root; row i predicts unknown token i + 1 of the block."""

    def __init__(self, settings: Jacobi, sequence: Start) -> None:
        self._settings = settings
        self._random = random.Random(settings.seed)
        self._source = fill_tokens(sequence.prompt, sequence.eos)
        self._last = sequence.first
        self._converged: list[int] = []
        self._given_up = 0
        self._begin_block()

    def _begin_block(self) -> None:
        self._unknown = self._settings.block_size
        self._iterations = 0
        # No other token of the block depends on the last one, so it needs no guess.
        self._guesses = [self._random.choice(self._source) for _ in range(self._unknown - 1)]

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
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
        if self._iterations == self._settings.max_jacobi_iterations:
            self._given_up += 1
            self._begin_block()
            return
        # The rows from the first wrong guess on predict the next iterate; row i predicts guess i. Guesses without a
        # row, or whose row has NaN logits, are kept.
        needed = self._unknown - 1
        rows = range(len(tokens), min(len(tree), len(tokens) + needed))
        answers = [best_or_nan(scores, node) for node in rows]
        kept = self._guesses[len(tokens) :]
        known = [answer if answer >= 0 else guess for answer, guess in zip(answers, kept, strict=False)]
        self._guesses = known + self._guesses[len(tree) :]
        del self._guesses[needed:]

    def stats(self) -> dict[str, float]:
        """Converged blocks, their iterations, and abandoned blocks."""
        blocks = len(self._converged)
        return {
            "converged_blocks": blocks,
            "iterations_per_block": sum(self._converged) / blocks if blocks else 0.0,
            "most_iterations": max(self._converged, default=0),
            "blocks_given_up": self._given_up,
        }
