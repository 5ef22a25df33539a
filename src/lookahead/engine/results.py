"""What decoding a prompt gives: updates while it runs, and a result at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..core import LookaheadError, Stats, Step


@dataclass(slots=True)
class Result:
    """One finished text.

    Attributes:
        text: without stop strings and special tokens; "" where there is no tokenizer.
        tokens: token ids as emitted, an end token or the tokens of a stop string included.
        finish_reason: "stop" (end token or stop string), "length", or "error".
        stats: steps, rows, tokens per step, seconds by phase; see ``lookahead.core.Stats``.
        prompt_tokens: token ids of the prompt.
        seed: that gives these tokens again; None for greedy.
        stopped: the stop string that was met, or None.
        error: what ended it, where ``finish_reason`` is "error".
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats
    prompt_tokens: list[int] = field(repr=False)
    seed: int | None = None
    stopped: str | None = None
    error: LookaheadError | None = None

    @property
    def seconds(self) -> float:
        """Wall time of all phases."""
        return sum(self.stats.seconds.values())


@dataclass(frozen=True, slots=True)
class Update:
    """What a forward pass gave one prompt.

    Attributes:
        index: which prompt of the list.
        step: the core's step; None where the prompt could not begin.
        piece: text that has become safe to show, perhaps "".
        result: on the last update of a prompt.
    """

    index: int
    step: Step | None
    piece: str
    result: Result | None


class Stream:
    """Pieces of text; iterate once. ``result`` is there when the iteration is over.

    Closing it (or leaving a ``with`` block) ends the generation.
    """

    def __init__(self, updates: Iterator[Update]) -> None:
        self._updates = updates
        self.result: Result | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        for update in self._updates:
            if update.result is not None:
                self.result = update.result
                if update.result.error is not None:
                    raise update.result.error
            if update.piece:
                return update.piece
        raise StopIteration

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the generation; what has been shown stays."""
        close = getattr(self._updates, "close", None)
        if close is not None:
            close()
