"""What adaptive keeps for a loaded model: its step times, and, if asked for, what it learns from texts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
