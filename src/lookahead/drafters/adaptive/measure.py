"""Measures the cost curve of a target.

The adaptive drafter itself drafts the timed steps, but the emitted tokens are not the target's: each step emits the
first child of the root, so that the next root has already been evaluated and has proposals.

Steps of few points alternate, each number of rows for an equal share of the time, and the fastest pass of each
counts: other work on the machine can only make a pass slower (``cost.fitted``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from statistics import median
from time import perf_counter

from ...core import OutOfMemory, SettingsError, Start, Target
from .cost import CostCurve, fitted
from .draft_state import AdaptiveDraftState
from .settings import AdaptiveSettings

#: Numbers of rows to measure. Exact mode evaluates 64 rows in a pass, which only 128 rows show.
ROWS = (1, 2, 4, 8, 16, 64, 128)
#: Those that are measured however long their passes take. Beyond the largest one, the last slope continues; after 4
#: rows on a CPU, it would be too small by several times.
LEAST_ROWS = (1, 2, 4, 8, 16)
#: Largest share of the time for one pass of other numbers of rows.
LONGEST_PASS = 0.1
#: Context lengths to measure.
CONTEXTS = (64, 512)
#: Seconds for the whole measurement.
PATIENCE = 2.0
#: Largest number of steps after a context; each takes a position.
MOST_STEPS = 128
#: The fastest pass is trusted if there is a second one, and it took at most this many times as long.
STEADY = 1.1
#: A pass of several rows that takes less than this share of a plain pass shows that other work disturbed the latter.
LEAST_COST = 0.9
#: Numbers of rows whose fastest passes must be trusted; larger ones are measured few times.
CHECKED_ROWS = 8


def measure(target: Target, patience: float = PATIENCE) -> tuple[CostCurve, bool]:
    """Time drafted steps of a target whose slots are all free, and are free afterwards.

    Args:
        target: any target.
        patience: seconds for the whole measurement.

    Returns:
        (the curve, whether it can be trusted and kept: other work did not slow down most passes).

    Raises:
        SettingsError: the model has too few positions, or no step of several rows fits in memory or its vocabulary.
        OutOfMemory: not even a plain step fits in memory.
    """
    # Time the steps. A slow model would take longer for the prefill of the long context than for the steps after it,
    # and their time hardly depends on the context, so those after the short one are timed twice.
    seconds: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    drafts: dict[int, list[float]] = defaultdict(list)
    slow = False
    for context in CONTEXTS:
        at = CONTEXTS[0] if slow else context
        begin = perf_counter()
        passes, drafted = time_steps(target, at, ROWS, patience / len(CONTEXTS))
        if len(passes) < 2:
            break
        for number, some in passes.items():
            seconds[at][number] += some
        drafts[at] += drafted
        if (perf_counter() - begin) * len(CONTEXTS) > 2 * patience:
            break
        most = max(passes)
        slow = CONTEXTS[-1] * min(passes[most]) / most > patience

    # The curve.
    rows = dict[int, dict[int, float]]()
    drafting, fastest = list[float](), list[float]()
    steady = True
    for context, passes in seconds.items():
        plain = min(passes[1])
        rows[context] = fitted({number: min(some) for number, some in passes.items()})
        drafting.append(median(drafts[context]) / plain)
        fastest.append(plain)
        steady &= all(is_steady(some) for number, some in passes.items() if number <= CHECKED_ROWS)
        steady &= all(min(some) >= LEAST_COST * plain for some in passes.values())
    if not rows:
        raise SettingsError(
            f"a cost curve needs steps of several rows after {CONTEXTS[0]} tokens, and this model has none"
        )
    return CostCurve(rows, min(drafting), min(fastest)), steady


def is_steady(seconds: Sequence[float]) -> bool:
    """Whether another pass was nearly as fast as the fastest one."""
    fastest = sorted(seconds)[:2]
    return len(fastest) == 2 and fastest[1] <= STEADY * fastest[0]


def time_steps(
    target: Target, context: int, sizes: Sequence[int], patience: float
) -> tuple[dict[int, list[float]], list[float]]:
    """Time passes of one sequence in slot 0.

    Args:
        target: any target.
        context: number of committed tokens.
        sizes: numbers of rows, ascending. Those that do not fit in memory, the vocabulary or the model's positions
            are left out, and the largest ones if the model is slow.
        patience: seconds; every number of rows is timed at least once, and those up to ``CHECKED_ROWS`` twice.

    Returns:
        (number of rows -> seconds of each pass, seconds of the drafter's work in drafted steps). Both are empty if
        the model has too few positions.

    Raises:
        OutOfMemory: not even a plain step fits in memory.
    """
    passes: dict[int, list[float]] = {rows: [] for rows in sizes}
    drafting = list[float]()
    settings = AdaptiveSettings(rows=sizes[-1])
    state = AdaptiveDraftState(
        settings, None, Start([1 % target.vocabulary], 0, vocabulary=target.vocabulary)
    )
    target.prefill([(0, [0])])
    left = target.positions_left(0)  # 0 if unknown
    target.release(0)
    if left:
        sizes = [rows for rows in sizes if rows <= (left - context) // 2]
    if not sizes:
        return {}, []
    steps = min(MOST_STEPS, left - context - sizes[-1]) if left else MOST_STEPS
    try:
        target.prefill([(0, _prompt(target, context))])

        # The first passes of a size compile or allocate; with CUDA graphs, the second one captures.
        known, seconds = 1, 0.0
        for rows in sizes:
            count = 0
            with suppress(OutOfMemory) if rows > 1 else nullcontext():
                if rows in LEAST_ROWS or seconds * rows / known <= LONGEST_PASS * patience:
                    for _ in range(1 + target.captures):
                        count, seconds, _ = step(target, state, rows)
            if count != rows:
                passes = {smaller: [] for smaller in sizes if smaller < rows}
                break
            known = rows

        # The size that has taken the least time so far is next.
        end = perf_counter() + patience
        for _ in range(steps - (1 + target.captures) * len(sizes)):
            late = perf_counter() > end
            wanting = [n for n, some in passes.items() if len(some) < 1 + (n <= CHECKED_ROWS)]
            if late and not wanting:
                break
            rows = min(wanting if late else passes, key=lambda number: sum(passes[number]))
            _, seconds, drafted = step(target, state, rows)
            passes[rows].append(seconds)
            drafting += [drafted] if rows > 1 else []
    finally:
        target.release(0)
    return passes, drafting


def _prompt(target: Target, length: int) -> list[int]:
    """Tokens that repeat only after a long period."""
    return [(7 + 31 * index) % target.vocabulary for index in range(length)]


def step(target: Target, state: AdaptiveDraftState, rows: int) -> tuple[int, float, float]:
    """Draft and evaluate ``rows`` rows in slot 0. Returns (rows, seconds of the pass, seconds of the drafter)."""
    begin = perf_counter()
    tree = state.draft(target.depth_limit(0), rows)
    state.pad(tree, rows)
    drafted = perf_counter()
    (scores,) = target.forward([(0, tree)])
    scores.best(0)
    target.commit([(0, [0])])
    evaluated = perf_counter()
    state.observe(tree, scores, [0], [tree.tokens[1] if len(tree) > 1 else tree.tokens[0]])
    end = perf_counter()
    return len(tree), evaluated - drafted, drafted - begin + end - evaluated
