"""Prompts while they are decoded: what each has given so far, and the loop that shares forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..core import Decoder, Generation, Request, Step, Target
from .results import Result, Update
from .text import TextStream


@dataclass(slots=True)
class Running:
    """One prompt while it is decoded."""

    index: int
    request: Request
    text: TextStream | None
    seed: int | None
    generation: Generation | None = None

    def finished(self, token: int) -> str | None:
        """Told of each token where stop strings are to be met."""
        assert self.text is not None
        return "stop" if self.text.push(token) else None

    def update(self, step: Step | None) -> Update:
        """What a step gave, with the result where it was the last one."""
        generation, text = self.generation, self.text
        assert generation is not None
        piece, done = "", generation.finish_reason
        if text is not None:
            if step is not None and self.request.finished is None:  # it pushes tokens itself
                for token in step.tokens:
                    text.push(token)
            if done is not None:
                text.finish()
            piece = text.drain()
        if done is None:
            return Update(self.index, step, piece, None)
        shown, stopped = (text.text, text.stopped) if text is not None else ("", None)
        prompt, error = list(self.request.prompt), generation.error
        result = Result(shown, generation.tokens, done, generation.stats, prompt, self.seed, stopped, error)
        return Update(self.index, step, piece, result)


def decode_prompts(
    make_target: Callable[[], Target], waiting: list[Running], batch_size: int
) -> Iterator[Update]:
    """Every step of every prompt; at most ``batch_size`` share a forward pass, and the next joins when one ends."""
    decoder = Decoder(make_target())
    waiting = waiting[::-1]
    running: dict[int, Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < batch_size:
                joining = waiting.pop()
                joining.generation = decoder.add(joining.request)
                running[id(joining.generation)] = joining
            steps = {id(step.generation): step for step in decoder.step()}
            for key, entry in list(running.items()):
                assert entry.generation is not None
                done = entry.generation.finish_reason is not None
                if done:
                    del running[key]
                if done or key in steps:
                    yield entry.update(steps.get(key))
    finally:  # also where the caller stops listening
        for entry in running.values():
            assert entry.generation is not None
            decoder.cancel(entry.generation)
