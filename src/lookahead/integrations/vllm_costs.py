"""The cost curves of vLLM's steps, measured on its own first steps and then read only.

A proposer cannot run a step of vLLM, so the first steps with a given number of requests are timed. Steps without
drafts alternate with steps of k rows for each request, and the fastest of each counts, as in ``measure``. vLLM
verifies these drafts like any others, so they change no text. The curve is saved, and later processes of the same
model, machine and version of vLLM measure nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from ..core import SettingsError
from ..drafters.adaptive.cost import CostCurve, fitted
from ..drafters.adaptive.measure import is_steady
from ..drafters.adaptive.model_curves import load_curve, save_curve

#: Steps of each number of rows that count.
ROUNDS = 6
#: Steps before them, which do not count: vLLM may compile or capture a new size.
DISCARDED = 1


class StepCosts:
    """Cost curves by number of requests, which is rounded up to a power of two.

    Args:
        name: what the curves depend on: model, device, number of drafted tokens and version of vLLM.
        most: the largest number of rows for a request.
        notice: called with a line of text if a saved curve is damaged, or of another machine or version, and once if
            curves cannot be saved.
    """

    def __init__(self, name: str, most: int, notice: Callable[[str], None]) -> None:
        self._name = name
        self._notice = notice
        self._saves = True
        #: k of each step to measure, in order; 1 stands for a step without drafts.
        self._plan = sorted({1, 2, (most + 1) // 2, most}) * (DISCARDED + ROUNDS)
        self._seconds: dict[int, list[float]] = {}
        self._curves: dict[int, CostCurve] = {}

    def curve(self, requests: int) -> CostCurve | None:
        """The costs of steps by rows for each request, in steps without drafts; None until they are measured."""
        group = _group(requests)
        if group not in self._curves and group not in self._seconds:
            saved = load_curve(self._of(group), self._notice)
            if saved is None:
                self._seconds[group] = []
            else:
                self._curves[group] = saved
        return self._curves.get(group)

    def rows(self, requests: int) -> int | None:
        """Rows for each request of the next step to measure, None if the curve is known."""
        if self.curve(requests) is not None:
            return None
        return self._plan[len(self._seconds[_group(requests)])]

    def count(self, requests: int, seconds: float) -> None:
        """Count a step that had the number of rows to measure."""
        group = _group(requests)
        spent = self._seconds[group]
        spent.append(seconds)
        if len(spent) < len(self._plan):
            return
        del self._seconds[group]
        begin = DISCARDED * len(set(self._plan))
        times: dict[int, list[float]] = {rows: [] for rows in self._plan}
        for rows, time in zip(self._plan[begin:], spent[begin:], strict=True):
            times[rows].append(time)
        self._curves[group] = curve = CostCurve(
            {0: fitted({rows: min(some) for rows, some in times.items()})}
        )
        if self._saves and all(map(is_steady, times.values())):
            try:
                save_curve(self._of(group), curve)
            except SettingsError as error:
                self._saves = False
                self._notice(str(error))

    def _of(self, group: int) -> str:
        return f"{self._name}|{group} requests"


def _group(requests: int) -> int:
    """The power of two that is at least this number of requests."""
    return 1 << max(0, requests - 1).bit_length()
