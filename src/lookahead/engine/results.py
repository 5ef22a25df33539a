"""The results of decoding: an update for each step of a sequence, and a result at its end."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from ..core import Generation, LookaheadError, Request, Stats, Step
from .text import TextStream


@dataclass(slots=True)
class Result:
    """One finished text.

    Attributes:
        text: the text without stop strings and special tokens; "" without a tokenizer.
        tokens: the emitted token ids, including an end token or the tokens of a stop string.
        finish_reason: "stop" (end token or stop string), "length", "cancelled" or "error".
        stats: steps, rows, tokens per step, seconds by phase; see ``lookahead.core.Stats``.
        prompt_tokens: token ids of the prompt.
        seed: the seed that reproduces these tokens; None for greedy decoding.
        stopped: the stop string that ended the text, or None.
        error: the error that ended the text, if ``finish_reason`` is "error".
    """

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats
    prompt_tokens: list[int] = field(repr=False)
    seed: int | None = None
    stopped: str | None = None
    error: LookaheadError | None = None

    def checked(self) -> Result:
        """Return this result, or raise the error that ended it."""
        if self.error is not None:
            raise self.error
        return self

    @property
    def seconds(self) -> float:
        """Wall time of all phases."""
        return sum(self.stats.seconds.values())


@dataclass(slots=True, eq=False)
class Sequence:
    """The handle of a request in an engine, which ``Engine.add`` returns.

    Attributes:
        request: the request.
        text: turns tokens into text; None for token ids only.
        seed: seed of the random numbers, for the result; None for greedy decoding.
        tag: the caller's own value. ``LLM.run`` uses it to number its prompts.
        generation: tokens and statistics so far; None while the sequence waits.
        cached: number of tokens of the prompt whose keys and values were reused.
        result: set by the last update.
    """

    request: Request
    text: TextStream | None = None
    seed: int | None = None
    tag: Any = None
    generation: Generation | None = None
    cached: int = 0
    result: Result | None = None

    @property
    def tokens(self) -> list[int]:
        """Token ids emitted so far."""
        return self.generation.tokens if self.generation is not None else []


@dataclass(frozen=True, slots=True)
class Update:
    """The result of one forward pass for one sequence.

    Attributes:
        sequence: the handle.
        step: the step; None if the sequence ended without one.
        piece: text that has become safe to show, possibly "".
        result: set in the last update of a sequence.
    """

    sequence: Sequence
    step: Step | None
    piece: str
    result: Result | None

    @property
    def index(self) -> int:
        """The number of the prompt in the list that was given to ``LLM.run``."""
        return int(self.sequence.tag)

    @property
    def tokens(self) -> list[int]:
        """Token ids that the step emitted."""
        return self.step.tokens if self.step is not None else []


Updates = Generator[Update, None, None]


class Stream:
    """An iterator over pieces of text. ``result`` is set at the end of the iteration.

    Closing it, or leaving a ``with`` block, ends the generation.
    """

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self.result: Result | None = None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        for update in self._updates:
            self.result = update.result
            if update.result is not None:
                update.result.checked()
            if update.piece:
                return update.piece
        raise StopIteration

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the generation."""
        self._updates.close()
