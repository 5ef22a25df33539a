"""Plain decoding: a tree of one node."""

from __future__ import annotations

from collections.abc import Sequence

from ..core import UNLIMITED_ROWS, Drafter, Scores, TokenTree


class AutoregressiveDrafter(Drafter):
    """Drafts nothing."""

    def reset(self, prompt: Sequence[int], first: int, eos: frozenset[int]) -> None:
        self._last = first

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS) -> TokenTree:
        return TokenTree(self._last)

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        self._last = tokens[-1]
