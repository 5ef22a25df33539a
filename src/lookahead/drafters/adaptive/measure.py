"""Measures the step times of targets and keeps them for each loaded model."""

from __future__ import annotations

import json
import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from math import inf
from time import perf_counter
from typing import Any

import numpy as np

from ...core import Request, Start, Target, TokenTree, decode
from . import precompile
from .drafter import Adaptive
from .step_times import StepTimes, from_points, load_times, save_times

#: Rows of the short measurement, the most informative first, and its context. Other times are interpolated.
SHORT_ROWS, SHORT_CONTEXTS = (1, 16, 4, 64), (64,)
#: The short measurement ends after this many seconds or steps, whichever is longer; two points are always measured.
PATIENCE, PATIENT_STEPS = 0.5, 5
#: If a plain step took this many times as long when it was measured, the machine was busy with other work.
BUSY = 1.5


def measure_times(
    target: Target,
    vocabulary: int,
    rows: Sequence[int] = SHORT_ROWS,
    contexts: Sequence[int] = SHORT_CONTEXTS,
    batches: Sequence[int] = (1,),
    repeats: int = 5,
    progress: Callable[[int, int, int, float], None] | None = None,
    patience: float = PATIENCE,
) -> StepTimes:
    """Time steps of a target on random tokens: forward pass, choosing at the root, reading all rows, commit.

    Args:
        target: any target; all its slots must be free, and are free afterwards.
        vocabulary: V.
        rows, contexts, batches: the points to measure; contexts that are too long for the model are skipped.
        repeats: largest number of steps per point; the fastest counts.
        progress: called with (batch, context, rows, seconds) for every point.
        patience: seconds after which only the first two numbers of rows are measured.
    """
    rng = random.Random(0)
    times = StepTimes()
    # The first step of a size compiles or allocates; with CUDA graphs, the second one captures.
    discard = 2 if target.path == "cuda-graph" else 1
    target.prefill([(0, [0])])
    longest = target.depth_limit(0) - (repeats + discard) * len(rows)
    target.release(0)
    start, quickest = perf_counter(), inf
    for batch, context in product(batches, [context for context in contexts if context < longest]):
        slots = list(range(batch))
        prompt = [rng.randrange(vocabulary) for _ in range(context)]
        target.prefill([(slot, prompt) for slot in slots])
        spent: dict[int, list[float]] = {count: [] for count in rows}
        try:
            # Sizes alternate and the fastest step counts, so that other work on the machine affects all sizes alike.
            # Each plain step follows another plain step, because a step of many rows leaves the caches cold.
            for _, count in product(range(discard + repeats), (1, *rows)):
                late = perf_counter() - start > max(patience, PATIENT_STEPS * quickest)
                if late and (count not in rows[:2] or len(spent[count]) > discard):
                    continue
                tree = _random_tree(count, vocabulary, target.depth_limit(0), rng)
                spent[count].append(_step(target, slots, tree))
                quickest = min(quickest, spent[count][-1])
        finally:
            for slot in slots:
                target.release(slot)
        points = {count: min(seconds[discard:]) for count, seconds in spent.items() if seconds[discard:]}
        if progress is not None:
            for count, seconds in points.items():
                progress(batch, context, count, seconds)
        times.bins[StepTimes.bin_of(batch, context)] = from_points(points)
    return times


def _step(target: Target, slots: Sequence[int], tree: TokenTree) -> float:
    start = perf_counter()
    for score in target.forward([(slot, tree) for slot in slots]):
        score.best(0)
        if len(tree) > 1:
            score.top(tree.needs_logits_nodes(), 8)
    target.commit([(slot, [0]) for slot in slots])
    return perf_counter() - start


def _random_tree(rows: int, vocabulary: int, deepest: int, rng: random.Random) -> TokenTree:
    """A tree shaped like a draft: every node is a child of a node in the first half."""
    tree = TokenTree(rng.randrange(vocabulary))
    while len(tree) < min(rows, vocabulary // 2 + 1):  # a tiny vocabulary has too few distinct children
        parent = rng.randrange((len(tree) + 1) // 2)
        tree.add(rng.randrange(vocabulary), parent if tree.depths[parent] < deepest else 0, needs_logits=True)
    return tree


class _NoNoise:
    """Zero noise, for the warm-up."""

    temperature = 1.0

    def __init__(self, vocabulary: int) -> None:
        self._zeros = np.zeros(vocabulary, np.float32)

    def __call__(self, index: int) -> Any:
        return self._zeros


def warm_up(target: Target, vocabulary: int, times: StepTimes) -> None:
    """Draft a few tokens, greedily and with noise, so that all code is compiled; also measure the set-up.

    Args:
        target: all its slots must be free, and are free afterwards.
        vocabulary: V.
        times: receives the set-up time in ``setup``.
    """
    prompt = [token % vocabulary for token in range(256)]
    spent = []
    for noise in (None, _NoNoise(vocabulary)):
        drafter = Adaptive(max_rows=8, budget=False)
        for _ in decode(target, [Request([*prompt[1:4], *prompt[1:4], 1], drafter, 4, noise=noise)]):
            pass
        for text in (4 * prompt, prompt):  # the longer one enlarges the tables
            sequence = drafter.start(Start(text, 0, vocabulary=vocabulary, noise=noise))
            start = perf_counter()
            sequence.draft(8)
            spent.append(perf_counter() - start)
    times.setup.value = min(spent)


class _BlankTarget:
    """A target without a model and without torch, whose logits are all equal."""

    path, reason, vocabulary = "blank", "to compile the drafter's code", 512

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[_BlankScores]:
        return [_BlankScores() for _ in prompts]

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[_BlankScores]:
        return [_BlankScores() for _ in trees]

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        pass

    def release(self, slot: int) -> None:
        pass

    def depth_limit(self, slot: int) -> int:
        return 1 << 20


class _BlankScores:
    def best(self, node: int) -> int:
        return 0

    def row(self, node: int) -> list[float]:
        return [0.0] * _BlankTarget.vocabulary

    def top(self, nodes: Sequence[int], k: int) -> tuple[list[list[int]], list[list[float]]]:
        return [list(range(k)) for _ in nodes], [[0.0] * k for _ in nodes]

    def hidden(self, node: int) -> None:
        return None


def compile_all() -> None:
    """Draft on a blank target, greedily and with noise; see ``precompile``."""
    target = _BlankTarget()
    warm_up(target, target.vocabulary, StepTimes())


def model_key(model: Any, path: str = "") -> str:
    """The key of a model's step times: shape, dtype, device and code path, but not the values of the weights.

    Args:
        model: a transformers model.
        path: the path of the target that evaluates it.
    """
    config = model.config.get_text_config(decoder=True).to_dict()
    shape = {key: value for key, value in config.items() if isinstance(value, int) and key != "eos_token_id"}
    parts = (
        type(model).__name__,
        json.dumps(shape, sort_keys=True),
        *_numbers_of(model),
        path,
    )
    return "|".join(str(part) for part in parts)


def _numbers_of(model: Any) -> tuple[Any, Any]:
    """(types of the weights, device)."""
    return getattr(model, "weights", None) or model.dtype, model.device


def _was_busy(kept: StepTimes, target: Any) -> bool:
    """Whether a plain step is much faster now than when the step times were measured.

    If so, other work slowed that measurement down, and rows look cheaper than they are: a step of 8 rows, which takes
    2.3 plain steps, was measured at 1.9 beside two busy processes. A slower machine only scales the table.
    """
    table, spent = kept.table(1, 0), []
    target.prefill([(0, [0])])
    for _ in range(4):
        start = perf_counter()
        (scores,) = target.forward([(0, TokenTree(0))])
        scores.best(0)
        target.commit([(0, [0])])
        spent.append(perf_counter() - start)
    target.release(0)
    return table is not None and min(spent) * BUSY < table[0]


def _compile_reading(target: Any) -> None:
    """Compile the code that reads the best tokens of a row, while the other process compiles the rest.

    If ``measure_times`` had to compile it, that would use up the time for measuring.
    """
    target.prefill([(0, [0])])
    (scores,) = target.forward([(0, TokenTree(0))])
    scores.top([0], 1)
    target.release(0)


_of_models: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], StepTimes]] = weakref.WeakKeyDictionary()


def times_for(model: Any, path: str, make_target: Callable[[], Any]) -> StepTimes:
    """The step times of a loaded model: read from disk, or measured and written there. Also compiles all code.

    Times from a busy machine are measured again. All callers with the same model share the result and its later
    updates, which are not written to disk.

    Args:
        model: a transformers model.
        path: the path of the target that evaluates it.
        make_target: returns a new target with a ``vocabulary``; called only for the first drafter of the model.
    """
    mine = _of_models.setdefault(model, {})
    key = (*_numbers_of(model), path)
    if key not in mine:
        target = make_target()
        _compile_reading(target)
        precompile.wait()
        name = model_key(model, path)
        times = load_times(name)
        if times is None or _was_busy(times, target):
            times = measure_times(target, target.vocabulary)
            with suppress(OSError):  # the folder cannot be written: the next process measures again
                save_times(name, times)
        warm_up(target, target.vocabulary, times)
        mine[key] = times
    return mine[key]
