"""Test helpers for this library and for code that uses it: fakes, and an assertion.

``FakeTarget`` implements the whole target protocol in plain Python, and ``FakeModel`` makes such targets.
Tiny models of transformers come from ``lookahead.hf.testing``.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from functools import partial
from typing import Any

from .core import (
    Choose,
    Drafter,
    Engine,
    Request,
    Sequence,
    first_divergence,
    greedy,
)
from .core.fake_target import FakeTarget as FakeTarget
from .core.fake_target import repetitive_text as repetitive_text
from .drafters import Plain, as_drafter
from .model import Model, Probe, Shape, path_error


class FakeModel(Model):
    """A model whose targets are ``FakeTarget``s, for tests of whatever drives a model.

    Args:
        vocabulary, next_token, max_positions, max_rows: as for ``FakeTarget``.
        eos: tokens that end a completion.
        drafts: whether it can evaluate drafts.
    """

    weights = "float32"
    parameter_count = 0
    key = "fake"

    def __init__(
        self,
        vocabulary: int = 32,
        next_token: Callable[[abc.Sequence[int]], int] | None = None,
        max_positions: int = 1 << 20,
        max_rows: int = 1 << 20,
        eos: abc.Iterable[int] = (),
        drafts: bool = True,
    ) -> None:
        self.description = "FakeModel, a function of the prefix"
        self.shape = Shape("fake", vocabulary, 0, 0)
        self.context = max_positions
        self.eos = frozenset(eos)
        self.state = {}
        self._make = partial(FakeTarget, vocabulary, next_token, max_positions, max_rows)
        self._probe = Probe("tree" if drafts else "plain", "a function of the prefix", None, None)

    @property
    def probe(self) -> Probe:
        return self._probe

    def make_target(self, path: str = "auto", exact: bool = False) -> FakeTarget:
        """A ``FakeTarget``, which any number of rows leaves bit-equal."""
        if path not in ("auto", FakeTarget.path):
            raise path_error(self, path, "omit it")
        return self._make()

    def checksum(self, samples: int | None = None) -> int:
        return 0


def run(target: Any, requests: abc.Sequence[Request]) -> list[Sequence]:
    """Decode requests concurrently to the end."""
    engine = Engine(lambda: target, target=target)
    sequences = [engine.add(request) for request in requests]
    while engine.busy:  # ``decode`` would raise the error that ended a sequence
        engine.step()
    return sequences


def assert_same_as_autoregressive(
    target: Any,
    prompts: abc.Sequence[abc.Sequence[int]],
    drafter: Any = "15,5,15",
    max_new_tokens: int = 64,
    eos: frozenset[int] = frozenset(),
    choose: Callable[[], Choose] = lambda: greedy,
) -> list[Sequence]:
    """Compare decoding with a drafter and plain decoding, token by token. Returns the drafter's sequences.

    Args:
        target: the target for both.
        prompts: token ids of each prompt.
        drafter: anything that ``lookahead.as_drafter`` accepts.
        max_new_tokens: largest number of new tokens per prompt.
        eos: tokens that end a sequence.
        choose: makes a new ``choose`` for each sequence; greedy by default.

    Raises:
        AssertionError: the tokens differ, as reported with the first differing index, or the finish reasons do.
    """

    drafter = as_drafter(drafter)

    def requests(by: Drafter) -> list[Request]:
        return [Request(prompt, by, max_new_tokens, choose(), eos) for prompt in prompts]

    drafted = run(target, requests(drafter))
    for number, (ours, request) in enumerate(zip(drafted, requests(Plain()), strict=True)):
        (plain,) = run(target, [request])
        if plain.error is not None:
            raise AssertionError(f"plain decoding failed for prompt {number}: {plain.error}") from plain.error
        index = first_divergence(ours.tokens, plain.tokens)
        if index is not None:
            raise AssertionError(
                f"{drafter} differs from plain decoding for prompt {number} at token {index}: "
                f"{ours.tokens[index : index + 5]} instead of {plain.tokens[index : index + 5]}"
            )
        if ours.finish_reason != plain.finish_reason:
            raise AssertionError(
                f"{drafter} ended with {ours.finish_reason!r}, plain decoding with {plain.finish_reason!r}"
                + (f": {ours.error}" if ours.error is not None else "")
            ) from ours.error
    return drafted
