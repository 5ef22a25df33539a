"""Lookahead decoding with the settings that lost against the library's own, for the ablation that says so.

slide           the window moves by one ``column`` a step (the library, and the authors' code), or by as many
                columns as tokens were ``emitted``
window_init     where the window's guesses come from: tokens of the ``prompt`` (the library), random tokens of the
                ``vocabulary``, or the ``pool``
verify_window   verification may descend into the window's rows too, at the price of their logits
"""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.core import LookaheadConfig, Scores, SettingsError, TokenTree
from lookahead.core.drafter import UNLIMITED_ROWS
from lookahead.drafters.lookahead import LookaheadDrafter


class VariantDrafter(LookaheadDrafter):
    """The paper's method with other choices than the library's.

    Args:
        config: (W, N, G) and what else the library has; must not be (1, 1, 0).
        vocabulary: V, for ``window_init="vocabulary"``.
        slide, window_init, verify_window: see the module.
    """

    def __init__(
        self,
        config: LookaheadConfig,
        vocabulary: int,
        slide: str = "column",
        window_init: str = "prompt",
        verify_window: bool = False,
    ) -> None:
        if slide not in ("column", "emitted"):
            raise SettingsError(f"slide must be 'column' or 'emitted', got {slide!r}")
        if window_init not in ("prompt", "vocabulary", "pool"):
            raise SettingsError(f"window_init must be 'prompt', 'vocabulary' or 'pool', got {window_init!r}")
        super().__init__(config)
        self.vocabulary = vocabulary
        self.slide = slide
        self.window_init = window_init
        self.verify_window = verify_window

    def _guess(self) -> int:
        if self.window_init == "vocabulary":
            return self._random.randrange(self.vocabulary)
        if self.window_init == "pool":
            candidates = self.pool.get(self._random.choice(self._text))
            if candidates:
                return candidates[0][0]
        return super()._guess()

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS) -> TokenTree:
        tree = super().draft(max_depth, max_rows)
        if self.verify_window:
            tree.needs_logits = [True] * len(tree)
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        super().observe(tree, scores, path, tokens)
        columns = len(tokens) - 1 if self.slide == "emitted" else 0
        if columns:
            for level in self._window.levels:
                kept = level[columns:]
                level[:] = kept + [self._guess() for _ in range(len(level) - len(kept))]
