"""What an adaptive drafter uses of one model on this machine; ``prepare`` measures and loads it."""

from __future__ import annotations

from typing import NamedTuple

from .cost import CostCurve
from .sources.base_table import BaseTable
from .sources.light_head import LightHead


class ForModel(NamedTuple):
    """What an adaptive drafter uses of one model on this machine; None for what is missing or not used.

    Attributes:
        cost_curve: the cost of steps; None if the number of rows is fixed.
        head: the light head, shared by all sequences.
        base_table: next-token statistics of text that models generated.
        tokenizer: the key of the model's tokenizer; "" if unknown.
        remembered: the version of the table if it has remembered answers; 0 for others.
    """

    cost_curve: CostCurve | None = None
    head: LightHead | None = None
    base_table: BaseTable | None = None
    tokenizer: str = ""
    remembered: int = 0
