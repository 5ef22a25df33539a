"""The only loop. Draft, forward, verify, commit, observe; for one sequence or for many.

    tree = drafter.draft()                 the rows to evaluate, root = last emitted token
    scores = target.forward(tree)          mask = ancestors, position = T + depth
    path, tokens = verify(tree, choose)    the target's own tokens, asked root to leaf
    target.commit(path)                    keep those rows
    drafter.observe(tree, scores, path)    slide the window, harvest n-grams

Several sequences are several trees in one forward pass; a single one is a list of one.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from .drafter import UNLIMITED_ROWS, Drafter
from .errors import LookaheadError, OutOfMemory, SettingsError
from .target import Scores, Target
from .tree import TokenTree
from .verify import verify

#: (scores, node) -> the target's own token there. Asked exactly once per emitted token, in order. It may have a
#: method ``overlap(tree)``, as a drafter has.
Choose = Callable[[Scores, int], int]
PHASES = ("prefill", "draft", "forward", "verify", "commit", "observe")


def greedy(scores: Scores, node: int) -> int:
    """The token with the largest logit."""
    return scores.best(node)


@dataclass(slots=True)
class Request:
    """One sequence to decode.

    Attributes:
        prompt: token ids, at least one.
        drafter: fresh or used; it is reset first.
        max_new_tokens: at least 1.
        choose: the target's own token under a row; greedy by default.
        eos: tokens that end the text; the ending token is emitted.
        finished: told of each token as it is emitted; a text ends the sequence with that finish reason.
    """

    prompt: Sequence[int]
    drafter: Drafter
    max_new_tokens: int
    choose: Choose = greedy
    eos: frozenset[int] = frozenset()
    finished: Callable[[int], str | None] | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise SettingsError("the prompt must have at least one token, got none")
        if self.max_new_tokens < 1:
            raise SettingsError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


@dataclass(slots=True)
class Stats:
    """What one sequence cost. A step is a forward pass after the prefill, which emits the first token.

    Attributes:
        prompt_tokens: length of the prompt.
        new_tokens: tokens emitted, that of the prefill included.
        steps: forward passes after the prefill.
        rows: rows evaluated in those passes.
        drafted: rows that verification could have accepted.
        accepted: rows that it did accept.
        tokens_per_step: steps by the number of tokens that they emitted.
        rows_per_step: steps by their number of rows.
        seconds: wall time by phase while this sequence was in it; sequences that share a pass share it.
        drafter: figures of the drafting method's own.
        path: what evaluated the steps, by the target's own name; "" where it has none.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens_per_step: Counter[int] = field(default_factory=Counter)
    rows_per_step: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    drafter: dict[str, float] = field(default_factory=dict)
    path: str = ""

    @property
    def compression_ratio(self) -> float:
        """S: tokens per forward pass after the prefill, bonus token included (paper, section 4)."""
        return (self.new_tokens - 1) / self.steps if self.steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted rows."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of steps that accepted at least 1, 2, 3, ... drafted tokens."""
        longest = max(self.tokens_per_step, default=1)
        return [
            sum(count for size, count in self.tokens_per_step.items() if size > depth) / self.steps
            for depth in range(1, longest)
        ]

    @property
    def decode_seconds(self) -> float:
        """Wall time of everything after the prefill."""
        return sum(self.seconds.values()) - self.seconds["prefill"]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "steps": self.steps,
            "rows": self.rows,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "compression_ratio": self.compression_ratio,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_position": self.acceptance_by_position,
            "tokens_per_step": {str(k): v for k, v in sorted(self.tokens_per_step.items())},
            "rows_per_step": {str(k): v for k, v in sorted(self.rows_per_step.items())},
            "seconds": dict(self.seconds),
            "drafter": dict(self.drafter),
            "path": self.path,
        }


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
        start = perf_counter()
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
            self._sweep()
            return []
        steps = []
        for generation, score in zip(joining, scores, strict=True):
            try:
                request = generation.request
                token = request.choose(score, 0)
                self._emit(generation, token)
                request.drafter.reset(request.prompt, token, request.eos)
                steps.append(Step(generation, [token], [], None))
            except LookaheadError as error:
                self._end(generation, "error", error)
        elapsed = perf_counter() - start
        for generation in joining:
            generation.stats.seconds["prefill"] += elapsed
        self._sweep()
        return steps

    def _forward(self) -> list[Step]:
        running = list(self._running)
        if not running:
            return []
        trees, scores, spent = self._evaluate(running)
        if scores is None:
            self._sweep()
            return []

        start = perf_counter()
        steps: list[Step | None] = []
        for generation, tree, score in zip(running, trees, scores, strict=True):
            steps.append(self._walk(generation, tree, score))
        spent["verify"] = perf_counter() - start

        start = perf_counter()
        walked = [step for step in steps if step is not None]
        if walked:
            self.target.commit([(s.generation.slot, s.path) for s in walked])
        spent["commit"] = perf_counter() - start

        start = perf_counter()
        for generation, score, step in zip(running, scores, steps, strict=True):
            if step is not None and step.tree is not None:
                self._observe(generation, step.tree, score, step)
        spent["observe"] = perf_counter() - start

        for generation in running:
            for phase, elapsed in spent.items():
                generation.stats.seconds[phase] += elapsed
        self._sweep()
        return [step for step in steps if step is not None]

    def _evaluate(
        self, running: list[Generation]
    ) -> tuple[list[TokenTree], list[Scores] | None, dict[str, float]]:
        """Draft and evaluate; a pass that does not fit is tried again with half the rows."""
        while True:
            start = perf_counter()
            trees = []
            for g in running:
                left = g.request.max_new_tokens - len(g.tokens)
                depth = min(left - 1, self.target.depth_limit(g.slot))
                trees.append(g.request.drafter.draft(max(0, depth), self.max_rows))
            drafted = perf_counter()
            try:
                scores = self.target.forward([(g.slot, t) for g, t in zip(running, trees, strict=True)])
                for g, tree in zip(running, trees, strict=True):
                    self._overlap(g.request, tree)
                spent = {"draft": drafted - start, "forward": perf_counter() - drafted}
                return trees, scores, spent
            except OutOfMemory as error:
                rows = max(map(len, trees))
                if rows == 1:
                    for generation in running:
                        self._end(generation, "error", error)
                    return trees, None, {}
                if self.max_rows == UNLIMITED_ROWS:
                    warnings.warn(
                        f"a step of {rows} rows did not fit in memory; going on with at most half as many "
                        "(the output stays the same)",
                        RuntimeWarning,
                        stacklevel=4,
                    )
                self.max_rows = rows // 2

    @staticmethod
    def _overlap(request: Request, tree: TokenTree) -> None:
        """What needs no logits; a device that runs by itself is still computing them."""
        ahead = getattr(request.choose, "overlap", None)
        if ahead is not None:
            ahead(tree)
        request.drafter.overlap(tree)

    def _walk(self, generation: Generation, tree: TokenTree, scores: Scores) -> Step | None:
        request = generation.request
        try:
            path, tokens = verify(
                tree, lambda node: request.choose(scores, node), lambda token: self._emit(generation, token)
            )
        except LookaheadError as error:
            self._end(generation, "error", error)
            return None
        stats = generation.stats
        stats.steps += 1
        stats.rows += len(tree)
        stats.drafted += sum(tree.needs_logits) - 1
        stats.accepted += len(tokens) - 1
        stats.tokens_per_step[len(tokens)] += 1
        stats.rows_per_step[len(tree)] += 1
        return Step(generation, tokens, path, tree)

    def _observe(self, generation: Generation, tree: TokenTree, scores: Scores, step: Step) -> None:
        drafter = generation.request.drafter
        try:
            drafter.observe(tree, scores, step.path, step.tokens)
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
