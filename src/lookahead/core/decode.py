"""The only loop. Draft, forward, verify, commit, observe; for one sequence or for many.

    tree = drafter.draft()                 the rows to evaluate, root = last emitted token
    scores = target.forward(tree)          mask = ancestors, position = T + depth
    path, tokens = verify(tree, choose)    the target's own tokens, asked root to leaf
    target.commit(path)                    keep those rows
    drafter.observe(tree, scores, path)    learn from the logits, which is where n-grams come from

Several sequences are several trees in one forward pass; a single one is a list of one. Users call ``decode``,
or ``Decoder.step`` where sequences join and leave as it runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .choose import Choose, as_choose, greedy
from .drafter import UNLIMITED_ROWS, Drafter
from .errors import LookaheadError, OutOfMemory, SettingsError
from .stats import Stats, timed
from .target import Scores, Target
from .tree import TokenTree
from .verify import verify


@dataclass(slots=True)
class Request:
    """One sequence to decode.

    Attributes:
        prompt: token ids, at least one.
        drafter: fresh or used; it is reset first.
        max_new_tokens: at least 1.
        choose: the target's own token under a row, a ``Choose`` or a plain function; greedy by default.
        eos: tokens that end the text; the ending token is emitted.
        finished: told of each token as it is emitted; a text ends the sequence with that finish reason.
    """

    prompt: Sequence[int]
    drafter: Drafter
    max_new_tokens: int
    choose: Choose | Callable[[Scores, int], int] = greedy
    eos: frozenset[int] = frozenset()
    finished: Callable[[int], str | None] | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise SettingsError("the prompt must have at least one token, got none")
        if self.max_new_tokens < 1:
            raise SettingsError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


@dataclass(slots=True)
class Generation:
    """One sequence's result, filled while it is decoded.

    ``finish_reason`` is None while it runs, then "stop" (an end token or what ``finished`` said),
    "length", "cancelled", or "error" with ``error`` set. Tokens emitted before an error stay.
    """

    request: Request
    slot: int = -1
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: LookaheadError | None = None
    stats: Stats = field(default_factory=Stats)
    choose: Choose = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.choose = as_choose(self.request.choose)


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass gave one sequence; ``tree`` is None for the prefill."""

    generation: Generation
    tokens: list[int]
    path: list[int]
    tree: TokenTree | None

    @property
    def rows(self) -> int:
        """Rows evaluated, 0 for the prefill."""
        return len(self.tree) if self.tree is not None else 0


class Decoder:
    """Drives any number of sequences over one target; they may join and leave between steps."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.max_rows = UNLIMITED_ROWS
        self._waiting: list[Generation] = []
        self._running: list[Generation] = []
        self._free: list[int] = []
        self._slots = 0

    @property
    def busy(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> Generation:
        """Let a sequence join at the next step."""
        generation = Generation(request)
        generation.stats.prompt_tokens = len(request.prompt)
        generation.stats.path = self.target.path
        self._waiting.append(generation)
        return generation

    def cancel(self, generation: Generation) -> None:
        """End a sequence now; what it has emitted stays."""
        if generation.finish_reason is None:
            self._end(generation, "cancelled")
            self._sweep()

    def step(self) -> list[Step]:
        """One prefill of those that wait, or else one forward pass for all that run."""
        return self._prefill() if self._waiting else self._forward()

    def _prefill(self) -> list[Step]:
        joining, self._waiting = self._waiting, []
        steps: list[Step] = []
        with timed("prefill", [g.stats for g in joining]):
            for generation in joining:
                if not self._free:
                    self._free.append(self._slots)
                    self._slots += 1
                generation.slot = self._free.pop()
            self._running += joining
            try:
                scores = self.target.prefill([(g.slot, g.request.prompt) for g in joining])
            except LookaheadError as error:
                for generation in joining:
                    self._end(generation, "error", error)
            else:
                for generation, score in zip(joining, scores, strict=True):
                    steps += self._begin(generation, score)
        self._sweep()
        return steps

    def _begin(self, generation: Generation, scores: Scores) -> list[Step]:
        """The token that the prefill gives, and the drafter's start; no step where that fails."""
        request = generation.request
        try:
            token = generation.choose(scores, 0)
            self._emit(generation, token)
            request.drafter.reset(request.prompt, token, request.eos)
        except LookaheadError as error:
            self._end(generation, "error", error)
            return []
        return [Step(generation, [token], [], None)]

    def _forward(self) -> list[Step]:
        running = list(self._running)
        stats = [g.stats for g in running]
        evaluated = self._evaluate(running, stats) if running else None
        steps: list[Step] = []
        if evaluated is not None:
            with timed("verify", stats):
                walked = [(self._walk(g, tree, score), score) for g, tree, score in evaluated]
                steps = [step for step, _ in walked if step is not None]
            with timed("commit", stats):
                if steps:
                    self.target.commit([(step.generation.slot, step.path) for step in steps])
            with timed("observe", stats):
                for step, score in walked:
                    if step is not None:
                        self._observe(step, score)
        self._sweep()
        return steps

    def _evaluate(
        self, running: list[Generation], stats: list[Stats]
    ) -> list[tuple[Generation, TokenTree, Scores]] | None:
        """Draft and evaluate; a pass that does not fit is tried again with half the rows. None: none fits."""
        while True:
            with timed("draft", stats):
                trees = [self._draft(generation) for generation in running]
            try:
                with timed("forward", stats):
                    scores = self.target.forward([(g.slot, t) for g, t in zip(running, trees, strict=True)])
                    # A device that runs by itself is still computing: this is for what needs no logits.
                    for generation, tree in zip(running, trees, strict=True):
                        generation.choose.overlap(tree)
                        generation.request.drafter.overlap(tree)
                return list(zip(running, trees, scores, strict=True))
            except OutOfMemory as error:
                rows = max(map(len, trees))
                if rows == 1:
                    for generation in running:
                        self._end(generation, "error", error)
                    return None
                if self.max_rows == UNLIMITED_ROWS:
                    warnings.warn(
                        f"a step of {rows} rows did not fit in memory; going on with at most half as many "
                        "(the output stays the same)",
                        RuntimeWarning,
                        stacklevel=4,
                    )
                self.max_rows = rows // 2

    def _draft(self, generation: Generation) -> TokenTree:
        left = generation.request.max_new_tokens - len(generation.tokens)
        depth = min(left - 1, self.target.depth_limit(generation.slot))
        return generation.request.drafter.draft(max(0, depth), self.max_rows)

    def _walk(self, generation: Generation, tree: TokenTree, scores: Scores) -> Step | None:
        try:
            path, tokens = verify(
                tree,
                lambda node: generation.choose(scores, node),
                lambda token: self._emit(generation, token),
            )
        except LookaheadError as error:
            self._end(generation, "error", error)
            return None
        generation.stats.count_step(len(tree), tree.verifiable(), len(tokens))
        return Step(generation, tokens, path, tree)

    def _observe(self, step: Step, scores: Scores) -> None:
        generation, drafter = step.generation, step.generation.request.drafter
        assert step.tree is not None
        try:
            drafter.observe(step.tree, scores, step.path, step.tokens)
        except LookaheadError as error:
            self._end(generation, "error", error)
        if generation.finish_reason is not None:
            generation.stats.drafter = drafter.stats()

    def _emit(self, generation: Generation, token: int) -> bool:
        request = generation.request
        generation.tokens.append(token)
        generation.stats.new_tokens += 1
        reason = request.finished(token) if request.finished is not None else None
        if reason is None and token in request.eos:
            reason = "stop"
        if reason is None and len(generation.tokens) >= request.max_new_tokens:
            reason = "length"
        generation.finish_reason = reason
        return reason is not None

    def _end(self, generation: Generation, reason: str, error: LookaheadError | None = None) -> None:
        generation.finish_reason = reason
        generation.error = error

    def _sweep(self) -> None:
        """Give back the slots of those that are done."""
        for generation in self._running:
            if generation.finish_reason is not None:
                self.target.release(generation.slot)
                self._free.append(generation.slot)
        self._running = [g for g in self._running if g.finish_reason is None]
        self._waiting = [g for g in self._waiting if g.finish_reason is None]


def decode(target: Target, requests: Iterable[Request]) -> Iterator[Step]:
    """Decode the requests together and yield every step as it is made.

    Raises:
        LookaheadError: once nothing is left to do, the first error that ended a sequence.
    """
    decoder = Decoder(target)
    generations = [decoder.add(request) for request in requests]
    try:
        while decoder.busy:
            yield from decoder.step()
    finally:
        for generation in generations:
            decoder.cancel(generation)
    for generation in generations:
        if generation.error is not None:
            raise generation.error
