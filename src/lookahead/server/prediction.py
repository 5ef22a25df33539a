"""Predicted outputs: how many tokens of a prediction drafting brought into the text."""

from __future__ import annotations

from collections.abc import Sequence


class Predicted:
    """Follows a text along its prediction.

    A token counts where it was drafted, accepted, and stands in the prediction behind what was followed so far.
    Where the two part, the place is found again by the last two tokens of the text.

    Attributes:
        tokens: of the prediction.
        accepted: how many of them were accepted drafts.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.accepted = tokens, 0
        self._at, self._last = 0, -1
        self._after: dict[tuple[int, int], list[int]] = {}
        for place in range(2, len(tokens) + 1):
            self._after.setdefault((tokens[place - 2], tokens[place - 1]), []).append(place)

    @property
    def rejected(self) -> int:
        """Tokens of the prediction that were not."""
        return len(self.tokens) - self.accepted

    def take(self, tokens: Sequence[int]) -> None:
        """The tokens of one step; all but the last were drafted."""
        for place, token in enumerate(tokens):
            if self._at < len(self.tokens) and self.tokens[self._at] == token:
                self._at += 1
                self.accepted += place < len(tokens) - 1 and self.accepted < len(self.tokens)
            else:
                places = self._after.get((self._last, token), [])
                self._at = next((p for p in places if p >= self._at), places[-1] if places else self._at)
            self._last = token
