"""The adaptive drafter: one calibrated token tree from every training-free source, with as many rows as pay.

It uses numpy and the core, but neither torch nor a model. docs/adaptive.md explains it. Only ``drafter`` and
``settings`` are imported here, because the other modules import numpy and numba:

    draft_state   the drafting state of one sequence, which drafts and learns
    rows, cost    the rule for the number of rows, and the cost curve that it reads
    grow, learn   compiled: growing the tree, and learning from a step; grower owns their memory
    calibration   how likely a proposal is to be right
    sources/      where proposals come from
    state         what may be kept across sequences
    measure       measures the cost curve of a target
"""

from .drafter import Adaptive
from .settings import SOURCES

__all__ = ["SOURCES", "Adaptive"]
