"""The definition of the attention, with a mask. Other backends are tested against it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .bits import unpack_bits


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor | Sequence[int],
    words: torch.Tensor,
    depths: torch.Tensor,
    slots: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the package for arguments and shapes. Computes in the query's dtype."""
    _, heads, rows, size = query.shape
    scale = scale if scale is not None else size**-0.5
    group = heads // key.shape[1]
    seen_rows = unpack_bits(words)
    outputs = []
    for b, length in enumerate(map(int, lengths)):
        # The scores of all keys up to the step's last row.
        width = length + rows
        slot = b if slots is None else int(slots[b])
        keys = key[slot, :, :width].repeat_interleave(group, 0)  # (H, width, D)
        values = value[slot, :, :width].repeat_interleave(group, 0)
        scores = query[b] @ keys.transpose(1, 2) * scale  # (H, Q, width)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        # The mask: ancestors among the step's rows, and the window by position.
        at = length + depths[b].long()  # positions of the rows
        where = torch.cat([torch.arange(length, device=query.device), at])
        seen = torch.ones(rows, width, dtype=torch.bool, device=query.device)
        seen[:, length:] = seen_rows[b]
        if window:
            seen &= at[:, None] - where[None] < window
        scores = scores.masked_fill(~seen, float("-inf"))
        # A sink takes part in the softmax, but has no value.
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(-1, rows, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :width]
        outputs.append(weights @ values)
    return torch.stack(outputs)
