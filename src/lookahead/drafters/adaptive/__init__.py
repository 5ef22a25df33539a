"""The adaptive drafter: one calibrated token tree from every training-free source, and a controller of its rows.

Knows numpy and the core; no torch, no model. docs/adaptive.md explains it.
"""

from .config import SOURCES, AdaptiveConfig
from .drafter import AdaptiveDrafter
from .measure import measure_times, model_key, times_for, warm_up
from .state import AdaptiveState
from .step_times import StepTimes, load_times, save_times

__all__ = [
    "SOURCES", "AdaptiveConfig", "AdaptiveDrafter", "AdaptiveState", "StepTimes", "load_times",
    "measure_times", "model_key", "save_times", "times_for", "warm_up",
]  # fmt: skip
