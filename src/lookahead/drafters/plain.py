"""Plain autoregressive decoding: a tree of one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core import UNLIMITED_ROWS, Drafter, DraftState, Scores, Start, TokenTree


@dataclass(frozen=True)
class Plain(Drafter):
    """Draft nothing: one row and one token per step."""

    name = "plain"

    def __str__(self) -> str:
        return self.name

    @property
    def max_step_rows(self) -> int:
        return 1

    def start(self, sequence: Start) -> DraftState:
        return PlainDraftState(sequence.first)


class PlainDraftState(DraftState):
    """The drafting state of plain decoding: the last token."""

    def __init__(self, first: int) -> None:
        self._last = first

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
        return TokenTree(self._last)

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        self._last = tokens[-1]
