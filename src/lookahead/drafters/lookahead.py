"""Lookahead decoding (paper, Algorithms 2 and 3): window, pool and candidates in one tree.

Each step the window closes up to W new n-grams and the pool keeps them; up to G n-grams that begin with
the last token are verified in the same forward pass.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..core import UNLIMITED_ROWS, Drafter, LookaheadConfig, NGramPool, Scores, TokenTree
from .window import Window


class LookaheadDrafter(Drafter):
    """The paper's method.

    Args:
        config: (W, N, G) and the rest; must not be (1, 1, 0).
        pool: a pool to keep across calls; None makes a fresh one at every reset.
    """

    def __init__(self, config: LookaheadConfig | None = None, pool: NGramPool | None = None) -> None:
        self.config = config if config is not None else LookaheadConfig()
        self._kept_pool = pool

    def reset(self, prompt: Sequence[int], first: int, eos: frozenset[int]) -> None:
        config = self.config
        kept = self._kept_pool
        self.pool = kept if kept is not None else NGramPool(config.guess_set_size, config.max_pool_keys)
        if config.pool_from_prompt:
            self.pool.add_text([*prompt, first], config.ngram_size)
        self._eos, self._text = eos, [*prompt, first]
        self._random = random.Random(config.seed)
        self._source = [token for token in prompt if token not in eos] or list(prompt)
        self._window = Window(config.window_size, config.ngram_size, self._guess)
        self._offered: list[tuple[int, ...]] = []
        self._steps = self._hits = self._matched = 0

    def _guess(self) -> int:
        """A token for an empty place of the window: some token of the prompt."""
        return self._random.choice(self._source)

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS) -> TokenTree:
        window = self._window
        tree = TokenTree(self._text[-1])
        levels = len(window.levels)
        # The deepest node of column i is i + levels - 1 below the root.
        window.narrow(max_depth - levels + 2)
        if window.rows() >= max_rows:
            window.narrow((max_rows // 2) // max(1, levels))
        window.add_to(tree)
        self._offered = []
        if self.config.guess_set_size and max_depth > 0:
            self._offered = self.pool.get(self._text[-1])[: self.config.guess_set_size]
        for continuation in self._offered:
            room = max_rows - len(tree)
            tree.add_candidate(continuation[: min(max_depth, room)])
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        config, window, pool, text = self.config, self._window, self.pool, self._text
        self._steps += 1
        self._hits += bool(self._offered)
        self._matched += max((_common(candidate, tokens) for candidate in self._offered), default=0)
        new = [scores.best(node) for node in window.newest_nodes()]
        for ngram in window.advance(text[-1], new, self._eos):
            if ngram[0] not in self._eos:
                pool.add(ngram[0], ngram[1:])
        text.extend(tokens)
        if config.pool_from_output:
            pool.add_text(text, config.ngram_size, len(text) - len(tokens) - config.ngram_size + 1)

    def stats(self) -> dict[str, float]:
        """The pool's figures and what it gave this sequence.

        ``pool_hit_rate`` is h, the share of steps in which the pool had candidates; ``mean_match_length`` is m,
        the tokens of the best of them that were right, on the mean over those steps. S = 1 + h m, except for what
        the window's own rows add.
        """
        figures = {f"pool_{key}": value for key, value in self.pool.stats().items()}
        figures["pool_hit_rate"] = self._hits / self._steps if self._steps else 0.0
        figures["mean_match_length"] = self._matched / self._hits if self._hits else 0.0
        return figures


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix, where ``b``'s last token is the bonus and does not count."""
    length = 0
    while length < min(len(a), len(b) - 1) and a[length] == b[length]:
        length += 1
    return length
