"""The window as a source of rows: the logit cache keeps what the target predicts under them.

The window gets the rows that are left in the step. It replaces rows of the tree only if that pays: the accepted
tokens per window row are compared with the probability of the tree row that would be replaced.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ....core import TokenTree
from ...window import Window, fill_tokens

#: Number of steps over which the credit is averaged, and the credit at the start.
HORIZON, FIRST_CREDIT = 100, 0.004


class WindowSource:
    """The window of one sequence.

    Args:
        width, ngram_size: W and N.
        prompt: its tokens fill empty positions.
        eos: tokens that end a text.
        seed: seed of the random tokens.

    Attributes:
        credit: accepted tokens per window row in recent steps.
        rows_used: total number of window rows.
    """

    def __init__(
        self, width: int, ngram_size: int, prompt: Sequence[int], eos: frozenset[int], seed: int
    ) -> None:
        rng = random.Random(seed)
        tokens = fill_tokens(prompt, eos)
        self._window = Window(width, ngram_size, lambda: rng.choice(tokens))
        self._eos, self.credit, self.rows_used = eos, FIRST_CREDIT, 0

    def wanted(self, max_depth: int) -> int:
        """The number of rows of the window, narrowed to ``max_depth``."""
        self._window.narrow(max_depth - len(self._window.levels) + 2)
        return self._window.rows()

    def nodes(self) -> list[list[int]]:
        """Rows of every level in the tree that the window was last added to."""
        return self._window.nodes()

    def add_to(self, tree: TokenTree) -> None:
        """Add the window to a tree; the logits of all rows are needed."""
        self._window.add_to(tree)
        tree.needs_logits = [True] * len(tree)

    def advance(self, root: int, answers: Sequence[int], rows: int, credited: int) -> None:
        """Advance the window by one step.

        Args:
            root: the token at the root of the step.
            answers: the target's token under each row.
            rows: rows of the window in the tree.
            credited: tokens accepted because of the window.
        """
        self.credit += (credited / rows - self.credit) / HORIZON
        self.rows_used += rows
        new = [answers[node] for node in self._window.newest_nodes()]
        self._window.advance(root, new, self._eos)
