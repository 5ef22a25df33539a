"""Logits of a pass: each row's best token came with it, the k best are found when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..logits import LogitsBatch, LogitsRows
from ..top import top_of_rows
from .microkernel import GROUP
from .packed_weights import round_up

Numbers = np.ndarray[Any, np.dtype[Any]]


class PassLogits(LogitsBatch):
    """What one pass has read: logits (1, R, V).

    Args:
        memory: (bytes,) uint8; holds the logits (R, width), then the peaks (R, width / 32) fp32.
        best: R tokens, -1 for NaN.
    """

    def __init__(
        self, memory: Numbers, dtype: torch.dtype, rows: int, vocabulary: int, best: list[int]
    ) -> None:
        stride, peaks_stride = self.strides(vocabulary, dtype)
        logits = torch.from_numpy(memory[: rows * stride].reshape(1, rows, stride)).view(dtype)
        super().__init__(logits[..., :vocabulary])
        self.memory = memory
        peaks = memory[rows * stride : rows * (stride + peaks_stride)].reshape(rows, peaks_stride)
        self._peaks = peaks.view(np.float32)
        self._best = [best]

    @staticmethod
    def strides(vocabulary: int, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes from row to row of logits and of peaks."""
        width = round_up(vocabulary, GROUP)
        return width * dtype.itemsize, width // GROUP * 4

    def detach(self) -> Numbers:
        """Go on with a copy of the logits; returns the memory, which is free now."""
        self.logits, self._peaks = self.logits.clone(), self._peaks.copy()
        return self.memory

    def top(self, k: int) -> tuple[Numbers, Numbers]:
        """The k best tokens of every row, int32, and their log-odds against the best, both (1, R, min(k, V))."""
        k = min(k, self.logits.shape[-1])
        if self._top is None or self._top[0].shape[-1] < k:
            ids, odds = top_of_rows(self.logits[0], k, self._peaks)
            self._top = ids[None], odds[None]
        return super().top(k)


class SegmentScores(LogitsRows):
    """The logits of one sequence's rows. Fulfils ``lookahead.core.Scores``.

    Args:
        logits: of the pass.
        start: the sequence's first row there.
        nodes: the node of each of its rows, in order.
    """

    def __init__(self, logits: PassLogits, start: int, nodes: Sequence[int]) -> None:
        super().__init__(logits, 0)
        self._row = {node: row for row, node in enumerate(nodes, start)}

    def row(self, node: int) -> torch.Tensor:
        """Logits of shape (V,), a copy."""
        return super().row(node).clone()
