"""Measure a target's step times, and hand out those of a model in hand."""

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

from ...core import Request, Target, TokenTree, decode
from .drafter import AdaptiveDrafter
from .step_times import StepTimes, from_points, load_times, save_times

#: Rows of the short calibration, the most telling ones first, and its context.
SHORT_ROWS, SHORT_CONTEXTS = (1, 16, 4, 64), (64,)
#: The short calibration ends after so many seconds, or so many of the quickest step; two points are measured anyway.
PATIENCE, PATIENT_STEPS = 0.5, 5


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
    """Time steps of a target on random tokens: forward, the choice at the root, reading all rows, commit.

    Args:
        target: any; its slots must be free, and they are left free.
        vocabulary: V.
        rows, contexts, batches: what to measure; contexts that the model cannot hold are left out.
        repeats: steps per point at most; the quickest counts.
        progress: told (batch, context, rows, seconds) of every point.
        patience: seconds after which no more is measured than must be; a large model is not held up.
    """
    rng = random.Random(0)
    times = StepTimes()
    # The first step of a size compiles or allots memory; where passes are captured, the second one captures.
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
            # Sizes take turns, and the quickest counts: what else the machine does then tells them apart least.
            # A plain step comes behind another one, because a wide one leaves cold caches behind.
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
    """A tree of the shape that drafts have: every node under one of the first half."""
    tree = TokenTree(rng.randrange(vocabulary))
    while len(tree) < min(rows, vocabulary // 2 + 1):  # a tiny vocabulary runs out of children
        parent = rng.randrange((len(tree) + 1) // 2)
        tree.add(rng.randrange(vocabulary), parent if tree.depths[parent] < deepest else 0, needs_logits=True)
    return tree


class _NoNoise:
    """Noise of a warm-up: none."""

    temperature = 1.0

    def __init__(self, vocabulary: int) -> None:
        self._zeros = np.zeros(vocabulary, np.float32)

    def __call__(self, index: int) -> Any:
        return self._zeros


def warm_up(target: Target, vocabulary: int, times: StepTimes) -> None:
    """Draft for a few tokens, greedily and with noise, so that no text pays for compilation; price the set-up.

    Args:
        target: its slots must be free, and they are left free.
        vocabulary: V.
        times: told what it takes to set up drafting.
    """
    prompt = [token % vocabulary for token in range(256)]
    spent = []
    for noise in (None, _NoNoise(vocabulary)):
        drafter = AdaptiveDrafter({"budget": False, "max_rows": 8}, vocabulary)
        drafter.use_noise(noise)
        for _ in decode(target, [Request([*prompt[1:4], *prompt[1:4], 1], drafter, 4)]):
            pass
        for text in (4 * prompt, prompt):  # the longer one makes the tables grow
            drafter.reset(text, 0, frozenset())
            start = perf_counter()
            drafter.draft(8)
            spent.append(perf_counter() - start)
    times.setup.value = min(spent)


def model_key(model: Any, path: str = "") -> str:
    """What tells step times of models apart: shape, dtype, device and code path, not the weights.

    Args:
        model: a transformers model.
        path: of the target that evaluates it.
    """
    config = model.config.get_text_config(decoder=True).to_dict()
    shape = {key: value for key, value in config.items() if isinstance(value, int) and key != "eos_token_id"}
    parts = (type(model).__name__, json.dumps(shape, sort_keys=True), model.dtype, model.device, path)
    return "|".join(str(part) for part in parts)


_of_models: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], StepTimes]] = weakref.WeakKeyDictionary()


def times_for(model: Any, path: str, make_target: Callable[[], Any]) -> StepTimes:
    """The step times of a model in hand: kept ones, or measured now and kept for later processes. Also warms up.

    All callers of one model share the result, and what any of them learns later, which is not kept.

    Args:
        model: a transformers model.
        path: of the target that evaluates it.
        make_target: called where nothing is known yet; for a fresh target, which has a ``vocabulary``.
    """
    mine = _of_models.setdefault(model, {})
    key = (model.dtype, model.device, path)
    if key not in mine:
        target = make_target()
        name = model_key(model, path)
        times = load_times(name)
        if times is None:
            times = measure_times(target, target.vocabulary)
            with suppress(OSError):  # a cache that cannot be written: the next process measures again
                save_times(name, times)
        warm_up(target, target.vocabulary, times)
        mine[key] = times
    return mine[key]
