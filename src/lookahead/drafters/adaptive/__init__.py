"""The adaptive drafter: one calibrated token tree from every training-free source, and a controller of its size.

It uses numpy and the core, but neither torch nor a model. docs/adaptive.md explains it. Only ``drafter`` and
``settings`` are imported here, because the other modules load numpy and numba:

    sequence      the state of one sequence
    state         what may be kept across sequences
    step_times    t(k), and the file that stores it
    measure       measures t(k) of a target
"""

from .drafter import Adaptive
from .settings import SOURCES

__all__ = ["SOURCES", "Adaptive"]
