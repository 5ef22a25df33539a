"""Logits of a pass: each row's best token came with it, the k best are found when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...core.errors import NumericalError
from ..logits import LogitsBatch
from .microkernel import GROUP
from .packed_weights import round_up
from .top_tokens import MAX_TOP_K, top_tokens

Numbers = np.ndarray[Any, np.dtype[Any]]


class PassLogits:
    """What one pass has read: R rows of logits over V tokens.

    Args:
        memory: (bytes,) uint8; holds the logits (R, width), then the peaks (R, width / 32) fp32.
        best: R tokens, -1 for NaN.
    """

    def __init__(
        self, memory: Numbers, dtype: torch.dtype, rows: int, vocabulary: int, best: Sequence[int]
    ) -> None:
        self.dtype, self.rows, self.vocabulary, self.best = dtype, rows, vocabulary, best
        self.memory = memory
        self._top: tuple[Numbers, Numbers] | None = None

    @staticmethod
    def strides(vocabulary: int, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes from row to row of logits and of peaks."""
        width = round_up(vocabulary, GROUP)
        return width * dtype.itemsize, width // GROUP * 4

    def _part(self, peaks: bool) -> Numbers:
        """(R, bytes of a row) of the memory."""
        logits_stride, peaks_stride = self.strides(self.vocabulary, self.dtype)
        begin = self.rows * logits_stride if peaks else 0
        stride = peaks_stride if peaks else logits_stride
        return self.memory[begin : begin + self.rows * stride].reshape(self.rows, stride)

    @property
    def logits(self) -> torch.Tensor:
        """(R, V), valid as long as the memory is."""
        return torch.from_numpy(self._part(False)).view(self.dtype)[:, : self.vocabulary]

    def detach(self) -> Numbers:
        """Go on with a copy of the logits; returns the memory, which is free now."""
        memory = self.memory
        self.memory = memory[: self.rows * sum(self.strides(self.vocabulary, self.dtype))].copy()
        return memory

    def top(self, k: int) -> tuple[Numbers, Numbers]:
        """The k best tokens of every row, int32, and their log-odds against the best, both (R, at least k)."""
        if self._top is None or self._top[0].shape[1] < k:
            ids, odds = np.empty((self.rows, k), np.int32), np.empty((self.rows, k), np.float32)
            bits, shift = (np.uint16, 16) if self.dtype == torch.bfloat16 else (np.uint32, 0)
            peaks = self._part(True).view(np.float32)
            top_tokens(self._part(False).view(bits), shift, peaks, self.vocabulary, ids, odds)
            self._top = ids, odds
        return self._top


class SegmentScores:
    """The logits of one sequence's rows. Fulfils ``lookahead.core.Scores``.

    Args:
        logits: of the pass.
        start: the sequence's first row there.
        nodes: the node of each of its rows, in order.
    """

    def __init__(self, logits: PassLogits, start: int, nodes: Sequence[int]) -> None:
        self._pass = logits
        self._row = {node: row for row, node in enumerate(nodes, start)}

    def best(self, node: int) -> int:
        """The token with the largest logit, the first of equals. Raises NumericalError on NaN."""
        token = self._pass.best[self._row[node]]
        if token < 0:
            raise NumericalError(
                "the model's logits are NaN, so no token can be chosen; check the weights and the dtype "
                "(float16 overflows in some models: try bfloat16 or float32)"
            )
        return token

    def row(self, node: int) -> torch.Tensor:
        """Logits of shape (V,), a copy."""
        return self._pass.logits[self._row[node]].clone()

    def top(self, nodes: Sequence[int], k: int) -> tuple[Numbers, Numbers]:
        """Tokens and log-odds of the k best, both (n, k)."""
        k = min(k, self._pass.vocabulary)
        rows = [self._row[node] for node in nodes]
        if k > MAX_TOP_K:
            ids, odds = (both[0] for both in LogitsBatch(self._pass.logits[None]).top(k))
        else:
            ids, odds = self._pass.top(k)
        return ids[rows, :k], odds[rows, :k]
