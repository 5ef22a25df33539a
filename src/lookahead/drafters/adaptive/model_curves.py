"""The cost curves of loaded models: read from disk, or measured and saved. A saved curve is the mean of up to three
measurements, each by a process that starts ten minutes or more after the one before (``cost.MEASUREMENTS``).

If other work disturbs the first measurement too much, the process uses a typical curve, with the measured costs where
these are larger on a CPU without the compiled path, and the next process measures again. The costs of light heads are
measured when a head is first used, and saved with the curve.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from threading import RLock
from typing import Any

from ...core import NumericalError, OutOfMemory, SettingsError, Target
from .cost import TYPICAL_HEAD, CostCurve, is_due, keep_curve, load_curve

#: Devices on which rows are assumed to be nearly free until the curve of a model is measured.
GPUS = ("cuda", "gpu")


def runs_on(model: Any) -> str:
    """The type of the device that evaluates the layers of a model, as in "cuda"; "gpu" for any GPU in llama.cpp."""
    return getattr(model, "runs_on", None) or str(getattr(model, "device", "cpu")).partition(":")[0]


def runs_on_gpu(model: Any) -> bool:
    """Whether rows of a model are assumed to be nearly free until its curve is measured."""
    return runs_on(model) in GPUS


def model_key(model: Any, path: str = "") -> str:
    """The key of a model's cost curve: shape, dtype, device and code path, but not the weights' values.

    Args:
        model: a loaded model.
        path: ``cost_path`` of the target that evaluates it.
    """
    parts = [type(model).__name__, config_key(model.config), *_numbers_of(model), path]
    options = getattr(getattr(model, "loaded", None), "options", None)  # of a model loaded by llama.cpp
    for name in ("flash_attn", "cache_type_k", "cache_type_v"):
        if value := getattr(options, name, None):
            parts.append(f"{name} {value}")
    if options is not None:  # the same options run on a GPU or not, depending on how llama.cpp was built
        parts.append(f"on {model.runs_on}")
    return "|".join(str(part) for part in parts)


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


def config_key(config: Any) -> str:
    """The shape of a model as JSON: the integers of its transformers configuration, and how its weights are
    quantized; None gives an empty text."""
    if config is None:
        return ""
    entries = config.get_text_config(decoder=True).to_dict().items()
    shape: dict[str, Any] = {
        key: value for key, value in entries if isinstance(value, int) and key != "eos_token_id"
    }
    quantization = getattr(config, "quantization_config", None)  # a dict or an object of transformers
    if quantization is not None:
        shape["quantization_config"] = dict(quantization)
    return json.dumps(shape, sort_keys=True, default=str)


def _numbers_of(model: Any) -> tuple[Any, Any]:
    """(types of the weights, device)."""
    return getattr(model, "weights", None) or model.dtype, model.device


_of_models: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], CostCurve]] = weakref.WeakKeyDictionary()
#: Held while curves are compiled for and measured, because two threads that measure at once disturb each other.
measuring = RLock()


def curve_of(
    model: Any, path: str, make_target: Callable[[], Any], notice: Callable[[str], None]
) -> CostCurve:
    """The cost curve of a loaded model: read from disk, or measured and saved. Also compiles all code.

    Sequences of the same model share it. A measurement that other work disturbed is not saved, and is used only on
    a CPU without the compiled path, where its rows cost more than typical ones.

    Args:
        model: a loaded model.
        path: ``cost_path`` of the target that evaluates it, or its ``path`` if a wrapper hides the rest.
        make_target: returns a new target with a ``vocabulary``; called only for the first drafter of the model.
        notice: called with a line of text if the file is damaged or of another machine or version, or if it cannot be
            written.
    """
    key = (*_numbers_of(model), path)
    with measuring:
        mine = _of_models.setdefault(model, {})
        if key not in mine:
            from ...jit import wait_for_compilation  # imports numba

            wait_for_compilation()
            target = make_target()
            name = model_key(model, cost_path(target))
            mine[key] = _load_or_measure(target, name, notice, runs_on(model))
        return mine[key]


def forget_curves(model: Any) -> None:
    """Let ``curve_of`` read the curves of this model from disk again."""
    _of_models.pop(model, None)


def head_cost(
    head: Any, model: Any, path: str, make_target: Callable[[], Any], notice: Callable[[str], None]
) -> float:
    """The cost of a call of a light head, in plain steps: read with the model's cost curve, or measured and saved.

    It is a typical cost if the curve could not be measured or other work disturbs the measurement of the head. The
    next process then measures again.

    Args:
        head: a light head with a ``shape``.
        model, path, make_target, notice: as for ``curve_of``.
    """
    curve = curve_of(model, path, make_target, notice)
    if head.shape not in curve.heads and curve.seconds:
        from .measure import measure_head

        target = make_target()
        cost = measure_head(target, head)
        if cost is not None:
            curve = replace(curve, heads={**curve.heads, head.shape: cost})
            _of_models[model][(*_numbers_of(model), path)] = curve
            _keep_head(model_key(model, cost_path(target)), head.shape, cost, notice)
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
