"""The cost curves of loaded models: read from disk, or measured and saved. A saved curve is the mean of up to three
measurements, each by a process that starts ten minutes or more after the one before (``cost.MEASUREMENTS``).

If other work disturbs the first measurement too much, the process uses a typical curve, with the measured costs where
these are larger on a CPU without the compiled path, and the next process measures again. The costs of light heads are
measured when a head is first used, and saved with the curve.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from threading import RLock
from typing import Any

from ...core import NumericalError, OutOfMemory, SettingsError, Target
from ...model import Model
from .cost import TYPICAL_HEAD, CostCurve, is_due, keep_curve, load_curve

#: Devices on which rows are assumed to be nearly free until the curve of a model is measured.
GPUS = ("cuda", "gpu")


def runs_on_gpu(model: Model) -> bool:
    """Whether rows of a model are assumed to be nearly free until its curve is measured."""
    return model.runs_on in GPUS


def curve_key(model: Model, target: Target) -> str:
    """The key of the cost curve of a model's steps on such a target."""
    return f"{model.key}|{cost_path(target)}"


def cost_path(target: Target) -> str:
    """The path of a target, and what else determines the cost of its steps: its attention function, the number of
    ranks, and the processor that its code is compiled for, if NUMBA_CPU_NAME names one."""
    attention = getattr(target, "attention", None)
    ranks = getattr(target, "ranks", 1)
    parts = [target.path]
    if attention is not None:
        parts.append(f"attention by {attention.backend}")
    if ranks > 1:
        parts.append(f"{ranks} ranks")
    processor = os.environ.get("NUMBA_CPU_NAME")
    if target.runs_compiled and processor:
        parts.append(f"compiled for {processor}")
    return ", ".join(parts)


#: Held while curves are compiled for and measured, because two threads that measure at once disturb each other.
measuring = RLock()


def known_curve(model: Model, target: Target) -> CostCurve | None:
    """The cost curve that ``curve_of`` has found for a model; None before."""
    curve: CostCurve | None = model.state.get("curves", {}).get(_place(model, target))
    return curve


def _place(model: Model, target: Target) -> tuple[str, ...]:
    """The key in ``Model.state``: what may change while a model is loaded. ``Model.key`` takes longer to make."""
    return model.weights, model.device, cost_path(target)


def curve_of(
    model: Model, target: Target, make_target: Callable[[], Target], notice: Callable[[str], None]
) -> CostCurve:
    """The cost curve of a loaded model: read from disk, or measured and saved. Also compiles all code.

    Sequences of the same model share it. A measurement that other work disturbed is not saved, and is used only on
    a CPU without the compiled path, where its rows cost more than typical ones.

    Args:
        model: a loaded model.
        target: a target whose steps the curve is for.
        make_target: makes a target to measure; called only for the first drafter of the model.
        notice: called with a line of text if the file is damaged or of another machine or version, or if it cannot be
            written.
    """
    with measuring:
        curve = known_curve(model, target)
        if curve is None:
            from ...jit import wait_for_compilation  # imports numba

            wait_for_compilation()
            fresh = make_target()
            curve = _load_or_measure(fresh, curve_key(model, fresh), notice, model.runs_on)
            model.state.setdefault("curves", {})[_place(model, target)] = curve
        return curve


def forget_curves(model: Model) -> None:
    """Let ``curve_of`` read the curves of this model from disk again."""
    model.state.pop("curves", None)


def head_cost(
    head: Any,
    model: Model,
    target: Target,
    make_target: Callable[[], Target],
    notice: Callable[[str], None],
) -> float:
    """The cost of a call of a light head, in plain steps: read with the model's cost curve, or measured and saved.

    It is a typical cost if the curve could not be measured or other work disturbs the measurement of the head. The
    next process then measures again.

    Args:
        head: a light head with a ``shape``.
        model, target, make_target, notice: as for ``curve_of``.
    """
    curve = curve_of(model, target, make_target, notice)
    if head.shape not in curve.heads and curve.seconds:
        from .measure import measure_head

        fresh = make_target()
        cost = measure_head(fresh, head)
        if cost is not None:
            curve = replace(curve, heads={**curve.heads, head.shape: cost})
            model.state["curves"][_place(model, target)] = curve
            _keep_head(curve_key(model, fresh), head.shape, cost, notice)
    return curve.heads.get(head.shape, TYPICAL_HEAD)


def _keep_head(name: str, shape: str, cost: float, notice: Callable[[str], None]) -> None:
    """Add the cost of a head to the saved curve, which another process may have replaced since it was read.

    If no curve could be saved, nor is this cost.
    """
    saved = _load(name, notice)
    if saved is not None:
        keep_curve(name, replace(saved, heads={**saved.heads, shape: cost}), notice)


def _load(name: str, notice: Callable[[str], None]) -> CostCurve | None:
    """The saved curve; None if there is none, or if it is not usable, which is reported."""
    try:
        return load_curve(name)
    except SettingsError as error:
        notice(f"{error}; measuring it again")
        return None


def _load_or_measure(target: Target, name: str, notice: Callable[[str], None], device: str) -> CostCurve:
    from .measure import measure, warm_up  # imports numba

    on_gpu = device in GPUS
    saved = None
    try:
        warm_up(target)
        saved = _load(name, notice)
        if saved is not None and not is_due(name, saved):
            return saved
        measured = measure(target, device=device)
        if not measured.has_rows:
            # No step of several rows fits in memory or the vocabulary.
            return saved or CostCurve.unmeasured(on_gpu)
    except (NumericalError, OutOfMemory, SettingsError):
        # Some tokens have NaN logits, which sequences report when they occur, there is no memory, or the model's
        # context is too short.
        return saved or CostCurve.unmeasured(on_gpu)
    if not measured.steady and saved is not None:
        keep_curve(name, saved, notice)  # as new, so that not every process on a busy machine measures
        return saved
    if not measured.steady:
        typical = CostCurve.typical(on_gpu)
        # The typical curve is that of compiled passes. Other rows may cost several times as much, which even a
        # disturbed measurement shows.
        return typical if on_gpu or target.runs_compiled else measured.curve().at_least(typical)
    curve = measured.curve() if saved is None else saved.averaged(measured.curve())
    keep_curve(name, curve, notice)
    return curve
