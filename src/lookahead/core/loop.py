"""The engine: the decoding loop that all methods share (draft, forward, verify, commit, observe).

    tree = state.draft()                   the rows to evaluate, root = last emitted token
    scores = target.forward(tree)          mask = ancestors, position = T + depth
    path, tokens = verify(tree, choose)    the target's own tokens, from the root to a leaf
    target.commit(path)                    keep those rows of the KV cache
    state.observe(tree, scores, path)      learn from the logits; this is where n-grams come from

One forward pass evaluates one tree per sequence. ``LLM``, the server, the benchmark and
``model.generate(custom_generate=...)`` drive ``Engine``; ``decode`` is the shortest way to use it.

An example of one step. The cache contains the T = 5 tokens of "The cat sat on the", but no row yet for the last
emitted token, "mat". The drafter's tree has six rows, one per node, at positions T + depth:

    row  token  parent  position     the target's token under this row
     0   mat      -        5         .                mat
     1   .        0        6         It               ├── .
     2   and      0        6         (not asked)      │   ├── It
     3   It       1        7         purred           │   └── The
     4   The      1        7         (not asked)      └── and
     5   then     2        7         (not asked)          └── then

``verify`` walks 0 -> 1 -> 3 and stops, because row 3 has no child "purred". So path = [0, 1, 3] and tokens =
[".", "It", "purred"]. Both have the same length: the last token, the bonus token, has no row yet.

    cache before the commit    5 committed rows | 0 mat | 1 . | 2 and | 3 It | 4 The | 5 then   (pending rows)
    cache after the commit     5 committed rows,  mat,    .,    It                              T = 8

Row 3 moves next to row 1; rows 2, 4 and 5 are dropped. "purred" is the root of the next tree.
"""

from __future__ import annotations

import warnings
from collections import abc, deque
from dataclasses import replace
from functools import partial
from itertools import count
from time import monotonic

from .drafter import UNLIMITED_ROWS, Drafter, DraftState
from .errors import LookaheadError, NumericalError, OutOfMemory, SettingsError, failure
from .sequence import Request, Sequence, Update
from .stats import Stats, timed
from .target import UNLIMITED_SEQUENCES, UNLIMITED_TOKENS, Scores, Target
from .tree import TokenTree
from .verify import verify

#: A target's errors caused by one prompt, which must be shortened or changed. After any other error, the target's
#: state is unknown.
OF_A_PROMPT = (NumericalError, OutOfMemory, SettingsError)
#: The work of a drafter, as in ``failure``. If it fails after the end of a sequence, the completion is kept.
DRAFTING = "the drafter"
#: Seconds that a pass over prompts should take while other sequences decode, if ``prompt_rows`` is limited.
PROMPT_SECONDS = 0.25
#: Prompt rows of a pass that longer seconds do not reduce.
LEAST_PROMPT_ROWS = 16
#: The accepted path and the tree of one sequence in a forward pass; see ``Update``.
Step = tuple[list[int], TokenTree]


class PassFailed(LookaheadError):
    """A forward pass failed, which ended every sequence in it. ``__cause__`` is the original error."""


class _ended_by_errors:
    """``with _ended_by_errors(sequence, DRAFTING):`` an exception in the block ends this sequence alone.

    A class rather than a generator for speed, like ``timed``.

    Args:
        sequence: the sequence.
        what: what the block does, as in ``failure``.
        kinds: the exceptions that end the sequence; others pass.
    """

    __slots__ = ("_kinds", "_sequence", "_what")

    def __init__(
        self,
        sequence: Sequence,
        what: str,
        kinds: type[Exception] | tuple[type[Exception], ...] = Exception,
    ) -> None:
        self._sequence = sequence
        self._what = what
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or not isinstance(error, self._kinds):
            return False
        failed = failure(self._what, error)
        if self._what == DRAFTING and self._sequence.finish_reason is not None:
            warnings.warn(f"{failed}; the completion is not affected", RuntimeWarning, stacklevel=4)
        else:
            self._sequence.fail(failed)
        return True


class Engine:
    """Decodes any number of sequences with one target. Sequences may join and leave between steps.

        engine = Engine(make_target)
        sequence = engine.add(Request(prompt, drafter, max_new_tokens=64))
        while engine.busy:
            for update in engine.step():        one forward pass, and an update for each sequence
                print(update.piece)

    ``add`` and ``cancel`` may be called from any thread and take effect in the next step. Only one thread may call
    ``step``. An exception in the code of one sequence (drafter, chooser, logits processor, grammar, stop function,
    detokenizer) ends that sequence alone. After a failed forward pass, the engine continues with a new target.

    Args:
        make_target: makes a target for this engine alone. Called now unless ``target`` is given, and again after a
            failed forward pass.
        target: the first target, such as one returned by an earlier engine's ``close``; None to make one.
        prepare: called with a request's drafter and the target when the request leaves the queue; returns the drafter
            to use (``Drafter.prepare``).
        max_sequences: largest number of concurrent sequences; the others wait in order.
        prompt_rows: largest number of prompt rows in one forward pass. A longer prompt is evaluated in chunks
            (chunked prefill); passes over prompts and passes over trees then alternate. While other sequences decode,
            a pass has as many rows as took ``PROMPT_SECONDS`` before, so that their pauses do not depend on the
            model's speed.
        row_budget: largest number of rows of all trees in one forward pass, or a function from the number of
            sequences to that number. In captured passes, every tree counts as many rows as the largest. Every tree
            keeps its root even if that exceeds the budget.
        max_tokens: largest number of tokens for which slots have memory, those of finished sequences that are kept
            included. A sequence waits until there is room for its prompt and its longest completion, but one always
            runs.

    Attributes:
        target: the target; None from a failed forward pass until the next request is admitted.

    Raises:
        SettingsError: a number is not positive.
        SettingsError, OutOfMemory: from ``make_target``.
    """

    def __init__(
        self,
        make_target: abc.Callable[[], Target],
        *,
        target: Target | None = None,
        prepare: abc.Callable[[Drafter, Target], Drafter] = lambda drafter, target: drafter,
        max_sequences: int = UNLIMITED_SEQUENCES,
        prompt_rows: int = UNLIMITED_ROWS,
        row_budget: int | abc.Callable[[int], int] = UNLIMITED_ROWS,
        max_tokens: int = UNLIMITED_TOKENS,
    ) -> None:
        numbers = ("max_sequences", max_sequences), ("prompt_rows", prompt_rows), ("max_tokens", max_tokens)
        for name, value in numbers:
            if value < 1:
                raise SettingsError(f"{name} must be at least 1, got {value}")
        self._make_target = make_target
        self._prepare = prepare
        self.max_sequences = max_sequences
        self.prompt_rows = prompt_rows
        self.row_budget = row_budget
        self.max_tokens = max_tokens
        self.target: Target | None = target if target is not None else make_target()
        #: Sequences that wait, those whose prompts are being evaluated, and those that decode.
        self._queue: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._cancelled: deque[tuple[Sequence, LookaheadError | None]] = deque()
        self._free_slots: list[int] = []
        self._new_slots = count()
        #: Largest number of rows per tree: half of the largest tree of the last step that did not fit in memory.
        self._max_rows = UNLIMITED_ROWS
        #: Prompt rows that take ``PROMPT_SECONDS``, at the speed of the last pass over prompts.
        self._prompt_rows_in_time = prompt_rows
        self._warned_too_large = self._warned_nan_drafts = False
        #: Sequences whose last step had NaN logits; their next step has no drafts.
        self._without_drafts: set[Sequence] = set()
        self._turn_of_trees = False
        self._in_step = False

    # ------------------------------------------------------------------------------- for callers

    @property
    def running(self) -> int:
        """The number of running sequences."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def most_running(self) -> int:
        """The largest number of running sequences: ``max_sequences``, or fewer if the target has fewer slots."""
        return min(
            self.max_sequences, UNLIMITED_SEQUENCES if self.target is None else self.target.max_sequences
        )

    @property
    def waiting(self) -> int:
        """The number of waiting sequences."""
        return len(self._queue)

    @property
    def busy(self) -> bool:
        """Whether any sequence is running, waiting or about to be cancelled."""
        return bool(self._decoding or self._prefilling or self._queue or self._cancelled)

    @property
    def sequences(self) -> list[Sequence]:
        """The running sequences, then the waiting ones."""
        return [*self._decoding, *self._prefilling, *self._queue]

    def add(self, request: Request) -> Sequence:
        """Add a request to the queue."""
        sequence = Sequence(request)
        self._queue.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence, error: LookaheadError | None = None) -> None:
        """End a sequence before the next forward pass, as "cancelled" or with an error. Its tokens are kept."""
        if sequence.result is None:
            self._cancelled.append((sequence, error))

    def step(self) -> list[Update]:
        """One forward pass, either over prompts or over the trees of all sequences whose prompts are in the cache.

        Waiting sequences join first while there is room.

        Returns:
            An update for each sequence that emitted tokens or ended.
        """
        updates = [*self._end_cancelled(), *self._admit()]
        if not (self._prefilling or self._decoding):
            return updates
        # Passes over prompts and over trees alternate.
        trees = not self._prefilling or (self._turn_of_trees and bool(self._decoding))
        self._turn_of_trees = not trees
        # The pass. It ends sequences one by one, or all of them if it fails as a whole.
        running = [*self._decoding, *self._prefilling]
        self._in_step = True  # from here on, an interrupt leaves the target in an unknown state
        steps: dict[Sequence, Step] = {}
        try:
            if trees:
                self._evaluate_trees(steps)
            else:
                self._evaluate_prompts()
            for sequence in running:
                if sequence.finish_reason is not None:
                    self._drop(sequence)
        except Exception as error:
            # The target's state is unknown, so all running sequences end. Waiting ones will use a new target.
            self.target = None
            self._free_slots = []
            self._new_slots = count()
            failed = failure("the forward pass", error, PassFailed)
            for sequence in running:
                if sequence.finish_reason is None:
                    sequence.fail(failed)
        for sequence in running:
            if sequence.fresh or sequence.finish_reason is not None:
                updates.append(self._update(sequence, *steps.get(sequence, ())))
        self._in_step = False
        return updates

    def close(self) -> Target | None:
        """End all sequences without an update.

        Returns:
            The target, for another engine; None if its state is unknown because an exception such as
            KeyboardInterrupt interrupted a step.
        """
        if self._in_step:
            self.target = None
        for sequence in self.sequences:
            sequence.finish_reason = sequence.finish_reason or "cancelled"
            self._drop(sequence)
        target, self.target = self.target, None
        return target

    # ------------------------------------------------------------------------------- joining and leaving

    def _end_cancelled(self) -> abc.Iterator[Update]:
        while self._cancelled:
            sequence, error = self._cancelled.popleft()
            if sequence.result is not None:
                continue
            sequence.finish_reason = "cancelled"
            if error is not None:
                sequence.fail(error)
            yield self._update(sequence)

    def _admit(self) -> abc.Iterator[Update]:
        """Let waiting sequences join while there is room. Yields an update for each one that cannot."""
        while self._queue and self.running < self.most_running and self._has_room(self._queue[0]):
            sequence = self._queue.popleft()
            with _ended_by_errors(sequence, "starting the request"):
                if self.target is None:
                    self.target = self._make_target()
                drafter = self._prepare(sequence.request.drafter, self.target)
                sequence.request = replace(sequence.request, drafter=drafter)
                sequence.stats.path = self.target.path
                sequence.stats.guarantee = self.target.guarantee
                self._prefilling.append(sequence)
            if sequence.finish_reason is not None:
                yield self._update(sequence)

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether there is memory for a sequence; drops finished ones for it."""
        if self.target is None or self.max_tokens == UNLIMITED_TOKENS:
            return True
        each = [*self._decoding, *self._prefilling, sequence]
        left = self.max_tokens - sum(self.target.capacity(one.most_tokens) for one in each)
        self.target.keep(max(0, left))
        return left >= 0 or not self.running

    def _update(
        self, sequence: Sequence, path: list[int] | None = None, tree: TokenTree | None = None
    ) -> Update:
        """The update of a sequence after a step. Releases a sequence that has ended, and sets its result."""
        piece = ""
        result = None
        tokens = sequence.fresh
        sequence.reported = len(sequence.tokens)
        with _ended_by_errors(sequence, "detokenization"):
            piece = sequence.read(tokens)
        if sequence.finish_reason is not None:
            self._drop(sequence)
            result = sequence.close()
        return Update(sequence, tokens, piece, path or [], tree, result)

    def _drop(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, if still present: read its drafter's statistics and release its slot."""
        groups = (self._decoding, self._prefilling, self._queue)
        group = next((group for group in groups if sequence in group), None)
        if group is None:
            return
        self._without_drafts.discard(sequence)
        if sequence.drafting is not None and sequence.error is None:
            with _ended_by_errors(sequence, DRAFTING):
                sequence.stats.drafter = sequence.drafting.stats()
                sequence.request.drafter.keep(sequence.request.prompt, sequence.tokens)
        if sequence.slot >= 0 and self.target is not None:
            self.target.release(sequence.slot)
            self._free_slots.append(sequence.slot)
            self._max_rows = UNLIMITED_ROWS  # with the freed memory, a larger step may fit
        group.remove(sequence)  # last, so that a sequence whose slot cannot be released is still found

    # ------------------------------------------------------------------------------- prompts

    def _evaluate_prompts(self) -> None:
        """Evaluate up to ``prompt_rows`` prompt rows. Sequences with a complete prompt emit their first token.

        Prompts are evaluated in order of arrival. If there are too few rows for all, the shortest uses up to half of
        them first: otherwise, a short prompt would wait for the long ones before it.
        """
        oldest = self._prefilling[0]
        order = list(self._prefilling)
        hurry = bool(self._decoding) and self.prompt_rows < UNLIMITED_ROWS
        most = room = min(self.prompt_rows, self._prompt_rows_in_time) if hurry else self.prompt_rows
        left = [len(each.request.prompt) - each.evaluated for each in order]
        held_back = 0
        if sum(left) > room:
            shortest = order.pop(left.index(min(left)))
            held_back = room // 2 if order and shortest is not oldest else 0
            order.insert(0, shortest)
        began = monotonic()
        for sequence in order:
            # A prompt whose rows are copied from the prefix cache takes time but no rows.
            late = hurry and sequence is not oldest and monotonic() - began >= PROMPT_SECONDS
            if room <= 0 or late:
                break
            if sequence.slot < 0:
                sequence.slot = self._free_slots.pop() if self._free_slots else next(self._new_slots)
            begin = sequence.evaluated
            with timed("prefill", [sequence.stats]):
                with _ended_by_errors(sequence, "prompt evaluation", OF_A_PROMPT):
                    scores, rows = self._evaluate_prompt(sequence, room - held_back)
                    reused = 0 if begin else sequence.cached
                    room -= sequence.evaluated - begin - reused
                held_back = 0
                if sequence.finish_reason is not None:
                    continue
                with _ended_by_errors(sequence, "reading the prompt's logits"):
                    self._read_prompt(sequence, scores, rows, begin)
                if sequence.evaluated == len(sequence.request.prompt) and sequence.finish_reason is None:
                    self._begin(sequence, scores, rows[-1])
        if room < most:
            in_time = (most - room) * PROMPT_SECONDS / max(monotonic() - began, 1e-6)
            self._prompt_rows_in_time = max(LEAST_PROMPT_ROWS, int(in_time))

    def _evaluate_prompt(self, sequence: Sequence, room: int) -> tuple[Scores, list[int]]:
        """Evaluate and commit up to ``room`` more tokens of a prompt, as a chain. Returns (scores, scored rows)."""
        target = self._require_target()
        request = sequence.request
        slot = sequence.slot
        begin = sequence.evaluated
        if request.read_prompt is not None and not begin:
            room = 1  # a prefill returns the scores of its last row only
        elif not begin:
            room += target.known(request.prompt)  # reused tokens need no rows
        if begin:
            room = min(room, target.depth_limit(slot) + 1)
        piece = request.prompt[begin : begin + room]
        sequence.evaluated = begin + len(piece)
        # The first chunk is a prefill, later ones are chains under committed tokens.
        if not begin:
            (scores,) = target.prefill([(slot, piece)])
            rows = [0]
            sequence.cached = target.reused.get(slot, 0)
        else:
            chain = TokenTree(piece[0])
            for row, token in enumerate(piece[1:]):
                chain.add(token, row, row + 2 == len(piece) or request.read_prompt is not None)
            (scores,) = target.forward([(slot, chain)])
            rows = chain.needs_logits_nodes()
            target.commit([(slot, range(len(piece)))])
        return scores, rows

    @staticmethod
    def _read_prompt(sequence: Sequence, scores: Scores, rows: list[int], begin: int) -> None:
        """Call the request's ``read_prompt`` for the tokens predicted by these rows of a chunk."""
        request = sequence.request
        if request.read_prompt is not None:
            predicted = request.prompt[begin + 1 : sequence.evaluated + 1]
            for row, token in zip(rows, predicted, strict=False):
                request.read_prompt(scores, row, token)

    def _begin(self, sequence: Sequence, scores: Scores, last: int) -> None:
        """Emit the first token of a sequence whose prompt is in the cache, and start its drafter."""
        with _ended_by_errors(sequence, "choosing a token"):
            token = sequence.choose(scores, last)
            sequence.first_token = monotonic()
            sequence.emit(token)
        if sequence.finish_reason is None:
            with _ended_by_errors(sequence, DRAFTING):
                sequence.start_drafting(self._require_target().vocabulary)
        self._prefilling.remove(sequence)
        self._decoding.append(sequence)

    # ------------------------------------------------------------------------------- trees

    def _evaluate_trees(self, steps: dict[Sequence, Step]) -> None:
        """One step of all sequences whose prompts are in the cache. Adds those that emitted tokens to ``steps``."""
        target = self._require_target()
        stats = [sequence.stats for sequence in self._decoding]
        evaluated = self._draft_and_forward(target, stats)
        with timed("verify", stats):
            for sequence, tree, scores in evaluated:
                if sequence.finish_reason is not None:  # its code failed during the forward pass
                    continue
                path: list[int] = []
                with _ended_by_errors(sequence, "choosing a token"):
                    path = self._verify(sequence, tree, scores)
                tokens = sequence.fresh
                if tokens:
                    # After an error in the middle of the walk, the path is that of the tokens emitted before it.
                    path = path or [0, *tree.chain(tokens[:-1])]
                    sequence.stats.count_step(len(tree), tree.verifiable(), len(tokens))
                    steps[sequence] = path, tree
        paths = [(sequence.slot, path) for sequence, (path, _) in steps.items() if sequence.error is None]
        with timed("commit", stats):
            if paths:
                target.commit(paths)
        with timed("observe", stats):
            for sequence, tree, scores in evaluated:
                if sequence in steps and sequence.error is None:
                    with _ended_by_errors(sequence, DRAFTING):
                        _state_of(sequence).observe(tree, scores, steps[sequence][0], sequence.fresh)

    def _verify(self, sequence: Sequence, tree: TokenTree, scores: Scores) -> list[int]:
        """Emit the tokens of a step. Returns the accepted path; [] if the step has to be repeated."""
        try:
            path, _ = verify(tree, partial(sequence.choose, scores), sequence.emit)
        except NumericalError:
            # A masked row can still affect the root: in attention, 0 times NaN is NaN.
            if len(tree) == 1 or sequence.fresh:
                raise
            self._without_drafts.add(sequence)
            return []
        if sequence in self._without_drafts:
            self._note_nan_drafts(sequence)
        return path

    def _note_nan_drafts(self, sequence: Sequence) -> None:
        """Warn once that the root's logits were NaN only with drafts, and let the sequence draft again."""
        self._without_drafts.remove(sequence)
        if not self._warned_nan_drafts:
            self._warned_nan_drafts = True
            warnings.warn(
                "the logits of a step were NaN with drafts but not without; such steps are evaluated twice (the "
                "output does not change). float16 overflows in some models; try bfloat16",
                RuntimeWarning,
                stacklevel=6,
            )

    def _draft_and_forward(
        self, target: Target, stats: list[Stats]
    ) -> list[tuple[Sequence, TokenTree, Scores]]:
        """Draft and evaluate. A pass that runs out of memory is retried with half the rows; [] if none fits."""
        while True:
            with timed("draft", stats):
                drafted = self._draft_trees(target)
            if not drafted:
                return []
            try:
                with timed("forward", stats):
                    scores = target.forward([(sequence.slot, tree) for sequence, tree in drafted])
                    # An asynchronous device (CUDA) is still computing; do the work that needs no logits meanwhile.
                    for sequence, tree in drafted:
                        with _ended_by_errors(sequence, "work that overlaps the forward pass"):
                            sequence.choose.overlap(tree)
                            _state_of(sequence).overlap(tree)
                return [(*pair, score) for pair, score in zip(drafted, scores, strict=True)]
            except OutOfMemory as error:
                self._make_smaller(drafted, error)

    def _draft_trees(self, target: Target) -> list[tuple[Sequence, TokenTree]]:
        """The trees of all sequences, within the row budget of the pass."""
        running = [sequence for sequence in self._decoding if sequence.finish_reason is None]
        if not running:
            return []
        budget = self.row_budget
        left = budget if isinstance(budget, int) else budget(len(running))
        # Captured passes pad all trees to the largest, so no tree may exceed an equal share.
        largest = left // len(running) if target.captures else left
        drafted: list[tuple[Sequence, TokenTree]] = []
        for index, sequence in enumerate(running):
            # An equal share of the remaining rows, so that unused rows go to later sequences.
            share = min(largest, left // (len(running) - index))
            with _ended_by_errors(sequence, DRAFTING):
                tree = self._draft(target, sequence, share, len(running))
                drafted.append((sequence, tree))
                left -= len(tree)
        return drafted

    def _make_smaller(self, drafted: list[tuple[Sequence, TokenTree]], error: OutOfMemory) -> None:
        """After a pass that did not fit in memory: halve the rows; if each tree has one, end the longest sequence."""
        rows = max(len(tree) for _, tree in drafted)
        if rows == 1:
            # This frees memory for the other sequences.
            longest, _ = max(drafted, key=lambda pair: pair[0].evaluated + len(pair[0].tokens))
            longest.fail(error)
            self._drop(longest)
            return
        self._max_rows = rows // 2
        if not self._warned_too_large:
            self._warned_too_large = True
            warnings.warn(
                f"a step of {rows} rows did not fit in memory; the next steps use at most half as many "
                "(the output does not change)",
                RuntimeWarning,
                stacklevel=5,
            )

    def _draft(self, target: Target, sequence: Sequence, share: int, batch: int) -> TokenTree:
        """The drafter's tree, checked. An invalid tree ends this sequence, not the whole pass."""
        left = sequence.request.max_new_tokens - len(sequence.tokens)
        depth = max(0, min(left - 1, target.depth_limit(sequence.slot)))
        rows = 1 if sequence in self._without_drafts else max(1, min(self._max_rows, share))
        tree = _state_of(sequence).draft(depth, rows, batch)
        if len(tree) > rows or max(tree.depths) > depth or tree.tokens[0] != sequence.tokens[-1]:
            raise SettingsError(
                f"a drafted tree must begin with the last token and have at most {rows} rows and depth {depth}, "
                f"got {tree!r} under token {tree.tokens[0]}"
            )
        least, largest = min(tree.tokens), max(tree.tokens)
        if target.vocabulary and not 0 <= least <= largest < target.vocabulary:
            wrong = least if least < 0 else largest
            raise SettingsError(f"drafted tokens must be between 0 and {target.vocabulary - 1}, got {wrong}")
        return tree

    def _require_target(self) -> Target:
        assert self.target is not None
        return self.target


def _state_of(sequence: Sequence) -> DraftState:
    assert sequence.drafting is not None
    return sequence.drafting


def decode(target: Target, requests: abc.Iterable[Request]) -> abc.Iterator[Update]:
    """Decode requests concurrently and yield every update.

    Raises:
        LookaheadError: the first error that ended a sequence, after all sequences have ended.
    """
    engine = Engine(lambda: target, target=target)
    sequences = [engine.add(request) for request in requests]
    try:
        while engine.busy:
            yield from engine.step()
    finally:
        engine.close()
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error
