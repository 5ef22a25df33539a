"""The logits of one forward pass of a transformers model: tensors on its device, read by node."""

from __future__ import annotations

import numpy as np
import torch

from ..sampling.scores import Logits, Numbers
from ..sampling.top import top_of_rows
from .cuda import HostCopy

#: Best tokens per row in ``packed``: as many as drafters request.
PACKED_TOP = 8


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """For each row, the token with the largest logit, the lowest token among ties; -1 if a logit is NaN."""
    values, tokens = logits.max(dim=-1)
    return tokens.masked_fill(values.isnan(), -1)  # the maximum of numbers and NaN is NaN


class LogitsBatch(Logits):
    """Logits computed by torch. The argmaxes of all rows are copied to the host at once, as are the k best tokens of
    each row.

    Args:
        logits: (B, R, V).
        hidden: their hidden states (B, R, hidden), if they were kept.
        copy: the copy of ``packed(logits)`` on its way to the host, possibly with further rows and sequences.
    """

    def __init__(
        self, logits: torch.Tensor, hidden: torch.Tensor | None = None, copy: HostCopy | None = None
    ) -> None:
        self.logits = logits
        self._hidden = hidden
        self._copy = copy
        self._best: list[list[int]] | None = None

    def row(self, b: int, r: int) -> torch.Tensor:
        return self.logits[b, r]

    def host(self, b: int, r: int) -> tuple[Numbers, Numbers | None]:
        return self.logits[b, r].detach().float().contiguous().cpu().numpy(), None

    def argmax(self, b: int, r: int) -> int:
        if self._copy is not None:
            return int(self._copy.numpy()[b, r, 0])
        if self._best is None:
            self._best = best_tokens(self.logits).tolist()
        return self._best[b][r]

    def hidden(self, b: int, r: int) -> Numbers | None:
        return None if self._hidden is None else self._hidden[b, r].float().cpu().numpy()

    def _search(self, k: int) -> tuple[Numbers, Numbers]:
        logits = self.logits.detach()
        batch, rows, vocabulary = logits.shape
        k = min(k, vocabulary)
        if self._copy is not None and k <= PACKED_TOP:
            numbers = self._copy.numpy()[:batch, :rows, 1:]
            known = numbers.shape[-1] // 2
            return numbers[..., :known], numbers[..., known:].view(np.float32)
        if logits.device.type == "cpu":
            ids, odds = top_of_rows(_as_numpy(logits.reshape(batch * rows, vocabulary)), k)
            return ids.reshape(batch, rows, k), odds.reshape(batch, rows, k)
        values, tokens = logits.topk(k, dim=-1)
        # One copy for both. float32 represents integers exactly only up to 2 ** 24, so the ids are copied bit by bit.
        log_odds = values.float() - values[..., :1].float()
        both = torch.stack((tokens.int().view(torch.float32), log_odds)).cpu().numpy()
        return both[0].view(np.int32), both[1]


def packed(logits: torch.Tensor) -> torch.Tensor:
    """What the host reads for most rows, in one tensor: (B, R, 1 + 2k) int32 from logits (B, R, V).

    Each row has its ``best_tokens``, its k best tokens, and the bits of their float32 log-odds against the best one.
    """
    values, tokens = logits.topk(min(PACKED_TOP, logits.shape[-1]), dim=-1)
    log_odds = values.float() - values[..., :1].float()
    best = best_tokens(logits).int()[..., None]
    return torch.cat((best, tokens.int(), log_odds.view(torch.int32)), dim=-1)


def _as_numpy(logits: torch.Tensor) -> Numbers:
    """Logits (R, V) in CPU memory in the form that ``top_of_rows`` accepts."""
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    return (logits.view(torch.int16) if logits.dtype == torch.bfloat16 else logits).numpy()
