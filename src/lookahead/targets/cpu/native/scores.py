"""Logits of a compiled pass: each row's best token came with it, the k best are found when asked for."""

from __future__ import annotations

import sys

import numpy as np
import torch

from ...logits import LogitsBatch
from . import jobs
from .products import GROUP
from .stages import MOST
from .team import team_of


class Shelf:
    """Memory for logits, used again when no tensor on it is left: fresh pages cost more than filling them."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def take(self, size: int) -> np.ndarray:
        """At least ``size`` bytes, uint8, with arbitrary contents."""
        for place, array in enumerate(self._arrays):
            # The list, the loop's name and the call: nobody else.
            if sys.getrefcount(array) <= 3:
                if len(array) >= size:
                    return array
                del self._arrays[place]
                break
        fresh = np.empty(size, np.uint8)
        self._arrays.append(fresh)
        if len(self._arrays) > 4:
            self._arrays.pop(0)
        return fresh


class NativeScores:
    """What one pass has read: R rows of logits over V tokens.

    Args:
        memory: holds the logits (R, width), then the peaks (R, width / 32) fp32.
        best: (R,) int64, -1 for NaN.
    """

    def __init__(
        self, memory: np.ndarray, dtype: torch.dtype, rows: int, vocabulary: int, best: list[int]
    ) -> None:
        width = -(-vocabulary // GROUP) * GROUP
        self._tensor = torch.from_numpy(memory)[: rows * width * dtype.itemsize].view(dtype).view(rows, width)
        self.logits = self._tensor[:, :vocabulary]
        self._best = best
        self._top: tuple[np.ndarray, np.ndarray] | None = None

    def part(self, start: int, rows: int) -> NativeBatch:
        """The logits of one sequence."""
        return NativeBatch(self, start, rows)

    def best(self, start: int, rows: int) -> list[int]:
        """Best tokens of some rows, -1 for NaN."""
        return self._best[start : start + rows]

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best tokens of every row, int32, and their log-odds against the best."""
        if self._top is None or self._top[0].shape[1] < k:
            rows, width = self._tensor.shape
            ids, odds = np.empty((rows, k), np.int32), np.empty((rows, k), np.float32)
            plan = np.zeros(jobs.PLAN_SIZE, np.int64)
            address = self._tensor.data_ptr()
            plan[jobs.READS], plan[jobs.LOGITS], plan[jobs.LOGITS_WIDTH] = rows, address, width
            plan[jobs.PEAKS] = address + rows * width * self._tensor.element_size()
            plan[jobs.VOCABULARY], plan[jobs.TOP] = self.logits.shape[1], k
            plan[jobs.TOP_IDS], plan[jobs.TOP_ODDS] = ids.ctypes.data, odds.ctypes.data
            team_of(torch.get_num_threads()).run(jobs.top_job(self._tensor.dtype), plan.ctypes.data)
            self._top = ids, odds
        return self._top


class NativeBatch(LogitsBatch):
    """One sequence's share of a pass, (1, R, V)."""

    def __init__(self, scores: NativeScores, start: int, rows: int) -> None:
        super().__init__(scores.logits[None, start : start + rows])
        self._scores, self._start, self._rows = scores, start, rows
        self._best = [scores.best(start, rows)]

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best tokens of every row and their log-odds against the best, both (1, R, k)."""
        k = min(k, self.logits.shape[-1])
        if k > MOST:
            return super().top(k)
        ids, odds = self._scores.top(k)
        mine = slice(self._start, self._start + self._rows)
        return ids[None, mine, :k], odds[None, mine, :k]
