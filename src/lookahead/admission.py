"""Completes a request for its model when it leaves the queue: drafter, cost curve, light head and base table.

It also sets the row budget of a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .core import Drafter, Request, Target
from .drafters import Adaptive, Plain
from .limits import Probe

if TYPE_CHECKING:
    from .drafters.adaptive.cost import CostCurve
    from .drafters.adaptive.sources.base_table import BaseTable


#: Minimum row budget of a pass, regardless of cost.
LEAST_ROWS = 64


def precompile(drafter: Drafter, device: str) -> None:
    """Start to compile adaptive's code in another process, if this drafter will need it.

    Args:
        drafter: the drafter of most requests.
        device: the type of the model's device; nothing is compiled ahead for a GPU.
    """
    if isinstance(drafter, Adaptive) and device == "cpu":
        from .drafters.adaptive import measure  # imports numba

        measure.precompile()


class Admission:
    """The ``admit`` of an engine on one model.

    It replaces the drafter with ``Plain`` if the model cannot evaluate drafts. It adds the cost curve, the light head
    and the base table for drafters that use them.

    Args:
        model: the model that the targets evaluate.
        probed: the result of its probe.
        make_target: makes a target, to measure steps.
        limits_rows: whether the engine uses ``row_budget``. The curve is then also measured for drafters with fixed
            settings of more than ``LEAST_ROWS`` rows.
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
        self._captured = False

    def __call__(self, request: Request, target: Target) -> Request:
        self._captured = target.captures
        wanted = request.drafter.wanted_head
        if not self._probed.drafts:
            request = replace(request, drafter=Plain())
        if request.drafter.needs_cost_curve and request.cost_curve is None:
            request = replace(request, cost_curve=self._cost_curve(target))
        elif self._limits_rows and (request.drafter.max_step_rows or 0) > LEAST_ROWS:
            self._cost_curve(target)  # for the row budget
        if wanted is not None and request.head is None:
            request = replace(request, head=self._head(wanted, target))
        if request.drafter.needs_base_table and request.base_table is None:
            request = replace(request, base_table=self._base_table)
        return request

    def row_budget(self, sequences: int) -> int:
        """The row budget of a pass over this many sequences, from the cost curve (``CostCurve.budget``), or from the
        device's default curve until one is measured."""
        from .drafters.adaptive.cost import CostCurve  # imports numpy

        curve = self._curve if self._curve is not None else CostCurve.unmeasured(self._on_gpu)
        return max(LEAST_ROWS, curve.budget(sequences, self._captured))

    @property
    def _on_gpu(self) -> bool:
        from .drafters.adaptive.model_curves import runs_on_gpu  # imports numpy

        return runs_on_gpu(self._model)

    def _head(self, wanted: str, target: Target) -> Any:
        """The light head with this name. None if it cannot be used; the reason is printed once."""
        from .light_head import head_of  # imports numba

        return head_of(self._model, target, wanted, self._make_target, _say)

    @cached_property
    def _base_table(self) -> BaseTable | None:
        """The base table of the model, if it has one."""
        from .drafters.adaptive.base_files import base_table_of  # imports numba

        config = self._model.config
        return base_table_of(config, int(config.get_text_config(decoder=True).vocab_size))

    def _cost_curve(self, target: Target) -> CostCurve:
        """The cost curve of the model on this machine, read from disk or measured now."""
        from .drafters.adaptive.model_curves import cost_path, curve_of  # imports numpy

        self._curve = curve_of(self._model, cost_path(target), self._make_target, _say)
        return self._curve


def _say(line: str) -> None:
    """Print a line to stderr."""
    Console(stderr=True, highlight=False).print(
        f"lookahead: {line}", style="dim", markup=False, soft_wrap=True
    )
