"""The logits of a forward pass as arrays, and one sequence's part of them. ``hf.logits`` has those of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import NumericalError, Scores
from .top import top_of_rows

Numbers = np.ndarray[Any, np.dtype[Any]]


def as_float32(numbers: Numbers) -> Numbers:
    """Logits as float32, from float32 or from the bits of bf16."""
    return (numbers.astype(np.int32) << 16).view(np.float32) if numbers.dtype == np.int16 else numbers


class Logits:
    """The logits (R, V) of the rows of a pass that need them, of all its sequences one after another.

    Args:
        rows: (R, V) float32, or int16 for the bits of bf16, in memory that the next pass may overwrite.
        peaks: the largest logit of each group of 32 tokens, (R, V / 32 rounded up) float32, if known.
        states: hidden states (R, hidden) float32, or int16 for the bits of bf16, if they were kept.
        top: what ``top`` returns, if the pass has found it.
    """

    def __init__(
        self,
        rows: Numbers,
        peaks: Numbers | None = None,
        states: Numbers | None = None,
        top: tuple[Numbers, Numbers] | None = None,
    ) -> None:
        self.rows = rows
        self.peaks = peaks
        self.states = states
        self._top = top

    def row(self, r: int) -> Any:
        """Logits (V,) of a row; here a copy, float32."""
        return np.array(as_float32(self.rows[r]))

    def host(self, r: int) -> tuple[Numbers, Numbers | None]:
        """The same and the largest of each group of 32 tokens, if known, as float32 in CPU memory.

        Valid until the next pass.
        """
        return as_float32(self.rows[r]), None if self.peaks is None else self.peaks[r]

    def hidden(self, r: int) -> Numbers | None:
        """The hidden state (hidden,) float32 of a row; None if the pass kept none."""
        return None if self.states is None else as_float32(self.states[r].copy())

    def argmax(self, r: int) -> int:
        """The token with the largest logit of a row, the lowest token among ties; -1 on NaN."""
        # The best token's log-odds against itself are 0, unless its logit is infinite or a logit of the row is NaN.
        if self._top is not None and self._top[1][r, 0] == 0:
            return int(self._top[0][r, 0])
        row = as_float32(self.rows[r])
        token = int(row.argmax())  # to numpy NaN is the largest
        return -1 if np.isnan(row[token]) else token

    def top(self, k: int) -> tuple[Numbers, Numbers]:
        """The best tokens of every row, int32, and their logits minus the row's largest, both (R, m).

        m is at least min(k, V); see ``Scores.top``.
        """
        if self._top is None or self._top[0].shape[-1] < k:
            self._top = self._search(k)
        return self._top

    def _search(self, k: int) -> tuple[Numbers, Numbers]:
        return top_of_rows(self.rows, min(k, self.rows.shape[-1]), self.peaks)

    def detach(self) -> None:
        """Replace the arrays with copies, because the next pass overwrites their memory."""
        self.rows = self.rows.copy()
        self.peaks = None if self.peaks is None else self.peaks.copy()
        self.states = None if self.states is None else self.states.copy()
        self._top = None if self._top is None else (self._top[0].copy(), self._top[1].copy())


class LogitsRows:
    """The logits of one sequence in a pass. Implements ``lookahead.core.Scores``.

    Args:
        logits: of the pass.
        start: the sequence's first row in it.
        nodes: the node of each row of the sequence; None for all nodes in order.
    """

    def __init__(self, logits: Logits, start: int = 0, nodes: Sequence[int] | None = None) -> None:
        self._logits = logits
        self._start = start
        self._row = None if nodes is None else {node: r for r, node in enumerate(nodes, start)}

    def _row_of(self, node: int) -> int:
        return self._start + node if self._row is None else self._row[node]

    def best(self, node: int) -> int:
        token = self._logits.argmax(self._row_of(node))
        if token < 0:
            raise NumericalError(
                "the model's logits are NaN, so no token can be chosen; check the weights and the dtype "
                "(float16 overflows in some models: try bfloat16 or float32)"
            )
        return token

    def row(self, node: int) -> Any:
        """Logits of shape (V,) on the model's device."""
        return self._logits.row(self._row_of(node))

    def hidden(self, node: int) -> Numbers | None:
        """The hidden state (hidden,) float32 under ``node``; None if the pass kept none."""
        return self._logits.hidden(self._row_of(node))

    def host(self, node: int) -> tuple[Numbers, Numbers | None]:
        """The logits in CPU memory; see ``Logits.host``."""
        return self._logits.host(self._row_of(node))

    def top(self, nodes: Sequence[int], k: int) -> tuple[Numbers, Numbers]:
        """Tokens and log-odds of the best, both (n, m), as numpy arrays; see ``Scores.top``."""
        ids, odds = self._logits.top(k)
        if self._row is None and isinstance(nodes, range) and nodes.step == 1:
            rows: Any = slice(self._start + nodes.start, self._start + nodes.stop)  # views instead of copies
        else:
            rows = [self._row_of(node) for node in nodes]
        return ids[rows], odds[rows]


def host_row(scores: Scores, node: int) -> tuple[Numbers, Numbers | None]:
    """The logits (V,) float32 under ``node`` in CPU memory, and the largest of each group of 32 tokens if known."""
    read = getattr(scores, "host", None)
    return read(node) if read is not None else (np.asarray(scores.row(node), np.float32), None)
