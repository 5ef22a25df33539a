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


class TensorLogits(Logits):
    """Logits computed by torch, on the model's device. The argmaxes of all rows are copied to the host at once,
    and so are the best tokens of each.

    Args:
        logits: (B, R, V), whose B x R rows lie one after another.
        hidden: their hidden states (B, R, hidden), if they were kept.
        copy: the copy of ``packed(logits)`` on its way to the host, possibly with further rows and sequences.
    """

    def __init__(
        self, logits: torch.Tensor, hidden: torch.Tensor | None = None, copy: HostCopy | None = None
    ) -> None:
        self.logits = logits.flatten(0, 1)
        self._hidden = None if hidden is None else hidden.flatten(0, 1)
        self._copy = copy
        self._shape = logits.shape[:2]
        self._best: list[int] | None = None
        self._top = None

    def row(self, r: int) -> torch.Tensor:
        return self.logits[r]

    def host(self, r: int) -> tuple[Numbers, Numbers | None]:
        return self.logits[r].detach().float().contiguous().cpu().numpy(), None

    def hidden(self, r: int) -> Numbers | None:
        return None if self._hidden is None else self._hidden[r].float().cpu().numpy()

    def argmax(self, r: int) -> int:
        if self._best is None:
            self._best = (
                best_tokens(self.logits).tolist() if self._copy is None else self._copied()[:, 0].tolist()
            )
        return self._best[r]

    def _copied(self) -> Numbers:
        """``packed`` of the rows, (R, 1 + 2k)."""
        assert self._copy is not None
        batch, rows = self._shape
        numbers: Numbers = self._copy.numpy()[:batch, :rows]
        return numbers.reshape(batch * rows, -1)

    def _search(self, k: int) -> tuple[Numbers, Numbers]:
        logits = self.logits.detach()
        k = min(k, logits.shape[-1])
        if self._copy is not None and k <= PACKED_TOP:
            numbers = self._copied()[:, 1:]
            known = numbers.shape[-1] // 2
            return numbers[:, :known], numbers[:, known:].view(np.float32)
        if logits.device.type == "cpu":
            return top_of_rows(_as_numpy(logits), k)
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
