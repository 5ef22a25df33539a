"""Fits a request to its model when it leaves the queue: the drafter that the model allows, and what rows cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core import Drafter, Request, Target
from ..core.target import PROMISES, UP_TO_ROUNDING
from ..drafters import Plain
from ..integrations.llamacpp.llamacpp_target import LlamaCppTarget
from ..targets.probe import Probe
from .progress import notice_if_slow

if TYPE_CHECKING:
    from ..drafters.adaptive.step_times import StepTimes


class Admission:
    """The ``admit`` of an engine on one model.

    Without drafts, if the model cannot evaluate them, whatever drafter a request has; with measured step times for
    drafters that choose their rows by them, if no text can depend on the choice.

    Args:
        model: the model that the targets evaluate.
        probed: the result of its probe.
        make_target: makes a target, to measure steps on.
    """

    def __init__(self, model: Any, probed: Probe, make_target: Callable[[], Target]) -> None:
        self._model = model
        self._drafts = probed.mode != "plain"
        self._make_target = make_target

    def __call__(self, request: Request, target: Target) -> Request:
        request = replace(request, drafter=self._drafter(request.drafter, target.path))
        if request.drafter.needs_step_times and request.step_times is None:
            request = replace(request, step_times=self._step_times(target.path))
        return request

    def _drafter(self, given: Drafter, path: str) -> Drafter:
        """The drafter of a request, within what the target allows."""
        if not self._drafts:
            return Plain()
        # On llama.cpp, rows cost so much that steps of a fixed size would take several times as long as plain steps.
        rounds = PROMISES.get(path) == UP_TO_ROUNDING and path != LlamaCppTarget.path
        dtype = getattr(self._model, "dtype", None) if rounds else None
        return given.untimed() if dtype is not None and dtype.itemsize == 2 else given

    def _step_times(self, path: str) -> StepTimes:
        """Step times of the model on this machine, read from disk or measured now."""
        from ..drafters.adaptive.measure import times_for  # loads numba

        with notice_if_slow("measuring steps of this model (once; their times are kept)"):
            return times_for(self._model, path, self._make_target)
