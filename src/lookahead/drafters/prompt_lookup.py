"""Prompt lookup (Saxena, 2023): draft the continuation of the longest earlier match of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..core import UNLIMITED_ROWS, Drafter, DraftState, Scores, Start, TokenTree
from .checks import check_whole, text_form


@dataclass(frozen=True)
class PromptLookup(Drafter):
    """One candidate: the tokens that followed the latest earlier occurrence of the last n tokens, for the largest n.

    Attributes:
        max_ngram: largest n, 1 to 32; without a match, smaller n are tried down to 1.
        max_drafted: number of tokens in the longest candidate, 1 to 512.

    Raises:
        SettingsError: a value out of range.
    """

    max_ngram: int = 3
    max_drafted: int = 10

    name = "prompt-lookup"

    @property
    def uses_prediction(self) -> bool:
        """Whether a prediction is searched for matches."""
        return True

    def __post_init__(self) -> None:
        check_whole(self, "max_ngram", 1, 32)
        check_whole(self, "max_drafted", 1, 512)

    def __str__(self) -> str:
        return text_form(self.name, self)

    @property
    def max_step_rows(self) -> int:
        return 1 + self.max_drafted

    def start(self, sequence: Start) -> DraftState:
        return PromptLookupDraftState(self, sequence)


class PromptLookupDraftState(DraftState):
    """The sequence so far and an index of its n-grams.

    Among matches of the same length, the latest is used. The index grows token by token, so the time of a step does
    not depend on the length of the sequence.
    """

    def __init__(self, settings: PromptLookup, sequence: Start) -> None:
        self._settings = settings
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._matches = self._steps = 0
        self._extend(sequence.text)

    def _extend(self, tokens: Sequence[int]) -> None:
        text = self._text
        for token in tokens:
            # Index the n-grams that end before this token, so that the end of the sequence does not match itself.
            end = len(text)
            for n in range(1, min(self._settings.max_ngram, end) + 1):
                self._after[tuple(text[end - n : end])] = end
            text.append(token)

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
        text = self._text
        tree = TokenTree(text[-1])
        length = min(self._settings.max_drafted, max_depth, max_rows - 1)
        for n in range(min(self._settings.max_ngram, len(text)), 0, -1):
            start = self._after.get(tuple(text[-n:]))
            if start is not None:
                tree.add_candidate(text[start : start + length])
                break
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        self._steps += 1
        self._matches += len(tree) > 1
        self._extend(tokens)

    def stats(self) -> dict[str, float]:
        """The share of steps with a match."""
        return {"match_rate": self._matches / self._steps if self._steps else 0.0}
