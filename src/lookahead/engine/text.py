"""Tokens in, text that is safe to show out: whole characters, and never a part of a stop string.

A token may hold a part of a character, and text may depend on the token before it (leading spaces), so text is the
difference of two decodings of a short window of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\ufffd"
#: A character has at most 4 bytes; a longer run without a whole character is not text and is let go.
LONGEST_WINDOW = 32
CONTEXT = 6


class TextStream:
    """The text of a growing list of tokens; it ends before the first stop string, wherever that begins.

    Args:
        tokenizer: anything with transformers' ``decode``; None gives no text.
        prompt: token ids before the text; its last few settle how the text begins.
        stop: strings that end the text and are not part of it.

    Attributes:
        text: everything that has been released.
        stopped: the stop string that was met, or None.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._window = list(prompt[-CONTEXT:])
        self._known = len(self._window)
        # A prompt may end inside a character: then the text begins with it.
        self._shown = self._decode().rstrip(INCOMPLETE)
        self._held = self._ready = self.text = ""
        self.stopped: str | None = None

    def push(self, token: int) -> bool:
        """Take one token. True once a stop string is complete."""
        self._window.append(token)
        text = self._decode()
        if not text.endswith(INCOMPLETE) or len(self._window) - self._known >= LONGEST_WINDOW:
            self._take(text)
        return self.stopped is not None

    def finish(self) -> None:
        """No more tokens: an unfinished character becomes U+FFFD, and what was held back is text after all."""
        if len(self._window) > self._known:
            self._take(self._decode())
        if self.stopped is None:
            self._ready += self._held
        self._held = ""

    def drain(self) -> str:
        """The text that has become safe to show since the last call."""
        piece, self._ready = self._ready, ""
        self.text += piece
        return piece

    def _decode(self) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(
            self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _take(self, text: str) -> None:
        """``text`` of the window is final; the newest tokens stay as the context of what follows."""
        held = self._held + text[len(self._shown) :]
        self._window = self._window[-CONTEXT:]
        self._known = len(self._window)
        self._shown = self._decode()
        if self.stopped is not None:
            return
        found = [(held.find(stop), -len(stop), stop) for stop in self._stop if stop in held]
        if found:  # the first to begin; of those that begin together the longest
            safe, _, self.stopped = min(found)
        else:
            safe = len(held) - self._possible_start(held)
        self._ready += held[:safe]
        self._held = held[safe:]

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of ``text`` that may turn out to begin a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in self._stop)), 0)
