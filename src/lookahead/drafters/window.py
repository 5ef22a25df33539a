"""The lookahead branch: a 2-D window of Jacobi iterates (paper, section 3.2, Algorithm 2).

W columns, N-1 levels. Column i guesses the token i positions ahead; a later level is a newer
iterate of the same trajectory. In a step with root x:

    level 0            x   a1  a2  ...        W-1 tokens after the root
    level 1            b0  b1  b2  ...        W tokens, bi hangs under ai (b0 under x)
    ...
    level N-2          the newest iterate

The target's own next tokens under the nodes of the newest level complete W new n-grams
(x, b0, ..., new0), (a1, b1, ..., new1), ... Then level 0 is dropped, every level moves up by one, and the new tokens
become the newest level. At first there is only level 0; N-2 warm-up steps add the other levels.

An example with W = 3 and N = 4, so three levels; x, y and z are the roots of three steps:

    step 1   level 0    x  a1 a2     the target answers n0 n1 n2 under level 2; the new n-grams are
             level 1   b0  b1 b2     (x, b0, c0, n0)  (a1, b1, c1, n1)  (a2, b2, c2, n2)
             level 2   c0  c1 c2

    step 2   level 0    y  b1 b2     level 0 and b0 are gone, y is the new root; the target answers m0 m1 m2:
             level 1   c0  c1 c2     (y, c0, n0, m0)  (b1, c1, n1, m1)  (b2, c2, n2, m2)
             level 2   n0  n1 n2

    step 3   level 0    z  c1 c2     level 0 and c0 are gone
             level 1   n0  n1 n2
             level 2   m0  m1 m2

The window moves by one column per step, however many tokens were emitted, as in the authors' code (lines 7-10 of
Algorithm 2 take random rows after several tokens). The shorter n-grams of the warm-up are also returned
(docs/settings.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.tree import TokenTree


def fill_tokens(prompt: Sequence[int], eos: frozenset[int]) -> list[int]:
    """The tokens from which random guesses are drawn: the prompt's, without end tokens if it has others."""
    return [token for token in prompt if token not in eos] or list(prompt)


class Window:
    """The window's tokens. The caller adds its rows to a tree and passes the target's tokens to ``advance``.

    Args:
        width: W, columns; at least 1.
        ngram_size: N, at least 2; the window has N-1 levels.
        fill: returns a token for an empty position.
    """

    def __init__(self, width: int, ngram_size: int, fill: Callable[[], int]) -> None:
        self.width = width
        self.height = ngram_size - 1
        self._fill = fill
        # During the warm-up, level 0 is longer, since every step consumes one of its tokens.
        self.levels: list[list[int]] = [[fill() for _ in range(width + self.height - 2)]]
        self._nodes: list[list[int]] = []

    @property
    def full(self) -> bool:
        """Whether the warm-up is over."""
        return len(self.levels) == self.height

    @property
    def columns(self) -> int:
        """Columns of the newest level, including the root's; 0 for an empty window."""
        if not self.levels:
            return 0
        return len(self.levels[0]) + 1 if len(self.levels) == 1 else len(self.levels[-1])

    def rows(self) -> int:
        """The largest number of rows that ``add_to`` adds (rows with the same path are merged)."""
        return sum(map(len, self.levels))

    def widen(self, columns: int) -> None:
        """Grow to ``columns`` columns, at most W plus one per remaining warm-up step. An empty window starts again.

        New columns contain guesses in all levels, so their n-grams are the target's own only after N-2 more steps.
        """
        if columns > 0 and not self.levels:
            self.levels = [[]]
        # Every step of the warm-up consumes one column.
        missing = min(columns, self.width + self.height - len(self.levels)) - self.columns
        for level in self.levels if missing > 0 else []:
            level.extend(self._fill() for _ in range(missing))

    def narrow(self, columns: int) -> None:
        """Keep at most ``columns`` columns; 0 or less empties the window."""
        if columns <= 0:
            self.levels = []
        elif columns < self.columns:
            self.levels = [self.levels[0][: columns - 1]] + [lv[:columns] for lv in self.levels[1:]]

    def add_to(self, tree: TokenTree) -> None:
        """Add the window's rows; those of the newest level need logits.

        Verification descends into every row that has logits: with N = 2 into level 0 (the newest level), with N = 3
        into the newest level's row under the root, and likewise during the warm-up.
        """
        self._nodes = []
        if not self.levels:
            return
        chain = [0]
        for token in self.levels[0]:
            chain.append(tree.add(token, chain[-1], len(self.levels) == 1))
        self._nodes = [chain]
        for index in range(1, len(self.levels)):
            above = self._nodes[-1]
            newest = index == len(self.levels) - 1
            self._nodes.append([tree.add(t, above[i], newest) for i, t in enumerate(self.levels[index])])

    def nodes(self) -> list[list[int]]:
        """Rows of every level in the tree that the window was last added to; level 0 includes the root."""
        return self._nodes

    def newest_nodes(self) -> list[int]:
        """Rows of the newest level in the tree that the window was last added to, one per column."""
        return self._nodes[-1] if self.levels else []

    def advance(self, root: int, new: Sequence[int], eos: frozenset[int]) -> list[tuple[int, ...]]:
        """Move by one column, with the target's tokens under ``newest_nodes``.

        Args:
            root: the token at the root of the step.
            new: the target's tokens, one per column; -1 where its logits are NaN (a random token may overflow
                float16), which is no n-gram and is replaced by a guess.
            eos: tokens that end a sequence; they may end an n-gram, but are not kept as guesses.

        Returns:
            The new n-grams, one per column with a token (shorter than N during the warm-up).
        """
        if not self.levels:
            return []
        columns = [[root, *self.levels[0]], *self.levels[1:]]
        ngrams = [tuple(column) for column in zip(*columns, new, strict=True) if column[-1] >= 0]
        clean = [self._fill() if token < 0 or token in eos else token for token in new]
        if self.full:
            self.levels.append(clean)
            del self.levels[0]
            del self.levels[0][0]
        elif self.levels[0]:
            self.levels = [level[1:] for level in [*self.levels, clean]]
        else:  # too narrow to finish the warm-up
            self.levels = []
        return ngrams
