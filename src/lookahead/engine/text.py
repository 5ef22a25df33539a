"""Tokens in, text that is safe to show out: whole characters, and never a part of a stop string.

Knows a tokenizer's ``decode`` and nothing else. A token may hold a part of a character, and text may depend
on the token before it (leading spaces), so text is taken as the difference of two decodings of a short
window of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\ufffd"
#: A character has at most 4 bytes; a longer run without a whole character is not text and is let go.
LONGEST_WINDOW = 32
CONTEXT = 6


class Detokenizer:
    """Text of a growing list of tokens, by whole characters.

    Args:
        tokenizer: anything with transformers' ``decode``.
        prompt: token ids before the text; its last few settle how the text begins.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-CONTEXT:])
        # What the known tokens say. A prompt may end inside a character: then the text begins with it.
        self._shown = self._decode(self._window).rstrip(INCOMPLETE)
        self._known = len(self._window)

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def push(self, token: int) -> str:
        """The text that ``token`` makes final; empty while a character is incomplete."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(INCOMPLETE) and len(self._window) - self._known < LONGEST_WINDOW:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """What is left at the end; an unfinished character becomes U+FFFD, as in ``decode``."""
        if len(self._window) == self._known:
            return ""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        piece = text[len(self._shown) :]
        # The newest tokens stay as the context of what follows.
        self._window = self._window[-CONTEXT:]
        self._known = len(self._window)
        self._shown = self._decode(self._window)
        return piece


class TextStream:
    """A sequence's text with stop strings: it ends before the first one, wherever that begins.

    Args:
        tokenizer, prompt: see ``Detokenizer``.
        stop: strings that end the text and are not part of it.

    Attributes:
        text: everything that has been released.
        stopped: the stop string that was met, or None.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stop = tuple(stop)
        self._held = ""
        self._ready: list[str] = []
        self.text = ""
        self.stopped: str | None = None

    def push(self, token: int) -> bool:
        """Take one token. True once a stop string is complete."""
        if self.stopped is None:
            self._take(self._detokenizer.push(token))
        return self.stopped is not None

    def finish(self) -> None:
        """No more tokens: what was held back is text after all, unless a stop string was met."""
        if self.stopped is None:
            self._take(self._detokenizer.flush())
        if self.stopped is None:
            self._ready.append(self._held)
        self._held = ""

    def drain(self) -> str:
        """The text that has become safe to show since the last call."""
        piece = "".join(self._ready)
        self._ready.clear()
        self.text += piece
        return piece

    def _take(self, piece: str) -> None:
        held = self._held + piece
        found = [(held.find(stop), stop) for stop in self._stop if stop in held]
        if found:
            # The first to begin; of those that begin together the longest.
            place, self.stopped = min(found, key=lambda hit: (hit[0], -len(hit[1])))
            self._ready.append(held[:place])
            self._held = ""
            return
        keep = self._possible_start(held)
        self._ready.append(held[: len(held) - keep])
        self._held = held[len(held) - keep :]

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of ``text`` that may turn out to begin a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return size
        return 0
