"""The adaptive drafter: one calibrated token tree from every training-free source, and a budget of its rows.

Knows numpy and the core; no torch, no model. docs/adaptive.md explains it.
"""

from .budget import Budget
from .config import SOURCES, AdaptiveConfig
from .costs import StepTimes
from .drafter import AdaptiveDrafter
from .state import AdaptiveState, warm_state
from .times import load_times, measure_times, model_key, rehearse, save_times, times_for, times_of

__all__ = [
    "SOURCES",
    "AdaptiveConfig",
    "AdaptiveDrafter",
    "AdaptiveState",
    "Budget",
    "StepTimes",
    "load_times",
    "measure_times",
    "model_key",
    "rehearse",
    "save_times",
    "times_for",
    "times_of",
    "warm_state",
]
