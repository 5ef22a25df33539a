"""The adaptive drafter: one calibrated token tree from every training-free source, with as many rows as pay off.

It uses numpy and the core, but neither torch nor a model. docs/adaptive.md explains it. Only ``drafter`` and
``settings`` are imported here, because the other modules import numpy and numba:

    draft_state   the drafting state of one sequence
    rows, cost    the rule for the number of rows, and its cost curve
    grow, learn   compiled code that grows the tree and learns from a step; grower owns its memory
    calibration   the estimated accuracy of proposals
    sources/      the sources of proposals
    state         statistics that may be kept across sequences
    measure       measures the cost curve of a target
"""

from .drafter import Adaptive
from .settings import SOURCES

__all__ = ["SOURCES", "Adaptive"]
