"""Measures the cost curve of a target and the cost of a light head, and compiles the drafter's code.

The adaptive drafter itself drafts the timed steps, so their cost includes drafting. However, the
emitted tokens are not the target's: each step emits the first child of the root, so that the next root has already
been evaluated and has proposals.

Steps of one row and of k rows alternate, and only the faster half of each counts, because other work on the machine
slows down individual steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from statistics import fmean, median
from time import perf_counter
from typing import Any

import numpy as np

from ...core import OutOfMemory, SettingsError, Start, Target, TokenTree
from ...core.fake_target import FakeTarget
from ...jit import compile_ahead
from ...sampling import draws
from .cost import CostCurve
from .draft_state import AdaptiveDraftState
from .settings import AdaptiveSettings
from .sources.light_head import READ, LightHead
from .state import AdaptiveState

#: Numbers of rows to measure, the most informative first.
ROWS = (4, 8, 2, 3, 16, 6, 32, 12, 64)
#: The same for captured passes, which are padded to these numbers, and for other passes with CUDA. Rows are cheap
#: there and slopes between small numbers would be noise, so a large number is measured first. Exact mode evaluates 64
#: rows per pass, which only 128 rows show.
CAPTURED_ROWS = (64, 8, 128, 16, 32, 4)
#: Context lengths to measure.
CONTEXTS = (64, 512)
#: Numbers of sequences, with one row each, to measure.
SEQUENCES = (4, 16, 64)
#: Seconds for the whole measurement. The remaining sizes are interpolated; two numbers of rows are always measured.
PATIENCE = 2.0
#: Rounds; each has one step of one row and one step of k rows.
ROUNDS = 5
#: Rounds for a light head; each has one plain step and one call.
HEAD_ROUNDS = 8
#: The faster half of the rounds is steady if its slowest took at most this many times its fastest.
STEADY = 1.15
#: How often a size is measured, at most, until it is steady. With other guests on the host, one of thirty sizes is
#: nearly always disturbed, and a curve of many sizes would never be kept.
ATTEMPTS = 3
#: Correction for long runs on a CPU: the measurement runs for two seconds at the highest clock, and only the faster
#: half of the steps counts. Over minutes, on two cores of a shared host, four rows of SmolLM2 took 1.10 to 1.36 plain
#: steps. A curve that is off by a fifth costs 3 % at most.
SUSTAINED = 1.25
#: Steps after which the drafter proposes as many rows as it ever will.
WARM_STEPS = 2
#: Largest number of row counts measured at a second context length.
MOST_AGAIN = 5


class Measurement:
    """The points of a measurement.

    Attributes:
        seconds: seconds of a step, by (sequences, context, rows).
        drafting: seconds of the drafter in drafted steps, by rows; those of the fewest rows count.
        of_a_prompt: seconds per token of a prompt.
        unsteady: points whose repeated steps took different times.
        sustained: the cost of a row in long runs, relative to the measurement.
    """

    def __init__(self, progress: Callable[[int, int, int, float], None] | None = None) -> None:
        self.seconds: dict[tuple[int, int, int], float] = {}
        self._progress = progress
        self.drafting: dict[int, list[float]] = {}
        self.of_a_prompt = 0.0
        self.unsteady = set[tuple[int, int, int]]()
        self.sustained = SUSTAINED

    @property
    def steady(self) -> bool:
        """Whether repeated steps of each size took about the same time."""
        return not self.unsteady

    def add(self, point: tuple[int, int, int], spent: Sequence[float], plain: Sequence[float] = ()) -> None:
        """Add repeated steps of one size, which replace earlier ones.

        Args:
            point: (sequences, context, rows).
            spent: seconds of each step; the mean of the faster half counts.
            plain: seconds of interleaved plain steps, relative to which the cost is computed.
        """
        seconds, steady = faster_half(spent)
        if plain:
            each, steady_plain = faster_half(plain)
            seconds *= self.seconds[(*point[:2], 1)] / each
            steady &= steady_plain
        if point in self.seconds and point[0] == point[2] == 1:  # other costs are relative to this one
            for other in self.seconds:
                if other != point and other[:2] == point[:2]:
                    self.seconds[other] *= seconds / self.seconds[point]
        self.seconds[point] = seconds
        (self.unsteady.discard if steady else self.unsteady.add)(point)
        if self._progress is not None:
            self._progress(*point, seconds)

    @property
    def has_rows(self) -> bool:
        """Whether a step of several rows was measured; without one, more rows would seem to be free."""
        return any(rows > 1 for _, _, rows in self.seconds)

    def curve(self) -> CostCurve:
        """The curve through the points. Costs are relative to the plain step of the same context."""
        rows: dict[int, dict[int, float]] = {}
        sequences: dict[int, float] = {}
        shortest = min(context for _, context, _ in self.seconds)
        plain = self.seconds[1, shortest, 1]
        for (batch, context, number), seconds in sorted(self.seconds.items()):
            if batch == 1:
                more = max(0.0, seconds / self.seconds[1, context, 1] - 1)  # a row that saves time is noise
                rows.setdefault(context, {})[number] = 1 + self.sustained * more
            elif number == 1:
                sequences[batch] = seconds / plain
        # Leave out contexts with plain steps only, which say nothing about the cost of rows.
        rows = {context: points for context, points in rows.items() if len(points) > 1} or rows
        drafting = median(self.drafting[min(self.drafting)]) / plain if self.drafting else 0.0
        return CostCurve(rows, sequences, drafting, plain)


def faster_half(spent: Sequence[float]) -> tuple[float, bool]:
    """The mean of the faster half of repeated steps, and whether these took about the same time (``STEADY``)."""
    half = sorted(spent)[: max(1, len(spent) // 2)]
    return fmean(half), half[-1] <= STEADY * half[0]


def measure(
    target: Target,
    rows: Sequence[int] | None = None,
    contexts: Sequence[int] = CONTEXTS,
    sequences: Sequence[int] = SEQUENCES,
    rounds: int = ROUNDS,
    patience: float = PATIENCE,
    progress: Callable[[int, int, int, float], None] | None = None,
    device: str = "cpu",
) -> Measurement:
    """Time drafted steps of a target.

    Args:
        target: any target; all its slots must be free, and are free afterwards.
        rows: numbers of rows of one sequence, besides 1; None for those that are informative on the target's path.
        contexts: numbers of committed tokens; those too long for the model are skipped.
        sequences: numbers of sequences of one row each.
        rounds: steps of each size; the mean of the faster half counts.
        patience: seconds after which no further size is started; two numbers of rows are always measured.
        progress: called with (sequences, context, rows, seconds) for every size, and again for one timed again.
        device: the type of the device that evaluates the model's layers (``Model.runs_on``).

    Sizes that do not fit in memory are left out.

    Raises:
        SettingsError: no context fits the model.
        OutOfMemory: not even a plain step fits in memory.
    """
    result = Measurement(progress)
    end = perf_counter() + patience
    captured = target.captures
    discard = _discarded(target)
    if captured or device != "cpu":
        result.sustained = 1.0
    if rows is None:
        rows = CAPTURED_ROWS if captured or device == "cuda" else ROWS
    sizes = [number for number in rows if number > 1]

    # Skip contexts from which the timed steps would run past the model's last position.
    target.prefill([(0, [0])])
    left = target.positions_left(0)  # 0 if unknown
    target.release(0)
    longest = left - positions_needed(target, rows, rounds)
    fitting = [context for context in contexts if context < longest or not left]
    if not fitting:
        raise SettingsError(f"a context must be shorter than {max(0, longest)} tokens, got {list(contexts)}")

    # Time each context, and several sequences at the first one.
    for index, context in enumerate(fitting):
        if index and perf_counter() + result.of_a_prompt * context > end:
            break
        some = sizes[: MOST_AGAIN if index and patience < inf else None]
        try:
            _time_context(target, result, context, some, rounds, discard, end)
        except OutOfMemory:
            if not result.seconds:
                raise
            break  # longer contexts do not fit either
    _time_sequences(target, result, fitting[0], sequences, rounds, end)

    # Time the disturbed sizes again.
    for _ in range(ATTEMPTS - 1):
        for batch, context in sorted({point[:2] for point in result.unsteady}):
            if perf_counter() + result.of_a_prompt * context > end:
                return result
            if batch == 1:
                some = [rows for rows in sizes if (1, context, rows) in result.unsteady]
                try:
                    _time_context(target, result, context, some, rounds, discard, end)
                except OutOfMemory:
                    return result  # memory that was free the first time; what was measured counts
            else:
                _time_sequences(target, result, context, [batch], rounds, end)
    return result


def measure_head(target: Target, head: LightHead) -> float | None:
    """The time of a call of a light head, in plain steps of the target.

    Each call follows a step, which evicts the processor's caches as in decoding.

    Args:
        target: the target of the head's model; slot 0 must be free, and is free afterwards.
        head: the head.

    Returns:
        The cost; None if other work disturbed the measurement.
    """
    discard = _discarded(target)
    state = np.zeros((1, head.hidden), np.float32)
    steps = list[float]()
    calls = list[float]()
    try:
        target.prefill([(0, [0])])
        for _ in range(discard + HEAD_ROUNDS):
            steps.append(_plain_step(target, [0]))
            begin = perf_counter()
            head.guess(state, [0], READ)
            calls.append(perf_counter() - begin)
    finally:
        target.release(0)
    call, calls_steady = faster_half(calls[discard:])
    step, steps_steady = faster_half(steps[discard:])
    return call / step if calls_steady and steps_steady else None


def positions_needed(target: Target, rows: Sequence[int], rounds: int) -> int:
    """The number of positions after a context that the steps of ``measure`` use, at most."""
    return 2 * (rounds + _discarded(target)) * (1 + sum(number > 1 for number in rows))


def _discarded(target: Target) -> int:
    """The number of steps of each size that do not count: they compile or allocate; with CUDA graphs, the second one
    captures."""
    return WARM_STEPS + (2 if target.captures else 1)


def _time_context(
    target: Target,
    result: Measurement,
    context: int,
    sizes: Sequence[int],
    rounds: int,
    discard: int,
    end: float,
) -> None:
    """Time plain steps, then drafted steps of each size, alternating with plain ones.

    Raises:
        OutOfMemory: not even plain steps fit in memory.
    """
    begin = perf_counter()
    try:
        # The prompt and plain steps.
        target.prefill([(0, _prompt(target, context))])
        result.of_a_prompt = (perf_counter() - begin) / context
        plain = [_plain_step(target, [0]) for _ in range(discard + rounds)][discard:]
        if (1, context, 1) not in result.seconds or (1, context, 1) in result.unsteady:
            result.add((1, context, 1), plain)
        # Drafted steps of each size.
        state = AdaptiveState()  # shared by all sizes, so that the drafter soon has enough proposals
        too_many = inf  # rows that do not fit in memory
        for index, number in enumerate(sizes):
            if index >= 2 and perf_counter() > end:
                return
            if number >= too_many:
                continue
            settings = AdaptiveSettings(rows=number, window_size=0, sources=("logits",))
            plain = []
            drafted = list[float]()
            counts = list[int]()
            times = list[float]()
            try:
                for count, seconds, drafting in drafted_steps(
                    target, settings, discard + rounds, state=state
                ):
                    counts.append(count)
                    plain.append(_plain_step(target, [0]))
                    drafted.append(seconds)
                    times.append(drafting)
            except OutOfMemory:
                too_many = number
                continue
            result.drafting.setdefault(number, []).extend(times)
            if counts[-1] == number:  # a tiny vocabulary has too few tokens
                result.add((1, context, number), drafted[discard:], plain[discard:])
    finally:
        target.release(0)


def _time_sequences(
    target: Target, result: Measurement, context: int, sequences: Sequence[int], rounds: int, end: float
) -> None:
    """Time steps of one row in each of several sequences."""
    for number in sequences:
        if number == 1 or perf_counter() + result.of_a_prompt * number > end:
            continue
        slots = list(range(number))
        try:
            target.prefill([(slot, [slot % target.vocabulary]) for slot in slots])
            for _ in range(2 if target.captures else 1):  # compile, and capture if it does
                _plain_step(target, slots)
            result.add((number, context, 1), [_plain_step(target, slots) for _ in range(rounds // 2 + 1)])
        except OutOfMemory:
            return  # more sequences do not fit either
        finally:
            for slot in slots:
                target.release(slot)


def _prompt(target: Target, length: int) -> list[int]:
    """Tokens that repeat only after a long period."""
    return [(7 + 31 * index) % target.vocabulary for index in range(length)]


def _plain_step(target: Target, slots: Sequence[int]) -> float:
    """Seconds of a step of one row in each slot."""
    begin = perf_counter()
    for scores in target.forward([(slot, TokenTree(slot % target.vocabulary)) for slot in slots]):
        scores.best(0)
    target.commit([(slot, [0]) for slot in slots])
    return perf_counter() - begin


def drafted_steps(
    target: Target,
    settings: AdaptiveSettings,
    steps: int,
    noise: Any = None,
    state: AdaptiveState | None = None,
) -> Iterator[tuple[int, float, float]]:
    """Draft and evaluate in slot 0, which must have committed tokens. Yields (rows, seconds, drafter seconds).

    Each step emits the first child of the root, whatever the target's own token is.
    """
    start = Start([1 % target.vocabulary], 0, vocabulary=target.vocabulary, noise=noise)
    drafting = AdaptiveDraftState(settings, state, start)
    for _ in range(steps):
        begin = perf_counter()
        tree = drafting.draft(target.depth_limit(0))
        drafting.pad(tree, settings.most_rows)
        grown = perf_counter()
        (scores,) = target.forward([(0, tree)])
        scores.best(0)
        target.commit([(0, [0])])
        evaluated = perf_counter()
        token = tree.tokens[1] if len(tree) > 1 else tree.tokens[0]
        drafting.observe(tree, scores, [0], [token])
        end = perf_counter()
        yield len(tree), end - begin, grown - begin + end - evaluated


class _NoNoise:
    """Zero noise, to compile the code for sampling."""

    temperature = 1.0
    start = 0
    key = None

    def __init__(self, vocabulary: int) -> None:
        self._zeros = np.zeros(vocabulary, np.float32)

    def __call__(self, index: int) -> Any:
        return self._zeros


def warm_up(target: Target) -> None:
    """Draft a few steps, greedy and with noise, to compile all code. All slots of the target must be free."""
    draws.warm_up()
    prompt = _prompt(target, 64)
    for noise in (None, _NoNoise(target.vocabulary)):
        for chain in (False, True):
            settings = AdaptiveSettings(rows=8, window_size=0, chain=chain)
            target.prefill([(0, [0])])
            try:
                for _ in drafted_steps(target, settings, 4, noise):
                    pass
            finally:
                target.release(0)
            # A longer sequence enlarges the tables.
            long = Start(8 * prompt, 0, vocabulary=target.vocabulary, noise=noise)
            AdaptiveDraftState(settings, None, long).draft(8)


def compile_all() -> None:
    """Draft on a target without a model or torch, greedy and with noise."""
    warm_up(FakeTarget(512))


def precompile() -> None:
    """Compile the drafter's code in another process, unless this machine has it compiled already."""
    compile_ahead(compile_all)
