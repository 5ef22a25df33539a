"""Prompt lookup: the continuation of the longest earlier match of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ..core import UNLIMITED_ROWS, Drafter, Scores, SettingsError, TokenTree


class PromptLookupDrafter(Drafter):
    """One chain, copied from where the last n tokens stood before; n from ``max_ngram`` down to 1.

    Of several matches of one length the latest is taken. The index is kept up token by token, so a step
    costs the same at any length of the text.

    Args:
        max_ngram: longest match tried, at least 1.
        max_drafted: longest chain, at least 1.
    """

    def __init__(self, max_ngram: int = 3, max_drafted: int = 10) -> None:
        if max_ngram < 1 or max_drafted < 1:
            raise SettingsError(
                f"max_ngram and max_drafted must be at least 1, got {max_ngram} and {max_drafted}"
            )
        self.max_ngram, self.max_drafted = max_ngram, max_drafted

    def reset(self, prompt: Sequence[int], first: int, eos: frozenset[int]) -> None:
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._matches = self._steps = 0
        self._extend([*prompt, first])

    def _extend(self, tokens: Sequence[int]) -> None:
        text = self._text
        for token in tokens:
            # Index what ends just before this token, so that the text's own tail never matches itself.
            end = len(text)
            for n in range(1, min(self.max_ngram, end) + 1):
                self._after[tuple(text[end - n : end])] = end
            text.append(token)

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS) -> TokenTree:
        text = self._text
        tree = TokenTree(text[-1])
        length = min(self.max_drafted, max_depth, max_rows - 1)
        for n in range(min(self.max_ngram, len(text)), 0, -1):
            start = self._after.get(tuple(text[-n:]))
            if start is not None:
                tree.add_candidate(text[start : start + max(0, length)])
                break
        return tree

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        self._steps += 1
        self._matches += len(tree) > 1
        self._extend(tokens)

    def stats(self) -> dict[str, float]:
        """Share of steps in which a match was found."""
        return {"match_rate": self._matches / self._steps if self._steps else 0.0}
