"""What adaptive keeps for a loaded model: its step times here, and, if asked for, what it learns from texts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .llm import LLM


def cold_state(llm: LLM, config: Any) -> Any:
    """Nothing of earlier texts, but the step times of this model on this machine."""
    from ..drafters.adaptive import AdaptiveConfig, AdaptiveState

    settings = AdaptiveConfig.of(config)
    return AdaptiveState(settings, keep=False, times=step_times(llm) if settings.budget else None)


def warm_state(llm: LLM, file: str | os.PathLike[str] | None, config: Any) -> Any:
    """A state that keeps what it learns; see ``LLM.warm_state``."""
    from ..drafters.adaptive import AdaptiveConfig, AdaptiveState

    settings = AdaptiveConfig.of(config)
    text = llm.model.config.get_text_config(decoder=True)
    scope = f"{text.model_type} {text.hidden_size} x {text.num_hidden_layers}, {llm.vocabulary} tokens"
    times = step_times(llm) if settings.budget and llm.probe.mode == "tree" else None
    if file is not None and os.path.exists(file):
        return AdaptiveState.load(file, settings, times, scope=scope)
    return AdaptiveState(settings, times=times, scope=scope)


def step_times(llm: LLM) -> Any:
    """Kept ones, or measured now, once."""
    from ..drafters.adaptive import times_for

    return times_for(llm.model, llm.path, llm.target)
