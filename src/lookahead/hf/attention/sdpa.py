"""Attention with one mask over all given columns, computed from lengths and ancestor bits on any device.

Nothing is read on the host, because a captured graph cannot wait for it. Lengths affect only the mask, so the cost
depends on the number of columns given by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .bits import check, unpack_bits


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
    """See the package for arguments and shapes.

    Raises:
        SettingsError: the shapes do not match, or a head is too large.
    """
    check(query, key, value, words)
    if slots is not None:
        index = slots.long()
        key, value = key[index], value[index]
    batch, heads, rows, size = query.shape
    kv_heads = key.shape[1]
    group = heads // key.shape[1]
    # The mask, from each column's index among the step's rows: negative in the prefix, Q or more after the rows.
    lengths = torch.as_tensor(lengths, device=query.device).long()
    index = torch.arange(key.shape[2], device=query.device)[None] - lengths[:, None]  # (B, C)
    row = index.clamp(0, rows - 1)
    own = unpack_bits(words).gather(2, row[:, None].expand(-1, rows, -1))
    live = index < rows
    seen = (index < 0)[:, None] | (own & live[:, None])
    if window:
        depth = torch.where(index < 0, index, depths.long().gather(1, row))
        seen &= depths[:, :, None] - depth[:, None] < window
    # Grouped heads become rows of one head, so the cache is read once.
    folded = query.reshape(batch, kv_heads, group * rows, size)
    scores = (folded @ key.transpose(2, 3)).float() * (scale if scale is not None else size**-0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen.repeat(1, group, 1)[:, None], float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(1, kv_heads, group, 1).expand(batch, -1, -1, rows)
        scores = torch.cat([scores, extra.reshape(batch, kv_heads, -1, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value).reshape(batch, heads, rows, -1)
