"""Predicted outputs: how many tokens of a prediction were accepted drafts."""

from __future__ import annotations

from collections.abc import Sequence


class Predicted:
    """Compares a completion with its prediction.

    A token counts if it was drafted, was accepted, and is the next token of the prediction. After a mismatch, the
    comparison resumes where the prediction contains the last two tokens of the completion.

    Attributes:
        tokens: the prediction's tokens.
        accepted: the number of these tokens that were accepted drafts.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.accepted = 0
        self._next = 0
        self._last = -1
        self._after: dict[tuple[int, int], list[int]] = {}
        for index in range(2, len(tokens) + 1):
            self._after.setdefault((tokens[index - 2], tokens[index - 1]), []).append(index)

    @property
    def rejected(self) -> int:
        """Tokens of the prediction that were not accepted."""
        return len(self.tokens) - self.accepted

    def take(self, tokens: Sequence[int]) -> None:
        """Process the tokens of one step; all but the last were drafted."""
        for number, token in enumerate(tokens):
            if self._next < len(self.tokens) and self.tokens[self._next] == token:
                self._next += 1
                self.accepted += number < len(tokens) - 1 and self.accepted < len(self.tokens)
            else:
                places = self._after.get((self._last, token), [])
                later = next((index for index in places if index >= self._next), None)
                self._next = later if later is not None else places[-1] if places else self._next
            self._last = token
