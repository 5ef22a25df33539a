"""Fits a request to its model when it leaves the queue: the drafter, what rows cost, the base table.

It also says how many rows a pass may have by their cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..core import Request, Target
from ..drafters import Plain
from ..targets.limits import Probe
from .progress import say

if TYPE_CHECKING:
    from ..drafters.adaptive.cost import CostCurve
    from ..drafters.adaptive.sources.base_table import BaseTable


#: The rows that a pass may always have, whatever they cost.
LEAST_ROWS = 64


class Admission:
    """The ``admit`` of an engine on one model.

    Without drafts, if the model cannot evaluate them, whatever drafter a request has; with the cost curve for
    drafters that choose their rows by it, and with the base table for those that read it.

    Args:
        model: the model that the targets evaluate.
        probed: the result of its probe.
        make_target: makes a target, to measure steps on.
        limits_rows: whether the engine asks for ``row_budget``. The curve is then also measured for drafters with
            fixed settings that have more than ``LEAST_ROWS`` rows.
    """

    def __init__(
        self,
        model: Any,
        probed: Probe,
        make_target: Callable[[], Target],
        limits_rows: bool = False,
    ) -> None:
        self._model = model
        self._probed = probed
        self._make_target = make_target
        self._limits_rows = limits_rows
        self._curve: CostCurve | None = None

    def __call__(self, request: Request, target: Target) -> Request:
        if self._probed.mode == "plain":
            request = replace(request, drafter=Plain())
        if request.drafter.needs_cost_curve and request.cost_curve is None:
            request = replace(request, cost_curve=self._cost_curve(target.path))
        elif self._limits_rows and (request.drafter.max_step_rows or 0) > LEAST_ROWS:
            self._cost_curve(target.path)  # for the row budget
        wanted = request.drafter.wanted_head
        if wanted is not None and request.head is None:
            request = replace(request, head=self._head(wanted, target.path))
        if request.drafter.needs_base_table and request.base_table is None:
            request = replace(request, base_table=self._base_table)
        return request

    def row_budget(self, sequences: int) -> int:
        """The rows of all trees of a pass over this many sequences, by the cost curve (``CostCurve.budget``); by the
        guess for the device until a curve is measured."""
        from ..drafters.adaptive.cost import CostCurve  # imports numpy

        curve = self._curve if self._curve is not None else CostCurve.unmeasured(self._on_gpu)
        return max(LEAST_ROWS, curve.budget(sequences))

    @property
    def _on_gpu(self) -> bool:
        return str(self._model.device).startswith("cuda")

    def _head(self, wanted: str, path: str) -> Any:
        """The light head with this name. None if it cannot be used; a line says why, once."""
        from ..targets.light_head import head_of  # imports numba

        return head_of(self._model, path, wanted, self._make_target, say)

    @cached_property
    def _base_table(self) -> BaseTable | None:
        """The base table of the model, if it has one."""
        from ..drafters.adaptive.base_files import find_base_table, usable_table  # imports numba

        config = self._model.config
        return usable_table(find_base_table(config), int(config.get_text_config(decoder=True).vocab_size))

    def _cost_curve(self, path: str) -> CostCurve:
        """The cost curve of the model on this machine, read from disk or measured now."""
        from ..drafters.adaptive.measure import curve_of  # imports numba

        self._curve = curve_of(self._model, path, self._make_target, say)
        return self._curve
