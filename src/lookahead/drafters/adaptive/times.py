"""Measure a target's step times, and keep them by machine and model in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import weakref
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from ...core import Decoder, Request, SettingsError, Target, TokenTree
from .costs import MENU, StepTimes, from_points

#: Rows and contexts of the short calibration.
SHORT_ROWS = (1, 4, 16, 64)
SHORT_CONTEXTS = (64,)
#: Seconds of one point after which it is not repeated again.
PATIENCE = 0.25
#: Seconds of a step from which on few points are measured, and what happens once in a process does not matter.
SLOW, SLOW_ROWS = 0.2, (1, 16)
LARGEST_FILE = 1 << 20


def measure_times(
    target: Target,
    vocabulary: int,
    rows: Sequence[int] = SHORT_ROWS,
    contexts: Sequence[int] = SHORT_CONTEXTS,
    batches: Sequence[int] = (1,),
    repeats: int = 3,
    progress: Callable[[int, int, int, float], None] | None = None,
    patience: float = PATIENCE,
) -> StepTimes:
    """Time steps of a target on random tokens: forward, the choice at the root, reading all rows, commit.

    Args:
        target: any; its slots must be free, and they are left free.
        vocabulary: V.
        rows, contexts, batches: what to measure; contexts that the model cannot hold are left out.
        repeats: steps per point; the median counts.
        progress: told (batch, context, rows, seconds) after every point.
        patience: seconds of one point after which it is not repeated again; a large model is not held up.
    """
    rng = random.Random(0)
    times = StepTimes()
    target.prefill([(0, [0])])
    longest = target.depth_limit(0) - (repeats + 1) * (len(rows) + 1)
    target.release(0)
    for batch in batches:
        for context in (context for context in contexts if context < longest):
            slots = list(range(batch))
            prompt = [rng.randrange(vocabulary) for _ in range(context)]
            target.prefill([(slot, prompt) for slot in slots])
            points: dict[int, float] = {}
            try:
                for count in rows:
                    if patience < inf and points and min(points.values()) > SLOW and count not in SLOW_ROWS:
                        continue
                    deepest = target.depth_limit(0)
                    spent: list[float] = []
                    while len(spent) <= repeats and (len(spent) < 2 or sum(spent) < patience):
                        spent.append(_step(target, slots, _bush(count, vocabulary, deepest, rng)))
                    points[count] = median(spent[1:])
                    if progress is not None:
                        progress(batch, context, count, points[count])
                root = TokenTree(rng.randrange(vocabulary))
                again = repeats + 1 if min(points.values()) < SLOW else 1
                plain = min(_step(target, slots, root, plain=True) for _ in range(again))
            finally:
                for slot in slots:
                    target.release(slot)
            key = StepTimes.bin_of(batch, context)
            times.bins[key] = from_points(points)
            times.plain[key] = min(plain, times.bins[key][0])
    price_opening(times, vocabulary)
    return times


def price_opening(times: StepTimes, vocabulary: int) -> None:
    """Note what it costs here to set up drafting for a text of middling length, in plain steps."""
    from .drafter import AdaptiveDrafter

    if not times.plain:
        return
    drafter = AdaptiveDrafter({"budget": False, "max_rows": 8}, vocabulary)
    spent = []
    for _ in range(3):
        drafter.reset([token % vocabulary for token in range(256)], 0, frozenset())
        start = perf_counter()
        drafter.draft(8)
        spent.append(perf_counter() - start)
    for experience in times.experience.values():
        experience.opening = min(spent) / min(times.plain.values())


def rehearse(target: Target, vocabulary: int) -> None:
    """Draft for a few tokens, greedily and with noise, so that no text pays for what happens once in a process.

    Args:
        target: its slots must be free, and they are left free.
        vocabulary: V.
    """
    from .drafter import AdaptiveDrafter

    for noise in (None, _Silence(vocabulary)):
        drafter = AdaptiveDrafter({"budget": False, "max_rows": 8}, vocabulary)
        drafter.use_noise(noise)
        prompt = [token % vocabulary for token in (1, 2, 3, 1, 2, 3, 1)]
        decoder = Decoder(target)
        decoder.add(Request(prompt, drafter, 6))
        while decoder.busy:
            decoder.step()


class _Silence:
    """Noise of a rehearsal: none."""

    temperature = 1.0

    def __init__(self, vocabulary: int) -> None:
        self._zeros = np.zeros(vocabulary, np.float32)

    def __call__(self, index: int) -> Any:
        return self._zeros


def _step(target: Target, slots: Sequence[int], tree: TokenTree, plain: bool = False) -> float:
    start = perf_counter()
    scores = target.forward([(slot, tree) for slot in slots])
    for score in scores:
        score.best(0)
        if not plain:
            score.top(tree.needs_logits_nodes(), 8)
    target.commit([(slot, [0]) for slot in slots])
    return perf_counter() - start


def _bush(rows: int, vocabulary: int, deepest: int, rng: random.Random) -> TokenTree:
    """A tree of the shape that drafts have: every node under one of the first half."""
    tree = TokenTree(rng.randrange(vocabulary))
    while len(tree) < rows:
        parent = rng.randrange((len(tree) + 1) // 2)
        if tree.depths[parent] >= deepest:
            parent = 0
        if len(tree) > vocabulary // 2:  # a tiny vocabulary runs out of children
            break
        tree.add(rng.randrange(vocabulary), parent, needs_logits=True)
    return tree


def machine_name() -> str:
    """Processor, cores and, where torch is loaded, its threads and accelerator."""
    parts = [platform.machine(), platform.processor() or platform.system(), f"{os.cpu_count()} cores"]
    import sys

    torch: Any = sys.modules.get("torch")
    if torch is not None:
        parts.append(f"{torch.get_num_threads()} threads")
        if torch.cuda.is_available():
            parts.append(torch.cuda.get_device_name(0))
    return ", ".join(parts)


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/lookahead-decoding``, or the platform's usual place."""
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        if platform.system() == "Windows":
            base = os.environ.get("LOCALAPPDATA", str(Path.home() / "AppData" / "Local"))
        elif platform.system() == "Darwin":
            base = str(Path.home() / "Library" / "Caches")
        else:
            base = str(Path.home() / ".cache")
    return Path(base) / "lookahead-decoding"


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


def times_of(key: str, measure: Callable[[], StepTimes]) -> StepTimes:
    """The step times for ``key``: this process's own, or kept ones, or else ``measure`` is called.

    All callers of one key share the result, and what any of them learns later.
    """
    times = _known.get(key)
    if times is None:
        times = _known[key] = load_times(key) or measure()
    return times


_known: dict[str, StepTimes] = {}
_of_models: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], StepTimes]] = weakref.WeakKeyDictionary()


def times_for(model: Any, path: str, make_target: Callable[[], Any]) -> StepTimes:
    """The step times of a model in hand: kept ones, or measured now. Also rehearses, the first time.

    Args:
        model: a transformers model.
        path: of the target that evaluates it.
        make_target: called where nothing is known yet; for a fresh target, which has a ``vocabulary``.
    """
    mine = _of_models.setdefault(model, {})
    key = (model.dtype, model.device, path)
    if key not in mine:
        target = make_target()
        times = times_of(model_key(model, path), lambda: measure_times(target, target.vocabulary))
        if times.plain and min(times.plain.values()) < SLOW:
            rehearse(target, target.vocabulary)
        price_opening(times, target.vocabulary)
        mine[key] = times
    return mine[key]


def forget_times(model: Any) -> None:
    """Look for a model's step times again when they are next asked for."""
    for key in {model_key(model, path) for _, _, path in _of_models.pop(model, {})}:
        _known.pop(key, None)


def times_file(model: str) -> Path:
    """Where the step times of one model on this machine are kept.

    Args:
        model: whatever tells models, dtypes, devices and code paths apart.
    """
    digest = hashlib.sha256(f"{machine_name()}|{model}".encode()).hexdigest()[:24]
    return cache_folder() / "times" / f"{digest}.json"


def save_times(model: str, times: StepTimes) -> Path:
    """Keep step times for this machine and model; returns the file."""
    path = times_file(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"model": model, "machine": machine_name(), "menu": MENU, "seconds": times.as_dict()}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=1))
    os.replace(temporary, path)
    return path


def load_times(model: str) -> StepTimes | None:
    """Step times that were kept for this machine and model, or None.

    Raises:
        SettingsError: the file is there and damaged.
    """
    path = times_file(model)
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError("too large")
        content = json.loads(path.read_text())
        if tuple(content["menu"]) != MENU:  # of another version
            return None
        return StepTimes.from_dict(content["seconds"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(
            f"{path} holds no step times ({error}); delete it or run lookahead tune"
        ) from error
