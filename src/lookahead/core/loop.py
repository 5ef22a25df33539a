"""The decoding loop that all methods share: draft, forward, verify, commit, observe; for any number of sequences.

    tree = state.draft()                   the rows to evaluate, root = last emitted token
    scores = target.forward(tree)          mask = ancestors, position = T + depth
    path, tokens = verify(tree, choose)    the target's own tokens, from the root to a leaf
    target.commit(path)                    keep those rows of the KV cache
    state.observe(tree, scores, path)      learn from the logits; this is where n-grams come from

Several sequences are several trees in one forward pass. Users call ``decode``, or ``Decoder.step``.

An example of one step. The cache holds the T = 5 tokens of "The cat sat on the"; the last emitted token "mat" has no
row in it yet. The drafter's tree has six rows, one for each node, at positions T + depth:

    row  token  parent  position     the target's token under this row
     0   mat      -        5         .                mat
     1   .        0        6         It               ├── .
     2   and      0        6         (not asked)      │   ├── It
     3   It       1        7         purred           │   └── The
     4   The      1        7         (not asked)      └── and
     5   then     2        7         (not asked)          └── then

``verify`` walks 0 -> 1 -> 3 and stops, because row 3 has no child "purred". So path = [0, 1, 3] and tokens =
[".", "It", "purred"]: as many tokens as rows, since the last token, the bonus token, has no row yet.

    cache before the commit    5 committed rows | 0 mat | 1 . | 2 and | 3 It | 4 The | 5 then   (pending rows)
    cache after the commit     5 committed rows,  mat,    .,    It                              T = 8

Row 3 moves next to row 1, and rows 2, 4 and 5 are dropped. "purred" is the root of the next tree.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from .drafter import UNLIMITED_ROWS, Drafter, DraftState, Noise, Start
from .errors import LookaheadError, OutOfMemory, SettingsError, failure
from .stats import Stats, timed
from .target import Scores, Target
from .tree import TokenTree
from .verify import Choose, as_choose, greedy, verify


@dataclass(slots=True)
class Request:
    """One sequence to decode.

    Attributes:
        prompt: token ids, at least one.
        drafter: the settings of the method; the decoder starts a state for this sequence.
        max_new_tokens: at least 1.
        choose: returns the target's token under a row; a ``Choose`` or a plain function; greedy by default.
        eos: tokens that end the text; such a token is emitted.
        finished: called with each emitted token; if it returns a text, the sequence ends with this finish reason.
        read_prompt: called with (scores, node, token) for every prompt token but the first: ``scores`` at ``node``
            predict ``token``.
        noise, predicted, step_times: passed to the drafter; see ``core.drafter.Start``.
    """

    prompt: Sequence[int]
    drafter: Drafter
    max_new_tokens: int
    choose: Choose | Callable[[Scores, int], int] = greedy
    eos: frozenset[int] = frozenset()
    finished: Callable[[int], str | None] | None = None
    read_prompt: Callable[[Scores, int, int], None] | None = None
    noise: Noise | None = None
    predicted: Sequence[int] = ()
    step_times: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, Drafter):
            raise SettingsError(
                f"drafter must be a Drafter, such as lookahead.Adaptive(), got {self.drafter!r:.80}"
            )
        if not self.prompt:
            raise SettingsError("the prompt must have at least one token, got none")
        if self.max_new_tokens < 1:
            raise SettingsError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


@dataclass(slots=True)
class Generation:
    """The result of one sequence, filled while it is decoded.

    ``finish_reason`` is None while the sequence runs, then "stop" (an end token), a reason that ``finished``
    returned, "length", "cancelled", or "error" with ``error`` set. Tokens emitted before an error are kept.
    """

    request: Request
    slot: int = -1
    evaluated: int = 0  # tokens of the prompt that are in the cache
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: LookaheadError | None = None
    stats: Stats = field(default_factory=Stats)
    choose: Choose = field(init=False, repr=False)
    #: Set when the prefill is done.
    drafting: DraftState | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.choose = as_choose(self.request.choose)
        self.stats.prompt_tokens = len(self.request.prompt)

    def emit(self, token: int) -> bool:
        """Append the next token of the text. Returns whether the sequence ends with it."""
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

    def start_drafting(self, first: int, vocabulary: int) -> None:
        """Start the drafter's state, after the prefill has emitted ``first``."""
        request = self.request
        self.drafting = request.drafter.start(
            Start(
                request.prompt,
                first,
                request.eos,
                vocabulary,
                request.noise,
                request.predicted,
                request.step_times,
            )
        )


class _ended_by_errors:
    """``with _ended_by_errors(generation, "the drafter"):`` an exception in the block ends this sequence alone.

    It is a class for the same reason as ``timed``.
    """

    __slots__ = ("_generation", "_what")

    def __init__(self, generation: Generation, what: str) -> None:
        self._generation, self._what = generation, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._generation.finish_reason, self._generation.error = "error", failure(self._what, error)
        return True


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one forward pass for one sequence; ``tree`` is None for the prefill."""

    generation: Generation
    tokens: list[int]
    path: list[int]
    tree: TokenTree | None

    @property
    def rows(self) -> int:
        """Rows evaluated, 0 for the prefill."""
        return len(self.tree) if self.tree is not None else 0


class Decoder:
    """Decodes any number of sequences with one target; sequences may join and leave between steps.

    Args:
        target: the model. The decoder uses all of its slots.
        prompt_rows: rows of prompts in one forward pass. A longer prompt is evaluated in chunks (chunked prefill);
            passes over prompts and passes over trees then alternate.
        row_budget: rows of all trees in one forward pass; every tree has its root even if the budget is smaller.
        known: returns how many tokens of a prompt the target already has in its cache (prefix caching). They do
            not count as rows of the first chunk.
    """

    def __init__(
        self,
        target: Target,
        prompt_rows: int = UNLIMITED_ROWS,
        row_budget: int = UNLIMITED_ROWS,
        known: Callable[[Sequence[int]], int] = lambda prompt: 0,
    ) -> None:
        self.target, self.known = target, known
        self.prompt_rows, self.row_budget = prompt_rows, row_budget
        self.max_rows = UNLIMITED_ROWS
        self._waiting: list[Generation] = []
        self._running: list[Generation] = []
        self._free_slots: list[int] = []
        self._new_slots = count()
        self._turn_of_trees = False
        self._said_too_large = False

    @property
    def busy(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> Generation:
        """Add a sequence; its prefill starts in the next step."""
        generation = Generation(request)
        generation.stats.path = self.target.path
        self._waiting.append(generation)
        return generation

    def cancel(self, generation: Generation) -> None:
        """End a sequence now. Its emitted tokens are kept."""
        if generation.finish_reason is None:
            generation.finish_reason = "cancelled"
            self._sweep()

    def step(self) -> list[Step]:
        """One forward pass: over prompts of waiting sequences, or over the trees of all running sequences."""
        trees = not self._waiting or (self._turn_of_trees and bool(self._running))
        self._turn_of_trees = not trees
        steps = self._forward() if trees else self._prefill()
        self._sweep()
        return steps

    def _prefill(self) -> list[Step]:
        """Evaluate up to ``prompt_rows`` rows of waiting prompts. A sequence runs once its prompt is complete."""
        room, steps = self.prompt_rows, list[Step]()
        for generation in list(self._waiting):
            if room <= 0:
                break
            if generation.slot < 0:
                generation.slot = self._free_slots.pop() if self._free_slots else next(self._new_slots)
            request, begin = generation.request, generation.evaluated
            with _ended_by_errors(generation, "the prompt"), timed("prefill", [generation.stats]):
                scores, last = self._evaluate_prompt(generation, room)
                room -= generation.evaluated - begin
                if generation.evaluated == len(request.prompt):
                    token = generation.choose(scores, last)
                    generation.emit(token)
                    if generation.finish_reason is None:
                        generation.start_drafting(token, self.target.vocabulary)
                    steps.append(Step(generation, [token], [], None))
                    self._waiting.remove(generation)
                    self._running.append(generation)
        return steps

    def _evaluate_prompt(self, generation: Generation, room: int) -> tuple[Scores, int]:
        """Evaluate and commit up to ``room`` more tokens of a prompt, as a chain. Returns (scores, last row)."""
        request, slot, begin = generation.request, generation.slot, generation.evaluated
        if request.read_prompt is not None and not begin:
            room = 1  # a prefill gives the scores of its last row only
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
                if generation.finish_reason is not None:  # its code failed during the forward pass
                    continue
                with _ended_by_errors(generation, "the choice of a token"):
                    path, tokens = verify(tree, partial(generation.choose, scores), generation.emit)
                    generation.stats.count_step(len(tree), tree.verifiable(), len(tokens))
                    steps.append((Step(generation, tokens, path, tree), tree, scores))
        with timed("commit", stats):
            if steps:
                self.target.commit([(step.generation.slot, step.path) for step, _, _ in steps])
        with timed("observe", stats):
            for step, tree, scores in steps:
                state = _state_of(step.generation)
                with _ended_by_errors(step.generation, "the drafter"):
                    state.observe(tree, scores, step.path, step.tokens)
        return [step for step, _, _ in steps]

    def _evaluate(self, stats: list[Stats]) -> list[tuple[Generation, TokenTree, Scores]]:
        """Draft and evaluate. A pass that does not fit in memory is repeated with half the rows; [] if none fits."""
        while True:
            drafted: list[tuple[Generation, TokenTree]] = []
            with timed("draft", stats):
                left = self.row_budget
                running = [generation for generation in self._running if generation.finish_reason is None]
                for index, generation in enumerate(running):
                    # An equal share of the rows that are left, so rows that a sequence does not use go to later ones.
                    share = left // (len(running) - index)
                    with _ended_by_errors(generation, "the drafter"):
                        tree = self._draft(generation, share, len(running))
                        drafted.append((generation, tree))
                        left -= len(tree)
            if not drafted:
                return []
            try:
                with timed("forward", stats):
                    scores = self.target.forward([(generation.slot, tree) for generation, tree in drafted])
                    # An asynchronous device (CUDA) is still computing, so work that needs no logits runs now.
                    for generation, tree in drafted:
                        with _ended_by_errors(generation, "work that overlaps the forward pass"):
                            generation.choose.overlap(tree)
                            _state_of(generation).overlap(tree)
                return [(*pair, score) for pair, score in zip(drafted, scores, strict=True)]
            except OutOfMemory as error:
                rows = max(len(tree) for _, tree in drafted)
                if rows == 1:
                    for generation, _ in drafted:
                        generation.finish_reason, generation.error = "error", error
                    return []
                if not self._said_too_large:
                    self._said_too_large = True
                    warnings.warn(
                        f"a step of {rows} rows did not fit in memory; the next steps have at most half as many "
                        "(the output stays the same)",
                        RuntimeWarning,
                        stacklevel=4,
                    )
                self.max_rows = rows // 2

    def _draft(self, generation: Generation, share: int, batch: int) -> TokenTree:
        """The drafter's tree, checked. A tree that the target cannot evaluate ends this sequence, not the pass."""
        left = generation.request.max_new_tokens - len(generation.tokens)
        depth = max(0, min(left - 1, self.target.depth_limit(generation.slot)))
        rows = max(1, min(self.max_rows, share))
        tree = _state_of(generation).draft(depth, rows, batch)
        if len(tree) > rows or max(tree.depths) > depth or tree.tokens[0] != generation.tokens[-1]:
            raise SettingsError(
                f"a drafted tree must begin with the last token and have at most {rows} rows and depth {depth}, "
                f"got {tree!r} under token {tree.tokens[0]}"
            )
        vocabulary, least, largest = self.target.vocabulary, min(tree.tokens), max(tree.tokens)
        if vocabulary and not 0 <= least <= largest < vocabulary:
            wrong = least if least < 0 else largest
            raise SettingsError(f"drafted tokens must be between 0 and {vocabulary - 1}, got {wrong}")
        return tree

    def _sweep(self) -> None:
        """Release the slots of sequences that have ended, and read their drafters' statistics."""
        for generation in (*self._waiting, *self._running):
            if generation.finish_reason is None:
                continue
            if generation.drafting is not None and generation.error is None:
                with _ended_by_errors(generation, "the drafter"):
                    generation.stats.drafter = generation.drafting.stats()
            if generation.slot >= 0:
                self.target.release(generation.slot)
                self._free_slots.append(generation.slot)
                self.max_rows = UNLIMITED_ROWS  # its memory may be what a large step needs
        self._running = [g for g in self._running if g.finish_reason is None]
        self._waiting = [g for g in self._waiting if g.finish_reason is None]


def _state_of(generation: Generation) -> DraftState:
    assert generation.drafting is not None
    return generation.drafting


def decode(target: Target, requests: Iterable[Request]) -> Iterator[Step]:
    """Decode the requests together and yield every step.

    Raises:
        LookaheadError: the first error that ended a sequence, after all sequences have ended.
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
