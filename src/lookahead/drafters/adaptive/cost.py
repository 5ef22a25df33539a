"""The cost curve c(k): the cost of a step of k rows in plain steps, for one model on one machine. It is measured when
the model is first used (``measure``) and saved on disk for later processes, two of which measure again: the curve is
the mean of ``MEASUREMENTS``.

A curve has a few points at two context lengths, and the cost of one row in each of several sequences. It is linear
between points, continues with the last slope beyond them, and never decreases. It also has the costs of light heads.

An example for one sequence and for four, with measured costs of c(8) = 1.6 for one sequence, 1.3 for one row in each
of four sequences, and 0.04 for the drafter's own work on one sequence:

    one sequence, 8 rows       1.6
    four sequences, 2 rows     the pass has 8 rows in all, so (1.3 + c(8) - c(4) + 4 * 0.04) / 1.3 of its plain step
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite.binding import get_host_cpu_name

from ...core import SettingsError
from ...core.target import MOST_ROWS, MOST_SEQUENCES
from ...records import cache_folder, not_writable, replacing
from ...threads import thread_count

#: Tokens of context that share a table.
CONTEXT_STEP = 256
#: The assumed cost of an additional row before any measurement, in plain steps.
ROW = 0.02
#: The same on a GPU, where a step of 64 rows is assumed to cost 1.2 plain steps.
ROW_ON_GPU = 0.2 / 63
#: Largest cost of a server's pass, in plain passes of the same sequences.
BUDGET = 2.0
#: The curve of 4-bit weights on two cores, for processes whose measurement other work disturbs: the larger cost of an
#: AMD EPYC and an Intel Xeon with AMX. Where rows cost less, some drafts that would pay off are not made.
TYPICAL = {1: 1.0, 2: 1.25, 4: 1.6, 8: 2.4, 16: 3.6, 64: 9.5}
#: The cost of a call of a light head that could not be measured; the included head's is 0.07 steps of 4-bit weights
#: on two cores of an AMD EPYC. Where calls cost less, some that would pay off are not made.
TYPICAL_HEAD = 0.1
#: Number of measurements of a saved curve, and the least number of seconds between them. Other guests of a host slow
#: down its memory for minutes, during which the rounds of a measurement agree: on one machine, four rows of SmolLM2
#: cost 1.06 plain steps in one such measurement, and 1.35 in another. The rule lost 3 to 5 % with the first curve,
#: and nothing with the mean of both.
MEASUREMENTS = 3
APART = 600.0
#: Format of the file; also incremented when a change makes compiled passes faster or slower.
FORMAT = 5


@dataclass(frozen=True)
class CostCurve:
    """c(k) by context length and number of sequences. Costs are in plain steps of one sequence.

    Attributes:
        rows: context length in tokens -> k -> the cost of a step of k rows; k = 1 costs 1.
        sequences: number of sequences -> the cost of a step of one row in each.
        drafting: the cost of the drafter's own work in a drafted step of one sequence.
        seconds: seconds of a plain step when the curve was measured; 0 if it was not, or other work disturbed that.
        heads: shape of a light head (``HeadWeights.shape``) -> the cost of a call.
        measured: number of measurements of which the curve is the mean.

    Raises:
        SettingsError: there are no points, or a cost is not a positive number.
    """

    rows: Mapping[int, Mapping[int, float]]
    sequences: Mapping[int, float] = field(default_factory=dict)
    drafting: float = 0.0
    seconds: float = 0.0
    heads: Mapping[str, float] = field(default_factory=dict)
    measured: int = 1
    _tables: dict[tuple[int, int, int], tuple[Any, Any]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        parts: tuple[Mapping[Any, float], ...] = *self.rows.values(), self.sequences, self.heads
        costs = [cost for part in parts for cost in part.values()]
        numbers = all(isinstance(cost, (int, float)) and 0 < cost < 1e4 for cost in costs)
        if not numbers or not self.rows or not all(self.rows.values()):
            raise SettingsError("a cost curve must have points, and every cost must be a positive number")

    @classmethod
    def unmeasured(cls, on_gpu: bool = False) -> CostCurve:
        """The curve used until one is measured: every row after the first costs ``ROW`` or ``ROW_ON_GPU``."""
        return cls({0: {1: 1.0, 2: 1.0 + (ROW_ON_GPU if on_gpu else ROW)}})

    @classmethod
    def typical(cls, on_gpu: bool = False) -> CostCurve:
        """The curve for a device that could not be measured because of other work."""
        return cls.unmeasured(on_gpu) if on_gpu else cls({0: TYPICAL}, drafting=0.04)

    def at_least(self, other: CostCurve) -> CostCurve:
        """This disturbed curve, with the costs of rows and of drafting at least those of another curve."""
        others = {number for points in other.rows.values() for number in points}
        rows = {
            context: {k: max(self.cost(k, context), other.cost(k, context)) for k in others.union(points)}
            for context, points in self.rows.items()
        }
        return replace(self, rows=rows, drafting=max(self.drafting, other.drafting), seconds=0.0)

    def averaged(self, other: CostCurve) -> CostCurve:
        """The mean of this curve, which is that of ``measured`` measurements, and of one more.

        A number of rows that only one of them has is interpolated in the other; a number of sequences is not.
        """
        share = 1 / (self.measured + 1)

        def mean(so_far: float, new: float) -> float:
            return so_far + share * (new - so_far)

        rows = {}
        for context in sorted(self.rows.keys() | other.rows.keys()):
            numbers = sorted(self.rows.get(context, {}).keys() | other.rows.get(context, {}).keys())
            rows[context] = {k: mean(self.cost(k, context), other.cost(k, context)) for k in numbers}
        sequences = {**other.sequences, **self.sequences}
        for number in self.sequences.keys() & other.sequences.keys():
            sequences[number] = mean(self.sequences[number], other.sequences[number])
        drafting = mean(self.drafting, other.drafting)
        seconds = mean(self.seconds, other.seconds)
        return CostCurve(rows, sequences, drafting, seconds, self.heads, self.measured + 1)

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

    def cost(self, rows: float, context: int = 0) -> float:
        """c(rows) of one sequence whose context has this many tokens."""
        lengths = sorted(self.rows)
        costs = [_interpolated(self.rows[length], rows) for length in lengths]
        # Beyond the measured contexts, use the nearest: an extrapolated slope of noise would grow without bound.
        return float(np.interp(context, lengths, costs))

    def table(self, limit: int, context: int, sequences: int = 1) -> tuple[Any, Any]:
        """The costs of steps of 0 to ``limit`` rows in each of ``sequences`` sequences, in plain steps of the batch.

        Returns:
            (costs, slopes), both (limit + 1,) float64. ``costs[1]`` is 1. ``slopes[k]`` is the smallest cost per
            additional row, from k to any larger number of rows.
        """
        key = limit, context // CONTEXT_STEP, sequences
        if key not in self._tables:
            self._tables[key] = self._new_table(limit, key[1] * CONTEXT_STEP, sequences)
        return self._tables[key]

    def _new_table(self, limit: int, context: int, sequences: int) -> tuple[Any, Any]:
        costs = np.array([self.cost(max(1, k) * sequences, context) for k in range(limit + 1)])
        if sequences > 1:
            plain = self._plain(sequences, context)
            costs += plain - costs[1] + sequences * self.drafting
            costs[:2] = plain
            costs /= plain
        # More rows are never cheaper; a measurement to the contrary is noise.
        costs = np.maximum.accumulate(costs)
        slopes = np.zeros(limit + 1)
        for k in range(1, limit):
            more = np.arange(1, limit - k + 1)
            slopes[k] = ((costs[k + 1 :] - costs[k]) / more).min()
        return costs, slopes

    def drafting_of(self, sequences: int, context: int) -> float:
        """The cost of drafting for all of ``sequences`` sequences, in plain steps of the batch."""
        return sequences * self.drafting / self._plain(sequences, context)

    def _plain(self, sequences: int, context: int) -> float:
        """The cost of one row in each of ``sequences`` sequences."""
        known = {1: 1.0, **self.sequences}
        if len(known) == 1:
            return self.cost(sequences, context)
        return _interpolated(known, sequences)


def _interpolated(points: Mapping[int, float], at: float) -> float:
    """Linear between known points, constant before the first, with the last slope beyond; never decreasing there."""
    known = sorted(points)
    after = min(bisect_left(known, at), len(known) - 1)
    before = max(0, after - 1)
    if after == before or at <= known[0]:
        return points[known[0]]
    slope = (points[known[after]] - points[known[before]]) / (known[after] - known[before])
    if at > known[after]:
        return points[known[after]] + max(0.0, slope) * (at - known[after])
    return points[known[before]] + slope * (at - known[before])


def machine() -> str:
    """The machine's part of a curve's key: system, processor, cores, threads and GPUs."""
    parts = [platform.system(), get_host_cpu_name(), f"{os.cpu_count()} cores", f"{thread_count()} threads"]
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        parts += [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(parts)


def curve_file(model: str) -> Path:
    """The file of a model's curve on this machine, in the user's cache folder.

    Args:
        model: a key unique to the model, dtype, device and code path (``drafters.adaptive.model_curves.curve_key``).
    """
    digest = hashlib.sha256(f"{machine()}|{model}".encode()).hexdigest()[:24]
    return cache_folder() / "costs" / f"{digest}.json"


def save_curve(model: str, curve: CostCurve) -> Path:
    """Save the curve of a model on this machine. Returns the file.

    Raises:
        OSError: the folder cannot be written.
    """
    path = curve_file(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    costs = {"rows": curve.rows, "sequences": curve.sequences, "heads": curve.heads}
    others = {"drafting": curve.drafting, "seconds": curve.seconds, "measured": curve.measured}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({**_origin(model), **costs, **others}))
    return path


def is_due(model: str, curve: CostCurve) -> bool:
    """Whether a saved curve should be measured again.

    It has fewer than ``MEASUREMENTS``, the last is old, and the new one can be saved.
    """
    path = curve_file(model)
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:  # another process has removed it
        return False
    return curve.measured < MEASUREMENTS and age > APART and os.access(path.parent, os.W_OK)


def keep_curve(model: str, curve: CostCurve, notice: Callable[[str], None]) -> bool:
    """Save the curve of a model on this machine, if possible. Returns whether it was saved.

    Args:
        notice: called with a line of text if the curve cannot be saved.
    """
    try:
        save_curve(model, curve)
    except OSError as error:
        instead = "the cost curve is not saved and is kept in memory for this process"
        notice(str(not_writable(curve_file(model), error, instead, "file")))
        return False
    return True


def load_curve(model: str) -> CostCurve | None:
    """The saved curve of a model on this machine; None if there is none.

    Raises:
        SettingsError: the file is damaged, or of another machine or version.
    """
    path = curve_file(model)
    try:
        content = json.loads(path.read_text())
        others = [name for name, value in _origin(model).items() if content[name] != value]
        if not others:
            return CostCurve(
                {int(context): _numbers(costs) for context, costs in content["rows"].items()},
                _numbers(content["sequences"]),
                float(content["drafting"]),
                float(content["seconds"]),
                {str(shape): float(cost) for shape, cost in content["heads"].items()},
                int(content["measured"]),
            )
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, SettingsError) as error:
        raise SettingsError(f"{path} must contain a cost curve, but does not ({error!r:.80})") from error
    raise SettingsError(f"{path} must contain a cost curve of this {others[0]}, but contains one of another")


def _origin(model: str) -> dict[str, Any]:
    """What a curve is for, as in its file."""
    return {"format": FORMAT, "machine": machine(), "model": model}


def _numbers(costs: Mapping[str, Any]) -> dict[int, float]:
    return {int(count): float(cost) for count, cost in costs.items()}
