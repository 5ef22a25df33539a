"""What decoding a prompt gives: updates while it runs, and a result at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core import Generation, LookaheadError, Request, Stats, Step
from .text import TextStream


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


class Running:
    """One prompt while it is decoded."""

    def __init__(self, index: int, request: Request, text: TextStream | None, seed: int | None) -> None:
        self.index = index
        self.request = request
        self.text = text
        self.seed = seed
        self.generation: Generation | None = None
        self.streams_by_token = False

    def finished(self, token: int) -> str | None:
        """Told of each token where stop strings are to be met."""
        assert self.text is not None
        return "stop" if self.text.push(token) else None

    def update(self, step: Step | None) -> Update:
        generation, text = self.generation, self.text
        assert generation is not None
        piece = ""
        if text is not None:
            if step is not None and not self.streams_by_token:
                for token in step.tokens:
                    text.push(token)
            if generation.finish_reason is not None:
                text.finish()
            piece = text.drain()
        return Update(self.index, step, piece, self.result())

    def result(self) -> Result | None:
        generation, text = self.generation, self.text
        assert generation is not None
        if generation.finish_reason is None:
            return None
        return Result(
            text.text if text is not None else "",
            generation.tokens,
            generation.finish_reason,
            generation.stats,
            list(self.request.prompt),
            self.seed,
            text.stopped if text is not None else None,
            generation.error,
        )
