"""The only loop. Draft, forward, verify, commit, observe; for one sequence or for many.

    tree = drafter.draft()                 the rows to evaluate, root = last emitted token
    scores = target.forward(tree)          mask = ancestors, position = T + depth
    path, tokens = verify(tree, choose)    the target's own tokens, asked root to leaf
    target.commit(path)                    keep those rows
    drafter.observe(tree, scores, path)    learn from the logits, which is where n-grams come from

Several sequences are several trees in one forward pass. Users call ``decode``, or ``Decoder.step``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from .drafter import UNLIMITED_ROWS, Drafter
from .errors import LookaheadError, OutOfMemory, SettingsError
from .stats import Stats, timed
from .target import Scores, Target
from .tree import TokenTree
from .verify import Choose, as_choose, greedy, verify


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
        read_prompt: told (scores, node, token) of every prompt token but the first: its row, and the token itself.
    """

    prompt: Sequence[int]
    drafter: Drafter
    max_new_tokens: int
    choose: Choose | Callable[[Scores, int], int] = greedy
    eos: frozenset[int] = frozenset()
    finished: Callable[[int], str | None] | None = None
    read_prompt: Callable[[Scores, int, int], None] | None = None

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
    evaluated: int = 0  # tokens of the prompt that its slot holds
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: LookaheadError | None = None
    stats: Stats = field(default_factory=Stats)
    choose: Choose = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.choose = as_choose(self.request.choose)
        self.stats.prompt_tokens = len(self.request.prompt)

    def emit(self, token: int) -> bool:
        """Take the next token of the text; whether it is the last one."""
        request = self.request
        self.tokens.append(token)
        self.stats.new_tokens += 1
        reason = request.finished(token) if request.finished is not None else None
        if reason is None and token in request.eos:
            reason = "stop"
        if reason is None and len(self.tokens) >= request.max_new_tokens:
            reason = "length"
        self.finish_reason = reason
        return reason is not None

    @contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """An error in the block ends this sequence; the others of the step go on."""
        try:
            yield
        except LookaheadError as error:
            self.finish_reason, self.error = "error", error


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
    """Drives any number of sequences over one target; they may join and leave between steps.

    Args:
        target: its slots are the decoder's.
        prompt_rows: rows of prompts in one pass. A longer prompt is evaluated in pieces, each a chain of rows that
            are all kept, and passes over prompts and over trees take turns.
        row_budget: rows of all trees of a pass together, as long as each has its root.
        known: tokens of a prompt that the target holds already; its first piece reaches so much further.
    """

    def __init__(
        self, target: Target, prompt_rows: int = UNLIMITED_ROWS, row_budget: int = UNLIMITED_ROWS,
        known: Callable[[Sequence[int]], int] = lambda prompt: 0,
    ) -> None:  # fmt: skip
        self.target, self.known = target, known
        self.prompt_rows, self.row_budget = prompt_rows, row_budget
        self.max_rows = UNLIMITED_ROWS
        self._waiting: list[Generation] = []
        self._running: list[Generation] = []
        self._free_slots: list[int] = []
        self._new_slots = count()
        self._turn_of_trees = False

    @property
    def busy(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> Generation:
        """Let a sequence join at the next step."""
        generation = Generation(request)
        generation.stats.path = self.target.path
        self._waiting.append(generation)
        return generation

    def cancel(self, generation: Generation) -> None:
        """End a sequence now; what it has emitted stays."""
        if generation.finish_reason is None:
            generation.finish_reason = "cancelled"
            self._sweep()

    def step(self) -> list[Step]:
        """One pass over the prompts of those that wait, or over the trees of all that run."""
        trees = not self._waiting or (self._turn_of_trees and bool(self._running))
        self._turn_of_trees = not trees
        steps = self._forward() if trees else self._prefill()
        self._sweep()
        return steps

    def _prefill(self) -> list[Step]:
        """Evaluate ``prompt_rows`` rows of the prompts that wait; whose prompt ends there begins to run."""
        room, steps = self.prompt_rows, list[Step]()
        for generation in list(self._waiting):
            if room <= 0:
                break
            if generation.slot < 0:
                generation.slot = self._free_slots.pop() if self._free_slots else next(self._new_slots)
            request, begin = generation.request, generation.evaluated
            with generation.ended_by_errors(), timed("prefill", [generation.stats]):
                scores, last = self._evaluate_prompt(generation, room)
                room -= generation.evaluated - begin
                if generation.evaluated == len(request.prompt):
                    token = generation.choose(scores, last)
                    generation.emit(token)
                    request.drafter.reset(request.prompt, token, request.eos)
                    steps.append(Step(generation, [token], [], None))
                    self._waiting.remove(generation)
                    self._running.append(generation)
        return steps

    def _evaluate_prompt(self, generation: Generation, room: int) -> tuple[Scores, int]:
        """Up to ``room`` more tokens of a prompt: a chain of which all rows are kept. (scores, its last row)."""
        request, slot, begin = generation.request, generation.slot, generation.evaluated
        if request.read_prompt is not None and not begin:
            room = 1  # a prefill has the scores of its last row only
        elif not begin:
            room += self.known(request.prompt)
        piece = request.prompt[begin : begin + room]
        generation.evaluated = end = begin + len(piece)
        if not begin:
            (scores,), rows = self.target.prefill([(slot, piece)]), [0]
        else:
            chain = TokenTree(piece[0])
            for row, token in enumerate(piece[1:]):
                chain.add(token, row, row + 2 == len(piece) or request.read_prompt is not None)
            (scores,), rows = self.target.forward([(slot, chain)]), chain.needs_logits_nodes()
            self.target.commit([(slot, range(len(piece)))])
        if request.read_prompt is not None:
            for row, token in zip(rows, request.prompt[begin + 1 : end + 1], strict=False):
                request.read_prompt(scores, row, token)
        return scores, rows[-1]

    def _forward(self) -> list[Step]:
        stats = [g.stats for g in self._running]
        evaluated = self._evaluate(stats) if stats else []
        steps: list[tuple[Step, TokenTree, Scores]] = []
        with timed("verify", stats):
            for generation, tree, scores in evaluated:
                with generation.ended_by_errors():
                    path, tokens = verify(tree, partial(generation.choose, scores), generation.emit)
                    generation.stats.count_step(len(tree), tree.verifiable(), len(tokens))
                    steps.append((Step(generation, tokens, path, tree), tree, scores))
        with timed("commit", stats):
            if steps:
                self.target.commit([(step.generation.slot, step.path) for step, _, _ in steps])
        with timed("observe", stats):
            for step, tree, scores in steps:
                drafter = step.generation.request.drafter
                with step.generation.ended_by_errors():
                    drafter.observe(tree, scores, step.path, step.tokens)
                if step.generation.finish_reason is not None:
                    step.generation.stats.drafter = drafter.stats()
        return [step for step, _, _ in steps]

    def _evaluate(self, stats: list[Stats]) -> list[tuple[Generation, TokenTree, Scores]]:
        """Draft and evaluate; a pass that does not fit is tried again with half the rows. [] where none fits."""
        while True:
            drafted: list[tuple[Generation, TokenTree]] = []
            with timed("draft", stats):
                left = self.row_budget
                running = [generation for generation in self._running if generation.finish_reason is None]
                for place, generation in enumerate(running):
                    generation.request.drafter.batch = len(running)
                    with generation.ended_by_errors():  # what one leaves of its share is for those behind
                        drafted.append((generation, self._draft(generation, left // (len(running) - place))))
                        left -= len(drafted[-1][1])
            if not drafted:
                return []
            try:
                with timed("forward", stats):
                    scores = self.target.forward([(generation.slot, tree) for generation, tree in drafted])
                    # A device that runs by itself is still computing: this is for what needs no logits.
                    for generation, tree in drafted:
                        generation.choose.overlap(tree)
                        generation.request.drafter.overlap(tree)
                return [(*pair, score) for pair, score in zip(drafted, scores, strict=True)]
            except OutOfMemory as error:
                rows = max(len(tree) for _, tree in drafted)
                if rows == 1:
                    for generation, _ in drafted:
                        generation.finish_reason, generation.error = "error", error
                    return []
                if self.max_rows == UNLIMITED_ROWS:
                    warnings.warn(
                        f"a step of {rows} rows did not fit in memory; going on with at most half as many "
                        "(the output stays the same)",
                        RuntimeWarning,
                        stacklevel=4,
                    )
                self.max_rows = rows // 2

    def _draft(self, generation: Generation, share: int) -> TokenTree:
        left = generation.request.max_new_tokens - len(generation.tokens)
        depth = min(left - 1, self.target.depth_limit(generation.slot))
        return generation.request.drafter.draft(max(0, depth), max(1, min(self.max_rows, share)))

    def _sweep(self) -> None:
        """Give back the slots of those that are done."""
        for generation in (*self._waiting, *self._running):
            if generation.finish_reason is not None and generation.slot >= 0:
                self.target.release(generation.slot)
                self._free_slots.append(generation.slot)
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
