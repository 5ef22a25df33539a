"""The cost curve c(k): the time of a step of k rows in plain steps, for one model on one machine.

It is measured when the model is first used (``measure``) and saved for later processes (``model_curves``). A curve
has a few points at one or two context lengths. It is linear between points and continues with the last slope beyond
them.

An example for one sequence and for four, with passes of p(2) = 1.2, p(4) = 1.4 and p(8) = 2.1 plain passes and 0.04
for the drafter's own work on one sequence:

    one sequence, 8 rows       c = 2.1 + 0.04
    four sequences, 2 rows     the pass has 8 rows in all, so c = (2.1 + 4 * 0.04) / 1.4 of its plain step
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from ...core import SettingsError
from ...core.target import MOST_ROWS, MOST_SEQUENCES

#: Tokens of context that share a table.
CONTEXT_STEP = 256
#: Largest cost of a server's pass, in plain passes of the same sequences.
BUDGET = 2.0
#: The cost of passes that have not been measured: of 4-bit weights on two cores of an AMD EPYC with AVX2, and on a
#: GPU, where rows are nearly free.
ASSUMED = {1: 1.0, 2: 1.22, 4: 1.62, 8: 2.5, 16: 4.3, 64: 16.0}
ASSUMED_ON_GPU = {1: 1.0, 64: 1.2}
ASSUMED_DRAFTING = 0.04


@dataclass(frozen=True)
class CostCurve:
    """c(k) by context length.

    Attributes:
        rows: context length in tokens -> k -> the time of a pass of k rows, in passes of one row.
        drafting: the drafter's own work in a drafted step of one sequence, in plain steps.
        plain: the time of a pass of one row, in seconds; 0 if unknown.

    Raises:
        SettingsError: there are no points, or a cost is not a positive number.
    """

    rows: Mapping[int, Mapping[int, float]]
    drafting: float = 0.0
    plain: float = 0.0
    _tables: dict[tuple[int, int, int], tuple[Any, Any]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        costs = [cost for points in self.rows.values() for cost in points.values()]
        numbers = all(isinstance(cost, (int, float)) and 0 < cost < 1e4 for cost in costs)
        others = all(0 <= number < 1e4 for number in (self.drafting, self.plain))
        if not (numbers and others and self.rows and all(self.rows.values())):
            raise SettingsError("a cost curve must have points, and every cost must be a positive number")

    @classmethod
    def assumed(cls, on_gpu: bool = False) -> CostCurve:
        """The curve of a model that has not been measured or cannot be."""
        return cls({0: ASSUMED_ON_GPU if on_gpu else ASSUMED}, ASSUMED_DRAFTING)

    def at_least(self, other: CostCurve) -> CostCurve:
        """This curve, but no pass costs less than in another one, and the time of a plain pass is unknown."""
        rows = {
            context: {
                number: max(cost, float(other.pass_cost(number, context))) for number, cost in points.items()
            }
            for context, points in self.rows.items()
        }
        return CostCurve(rows, max(self.drafting, other.drafting))

    def budget(self, sequences: int, captured: bool = False) -> int:
        """The row budget of a pass over this many sequences: as many rows as cost at most ``BUDGET`` plain passes,
        and at most ``MOST_ROWS`` if each sequence has several rows.

        A captured pass is padded to powers of two, and a step beyond ``MOST_ROWS`` padded rows takes two passes. So
        for up to ``MOST_SEQUENCES`` sequences, which is the most that such a pass can have, the budget is so small
        that equal shares of it fit in one pass:

            5 sequences    padded to 8 sequences of MOST_ROWS / 8 = 32 rows, so at most 5 * 32 rows

        The budget also limits drafters with fixed settings such as (15, 5, 15), which do not use the curve. They
        rarely pay off beyond it, because their S is seldom above ``BUDGET``.
        """
        padded = 1 << (sequences - 1).bit_length() if captured and sequences <= MOST_SEQUENCES else sequences
        costs, _ = self.table(max(1, MOST_ROWS // padded), 0, sequences)
        return sequences * int(np.searchsorted(costs[1:], BUDGET, side="right"))

    def pass_cost(self, rows: Any, context: int = 0) -> Any:
        """p(k): the time of a pass of k rows after a context of this many tokens, in passes of one row.

        Beyond the measured contexts, the nearest counts: an extrapolated slope of noise would grow without bound.
        """
        lengths = sorted(self.rows)
        costs = np.array([_interpolated(self.rows[length], rows) for length in lengths])
        shares = [np.interp(context, lengths, one) for one in np.eye(len(lengths))]
        return shares @ costs

    def table(self, limit: int, context: int, sequences: int = 1) -> tuple[Any, Any]:
        """The costs of steps of 0 to ``limit`` rows in each of ``sequences`` sequences, in plain steps of the batch.

        Returns:
            (costs, slopes), both (limit + 1,) float64. ``costs[1]`` is 1, and larger steps include drafting.
            ``slopes[k]`` is the smallest cost per additional row, from k to any larger number of rows.
        """
        key = limit, context // CONTEXT_STEP, sequences
        if key not in self._tables:
            self._tables[key] = self._new_table(limit, key[1] * CONTEXT_STEP, sequences)
        return self._tables[key]

    def _new_table(self, limit: int, context: int, sequences: int) -> tuple[Any, Any]:
        numbers = sequences * np.maximum(np.arange(limit + 1), 1)
        passes = self.pass_cost(numbers, context)
        costs = passes / passes[1 if limit else 0]
        costs[2:] += self.drafting_of(sequences, context)
        slopes = np.zeros(limit + 1)
        for k in range(1, limit):
            slopes[k] = ((costs[k + 1 :] - costs[k]) / np.arange(1, limit - k + 1)).min()
        return costs, slopes

    def drafting_of(self, sequences: int, context: int) -> float:
        """The cost of drafting for all of ``sequences`` sequences, in plain steps of the batch."""
        return float(sequences * self.drafting / self.pass_cost(sequences, context))


def _interpolated(points: Mapping[int, float], rows: Any) -> Any:
    """Linear between points, constant before the first, with the last slope beyond; never decreasing."""
    known = sorted(points)
    costs = np.maximum.accumulate([points[number] for number in known])
    slope = (costs[-1] - costs[-2]) / (known[-1] - known[-2]) if len(known) > 1 else 0.0
    return np.interp(rows, known, costs) + slope * np.maximum(0, np.asarray(rows) - known[-1])


def fitted(seconds: Mapping[int, float]) -> dict[int, float]:
    """p(k) from the fastest pass of each number of rows: the greatest convex curve below the points after the first.

    Other work can only make a pass slower, so the curve goes below a point that lies above its neighbours, as 4 here,
    and never decreases:

        rows              1      2      4      8     16
        milliseconds    5.0    5.5    6.4    6.9    8.9
        p(k)            1.0   1.10   1.19   1.38   1.78

    From one row to two, the curve may rise by any amount: the code of a single row may be different.
    """
    plain = seconds[1]
    points = [(rows, max(1.0, time / plain)) for rows, time in sorted(seconds.items()) if rows > 1]
    hull = list[tuple[int, float]]()  # from the right
    lowest = inf
    for rows, cost in reversed(points):
        lowest = min(lowest, cost)
        while len(hull) > 1 and _slope((rows, lowest), hull[-1]) >= _slope((rows, lowest), hull[-2]):
            hull.pop()
        hull.append((rows, lowest))
    return {1: 1.0, **{rows: float(_interpolated(dict(hull), rows)) for rows, _ in points}}


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])
