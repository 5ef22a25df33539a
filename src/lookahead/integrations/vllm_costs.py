"""The cost curves of vLLM's steps, measured on its own first steps and then read only.

A proposer cannot run a step of vLLM, so the first steps with a given number of requests are timed. Steps without
drafts alternate with steps of k rows for each request, and the faster half of each counts, as in ``measure``. vLLM
verifies these drafts like any others, so they change no text. The curve is saved, and later processes of the same
model, machine and version of vLLM measure nothing. If other work disturbs the measurement too much, the process uses
a typical curve, with the measured costs where these are larger on a CPU, and the next process measures again.
"""

from __future__ import annotations

from collections.abc import Callable

from ..core import SettingsError
from ..drafters.adaptive.cost import CostCurve, keep_curve, load_curve
from ..drafters.adaptive.measure import Measurement

#: Rounds of each number of rows; each has one step without drafts and one with. The faster half counts.
ROUNDS = 6
#: Rounds before them, which are not counted: vLLM may compile or capture a new size.
DISCARDED = 1


class StepCosts:
    """Cost curves by number of requests, which is rounded up to a power of two.

    Args:
        name: what the curves depend on: model, device, number of drafted tokens and version of vLLM.
        most: the largest number of rows for a request.
        on_gpu: whether the model runs on a GPU or a similar device, where rows are nearly free and cost as much in
            long runs as in a short measurement.
        notice: called with a line of text if a saved curve is damaged, or of another machine or version, and once if
            curves cannot be saved.
    """

    def __init__(self, name: str, most: int, on_gpu: bool, notice: Callable[[str], None]) -> None:
        self._name = name
        self._most = most
        self._on_gpu = on_gpu
        #: k of each step to measure, in order; 1 stands for a step without drafts.
        sizes = sorted({most, (most + 1) // 2, 2} - {1}, reverse=True)
        self._plan = [rows for size in sizes for _ in range(DISCARDED + ROUNDS) for rows in (1, size)]
        self._notice = notice
        self._saves = True
        self._seconds: dict[int, list[float]] = {}
        self._curves: dict[int, CostCurve] = {}

    def curve(self, requests: int) -> CostCurve | None:
        """The costs of steps by rows for each request, in steps without drafts; None until they are measured."""
        group = _group(requests)
        if group not in self._curves and group not in self._seconds:
            try:
                saved = load_curve(self._of(group))
            except SettingsError as error:
                self._notice(f"{error}; measuring it again")
                saved = None
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
        measured = Measurement()
        if self._on_gpu:
            measured.sustained = 1.0
        counted = 2 * ROUNDS
        whole = counted + 2 * DISCARDED
        for start in range(2 * DISCARDED, len(spent), whole):
            plain = spent[start : start + counted : 2]
            if not start // whole:
                measured.add((1, 0, 1), plain)
            measured.add((1, 0, self._plan[start + 1]), spent[start + 1 : start + counted : 2], plain)
        del self._seconds[group]
        curve = measured.curve()
        if measured.steady:
            self._saves = self._saves and keep_curve(self._of(group), curve, self._notice)
        else:
            typical = self._typical(group)
            curve = typical if self._on_gpu else curve.at_least(typical)
        self._curves[group] = curve

    def _typical(self, requests: int) -> CostCurve:
        """The typical costs of steps by rows for each of this many requests, in steps without drafts."""
        costs, _ = CostCurve.typical(self._on_gpu).table(self._most, 0, requests)
        return CostCurve({0: {rows: float(costs[rows]) for rows in range(1, self._most + 1)}})

    def _of(self, group: int) -> str:
        return f"{self._name}|{group} requests"


def _group(requests: int) -> int:
    """The power of two that is at least this number of requests."""
    return 1 << max(0, requests - 1).bit_length()
