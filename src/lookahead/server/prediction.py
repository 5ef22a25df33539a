"""Predicted outputs: how many tokens of a prediction were accepted drafts."""

from __future__ import annotations

from collections.abc import Sequence


class Predicted:
    """Compares a text with its prediction.

    A token counts where it was drafted, accepted, and is the next one of the prediction. Where text and prediction
    differ, the comparison continues after the last two tokens of the text, where the prediction has these.

    Attributes:
        tokens: of the prediction.
        accepted: how many of them were accepted drafts.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.accepted = tokens, 0
        self._next, self._last = 0, -1
        self._after: dict[tuple[int, int], list[int]] = {}
        for index in range(2, len(tokens) + 1):
            self._after.setdefault((tokens[index - 2], tokens[index - 1]), []).append(index)

    @property
    def rejected(self) -> int:
        """Tokens of the prediction that were not accepted."""
        return len(self.tokens) - self.accepted

    def take(self, tokens: Sequence[int]) -> None:
        """Take the tokens of one step; all but the last were drafted."""
        for number, token in enumerate(tokens):
            if self._next < len(self.tokens) and self.tokens[self._next] == token:
                self._next += 1
                self.accepted += number < len(tokens) - 1 and self.accepted < len(self.tokens)
            else:
                found = self._after.get((self._last, token), [])
                later = next((index for index in found if index >= self._next), None)
                self._next = later if later is not None else found[-1] if found else self._next
            self._last = token
