"""The adaptive drafter: one calibrated token tree from every training-free source, with as many rows as pay off.

It uses numpy and the core, but neither torch nor a model. docs/adaptive.md explains it. Only ``drafter`` and
``settings`` are imported here, because the other modules import numpy:

    draft_state             the drafting state of one sequence
    rows, cost              the rule for the number of rows, and its cost curve
    tree_growth, learn      compiled code that grows the tree and learns from a step
    sequence_memory         owns what this code reads and writes (``memory``, ``layout``)
    sources/                the sources of guesses, one file each
    calibration             the estimated accuracy of proposals
    state                   statistics that sequences may share
    measure, model_curves   measure, save and find the cost curve of a model
"""

from .drafter import Adaptive
from .settings import SOURCES

__all__ = ["SOURCES", "Adaptive"]
