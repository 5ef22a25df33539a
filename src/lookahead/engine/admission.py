"""Fits a request to its model when it leaves the queue: the drafter that the model allows, and what rows cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core import Request, Target
from ..drafters import Plain
from ..targets.limits import Probe
from .progress import notice_if_slow, say

if TYPE_CHECKING:
    from ..drafters.adaptive.cost import CostCurve


class Admission:
    """The ``admit`` of an engine on one model.

    Without drafts, if the model cannot evaluate them, whatever drafter a request has; with the cost curve for
    drafters that choose their rows by it.

    Args:
        model: the model that the targets evaluate.
        probed: the result of its probe.
        make_target: makes a target, to measure steps on.
    """

    def __init__(self, model: Any, probed: Probe, make_target: Callable[[], Target]) -> None:
        self._model = model
        self._probed = probed
        self._make_target = make_target

    def __call__(self, request: Request, target: Target) -> Request:
        if self._probed.mode == "plain":
            request = replace(request, drafter=Plain())
        if request.drafter.needs_cost_curve and request.cost_curve is None:
            request = replace(request, cost_curve=self._cost_curve(target.path))
        wanted = request.drafter.wanted_head
        if wanted is not None and request.head is None:
            request = replace(request, head=self._head(wanted, target.path))
        return request

    def _head(self, wanted: str, path: str) -> Any:
        """The light head with this name. None if it cannot be used; a line says why, once."""
        from ..targets.light_head import head_of  # imports numba

        return head_of(self._model, path, wanted, self._make_target, say)

    def _cost_curve(self, path: str) -> CostCurve:
        """The cost curve of the model on this machine, read from disk or measured now."""
        from ..drafters.adaptive.measure import curve_of  # imports numba

        with notice_if_slow("measuring steps of this model (once; their costs are kept)"):
            return curve_of(self._model, path, self._make_target, say)
