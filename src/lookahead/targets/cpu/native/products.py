"""Products of rows with packed weights, and what is done with each block of results while it is in the cache.

Weights lie in groups of 32 outputs, each group one stream of memory (``packing.py``). ``block`` computes up to 32
rows of one group; every result is one chain of sums over the inner size, in an order that depends on neither the
number of rows nor a row's place among them. So a row has the same bits in any step.

One pass over a matrix tile costs about as much for 16 rows as for one, and less than its kilobyte takes to come from
memory: up to 32 rows run at nearly the memory's speed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import overload, register_jitable

from .finish import GROUP, VECTORS, add_sums, gate_sums, score_sums, store_sums
from .intrinsics import (
    F32,
    I8,
    I16,
    I32,
    ON_TILES,
    VECTOR,
    VOID,
    at,
    bytes_of,
    call,
    const,
    emitted,
    input_tag,
    load_single,
    load_vector,
    multiply_add,
    pointer,
    spread,
    store_vector,
    zeros,
)
from .machine import LANES, REGISTERS

#: Bytes of the scales before a group of bytes.
SCALES = 4 * GROUP
#: Rows whose sums fit the register file.
MOST_ROWS = {(16, 32): 8, (8, 16): 2, (4, 32): 2}.get((LANES, REGISTERS), 1)


#: Lines of each of the next group's panels that are asked for before a block is finished.
NEXT = 16


def tile(number: int) -> ir.Constant:
    """The name of a tile register."""
    return ir.Constant(I8, number)


def load_tile(builder: Any, number: int, address: Any, stride: Any) -> None:
    """Up to 16 rows of 64 bytes."""
    call(builder, "llvm.x86.tileloadd64", VOID, [tile(number), at(builder, address), stride])


def prefetch(builder: Any, address: Any, distance: int, lines: int) -> None:
    """Ask for some cache lines at a distance, into the second level."""
    for line in range(lines):
        ahead = at(builder, builder.add(address, const(distance + 64 * line)))
        call(builder, "llvm.prefetch.p0", VOID, [ahead, *(ir.Constant(I32, n) for n in (0, 2, 1))])


def _tiles(row_tiles: int, from_bytes: bool) -> Any:
    """16 rows per row tile by 32 outputs. Tiles 0-3 hold sums, 4-5 rows, 6-7 weights.

    Weights as bytes follow 32 scales; they are widened to bf16, which holds them exactly, behind the sums.
    """
    size = 512 if from_bytes else 1024

    def emit(builder: Any, weights: Any, rows: Any, stride: Any, steps: Any, out: Any) -> None:
        for number in range(2 * row_tiles):
            call(builder, "llvm.x86.tilezero", VOID, [tile(number)])
        second = builder.add(rows, builder.mul(stride, const(16)))
        panel_bytes = builder.mul(steps, const(size))
        begin = builder.add(weights, const(SCALES)) if from_bytes else weights
        with cgutils.for_range(builder, steps) as loop:
            here = builder.add(begin, builder.mul(loop.index, const(size)))
            panels = [here, builder.add(here, panel_bytes)]
            # The processor's own prefetching stops at pages; a few lines of the next one start it early.
            for panel in panels:
                prefetch(builder, panel, 4096, 4)
            if from_bytes:
                panels = [_widened(builder, panel, out, n) for n, panel in enumerate(panels)]
            column = builder.mul(loop.index, const(64))
            load_tile(builder, 4, builder.add(rows, column), stride)
            if row_tiles == 2:
                load_tile(builder, 5, builder.add(second, column), stride)
            for number, panel in enumerate(panels, 6):
                load_tile(builder, number, panel, const(64))
            for row in range(row_tiles):
                for n in range(2):
                    numbers = (2 * row + n, 4 + row, 6 + n)
                    call(builder, "llvm.x86.tdpbf16ps", VOID, [tile(n) for n in numbers])
        following = builder.add(begin, builder.mul(panel_bytes, const(2)))
        for panel in (following, builder.add(following, panel_bytes)):
            prefetch(builder, panel, 0, NEXT)
        for row in range(row_tiles):
            for n in range(2):
                place = at(builder, builder.add(out, const(row * 16 * 4 * GROUP + n * 64)))
                call(builder, "llvm.x86.tilestored64", VOID, [tile(2 * row + n), place, const(4 * GROUP)])
        if from_bytes:
            _scale(builder, weights, out, 16 * row_tiles)

    return emitted(emit, 5)


def _widened(builder: Any, weights: Any, out: Any, number: int) -> Any:
    """A tile of bytes as a tile of bf16, behind the block of sums."""
    narrow_row, wide_row = ir.VectorType(I8, 32), ir.VectorType(F32, 32)
    integers, halves = ir.VectorType(I32, 32), ir.VectorType(I16, 32)
    shifts = ir.Constant(integers, [ir.Constant(I32, 16)] * 32)
    spare = builder.add(out, const(4 * 32 * GROUP + 1024 * number))
    for row in range(16):
        bits = builder.load(at(builder, builder.add(weights, const(32 * row)), narrow_row))
        bits.align = 1
        value = builder.bitcast(builder.sitofp(bits, wide_row), integers)
        half = builder.trunc(builder.lshr(value, shifts), halves)
        builder.store(half, at(builder, builder.add(spare, const(64 * row)), halves)).align = 2
    return spare


def _scale(builder: Any, scales: Any, out: Any, rows: int) -> None:
    parts = [load_vector(builder, builder.add(scales, const(4 * LANES * v)), False) for v in range(VECTORS)]
    with cgutils.for_range(builder, const(rows)) as loop:
        line = builder.add(out, builder.mul(loop.index, const(4 * GROUP)))
        for v, part in enumerate(parts):
            place = builder.add(line, const(4 * LANES * v))
            store_vector(builder, builder.fmul(load_vector(builder, place, False), part), place)


def _vectors(rows_at_once: int, narrow_weights: bool) -> Any:
    """Some rows (fp32) by 32 outputs, one inner number after the other."""

    def emit(builder: Any, weights: Any, rows: Any, stride: Any, inner: Any, out: Any) -> None:
        sums = [
            [cgutils.alloca_once_value(builder, zeros()) for _ in range(VECTORS)] for _ in range(rows_at_once)
        ]
        size = 2 if narrow_weights else 4
        with cgutils.for_range(builder, inner) as loop:
            here = builder.add(weights, builder.mul(loop.index, const(size * GROUP)))
            prefetch(builder, here, 4096, 1)
            parts = [
                load_vector(builder, builder.add(here, const(v * LANES * size)), narrow_weights)
                for v in range(VECTORS)
            ]
            for r in range(rows_at_once):
                place = builder.add(rows, builder.mul(stride, const(r)))
                place = builder.add(place, builder.mul(loop.index, const(4)))
                factor = spread(builder, load_single(builder, place, False))
                for v in range(VECTORS):
                    total = multiply_add(builder, parts[v], factor, builder.load(sums[r][v]))
                    builder.store(total, sums[r][v])
        for r in range(rows_at_once):
            for v in range(VECTORS):
                place = builder.add(out, const(4 * (r * GROUP + v * LANES)))
                store_vector(builder, builder.load(sums[r][v]), place)

    return emitted(emit, 5)


class _Brain(ir.types.Type):
    """LLVM's bfloat, which llvmlite does not know by name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self))

    def __hash__(self) -> int:
        return hash(type(self))


BRAINS = ir.VectorType(_Brain(), 32)


def _pairs(rows_at_once: int) -> Any:
    """Some rows (bf16) by 32 outputs, two inner numbers after two."""
    wide = ir.VectorType(I32, 16)

    def emit(builder: Any, weights: Any, rows: Any, stride: Any, steps: Any, out: Any) -> None:
        def dot(a: Any, b: Any, total: Any) -> Any:
            a, b = (builder.bitcast(x, BRAINS) for x in (a, b))
            return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, [total, a, b])

        sums = [[cgutils.alloca_once_value(builder, zeros()) for _ in range(2)] for _ in range(rows_at_once)]
        with cgutils.for_range(builder, steps) as loop:
            here = builder.add(weights, builder.mul(loop.index, const(128)))
            parts = []
            for v in range(2):
                part = builder.load(at(builder, builder.add(here, const(64 * v)), wide))
                part.align = 4
                parts.append(part)
            for r in range(rows_at_once):
                place = builder.add(rows, builder.mul(stride, const(r)))
                place = builder.add(place, builder.mul(loop.index, const(4)))
                pair = builder.load(at(builder, place, I32))
                pair.align = 4
                factor = spread(builder, pair)
                for v in range(2):
                    builder.store(dot(factor, parts[v], builder.load(sums[r][v])), sums[r][v])
        for r in range(rows_at_once):
            for v in range(2):
                store_vector(
                    builder, builder.load(sums[r][v]), builder.add(out, const(4 * (r * GROUP + v * 16)))
                )

    return emitted(emit, 5)


tiles_1, tiles_2 = _tiles(1, False), _tiles(2, False)
bytes_1, bytes_2 = _tiles(1, True), _tiles(2, True)
pairs_1, pairs_2, pairs_4, pairs_8 = (_pairs(n) for n in (1, 2, 4, 8))
wide_1, wide_2, wide_4, wide_8 = (_vectors(n, False) for n in (1, 2, 4, 8))
bits_1, bits_2, bits_4, bits_8 = (_vectors(n, True) for n in (1, 2, 4, 8))


def block(
    weights: int, rows: int, stride: int, steps: int, count: int, out: int, kind: Any, tag: Any
) -> None:
    raise NotImplementedError("compiled code only")


@overload(block)
def _block_code(weights, rows, stride, steps, count, out, kind, tag):  # type: ignore[no-untyped-def]
    """Sums (count, 32) fp32 of up to 32 rows with one group. ``steps`` counts tiles, pairs or numbers."""
    if kind in ON_TILES:
        few, many = (bytes_1, bytes_2) if kind == types.uint8 else (tiles_1, tiles_2)

        def tiles(weights, rows, stride, steps, count, out, kind, tag):  # type: ignore[no-untyped-def]
            if count > 16:
                many(weights, rows, stride, steps, out)
            else:
                few(weights, rows, stride, steps, out)

        return tiles
    if kind == types.int16:
        one, two, four, eight = pairs_1, pairs_2, pairs_4, pairs_8
    elif tag == types.uint16:
        one, two, four, eight = bits_1, bits_2, bits_4, bits_8
    else:
        one, two, four, eight = wide_1, wide_2, wide_4, wide_8
    line = 4 * GROUP

    def rows_by_rows(weights, rows, stride, steps, count, out, kind, tag):  # type: ignore[no-untyped-def]
        r = 0
        while MOST_ROWS >= 8 and count - r >= 8:
            eight(weights, rows + r * stride, stride, steps, out + r * line)
            r += 8
        while MOST_ROWS >= 4 and count - r >= 4:
            four(weights, rows + r * stride, stride, steps, out + r * line)
            r += 4
        while MOST_ROWS >= 2 and count - r >= 2:
            two(weights, rows + r * stride, stride, steps, out + r * line)
            r += 2
        while count - r >= 1:
            one(weights, rows + r * stride, stride, steps, out + r * line)
            r += 1

    return rows_by_rows


@register_jitable
def share(count: int, rank: int, team: int) -> tuple[int, int]:
    """The part of ``range(count)`` that is this thread's."""
    return count * rank // team, count * (rank + 1) // team


@njit(nogil=True, error_model="numpy")
def product(
    weights: int, size: int, bias: int, rows: int, stride: int, steps: int, count: int,
    begin: int, end: int, scratch: int, out: int, width: int, add: bool, kind: Any, tag: Any,
) -> None:  # fmt: skip
    """Groups begin..end of W x + b, written to or added to ``out``.

    Args:
        size: bytes of a group.
        bias: (32 * groups,) fp32.
        rows, stride: x, and bytes from row to row.
        out: (count, width) fp32; width is a multiple of 32.
    """
    for g in range(begin, end):
        here, added = out + 4 * g * GROUP, bias + 4 * g * GROUP
        for r in range(0, count, 32):
            some = min(32, count - r)
            block(weights + g * size, rows + r * stride, stride, steps, some, scratch, kind, tag)
            if add:
                add_sums(scratch, added, here + 4 * r * width, 4 * width, some)
            else:
                store_sums(scratch, added, here + 4 * r * width, 4 * width, some)


@njit(nogil=True, error_model="numpy")
def gated(
    weights: int, size: int, bias: int, rows: int, stride: int, steps: int, count: int,
    begin: int, end: int, scratch: int, out: int, width: int, kind: Any, tag: Any,
) -> None:  # fmt: skip
    """silu(gate) * up of groups begin..end, each 16 gates and their 16 ups, to out (count, width)."""
    element = bytes_of(input_tag(kind))
    for g in range(begin, end):
        here = out + element * g * (GROUP // 2)
        for r in range(0, count, 32):
            some = min(32, count - r)
            block(weights + g * size, rows + r * stride, stride, steps, some, scratch, kind, tag)
            line = element * width
            gate_sums(scratch, bias + 4 * g * GROUP, here + r * line, line, some, kind)


@njit(nogil=True, error_model="numpy")
def scored(
    weights: int, size: int, bias: int, rows: int, stride: int, steps: int, count: int,
    begin: int, end: int, scratch: int, out: int, width: int, peaks: int, vocabulary: int, kind: Any, tag: Any,
) -> None:  # fmt: skip
    """Logits of groups begin..end in the model's dtype, out (count, width), and each group's largest.

    Args:
        peaks: (count, width / 32) fp32; NaN where a logit of the group is NaN.
    """
    sums = carray(pointer(scratch, np.float32(0)), (32, GROUP))
    line, peak_line = bytes_of(tag) * width, 4 * (width // GROUP)
    for g in range(begin, end):
        here = out + bytes_of(tag) * g * GROUP
        for r in range(0, count, 32):
            some = min(32, count - r)
            block(weights + g * size, rows + r * stride, stride, steps, some, scratch, kind, tag)
            store_sums(scratch, bias + 4 * g * GROUP, scratch, 4 * GROUP, some)
            if vocabulary - g * GROUP < GROUP:
                for i in range(some):
                    for j in range(vocabulary - g * GROUP, GROUP):
                        sums[i, j] = np.float32(-np.inf)
            score_sums(scratch, here + r * line, line, peaks + 4 * g + r * peak_line, peak_line, some, tag)
