"""Turns tokens into text that is safe to show: complete characters and no part of a stop string.

A token may contain part of a character, and its text may depend on the token before it (leading spaces). So new text
is the difference between two decodings of a short window of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from ..core import SettingsError

INCOMPLETE = "\ufffd"
#: A character has at most 4 bytes. A longer run without a complete character is not text and is released as it is.
LONGEST_WINDOW = 32
CONTEXT = 6
#: A longer window is shortened to ``CONTEXT`` tokens.
LONGEST_CONTEXT = 16


def split_stops(tokenizer: Any, stops: Sequence[str]) -> tuple[list[str], frozenset[int]]:
    """The stop strings to find in the text, and those that are special tokens, which are not part of it.

    Raises:
        SettingsError: a stop string contains a special token and other text.
    """
    strings = list[str]()
    tokens = set[int]()
    for stop in stops:
        try:
            stop.encode()
        except UnicodeEncodeError:
            raise SettingsError(f"stop must be text that UTF-8 can encode, got {stop!r}") from None
        ids = list(tokenizer(stop, add_special_tokens=False).input_ids)
        hidden = [token for token in ids if not tokenizer.decode([token], skip_special_tokens=True)]
        # A token for unknown text is hidden too, but its own text does not occur in the stop string.
        names = [tokenizer.decode([token]).strip() for token in hidden]
        if not any(name and name in stop for name in names):
            strings.append(stop)
        elif len(ids) == 1:
            tokens.update(ids)
        else:
            raise SettingsError(
                f"stop: {stop!r} contains a special token, which is not part of the text; give that token as a stop "
                "of its own"
            )
    return strings, frozenset(tokens)


class TextDecoder:
    """The text of a growing list of tokens, ending before the first stop string. A ``core.sequence.Detokenizer``.

    Args:
        tokenizer: an object with ``decode`` as in transformers; with None, the text is empty.
        prompt: token ids before the text; the last few affect the beginning of the text.
        stop: strings that end the text and are not part of it.

    Attributes:
        stops: the stop strings.
        text: all text released so far.
        stopped: the stop string that ended the text, or None.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self.stops = stop
        self._window, self._shown = self._end_of(list(prompt[-LONGEST_WINDOW:]))
        self._known = len(self._window)
        self._held = self._ready = self.text = ""
        self.stopped: str | None = None

    def push(self, *tokens: int) -> bool:
        """Append tokens, or a single one if there are stop strings. Returns whether a stop string is complete."""
        window = [*self._window, *tokens]
        text = self._decode(window)
        whole = not text.endswith(INCOMPLETE)
        if len(tokens) > 1 and INCOMPLETE in text[len(self._shown) :]:
            # All tokens before an unfinished character can be shown, and what is shown of broken bytes must not
            # depend on the tokens that arrive together.
            for token in tokens:
                self.push(token)
            return self.stopped is not None
        self._window = window
        if whole or len(window) - self._known >= LONGEST_WINDOW:
            self._take(text)
        return self.stopped is not None

    def place(self, token: int) -> int:
        """Append a token. Returns its position in the text; tokens within a character have that of the character."""
        known = len(self._shown)
        start = len(self.text) + len(self._ready) + len(self._held) - known
        before, after = self._decode(self._window), self._decode([*self._window, token])
        self.push(token)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))))
        return start + max(known, min(same, len(after.rstrip(INCOMPLETE))))

    def finish(self) -> None:
        """End the text: an unfinished character becomes U+FFFD, and text that was held back is released."""
        if len(self._window) > self._known:
            self._take(self._decode(self._window))
        if self.stopped is None:
            self._ready += self._held
        self._held = ""

    def drain(self) -> str:
        """The text that became safe to show since the last call."""
        piece, self._ready = self._ready, ""
        self.text += piece
        return piece

    def _decode(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _end_of(self, prompt: list[int]) -> tuple[list[int], str]:
        """The window at the end of a prompt, and the window's complete characters.

        If the prompt ends inside a character, the text begins with that character. A window must not begin inside
        one, because SentencePiece decodes a run of bytes as a whole: one incomplete character makes all of them
        U+FFFD.
        """
        for size in range(min(CONTEXT, len(prompt)), len(prompt) + 1):
            window = prompt[len(prompt) - size :]
            text = self._decode(window)
            for end in range(size, max(size - 4, -1), -1):
                shown = self._decode(window[:end])
                if not shown.startswith(INCOMPLETE) and not shown.endswith(INCOMPLETE):
                    # The first token of an unfinished character may also contain complete ones.
                    return window, max(shown, text.rstrip(INCOMPLETE), key=len)
        window = prompt[-CONTEXT:]  # bytes that are not text
        return window, self._decode(window).rstrip(INCOMPLETE)

    def _take(self, text: str) -> None:
        """Release the window's ``text``. The newest tokens stay in the window as context for the following tokens.

        The window is shortened only now and then, because that takes another decoding.
        """
        held = self._held + text[len(self._shown) :]
        self._shown = text
        if len(self._window) > LONGEST_CONTEXT:
            for size in range(CONTEXT, LONGEST_WINDOW):
                window = self._window[-size:]
                self._shown = self._decode(window)
                # See ``_end_of``; broken bytes of the text itself are shown as they are.
                if not self._shown.startswith(INCOMPLETE) or text.endswith(self._shown):
                    break
            self._window = window
        self._known = len(self._window)
        if self.stopped is not None:
            return
        matches = [(held.find(stop), -len(stop), stop) for stop in self.stops if stop in held]
        if matches:  # the first match, and the longest of those that begin at the same character
            safe, _, self.stopped = min(matches)
        else:
            safe = len(held) - self._possible_start(held)
        self._ready += held[:safe]
        self._held = held[safe:]

    def _possible_start(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that may be the beginning of a stop string."""
        longest = max(map(len, self.stops), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)
