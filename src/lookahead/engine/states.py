"""What adaptive keeps for a loaded model: its step times, and, if asked for, what it learns from texts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import Target

if TYPE_CHECKING:
    from ..drafters.adaptive import AdaptiveState, StepTimes


def cold_state(config: Any, times: Callable[[], StepTimes]) -> AdaptiveState:
    """Nothing of earlier texts, but the step times of this model on this machine.

    Args:
        config: what ``AdaptiveConfig.of`` takes.
        times: gives the step times; asked only where the settings need them.
    """
    from ..drafters.adaptive import AdaptiveConfig, AdaptiveState

    settings = AdaptiveConfig.of(config)
    return AdaptiveState(settings, keep=False, times=times() if settings.budget else None)


def warm_state(
    config: Any, times: Callable[[], StepTimes | None], scope: str, file: str | os.PathLike[str] | None
) -> AdaptiveState:
    """A state that keeps what it learns; read from ``file`` where that exists.

    Args:
        config, times: as for ``cold_state``.
        scope: which models the state is for.

    Raises:
        SettingsError: the file is of another model, or no such file.
    """
    from ..drafters.adaptive import AdaptiveConfig, AdaptiveState

    settings = AdaptiveConfig.of(config)
    known = times() if settings.budget else None
    if file is not None and os.path.exists(file):
        return AdaptiveState.load(os.fspath(file), settings, known, scope=scope)
    return AdaptiveState(settings, times=known, scope=scope)


def keep_step_times(
    model: Any,
    target: Target,
    rows: Sequence[int],
    contexts: Sequence[int],
    batches: Sequence[int],
    repeats: int,
    progress: Callable[[int, int, int, float], None],
) -> Path | None:
    """Measure the step times that adaptive chooses its rows by, and keep them for this model and machine.

    Args:
        target: a fresh one on ``model``.
        rows, contexts, batches: what to measure; contexts that the model cannot hold are left out.
        repeats: steps per point; the median counts.
        progress: told (batch, context, rows, seconds) after every point.

    Returns:
        The file, or None where no point could be measured.
    """
    from ..drafters.adaptive import measure_times, model_key, save_times

    times = measure_times(target, target.vocabulary, rows, contexts, batches, repeats, progress, inf)
    return save_times(model_key(model, target.path), times) if times.bins else None
