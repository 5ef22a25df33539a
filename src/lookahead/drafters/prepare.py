"""Prepares the drafters of an engine's sequences for its model, and sets the row budget of a pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..core import Drafter, Target
from ..model import Model
from .notice import notice
from .plain import Plain

if TYPE_CHECKING:
    from .adaptive.cost import CostCurve

#: Minimum row budget of a pass, regardless of cost.
LEAST_ROWS = 64
#: Seconds to wait for the count of a base table before something is timed; beside other work, it can take minutes.
LONGEST_WAIT = 30.0


class Preparation:
    """The ``prepare`` of an engine on one model.

    A model that cannot evaluate drafts is decoded with ``Plain``.

    Args:
        model: the model that the targets evaluate.
        drafts: whether it can evaluate drafts (``Probe.drafts``).
        make_target: makes a target, to measure steps.
        limits_rows: whether the engine uses ``row_budget``. The curve is then also measured for drafters with fixed
            settings of more than ``LEAST_ROWS`` rows.
    """

    def __init__(
        self, model: Model, drafts: bool, make_target: Callable[[], Target], limits_rows: bool = False
    ) -> None:
        self._model = model
        self._drafts = drafts
        self._make_target = make_target
        self._limits_rows = limits_rows
        self._curve: CostCurve | None = None
        self._captured = False

    def __call__(self, drafter: Drafter, target: Target) -> Drafter:
        self._captured = target.captures
        prepared = (drafter if self._drafts else Plain()).prepare(self._model, target)
        most = prepared.max_step_rows
        if self._limits_rows and (most is None or most > LEAST_ROWS):
            from .adaptive.base_files import wait_for_tables  # imports numpy
            from .adaptive.model_curves import curve_at_hand, measure_wanted

            self._curve = curve_at_hand(self._model, target, notice)
            before = partial(wait_for_tables, LONGEST_WAIT)  # a count would disturb the measurement
            if measure_wanted(self._model, self._make_target, notice, before):
                self._curve = curve_at_hand(self._model, target, notice)
                prepared = drafter.prepare(self._model, target)
        return prepared

    def row_budget(self, sequences: int) -> int:
        """The row budget of a pass over this many sequences, from the cost curve (``CostCurve.budget``), or from the
        device's default curve until one is measured."""
        from .adaptive.cost import CostCurve  # imports numpy
        from .adaptive.model_curves import runs_on_gpu

        curve = self._curve if self._curve is not None else CostCurve.assumed(runs_on_gpu(self._model))
        return max(LEAST_ROWS, curve.budget(sequences, self._captured))
