"""Prefix without a mask, tree part by its bits, merged by log-sum-exp; for every device.

    out = (e^l1 o1 + e^l2 o2) / (e^l1 + e^l2)        o, l: output and log-sum-exp of each part

Grouped heads become rows of one head, so the cache is read once. The prefix goes to torch's own flash kernel
where there is one with a log-sum-exp, else it is taken block by block. With a sliding window, keys that all
rows see go the same way, and the few at its edge, which only some rows see, join the tree part.

Lengths that lie on a device are not read back, because a captured graph must not wait for one. They are
honoured by a mask over the whole cache then: slower, and right wherever torch runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import check, unpack_bits

#: Keys per block where no flash kernel fits.
BLOCK = 1024


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor | Sequence[int],
    words: torch.Tensor,
    depths: torch.Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    read_lengths: bool | None = None,
) -> torch.Tensor:
    """See the package for arguments and shapes. One sequence after the other.

    Args:
        read_lengths: whether the lengths may be read on the host; None allows it where they lie there.
    """
    check(query, key, value, words)
    if read_lengths is None:
        read_lengths = not torch.is_tensor(lengths) or lengths.device.type == "cpu"
    if not read_lengths:
        return _whole_cache(
            query, key, value, lengths, words, depths,
            scale if scale is not None else query.shape[-1] ** -0.5, window, softcap, sinks,
        )  # fmt: skip
    _, heads, rows, size = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    scale = scale if scale is not None else size**-0.5
    ancestors = unpack_bits(words)
    outputs = []
    for b, length in enumerate(map(int, lengths)):
        folded = query[b].reshape(kv_heads, group * rows, size)  # all rows of a key head together
        keys, values = key[b], value[b]
        first, common = _visible_to_all(length, depths[b], window)
        # Tree part and the window's edge: columns common .. length - 1 of the prefix, then the rows.
        at = length + depths[b].long()
        where = torch.cat([torch.arange(first, common, device=query.device), at])
        seen = torch.ones(rows, len(where), dtype=torch.bool, device=query.device)
        seen[:, common - first :] = ancestors[b]
        if window:
            seen &= at[:, None] - where[None] < window
        columns = torch.cat([torch.arange(first, common), torch.arange(length, length + rows)]).to(
            query.device
        )
        out, total = _masked(
            folded, keys[:, columns], values[:, columns], seen.repeat(group, 1), scale, softcap
        )
        if common < length:
            part, part_total = _prefix(
                folded, keys[:, common:length], values[:, common:length], scale, softcap
            )
            out, total = _merge(out, total, part, part_total)
        if sinks is not None:
            sink = sinks.float().view(kv_heads, group, 1).expand(-1, -1, rows).reshape(kv_heads, -1)
            out = out * torch.sigmoid(total - sink)[..., None]
        outputs.append(out.view(heads, rows, -1).to(query.dtype))
    return torch.stack(outputs)


def _whole_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    words: torch.Tensor,
    depths: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """All columns of the cache, with a mask (B, Q, C) made on the device; nothing is read back."""
    batch, heads, rows, _ = query.shape
    kv_heads, group = key.shape[1], heads // key.shape[1]
    # A column's place among the step's rows; negative in the prefix, rows or more where nothing is yet.
    place = torch.arange(key.shape[2], device=query.device)[None] - lengths[:, None].long()  # (B, C)
    row = place.clamp(0, rows - 1)
    own = unpack_bits(words).gather(2, row[:, None].expand(-1, rows, -1))
    live = place < rows
    seen = (place < 0)[:, None] | (own & live[:, None])
    if window:
        at = torch.where(place < 0, place, depths.long().gather(1, row))
        seen &= depths[:, :, None] - at[:, None] < window
    folded = query.reshape(batch, kv_heads, group * rows, -1)
    scores = (folded @ key.transpose(2, 3)).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen.repeat(1, group, 1)[:, None], float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(1, kv_heads, group, 1).expand(batch, -1, -1, rows)
        scores = torch.cat([scores, extra.reshape(batch, kv_heads, -1, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    # What lies behind the rows is no number that anybody wrote, and 0 times NaN is NaN.
    out = weights @ value.masked_fill(~live[:, None, :, None], 0)
    return out.reshape(batch, heads, rows, -1)


def _visible_to_all(length: int, depths: torch.Tensor, window: int) -> tuple[int, int]:
    """(first prefix column that any row sees, first one that all rows see)."""
    if not window:
        return 0, 0
    first = max(0, length + int(depths.min()) - window + 1)
    common = max(0, length + int(depths.max()) - window + 1)
    return min(first, length), min(common, length)


def _masked(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (Hkv, R, Dv) and log-sum-exp (Hkv, R), both fp32; every row must see a key, or no mask."""
    scores = (query @ keys.transpose(1, 2)).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    total = scores.logsumexp(dim=-1)
    weights = (scores - total[..., None]).exp()
    return (weights.to(values.dtype) @ values).float(), total


def _prefix(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows over keys that every row sees."""
    if not softcap and query.shape[-1] == values.shape[-1]:
        flash = _flash(query, keys, values, scale)
        if flash is not None:
            return flash
    out: torch.Tensor | None = None
    total = query.new_zeros(())
    for start in range(0, keys.shape[1], BLOCK):
        piece = slice(start, start + BLOCK)
        part, part_total = _masked(query, keys[:, piece], values[:, piece], None, scale, softcap)
        out, total = (part, part_total) if out is None else _merge(out, total, part, part_total)
    assert out is not None
    return out, total


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """torch's flash kernel, or None where it has none for this device, dtype or version."""
    q, k, v = query[None], keys[None], values[None]
    aten = torch.ops.aten
    if query.device.type == "cpu":
        kernel = getattr(aten, "_scaled_dot_product_flash_attention_for_cpu", None)
        if kernel is None or query.dtype == torch.float64:
            return None
        out, total = kernel(q, k, v, 0.0, False, scale=scale)[:2]
    elif query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16):
        kernel = getattr(aten, "_scaled_dot_product_flash_attention", None)
        if kernel is None or query.shape[-1] % 8 or torch.cuda.get_device_capability(query.device)[0] < 8:
            return None
        out, total = kernel(q, k, v, 0.0, False, False, scale=scale)[:2]
    else:
        return None
    return out[0].float(), total[0, :, : query.shape[1]].float()


def _merge(
    a: torch.Tensor, a_total: torch.Tensor, b: torch.Tensor, b_total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two parts' outputs and log-sum-exps as those of the whole."""
    weight = torch.sigmoid(a_total - b_total)[..., None]
    return a * weight + b * (1 - weight), torch.logaddexp(a_total, b_total)
