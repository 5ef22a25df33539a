"""``hf.attention.exact`` in one kernel for NVIDIA GPUs. It divides the keys of a row at the same B(p).

A program evaluates one row and one key head, with the query heads of its group in a tile of fixed size, so its sums
do not depend on other rows. It processes the row's window first and then the keys before B(p), in blocks at absolute
positions. Everything that changes from step to step is read on the device, so one captured graph serves all lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .exact import DEPTH
from .triton import _absorb, _dots, blocks, has_small_memory


@triton.jit(do_not_specialize=["group", "window"])
def _rows(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    slots,
    positions,
    counts,
    columns,
    sinks,
    out,
    q_h,
    q_r,
    k_b,
    k_h,
    k_c,
    v_b,
    v_h,
    v_c,
    c_r,
    o_h,
    o_r,
    scale,
    softcap,
    window,
    group,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEEPEST: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attention of one row of the pass for the query heads of one key head. The grid is (R rows, key heads).

    Shapes, with the rows of all sequences in one axis:

        query      (1, heads, R, D); strides q_h, q_r
        key        (S slots, key heads, C columns, D), value with DV; strides k_b, k_h, k_c and v_b, v_h, v_c
        slots, positions, counts
                   (R,): the row's slot, its position p, and its number of keys from B(p) on
        columns    (R, DEEPEST + 1), stride c_r: the columns of those keys
        sinks      (heads,); out (1, heads, R, DV), with the strides o_h, o_r
    """
    # This program's row and key head, and the row's sequence, position and number of keys from B(p) on.
    row, h = tl.program_id(0), tl.program_id(1)
    slot, position, count = tl.load(slots + row), tl.load(positions + row), tl.load(counts + row)
    begin = tl.maximum(position - DEEPEST, 0)
    member = tl.arange(0, BLOCK_M)
    live = member < group
    head = h * group + member
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    # The queries of the row's group, and the cache of its sequence and head.
    q_at = query + head[:, None] * q_h + row * q_r + d[None, :]
    q = tl.load(q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    key += slot.to(tl.int64) * k_b + h.to(tl.int64) * k_h
    value += slot.to(tl.int64) * v_b + h.to(tl.int64) * v_h
    # The state of the online softmax.
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    # The window: keys from B(p) on, at the columns of the row's path.
    place = tl.arange(0, DEEPEST + 1)
    inside = place < count
    own = tl.load(columns + row * c_r + place, mask=inside, other=0)
    known = inside[None, :] & live[:, None]
    if WINDOW:
        known = known & (position - begin - place < window)[None, :]
    best, total, acc = _absorb(
        q,
        key,
        value,
        own,
        inside,
        known,
        best,
        total,
        acc,
        d,
        dv,
        k_c,
        v_c,
        scale,
        softcap,
        D,
        DV,
        SOFTCAP,
        PRECISION,
        UPCAST,
    )
    # The keys before B(p).
    first = begin * 0
    if WINDOW:  # skip whole blocks that the row does not see, which would have no effect
        first = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
    for start in range(first, begin, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        here = column < begin
        seen = here[None, :] & live[:, None]
        if WINDOW:
            seen = seen & (position - column < window)[None, :]
        best, total, acc = _absorb(
            q,
            key,
            value,
            column,
            here,
            seen,
            best,
            total,
            acc,
            d,
            dv,
            k_c,
            v_c,
            scale,
            softcap,
            D,
            DV,
            SOFTCAP,
            PRECISION,
            UPCAST,
        )
    # A sink adds to the sum of weights, but has no value.
    if SINKS:
        sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(best, sink)
        total, acc = total * tl.exp2(best - new) + tl.exp2(sink - new), acc * tl.exp2(best - new)[:, None]
    # Normalize and store the live heads.
    total = tl.where(live, total, 1.0)
    at = out + head[:, None] * o_h + row * o_r + dv[None, :]
    tl.store(at, (acc / total[:, None]).to(out.dtype.element_ty), mask=live[:, None] & (dv < DV)[None, :])


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    counts: torch.Tensor,
    columns: torch.Tensor,
    pages: Sequence[tuple[int, int]],
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``hf.attention.exact.attend``; ``pages`` is not used, because the kernel reads the positions.

    Raises:
        TypeError: a dtype or a number of query heads that the kernel does not support.
    """
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"the kernel takes float16, bfloat16 and float32, got {query.dtype}")
    # Shapes. The kernel needs a contiguous last dimension.
    _, heads, rows, size = query.shape
    kv_heads = key.shape[1]
    value_size = value.shape[-1]
    group = heads // kv_heads
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    out = query.new_empty(1, heads, rows, value_size)
    block = blocks(group, size, value_size, query.element_size(), has_small_memory(query.device))
    if group > block["BLOCK_M"]:
        raise TypeError(
            f"the kernel takes at most {block['BLOCK_M']} query heads per key head here, got {group}"
        )
    # One program per row and key head. The arguments are tensors, strides, scalars, and constants of the kernel.
    _rows[(rows, kv_heads)](
        query,
        key,
        value,
        slots.contiguous(),
        positions.contiguous(),
        counts.contiguous(),
        columns,
        sinks if sinks is not None else out,
        out,
        *query.stride()[1:3],
        *key.stride()[:3],
        *value.stride()[:3],
        columns.stride(0),
        *out.stride()[1:3],
        scale if scale is not None else size**-0.5,
        softcap,
        window,
        group,
        D=size,
        DV=value_size,
        BLOCK_D=_dots(size),
        BLOCK_DV=_dots(value_size),
        DEEPEST=DEPTH,
        WINDOW=window > 0,
        SOFTCAP=softcap > 0,
        SINKS=sinks is not None,
        enable_fp_fusion=True,
        **block,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        # The interpreter multiplies the bits of bfloat16 as if they were integers.
        UPCAST=query.dtype == torch.bfloat16 and not isinstance(_rows, triton.JITFunction),
    )
    return out
