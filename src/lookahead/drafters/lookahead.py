"""Lookahead decoding (paper, Algorithms 2 and 3): window, pool and candidates in one tree.

Each step the window closes up to W new n-grams and the pool keeps them; up to G n-grams that begin with
the last token are verified in the same forward pass.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..core.config import LookaheadConfig
from ..core.drafter import UNLIMITED_ROWS, Drafter
from ..core.pool import NGramPool
from ..core.target import Scores
from ..core.tree import TokenTree
from .window import Window


class LookaheadDrafter(Drafter):
    """The paper's method.

    Args:
        config: (W, N, G) and the rest; must not be (1, 1, 0).
        vocabulary: V, for guesses at random; 0 takes them from the prompt only.
        pool: a pool to keep across calls; None makes a fresh one at every reset.
    """

    def __init__(
        self, config: LookaheadConfig | None = None, vocabulary: int = 0, pool: NGramPool | None = None
    ) -> None:
        self.config = config if config is not None else LookaheadConfig()
        self.pool = pool
        self._keep_pool = pool is not None
        self._vocabulary = vocabulary

    def reset(self, prompt: Sequence[int], first: int, eos: frozenset[int]) -> None:
        config = self.config
        if self.pool is None or not self._keep_pool:
            self.pool = NGramPool(config.guess_set_size, config.max_pool_keys)
        if config.pool_from_prompt:
            self.pool.add_text([*prompt, first], config.ngram_size)
        self._eos = eos
        self._text = [*prompt, first]
        self._random = random.Random(config.seed)
        self._source = [token for token in prompt if token not in eos] or list(prompt)
        self._window = Window(config.window_size, config.ngram_size, self._guess)

    def _guess(self) -> int:
        """A token for an empty place of the window (``window_init``)."""
        if self.config.window_init == "vocabulary" and self._vocabulary:
            return self._random.randrange(self._vocabulary)
        if self.config.window_init == "pool" and self.pool:
            continuation = self.pool.sample(self._random.getrandbits(30))
            if continuation is not None:
                return continuation[0]
        return self._random.choice(self._source)

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS) -> TokenTree:
        config, window = self.config, self._window
        assert self.pool is not None
        tree = TokenTree(self._text[-1])
        levels = len(window.levels)
        # The deepest node of column i is i + levels - 1 below the root.
        window.narrow(max_depth - levels + 2)
        if window.rows() >= max_rows:
            window.narrow((max_rows // 2) // max(1, levels))
        window.add_to(tree)
        if config.verify_window:
            tree.needs_logits = [True] * len(tree)
        if config.guess_set_size and max_depth > 0:
            for continuation in self.pool.get(self._text[-1])[: config.guess_set_size]:
                room = max_rows - len(tree)
                tree.add_candidate(continuation[: min(max_depth, room)])
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        config, window, pool = self.config, self._window, self.pool
        assert pool is not None
        new = [scores.best(node) for node in window.newest_nodes()]
        for ngram in window.advance(self._text[-1], new, self._eos):
            if ngram[0] not in self._eos:
                pool.add(ngram[0], ngram[1:])
        if config.slide == "emitted":
            window.slide(len(tokens) - 1)
        text = self._text
        text.extend(tokens)
        if config.pool_from_output:
            pool.add_text(text, config.ngram_size, len(text) - len(tokens) - config.ngram_size + 1)

    def stats(self) -> dict[str, float]:
        """The pool's figures."""
        return (
            {f"pool_{key}": value for key, value in self.pool.stats().as_dict().items()} if self.pool else {}
        )
