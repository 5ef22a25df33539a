"""The adaptive drafter: one calibrated token tree from every training-free source. Knows numpy, no torch."""

from .drafter import AdaptiveDrafter
from .config import AdaptiveConfig
from .state import AdaptiveState
