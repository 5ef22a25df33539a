"""Reasoning: text between <think> tags before an answer, which the API returns in a field of its own."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def held_back(text: str, tag: str) -> int:
    """How many characters at the end of a text may be the beginning of a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)


class ThoughtReader:
    """Splits a completion that arrives in pieces into its reasoning and its answer.

    Args:
        inside: whether the prompt ends with the opening tag.
    """

    def __init__(self, inside: bool) -> None:
        #: Whether the next text is reasoning; None while that is not known.
        self._inside: bool | None = True if inside else None
        self._begun = False
        self._text = ""

    def push(self, piece: str, end: bool = False) -> tuple[str, str]:
        """Read a piece. Returns (reasoning, answer) that are safe to show.

        Args:
            piece: the next piece of the completion.
            end: whether it is the last one.
        """
        self._text += piece
        reasoning = ""
        if self._inside is None:
            start = self._text.lstrip()
            if OPEN.startswith(start) and start != OPEN and not end:
                return "", ""
            self._inside = start.startswith(OPEN)
            self._text = start[len(OPEN) :] if self._inside else self._text
        if self._inside:
            reasoning, closed, rest = self._text.partition(CLOSE)
            if closed:
                self._inside = False
                self._begun = True
                self._text = rest
            else:
                held = 0 if end else held_back(reasoning, CLOSE)
                self._text = reasoning[len(reasoning) - held :]
                return reasoning[: len(reasoning) - held], ""
        # The line breaks between the closing tag and the answer belong to neither.
        answer = self._text.lstrip("\n") if self._begun else self._text
        self._begun = self._begun and not answer
        self._text = ""
        return reasoning, answer
