"""The cost curves of loaded models: read from disk, or measured when a model is first used on a machine, and saved.

The first text on a machine has the assumed curve, so that it does not wait; the curve is measured when it has ended.

A measurement that other work disturbed is not saved, so the next process measures again. Its own process takes no row
to cost less than it is assumed to, because a disturbed plain step makes rows look cheap, and measures again when it
has decoded for some time: the other work may have ended by then, such as the count of a base table.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from threading import RLock
from typing import Any

from ... import processor
from ...core import NumericalError, OutOfMemory, SettingsError, Stats, Target
from ...model import Model
from ...records import cache_folder, not_writable, read_json, replacing, require
from ...threads import thread_count
from .base_files import is_building
from .cost import CostCurve

#: Format of the file; also incremented when a change makes compiled passes faster or slower.
FORMAT = 8
#: Devices on which rows are assumed to be nearly free until the curve of a model is measured.
GPUS = ("cuda", "gpu")
#: Seconds of ``lookahead tune``.
TUNING = 10.0
#: If a text's passes took less than this share of the time that the curve says, the machine was slower when the curve
#: was measured. A slow memory makes rows look cheap, because a plain pass waits for the weights. The curve has the
#: fastest passes, so at an equal speed of the machine the mean of a text takes longer (1.02 to 1.15 in dev/LOG.md).
FASTER = 0.97
#: Fewest steps of such a text.
ENOUGH_STEPS = 16
#: Seconds of passes after which a disturbed measurement is repeated; it takes two to four.
REPEAT = 30.0
#: Held while curves are measured, because two threads that measure at once disturb each other.
measuring = RLock()


def runs_on_gpu(model: Model) -> bool:
    """Whether rows of a model are assumed to be nearly free until its curve is measured."""
    return model.runs_on in GPUS


def curve_key(model: Model, target: Target) -> str:
    """The key of the cost curve of a model's steps on such a target."""
    return f"{model.key}|{cost_path(target)}"


def cost_path(target: Target) -> str:
    """The path of a target, and what else determines the cost of its steps: its attention function, the number of
    ranks, and the level of processors that its code is for, if it is not this processor's best."""
    attention = getattr(target, "attention", None)
    ranks = getattr(target, "ranks", 1)
    parts = [target.path]
    if attention is not None:
        parts.append(f"attention by {attention.backend}")
    if ranks > 1:
        parts.append(f"{ranks} ranks")
    named = os.environ.get("LOOKAHEAD_LEVEL")
    if target.runs_compiled and named:
        parts.append(f"compiled for {named}")
    return ", ".join(parts)


def machine() -> str:
    """The machine's part of a curve's key: system, processor, cores, threads and GPUs."""
    parts = [platform.system(), processor.name(), f"{os.cpu_count()} cores", f"{thread_count()} threads"]
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        parts += [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(parts)


def curve_file(name: str) -> Path:
    """The file of a curve on this machine, in the user's cache folder.

    Args:
        name: what the curve depends on besides the machine (``curve_key``).
    """
    digest = hashlib.sha256(f"{machine()}|{name}".encode()).hexdigest()[:24]
    return cache_folder() / "costs" / f"{digest}.json"


def save_curve(name: str, curve: CostCurve) -> Path:
    """Save a curve. Returns the file.

    Args:
        name: as for ``curve_file``.
        curve: the curve.

    Raises:
        SettingsError: the file cannot be written.
    """
    path = curve_file(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            content = {**_origin(name), "rows": curve.rows, "drafting": curve.drafting, "plain": curve.plain}
            temporary.write_text(json.dumps(content))
    except OSError as error:
        instead = "the cost curve is not saved and is kept in memory for this process"
        raise not_writable(path, error, instead, "file") from None
    return path


def load_curve(name: str, notice: Callable[[str], None]) -> CostCurve | None:
    """The saved curve; None if there is none, or if it cannot be used.

    Args:
        name: as for ``curve_file``.
        notice: called with a line of text if the file is damaged, or of another machine or version.
    """
    path = curve_file(name)
    try:
        content = read_json(path)
        if content is None:
            return None
        for part, value in _origin(name).items():
            require(content[part] == value, f"it is of another {part}")
        rows = {
            int(context): {int(count): float(cost) for count, cost in points.items()}
            for context, points in content["rows"].items()
        }
        return CostCurve(rows, float(content["drafting"]), float(content["plain"]))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        notice(f"{path} must contain a cost curve, but does not ({error!r:.80}); measuring it again")
        return None


def _origin(name: str) -> dict[str, Any]:
    """What a curve is for, as in its file."""
    return {"format": FORMAT, "machine": machine(), "model": name}


def curve_at_hand(model: Model, target: Target, notice: Callable[[str], None]) -> CostCurve:
    """The cost curve of a loaded model, from memory or from disk; else the assumed one, until ``measure_wanted``.

    Args:
        model: a loaded model. Its sequences share the curve.
        target: a target whose steps the curve is for.
        notice: called with a line of text if the file is damaged, or of another machine or version.
    """
    with measuring:
        # A curve that is None is neither known nor on disk.
        curves = model.state.setdefault("curves", {})
        place = _place(model, target)
        if place not in curves:
            curves[place] = load_curve(curve_key(model, target), notice)
        return curves[place] or CostCurve.assumed(runs_on_gpu(model))


def measure_wanted(
    model: Model,
    make_target: Callable[[], Target],
    notice: Callable[[str], None],
    before: Callable[[], None] = lambda: None,
) -> bool:
    """Measure the curve of a model if ``curve_at_hand`` had to do without. Returns whether it had to.

    Args:
        model: a loaded model.
        make_target: makes a target to measure.
        notice: called with a line of text if the curve cannot be saved.
        before: called before a measurement.
    """
    with measuring:
        curves = model.state.get("curves", {})
        if None not in curves.values():
            return False
        before()
        target = make_target()
        said = "unwritable cache" in model.state  # one line about it is enough
        curve = measured(
            target, curve_key(model, target), (lambda _: None) if said else notice, runs_on_gpu(model)
        )
        known = {place: other for place, other in curves.items() if other is not None}
        model.state["curves"] = known | {_place(model, target): curve}
        return True


def forget_outdated(model: Model, target: Target, stats: Stats) -> None:
    """Forget the curve of a model, once in a process, if a text's passes were much faster than it says, or if its
    measurement was disturbed, passes have taken ``REPEAT`` seconds since, and no table is being built.

    Args:
        model: a loaded model.
        target: the target that decoded the text.
        stats: of the text. Passes that it shared with other sequences are slower, so they never show that a curve is
            outdated.
    """
    curves = model.state.get("curves", {})
    curve = curves.get(_place(model, target))
    if curve is None or runs_on_gpu(model) or "outdated curve" in model.state:
        return  # a pass of a GPU goes on after its call has returned
    seconds = stats.seconds["forward"]
    if curve.plain:
        passes = sum(number * float(curve.pass_cost(rows)) for rows, number in stats.rows_per_step.items())
        outdated = stats.steps >= ENOUGH_STEPS and seconds < FASTER * curve.plain * passes
    else:
        since = model.state.setdefault("disturbed curve", {"seconds": 0.0})
        since["seconds"] += seconds
        outdated = since["seconds"] > REPEAT and not is_building()
    if outdated:
        model.state["outdated curve"] = {}
        curves[_place(model, target)] = None


def _place(model: Model, target: Target) -> tuple[str, ...]:
    """The key in ``Model.state``: what may change while a model is loaded. ``Model.key`` takes longer to make."""
    return model.weights, model.device, cost_path(target)


def measured(target: Target, name: str, notice: Callable[[str], None], on_gpu: bool) -> CostCurve:
    """Measure the curve of a target, and save it unless other work disturbed the measurement.

    Args:
        target: any target without sequences.
        name: as for ``curve_file``.
        notice: called with a line of text if the file cannot be written.
        on_gpu: whether rows are nearly free until they are measured.
    """
    from .measure import measure

    try:
        curve, steady = measure(target)
    except (NumericalError, OutOfMemory, SettingsError):
        # Some tokens have NaN logits, which sequences report when they occur; there is no memory; or the model's
        # context or vocabulary is too small.
        return CostCurve.assumed(on_gpu)
    if not steady:
        return curve.at_least(CostCurve.assumed(on_gpu))
    try:
        save_curve(name, curve)
    except SettingsError as error:
        notice(str(error))
    return curve


def tune(model: Model, target: Target) -> tuple[CostCurve, Path | None]:
    """Measure the curve of a model again, in ``TUNING`` seconds, and save it for all later uses.

    Returns:
        (the curve, its file, or None if it was not saved because other work disturbed the measurement).

    Raises:
        SettingsError: the model has too few positions or tokens, or the file cannot be written.
    """
    from .measure import measure

    with measuring:
        curve, steady = measure(target, TUNING)
        file = save_curve(curve_key(model, target), curve) if steady else None
        model.state.pop("curves", None)
    return curve, file
