"""The logits of one forward pass, read by node: for arrays, and what those for tensors share (``hf.logits``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import NumericalError, Scores
from .top import top_of_rows

Numbers = np.ndarray[Any, np.dtype[Any]]


class Logits(ABC):
    """The logits (B, R, V) of a pass, for the rows that need them."""

    _top: tuple[Numbers, Numbers] | None = None

    @abstractmethod
    def row(self, b: int, r: int) -> Any:
        """Logits (V,) of row r of sequence b."""

    @abstractmethod
    def host(self, b: int, r: int) -> tuple[Numbers, Numbers | None]:
        """The same logits and the largest of each group of 32 tokens, if known, as float32 in CPU memory.

        Valid until the next pass.
        """

    @abstractmethod
    def argmax(self, b: int, r: int) -> int:
        """The token with the largest logit in row r of sequence b, the lowest token among ties; -1 on NaN."""

    @abstractmethod
    def hidden(self, b: int, r: int) -> Numbers | None:
        """The hidden state (hidden,) float32 of row r of sequence b; None if the pass kept none."""

    @abstractmethod
    def _search(self, k: int) -> tuple[Numbers, Numbers]:
        """Compute what ``top`` returns."""

    def top(self, k: int) -> tuple[Numbers, Numbers]:
        """The best tokens of every row, int32, and their logits minus the row's largest, both (B, R, m).

        m is at least min(k, V); see ``Scores.top``.
        """
        if self._top is None or self._top[0].shape[-1] < k:
            self._top = self._search(k)
        return self._top

    def best(self, b: int, r: int) -> int:
        """The token with the largest logit in row r of sequence b, the lowest token among ties.

        Raises:
            NumericalError: a logit is NaN.
        """
        token = self.argmax(b, r)
        if token < 0:
            raise NumericalError(
                "the model's logits are NaN, so no token can be chosen; check the weights and the dtype "
                "(float16 overflows in some models: try bfloat16 or float32)"
            )
        return token


def as_float32(numbers: Numbers) -> Numbers:
    """Logits as float32, from float32 or from the bits of bf16."""
    return (numbers.astype(np.int32) << 16).view(np.float32) if numbers.dtype == np.int16 else numbers


class HostLogits(Logits):
    """Logits (1, R, V) as arrays, in memory that the next pass may overwrite; rows may come from several sequences.

    Args:
        rows: (R, V) float32, or int16 for the bits of bf16.
        peaks: the largest logit of each group of 32 tokens, (R, V / 32 rounded up) float32, if known.
        states: hidden states (R, hidden) float32, or int16 for the bits of bf16, if they were kept.
    """

    def __init__(self, rows: Numbers, peaks: Numbers | None = None, states: Numbers | None = None) -> None:
        self.rows = rows
        self.peaks = peaks
        self.states = states

    def row(self, b: int, r: int) -> Numbers:
        """A copy of the row, float32."""
        return np.array(as_float32(self.rows[r]))

    def hidden(self, b: int, r: int) -> Numbers | None:
        """A copy of the state."""
        return None if self.states is None else as_float32(self.states[r].copy())

    def argmax(self, b: int, r: int) -> int:
        row = as_float32(self.rows[r])
        token = int(row.argmax())  # to numpy NaN is the largest
        return -1 if np.isnan(row[token]) else token

    def detach(self) -> Any:
        """Replace the logits with a copy, because the next pass overwrites their memory."""
        self.rows = self.rows.copy()

    def host(self, b: int, r: int) -> tuple[Numbers, Numbers | None]:
        return as_float32(self.rows[r]), None if self.peaks is None else self.peaks[r]

    def _search(self, k: int) -> tuple[Numbers, Numbers]:
        ids, odds = top_of_rows(self.rows, min(k, self.rows.shape[-1]), self.peaks)
        return ids[None], odds[None]


class LogitsRows:
    """The logits of one sequence in a pass's ``Logits``. Implements ``lookahead.core.Scores``.

    Args:
        batch: logits of the pass.
        b: index of the sequence.
        nodes: the node of each row of logits; None for all nodes in order.
        start: the row of the first of them.
    """

    def __init__(self, batch: Logits, b: int, nodes: Sequence[int] | None = None, start: int = 0) -> None:
        self._batch = batch
        self._b = b
        self._start = start
        self._row = None if nodes is None else {node: r for r, node in enumerate(nodes, start)}

    def _row_of(self, node: int) -> int:
        return self._start + node if self._row is None else self._row[node]

    def best(self, node: int) -> int:
        return self._batch.best(self._b, self._row_of(node))

    def row(self, node: int) -> Any:
        """Logits of shape (V,) on the model's device."""
        return self._batch.row(self._b, self._row_of(node))

    def hidden(self, node: int) -> Numbers | None:
        """The hidden state (hidden,) float32 under ``node``; None if the pass kept none."""
        return self._batch.hidden(self._b, self._row_of(node))

    def host(self, node: int) -> tuple[Numbers, Numbers | None]:
        """The same in CPU memory; see ``Logits.host``."""
        return self._batch.host(self._b, self._row_of(node))

    def top(self, nodes: Sequence[int], k: int) -> tuple[Numbers, Numbers]:
        """Tokens and log-odds of the best, both (n, m), as numpy arrays; see ``Scores.top``."""
        ids, odds = self._batch.top(k)
        if self._row is None and isinstance(nodes, range) and nodes.step == 1:
            rows: Any = slice(self._start + nodes.start, self._start + nodes.stop)  # views instead of copies
        else:
            rows = [self._row_of(node) for node in nodes]
        return ids[self._b, rows], odds[self._b, rows]


def host_row(scores: Scores, node: int) -> tuple[Numbers, Numbers | None]:
    """The logits (V,) float32 under ``node`` in CPU memory, and the largest of each group of 32 tokens if known."""
    read = getattr(scores, "host", None)
    return read(node) if read is not None else (np.asarray(scores.row(node), np.float32), None)
