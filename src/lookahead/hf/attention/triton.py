"""The kernel for NVIDIA GPUs: flash decoding (Dao et al., 2023) over a token tree.

There are two launches. The first has one program per (part of the context, tile of rows, key head of a sequence).
All query rows of a key head are in one tile if they fit (groups times rows up to ``BLOCK_M``), so the cache is read
once. Parts 0 .. P - 1 are consecutive ranges of the committed prefix and need no mask; part P is the tree itself,
with one word of ancestor bits per query row and 32 columns, kept in registers. The second launch merges the parts by
log-sum-exp and adds the sinks.

Lengths and bits are read on the device, so one captured graph serves all lengths of a capacity: the grid fixes the
number of parts, and each program computes its own range from the length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from .bits import check


@triton.jit
def _absorb(  # type: ignore[no-untyped-def]
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
    D: tl.constexpr,
    DV: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add one block of keys to the running softmax. Scores are multiplied by log2(e), so their exp2 is exp of the
    model's scores."""
    column = column.to(tl.int64)
    k = tl.load(key + column[None, :] * k_c + d[:, None], mask=here[None, :] & (d < D)[:, None], other=0.0)
    v = tl.load(
        value + column[:, None] * v_c + dv[None, :], mask=here[:, None] & (dv < DV)[None, :], other=0.0
    )
    if UPCAST:
        k, v = k.to(tl.float32), v.to(tl.float32)
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if SOFTCAP:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
    new = tl.maximum(best, tl.max(scores, 1))
    # A row that has seen nothing yet has the maximum -inf. Any finite number may replace it, because the weights are
    # 0.
    at = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - at[:, None])
    shrink = tl.exp2(best - at)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new, total, acc


# Arguments that change with the rows of a step or the capacity of a cache are not specialized, so that kernels are
# not compiled for every bucket of rows.
_CHANGES = ["window", "parts", "kv_heads", "group", "rows", "width"]


@triton.jit(do_not_specialize=_CHANGES)
def _parts(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    lengths,
    words,
    depths,
    slots,
    partial,
    totals,
    q_b,
    q_h,
    q_r,
    k_b,
    k_h,
    k_c,
    v_b,
    v_h,
    v_c,
    scale,
    softcap,
    window,
    parts,
    kv_heads,
    group,
    rows,
    width,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The first launch: one part's output for one tile of rows, and the base-2 logarithm of its sum of weights.

    The grid is (P + 1 parts, tiles, B sequences times key heads). Shapes, with G query heads per key head and R rows:

        query     (B, heads, R, D); strides q_b, q_h, q_r
        key       (S slots, key heads, C columns, D), value with DV; strides k_b, k_h, k_c and v_b, v_h, v_c
        lengths   (B,) committed tokens; slots (B,); depths (B, R)
        words     (B, R, width) ancestor bits, 32 columns per word
        partial   (B * key heads, P + 1, G * R, DV), out: normalized outputs; not written for rows that saw no key
        totals    (B * key heads, P + 1, G * R), out: log2 of the sum of exp2(score); -inf for rows that saw no key
    """
    # This program's part of the columns, tile of rows, and pair of sequence and key head.
    part, tile, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = pair // kv_heads, pair % kv_heads
    length = tl.load(lengths + b)
    member = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # rows of all heads of the group, head by head
    live = member < group * rows
    head, row = member // rows, member % rows
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    # The tile's queries and depths, and the cache of this sequence and head.
    q_at = query + b * q_b + (h * group + head)[:, None] * q_h + row[:, None] * q_r + d[None, :]
    q = tl.load(q_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    depth = tl.load(depths + b * rows + row, mask=live, other=0)
    slot = tl.load(slots + b).to(tl.int64)
    key += slot * k_b + h.to(tl.int64) * k_h
    value += slot * v_b + h.to(tl.int64) * v_h
    # The state of the online softmax.
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    # The first programs each process a range of the prefix, the last one the tree.
    if part < parts:
        chunk = tl.cdiv(tl.cdiv(length, parts), BLOCK_N) * BLOCK_N
        start = part * chunk
        end = tl.minimum(start + chunk, length)
        if WINDOW:
            start = tl.maximum(start, length - window + 1)
        for first in range(start, end, BLOCK_N):
            column = first + tl.arange(0, BLOCK_N)
            here = column < end
            seen = here[None, :] & live[:, None]
            if WINDOW:
                seen = seen & (length + depth[:, None] - column[None, :] < window)
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
    else:
        for word in range(0, width):
            bits = tl.load(words + (b * rows + row) * width + word, mask=live, other=0)
            bit = tl.arange(0, 32)
            other = word * 32 + bit
            here = other < rows
            column = length + other
            seen = (((bits[:, None] >> bit[None, :]) & 1) != 0) & here[None, :]
            if WINDOW:
                depth_there = tl.load(depths + b * rows + other, mask=here, other=0)
                seen = seen & (depth[:, None] - depth_there[None, :] < window)
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
    # If a row saw nothing in this part, only its maximum, -inf, is written; ``_merge`` recognizes it.
    saw = live & (best > float("-inf"))
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc / total[:, None]
    place = (pair * (parts + 1) + part) * group * rows + member
    tl.store(totals + place, best + tl.log2(total), mask=live)
    tl.store(
        partial + place.to(tl.int64)[:, None] * DV + dv[None, :], acc, mask=saw[:, None] & (dv < DV)[None, :]
    )


@triton.jit(do_not_specialize=["parts", "kv_heads", "group", "rows"])
def _merge(  # type: ignore[no-untyped-def]
    partial,
    totals,
    sinks,
    out,
    parts,
    kv_heads,
    group,
    rows,
    o_b,
    o_h,
    o_r,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SINKS: tl.constexpr,
):
    """The second launch: merge the parts of one row and query head by log-sum-exp, and add the sinks.

    The grid is (G * R, B sequences times key heads). ``partial`` and ``totals`` are those of ``_parts`` for all
    ``parts``, the tree included; sinks (heads,); out (B, heads, R, DV), with the strides o_b, o_h, o_r.
    """
    member, pair = tl.program_id(0), tl.program_id(1)
    b, h = pair // kv_heads, pair % kv_heads
    head, row = h * group + member // rows, member % rows
    dv = tl.arange(0, BLOCK_DV)
    best, whole, acc = float("-inf"), 0.0, tl.zeros((BLOCK_DV,), tl.float32)
    # Merge in blocks, so that the kernel does not depend on the number of parts, which changes with capacity and
    # batch.
    for first in range(0, parts, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        place = (pair * parts + part) * group * rows + member
        totals_here = tl.load(totals + place, mask=part < parts, other=float("-inf"))
        new = tl.maximum(best, tl.max(totals_here, 0))
        at_most = tl.where(new == float("-inf"), 0.0, new)
        weights, shrink = tl.exp2(totals_here - at_most), tl.exp2(best - at_most)
        # Parts that saw nothing were not written. Their weight is 0, but 0 times garbage may be NaN.
        mask = (totals_here > float("-inf"))[:, None] & (dv < DV)[None, :]
        values = tl.load(partial + place.to(tl.int64)[:, None] * DV + dv[None, :], mask=mask, other=0.0)
        whole = whole * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        best = new
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(best, sink)
        whole = whole * tl.exp2(best - new) + tl.exp2(sink - new)
        acc = acc * tl.exp2(best - new)
    at = out + b * o_b + head * o_h + row * o_r + dv
    tl.store(at, (acc / whole).to(out.dtype.element_ty), mask=dv < DV)


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
    tuning: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """See the package for arguments and shapes. Lengths on the device are not read back.

    Args:
        tuning: tile sizes that override ``blocks``, and "parts", which overrides ``split``.

    Raises:
        SettingsError: the shapes do not match, or a head is too large.
        TypeError: a dtype that the kernel does not support.
    """
    check(query, key, value, words)
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"the kernel takes float16, bfloat16 and float32, got {query.dtype}")
    device = query.device
    batch, heads, rows, size = query.shape
    value_size = value.shape[-1]
    kv_heads, columns = key.shape[1], key.shape[2]
    group = heads // kv_heads
    pairs = batch * kv_heads
    # Tiles and parts.
    block = blocks(group * rows, size, value_size, query.element_size(), has_small_memory(device))
    block |= dict(tuning or {})
    tiles = triton.cdiv(group * rows, block["BLOCK_M"])
    processors = torch.cuda.get_device_properties(device).multi_processor_count if query.is_cuda else 8
    wanted = split(columns - rows, pairs * tiles, block["BLOCK_N"], processors)
    parts = block.pop("parts", wanted)
    scale = scale if scale is not None else size**-0.5
    # Only the last axis must be contiguous.
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    words, depths = (t.to(device, torch.int32).contiguous() for t in (words, depths))
    lengths = torch.as_tensor(lengths, dtype=torch.int32, device=device)
    slots = torch.arange(batch, dtype=torch.int32, device=device) if slots is None else slots
    # Every part's output and base-2 log-sum-exp.
    partial = _empty((pairs, parts + 1, group * rows, value_size), dtype=torch.float32, device=device)
    totals = _empty((pairs, parts + 1, group * rows), dtype=torch.float32, device=device)
    out = _empty((batch, heads, rows, value_size), dtype=query.dtype, device=device)
    values = {"DV": value_size, "BLOCK_DV": _dots(value_size), "enable_fp_fusion": True}
    # The two launches.
    _parts[(parts + 1, tiles, pairs)](
        query,
        key,
        value,
        lengths,
        words,
        depths,
        slots,
        partial,
        totals,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        scale,
        softcap,
        window,
        parts,
        kv_heads,
        group,
        rows,
        words.shape[2],
        D=size,
        BLOCK_D=_dots(size),
        **values,
        **block,
        WINDOW=window > 0,
        SOFTCAP=softcap > 0,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        # The interpreter multiplies the bits of bfloat16 as if they were integers.
        UPCAST=query.dtype == torch.bfloat16 and not isinstance(_parts, triton.JITFunction),
    )
    _merge[(group * rows, pairs)](
        partial,
        totals,
        sinks if sinks is not None else totals,
        out,
        parts + 1,
        kv_heads,
        group,
        rows,
        *out.stride()[:3],
        **values,
        BLOCK_P=MERGED,
        SINKS=sinks is not None,
    )
    return out


#: Parts merged at a time.
MERGED = 16


def blocks(
    members: int, size: int, value_size: int, item_bytes: int, small_memory: bool = False
) -> dict[str, Any]:
    """Tile sizes: rows per tile, keys per block, warps and stages.

    Args:
        members: groups times rows.
        size, value_size, item_bytes: head sizes, and bytes per number.
        small_memory: whether a program has only 64 KB of shared memory.
    """
    wide = max(size, value_size) > 128
    full = item_bytes == 4
    most = 128 >> (wide + full + small_memory)
    block_m = max(16, min(most, triton.next_power_of_2(members)))
    block_n = 32 if wide or full or small_memory else 64
    # Keys and values of every stage are in shared memory; an A100 has 163 KB of it per program.
    stages = 3 if not full else 1 if wide else 2
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": 8 if block_m == 128 else 4,
        "num_stages": stages - (stages == 3 and small_memory),
    }


def has_small_memory(device: torch.device) -> bool:
    """Whether a program on the device has only 64 KB of shared memory: before compute capability 8.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


def split(longest: int, programs: int, block_n: int, processors: int) -> int:
    """The number of parts of a prefix: about two programs per processor, and at least 4 blocks per part for the
    longest prefix."""
    wanted = max(1, 2 * processors // max(1, programs))
    return max(1, min(wanted, int(triton.cdiv(max(1, longest), 4 * block_n)), 64))


def _dots(size: int) -> int:
    """A head size padded to a power of two, at least 16; the padding is never loaded."""
    return max(16, int(triton.next_power_of_2(size)))


#: Allocates outputs; tests fill them with NaN first.
_empty = torch.empty
