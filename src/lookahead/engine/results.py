"""What decoding prompts gives: an update per step while it runs, and a result at the end of each."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice

from ..core import Decoder, Generation, LookaheadError, Request, Stats, Step, Target
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

    def checked(self) -> Result:
        """Itself; raises the error that ended it."""
        if self.error is not None:
            raise self.error
        return self

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


Updates = Generator[Update, None, None]


class Stream:
    """Pieces of text; iterate once. ``result`` is there when the iteration is over.

    Closing it (or leaving a ``with`` block) ends the generation.
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
        """End the generation; what has been shown stays."""
        self._updates.close()


@dataclass(frozen=True, slots=True)
class Entry:
    """One prompt of a list, ready to be decoded."""

    index: int
    request: Request
    text: TextStream
    seed: int | None

    def update(self, generation: Generation, step: Step | None) -> Update:
        """What a step gave, with the result where it was the last one."""
        done, text, result = generation.finish_reason, self.text, None
        if step is not None and self.request.finished is None:  # which is told of each token at once
            for token in step.tokens:
                text.push(token)
        if done is not None:
            text.finish()
        piece = text.drain()
        if done is not None:
            result = Result(
                text.text, generation.tokens, done, generation.stats, list(self.request.prompt), self.seed,
                text.stopped, generation.error,
            )  # fmt: skip
        return Update(self.index, step, piece, result)


def decode_prompts(
    lend: Callable[[], AbstractContextManager[Target]], entries: Iterable[Entry], batch_size: int
) -> Updates:
    """Every step of every prompt; at most ``batch_size`` share a forward pass, and the next joins when one ends."""
    waiting = iter(entries)
    running: list[tuple[Entry, Generation]] = []
    with lend() as target:
        decoder = Decoder(target)
        try:
            while True:
                joining = islice(waiting, batch_size - len(running))
                running += [(entry, decoder.add(entry.request)) for entry in joining]
                if not running:
                    return
                steps = {id(step.generation): step for step in decoder.step()}
                for entry, generation in running:
                    step = steps.get(id(generation))
                    if step is not None or generation.finish_reason is not None:
                        yield entry.update(generation, step)
                running = [one for one in running if one[1].finish_reason is None]
        finally:  # also where the caller stops listening
            for _, generation in running:
                decoder.cancel(generation)
