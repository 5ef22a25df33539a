"""The prefix by torch's stock flash kernel, the tree part by ours, joined by their log-sum-exps.

The stock kernel reads the live length on the device, so this can be captured too. It knows neither soft-capping
nor a window that moves with a row's depth; there, and in dtypes it does not take, the triton kernel does both
parts. Which of the two is faster is for a GPU to say: `make gpu-check` times them side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from . import check
from . import triton as kernel


@triton.jit(do_not_specialize=["kv_heads", "group", "rows"])
def _join(
    prefix, prefix_total, tree, tree_total, sinks, out, kv_heads, group, rows, p_h, p_r, o_b, o_h, o_r, t_b, t_h,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    member, pair = tl.program_id(0), tl.program_id(1)
    b, h = pair // kv_heads, pair % kv_heads
    head, row = h * group + member // rows, member % rows
    dv = tl.arange(0, BLOCK_DV)
    here = dv < DV
    low = tl.load(prefix_total + b * t_b + h * t_h + member).to(tl.float32) * 1.4426950408889634
    # An empty prefix has no weight; the stock kernel gives it a log-sum-exp of plus infinity.
    low = tl.where(low == float("inf"), float("-inf"), low)
    place = pair * group * rows + member
    own = tl.load(tree_total + place)
    best = tl.maximum(low, own)  # a row sees itself, so its own part is finite
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        best = tl.maximum(best, sink)
    first, second = tl.exp2(low - best), tl.exp2(own - best)
    whole = first + second
    if SINKS:
        whole += tl.exp2(sink - best)
    a = tl.load(prefix + (b * kv_heads + h) * p_h + member * p_r + dv, mask=here, other=0.0)
    c = tl.load(tree + place.to(tl.int64) * DV + dv, mask=here, other=0.0)
    a = tl.where(first > 0.0, a.to(tl.float32) * first, 0.0)
    result = (a + c * second) / whole
    tl.store(out + b * o_b + head * o_h + row * o_r + dv, result.to(out.dtype.element_ty), mask=here)


def fits(query: torch.Tensor, value: torch.Tensor, window: int, softcap: float) -> bool:
    """Whether the stock kernel computes this prefix."""
    size = query.shape[-1]
    if window or softcap or size != value.shape[-1] or size % 8:
        return False
    if query.device.type == "cpu":
        return query.dtype != torch.float64
    capability = torch.cuda.get_device_capability(query.device)
    return query.dtype in (torch.float16, torch.bfloat16) and capability[0] >= 8


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
) -> torch.Tensor:
    """See the package for arguments and shapes."""
    check(query, key, value, words)
    if not fits(query, value, window, softcap):
        return kernel.attend(
            query, key, value, lengths, words, depths,
            scale=scale, window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
    batch, heads, rows, size = query.shape
    kv_heads, group = key.shape[1], heads // key.shape[1]
    scale = scale if scale is not None else size**-0.5
    lengths = torch.as_tensor(lengths, dtype=torch.int32, device=query.device)
    tree, tree_total = kernel.tree_part(query, key, value, lengths, words, depths, scale)
    folded = query.reshape(batch, kv_heads, group * rows, size)
    parts = [_prefix(folded[b], key[b], value[b], lengths[b : b + 1], scale) for b in range(batch)]
    prefix, total = (torch.stack(x) if batch > 1 else x[0][None] for x in zip(*parts, strict=True))
    out = kernel._empty((batch, heads, rows, size), query.dtype, query.device)
    _join[(group * rows, batch * kv_heads)](
        prefix, total, tree, tree_total, sinks if sinks is not None else total, out, kv_heads, group, rows,
        prefix.stride(1), prefix.stride(2), *out.stride()[:3], *total.stride()[:2],
        DV=size, BLOCK_DV=kernel._dots(size), SINKS=sinks is not None,
    )  # fmt: skip
    return out


def _prefix(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (Hkv, R, D) and log-sum-exp (Hkv, R) of one sequence; the length (1,) int32 is on the device."""
    rows, columns = query.shape[1], key.shape[1]
    aten: Any = torch.ops.aten
    if query.device.type == "cpu":
        live = int(length)
        if not live:  # as the stock kernel on a GPU has it
            return torch.zeros_like(query), query.new_full(query.shape[:2], torch.inf, dtype=torch.float32)
        out, total = aten._scaled_dot_product_flash_attention_for_cpu(
            query[None], key[None, :, :live], value[None, :, :live], 0.0, False, scale=scale
        )[:2]
        return out[0].contiguous(), total[0].contiguous()
    ends = torch.nn.functional.pad(length, (1, 0))  # 0, T
    all_rows = torch.arange(0, rows + 1, rows, dtype=torch.int32, device=query.device)  # 0, R
    out, total = aten._flash_attention_forward(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1),
        all_rows, ends, rows, columns, 0.0, False, False, scale=scale,
    )[:2]  # fmt: skip
    # (R, Hkv, D), and (Hkv, R) or in older versions (1, Hkv, R rounded up).
    return out.transpose(0, 1).contiguous(), total.reshape(query.shape[0], -1)[:, :rows].contiguous()
