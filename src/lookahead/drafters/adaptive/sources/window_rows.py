"""The window as a source of rows, under which the target's predictions enter the logit cache.

The window gets the remaining rows of the step. It replaces rows of the tree only if its accepted tokens per row are
worth more than the probabilities of the rows that it replaces.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ....core import TokenTree
from ...window import Window, fill_tokens

#: Number of steps over which the credit is averaged.
HORIZON = 100
#: Initial credit.
FIRST_CREDIT = 0.004


class WindowSource:
    """The window of one sequence.

    Args:
        width, ngram_size: W and N.
        prompt: the tokens from which empty positions are filled at random.
        eos: tokens that end a sequence.
        seed: seed of the random tokens.

    Attributes:
        credit: accepted tokens per window row, averaged over recent steps.
        rows_used: total number of window rows.
    """

    def __init__(
        self, width: int, ngram_size: int, prompt: Sequence[int], eos: frozenset[int], seed: int
    ) -> None:
        rng = random.Random(seed)
        tokens = fill_tokens(prompt, eos)
        self._window = Window(width, ngram_size, lambda: rng.choice(tokens))
        self._eos = eos
        self.credit = FIRST_CREDIT
        self.rows_used = 0

    def wanted(self, max_depth: int) -> int:
        """The number of rows of the window, after narrowing it to ``max_depth``."""
        self._window.narrow(max_depth - len(self._window.levels) + 2)
        return self._window.rows()

    def nodes(self) -> list[list[int]]:
        """Rows of every level in the tree that the window was last added to."""
        return self._window.nodes()

    def add_to(self, tree: TokenTree) -> None:
        """Add the window to a tree, whose rows then all need logits."""
        self._window.add_to(tree)
        tree.needs_logits = [True] * len(tree)

    def advance(self, root: int, answers: Sequence[int], rows: int, credited: int) -> None:
        """Advance the window by one step.

        Args:
            root: the token at the root of the step.
            answers: the target's token under each row; -1 where its logits are NaN.
            rows: number of window rows in the tree.
            credited: tokens accepted because of the window.
        """
        self.credit += (credited / rows - self.credit) / HORIZON
        self.rows_used += rows
        new = [answers[node] for node in self._window.newest_nodes()]
        self._window.advance(root, new, self._eos)
