"""The result of comparing a model's token trees with its causal passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .limits import Limits

if TYPE_CHECKING:
    from .equivalence import Equivalence


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of the probe.

    Attributes:
        mode: "tree", "batch-rows" (a tree's paths as rows of a batch), or "plain" (one row per step).
        reason: why, in one line with the figures.
        equivalence: the last completed comparison; None if there was none.
        facts: the model's facts, for tree targets; None in the other modes.
    """

    mode: str
    reason: str
    equivalence: Equivalence | None
    facts: Limits | None
