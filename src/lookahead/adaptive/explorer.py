"""The window as an explorer: Jacobi rows whose answers feed the other sources.

It gets the rows that the step has to spare. More only where it pays: the tokens accepted on the word of
window rows, per window row, are compared with the probability of the tree row that would be given up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..core import TokenTree, Window

#: Steps over which the credit looks back, roughly, and what a window row is thought to bring at first.
HORIZON = 100
FIRST_CREDIT = 0.004
#: Continuations kept per two tokens.
KEEP = 3
#: N-grams by their first two tokens, oldest out first.
MAX_KEYS = 50_000


class Explorer:
    """The window of one sequence, and what it has closed.

    Args:
        width, ngram_size: W and N.
        source: tokens for empty places.
        vocabulary: V.
        eos: tokens that end a text.
        seed: of the window's own generator.
    """

    def __init__(
        self,
        width: int,
        ngram_size: int,
        source: Sequence[int],
        vocabulary: int,
        eos: frozenset[int],
        seed: int,
    ) -> None:
        rng = random.Random(seed)
        tokens = [token for token in source if token not in eos] or list(source)
        self._window = Window(width, ngram_size, lambda: rng.choice(tokens))
        self._vocabulary = vocabulary
        self._eos = eos
        self._planted = False
        #: Key of two tokens -> what followed in the window, latest first.
        self.ngrams: dict[int, list[int]] = {}
        self.credit = FIRST_CREDIT
        self.rows_used = 0

    def wanted(self, max_depth: int) -> int:
        """Rows that the window would take below ``max_depth``."""
        self._window.narrow(max_depth - len(self._window.levels) + 2)
        return self._window.rows()

    def plant(self, tree: TokenTree) -> None:
        """Add the window to a tree, all of its rows to be read."""
        self._window.plant(tree)
        tree.read = [True] * len(tree)
        self._planted = True

    def advance(self, root: int, answers: Sequence[int], rows: int, credited: int) -> None:
        """Take the answers under the planted rows; ``credited`` tokens were accepted on the window's word."""
        self.credit += ((credited / rows if rows else 0.0) - self.credit) / HORIZON if self._planted else 0.0
        if not self._planted:
            return
        self._planted = False
        self.rows_used += rows
        new = [answers[node] for node in self._window.newest_nodes()]
        for ngram in self._window.advance(root, new, self._eos):
            for i in range(2, len(ngram)):
                self._keep(ngram[i - 2] * self._vocabulary + ngram[i - 1], ngram[i])

    def _keep(self, key: int, token: int) -> None:
        known = self.ngrams.get(key)
        if known is None:
            if len(self.ngrams) >= MAX_KEYS:
                self.ngrams.clear()
            self.ngrams[key] = [token]
        elif known[0] != token:
            if token in known:
                known.remove(token)
            known.insert(0, token)
            del known[KEEP:]
