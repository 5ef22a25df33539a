"""Facts about a model: its limits, comparisons of its passes, and its probe.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .equivalence import Equivalence  # imports numpy

#: The position limit of a model without one; longer than any sequence.
NO_LIMIT = 1 << 30
#: The share of a device's memory that the captured passes of a model may use (``hf.graph_store``).
GRAPH_MEMORY = 0.1


def positions_of(config: Any) -> int | None:
    """The number of positions that a model was trained for; None without a limit.

    MPT calls it ``max_seq_len``; it builds its ALiBi bias for as many positions.

    Args:
        config: the text config.
    """
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    return int(positions) if positions else None


class Limits:
    """Properties of a model that every target needs.

    Attributes:
        vocabulary: V, the columns of the logits.
        max_positions: positions that the model was trained for; ``NO_LIMIT`` without a limit.
        rope_type, rope_boundary: the type of rotary positions whose frequencies depend on the sequence length, and
            the position at which they change; ("", ``NO_LIMIT``) if they do not change.
    """

    rope_type: str = ""
    rope_boundary: int = NO_LIMIT

    def __init__(self, vocabulary: int, max_positions: int) -> None:
        self.vocabulary = vocabulary
        self.max_positions = max_positions


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of ``paths.probe`` for a model.

    Attributes:
        mode: "tree", "batch-rows" (a tree's paths as rows of a batch), or "plain" (one row per step).
        reason: why, in one line with the figures.
        equivalence: the last completed comparison; None if there was none.
        facts: the model's facts, for targets that evaluate trees; None in the other modes.
        half: whether logits are rounded to 16 bits or less, so a path that is equal up to rounding may resolve near
            ties either way.
    """

    mode: str
    reason: str
    equivalence: Equivalence | None
    facts: Limits | None
    half: bool = False

    @property
    def drafts(self) -> bool:
        """Whether the model can evaluate drafts."""
        return self.mode != "plain"
