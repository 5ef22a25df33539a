"""The logits of one forward pass, read by node. Torch is imported only if a whole row is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import NumericalError
from ..sampling.top import top_of_rows

if TYPE_CHECKING:
    import torch

    from .cuda import HostCopy

Numbers = np.ndarray[Any, np.dtype[Any]]


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """For each row, the token with the largest logit, the lowest token among ties; -1 if a logit is NaN."""
    values, tokens = logits.max(dim=-1)
    return tokens.masked_fill(values.isnan(), -1)  # the maximum of numbers and NaN is NaN


class Logits(ABC):
    """The logits (B, R, V) of a pass, for the rows that need them."""

    _top: tuple[Numbers, Numbers] | None = None

    @abstractmethod
    def row(self, b: int, r: int) -> torch.Tensor:
        """Logits (V,) of row r of sequence b."""

    @abstractmethod
    def host(self, b: int, r: int) -> tuple[Numbers, Numbers | None] | None:
        """The same logits and the largest of each group of 32 tokens, if known, as float32 in CPU memory.

        Valid until the next pass. None if the logits are on another device.
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


class LogitsBatch(Logits):
    """Logits computed by torch. The argmaxes of all rows are copied to the host at once, as are the k best tokens of
    each row.

    Args:
        logits: (B, R, V).
        hidden: their hidden states (B, R, hidden), if they were kept.
    """

    def __init__(self, logits: torch.Tensor, hidden: torch.Tensor | None = None) -> None:
        self.logits = logits
        self._hidden = hidden
        self._best: list[list[int]] | None = None

    def row(self, b: int, r: int) -> torch.Tensor:
        return self.logits[b, r]

    def host(self, b: int, r: int) -> tuple[Numbers, Numbers | None] | None:
        if self.logits.device.type != "cpu":
            return None
        return self.logits[b, r].detach().float().contiguous().numpy(), None

    def argmax(self, b: int, r: int) -> int:
        if self._best is None:
            self._best = best_tokens(self.logits).tolist()
        return self._best[b][r]

    def hidden(self, b: int, r: int) -> Numbers | None:
        return None if self._hidden is None else self._hidden[b, r].float().cpu().numpy()

    def _search(self, k: int) -> tuple[Numbers, Numbers]:
        logits = self.logits.detach()
        batch, rows, vocabulary = logits.shape
        k = min(k, vocabulary)
        if logits.device.type == "cpu":
            ids, odds = top_of_rows(_as_numpy(logits.reshape(batch * rows, vocabulary)), k)
            return ids.reshape(batch, rows, k), odds.reshape(batch, rows, k)
        import torch

        values, tokens = logits.topk(k, dim=-1)
        # One copy for both. float32 represents integers exactly only up to 2 ** 24, so the ids are copied bit by bit.
        log_odds = values.float() - values[..., :1].float()
        both = torch.stack((tokens.int().view(torch.float32), log_odds)).cpu().numpy()
        return both[0].view(np.int32), both[1]


def as_float32(numbers: Numbers) -> Numbers:
    """Logits as float32, from float32 or from the bits of bf16."""
    return (numbers.astype(np.int32) << 16).view(np.float32) if numbers.dtype == np.int16 else numbers


#: Best tokens per row in ``packed``: as many as drafters request.
PACKED_TOP = 8


def packed(logits: torch.Tensor) -> torch.Tensor:
    """What the host reads for most rows, in one tensor: (B, R, 1 + 2k) int32 from logits (B, R, V).

    Each row has its ``best_tokens``, its k best tokens, and the bits of their float32 log-odds against the best one.
    """
    import torch

    values, tokens = logits.topk(min(PACKED_TOP, logits.shape[-1]), dim=-1)
    log_odds = values.float() - values[..., :1].float()
    best = best_tokens(logits).int()[..., None]
    return torch.cat((best, tokens.int(), log_odds.view(torch.int32)), dim=-1)


class CopiedLogits(LogitsBatch):
    """Logits on a device, whose ``packed`` form is being copied to the host.

    Args:
        logits: (B, R, V).
        copy: the copy of ``packed(logits)``, possibly with further rows and sequences.
        hidden: their hidden states (B, R, hidden), if they were kept.
    """

    def __init__(self, logits: torch.Tensor, copy: HostCopy, hidden: torch.Tensor | None = None) -> None:
        super().__init__(logits, hidden)
        self._copy = copy

    def argmax(self, b: int, r: int) -> int:
        return int(self._copy.numpy()[b, r, 0])

    def _search(self, k: int) -> tuple[Numbers, Numbers]:
        batch, rows, vocabulary = self.logits.shape
        numbers = self._copy.numpy()[:batch, :rows, 1:]
        known = numbers.shape[-1] // 2
        if min(k, vocabulary) > known:
            return super()._search(k)
        return numbers[..., :known], numbers[..., known:].view(np.float32)


def _as_numpy(logits: torch.Tensor) -> Numbers:
    """Logits (R, V) in CPU memory in the form that ``top_of_rows`` accepts."""
    import torch

    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    return (logits.view(torch.int16) if logits.dtype == torch.bfloat16 else logits).numpy()


class HostLogits(Logits):
    """Logits (1, R, V) in CPU memory that torch did not compute; rows may come from several sequences.

    Args:
        rows: (R, V) float32, or int16 for the bits of bf16.
        peaks: the largest logit of each group of 32 tokens, (R, V / 32 rounded up) float32, if known.
        states: hidden states (R, hidden) float32, or int16 for the bits of bf16, if they were kept.
    """

    def __init__(self, rows: Numbers, peaks: Numbers | None = None, states: Numbers | None = None) -> None:
        self.rows = rows
        self.peaks = peaks
        self.states = states

    def row(self, b: int, r: int) -> torch.Tensor:
        """A copy of the row."""
        import torch

        row = torch.from_numpy(self.rows[r].copy())
        return row.view(torch.bfloat16) if self.rows.dtype == np.int16 else row

    def hidden(self, b: int, r: int) -> Numbers | None:
        """A copy of the state."""
        return None if self.states is None else as_float32(self.states[r].copy())

    def host(self, b: int, r: int) -> tuple[Numbers, Numbers | None] | None:
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

    def row(self, node: int) -> torch.Tensor:
        """Logits of shape (V,) on the model's device."""
        return self._batch.row(self._b, self._row_of(node))

    def hidden(self, node: int) -> Numbers | None:
        """The hidden state (hidden,) float32 under ``node``; None if the pass kept none."""
        return self._batch.hidden(self._b, self._row_of(node))

    def host(self, node: int) -> tuple[Numbers, Numbers | None] | None:
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
