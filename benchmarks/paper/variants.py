"""Lookahead decoding with settings that were tried and that the library does not include.

slide           how far the window moves in a step: by one ``column`` (the library, and the authors' code), or by one
                column per ``emitted`` token
window_init     source of the tokens that fill the window: the ``prompt`` (the library), random tokens of the
                ``vocabulary``, or the ``pool``
verify_window   also verify the window's rows, which requires their logits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lookahead.core import DraftState, Scores, SettingsError, Start, TokenTree
from lookahead.core.drafter import UNLIMITED_ROWS
from lookahead.drafters.lookahead import Lookahead, LookaheadDraftState


@dataclass(frozen=True)
class VariantDrafter(Lookahead):
    """The paper's method with choices that differ from the library's.

    Attributes:
        slide, window_init, verify_window: see the module docstring.
    """

    slide: str = "column"
    window_init: str = "prompt"
    verify_window: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slide not in ("column", "emitted"):
            raise SettingsError(f"slide must be 'column' or 'emitted', got {self.slide!r}")
        if self.window_init not in ("prompt", "vocabulary", "pool"):
            raise SettingsError(
                f"window_init must be 'prompt', 'vocabulary' or 'pool', got {self.window_init!r}"
            )

    def start(self, sequence: Start) -> DraftState:
        return VariantDraftState(self, sequence)


class VariantDraftState(LookaheadDraftState):
    """The draft state of one sequence."""

    def __init__(self, settings: VariantDrafter, sequence: Start) -> None:
        # The superclass fills the window, which calls _guess: set what it needs first.
        self.variant = settings
        self.vocabulary = sequence.vocabulary
        super().__init__(settings, sequence)

    def _guess(self) -> int:
        if self.variant.window_init == "vocabulary":
            return self._random.randrange(self.vocabulary)
        if self.variant.window_init == "pool":
            candidates = self.pool.get(self._random.choice(self._text))
            if candidates:
                return candidates[0][0]
        return super()._guess()

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
        tree = super().draft(max_depth, max_rows, batch)
        if self.variant.verify_window:
            tree.needs_logits = [True] * len(tree)
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        super().observe(tree, scores, path, tokens)
        # The superclass has moved the window by one column; move it by the others.
        columns = len(tokens) - 1 if self.variant.slide == "emitted" else 0
        if columns:
            for level in self._window.levels:
                kept = level[columns:]
                level[:] = kept + [self._guess() for _ in range(len(level) - len(kept))]
