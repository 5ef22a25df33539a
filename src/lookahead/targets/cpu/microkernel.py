"""Up to 32 rows by one group of 32 outputs: the sums that a gemm is made of, held in registers.

Every sum is one chain over the inner size, in an order that depends on neither the number of rows nor a row's
place among them. So a row has the same bits in any step.

One pass over a matrix tile costs about as much for 16 rows as for one, and less than its kilobyte takes to come from
memory: up to 32 rows run at nearly the memory's speed.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from . import llvm
from .llvm import F32, I8, I32, VECTOR, VOID, call, const, load_numbers, offset
from .numeric_format import Format
from .processor import LANES, REGISTERS

#: Outputs in a group, and vectors of it.
GROUP = 32
VECTORS = GROUP // LANES
#: Most rows of a call.
ROW_BLOCK = 32
#: Rows whose sums fit the register file.
ROWS_AT_ONCE = {(16, 32): 8, (8, 16): 2, (4, 32): 2}.get((LANES, REGISTERS), 1)
#: Lines of each of the next group's panels that are asked for before a group is done.
NEXT_LINES = 16


def tile(number: int) -> ir.Constant:
    """The name of a tile register."""
    return ir.Constant(I8, number)


def load_tile(builder: Any, number: int, address: Any, stride: Any) -> None:
    """Up to 16 rows of 64 bytes."""
    call(builder, "llvm.x86.tileloadd64", VOID, [tile(number), llvm.at(builder, address), stride])


def _prefetch(builder: Any, address: Any, distance: int, lines: int) -> None:
    """Ask for some cache lines at a distance, into the second level."""
    for line in range(lines):
        ahead = llvm.at(builder, offset(builder, address, distance + 64 * line))
        call(builder, "llvm.prefetch.p0", VOID, [ahead, *(ir.Constant(I32, n) for n in (0, 2, 1))])


def _tiles(builder: Any, row_tiles: int, weights: Any, rows: Any, stride: Any, steps: Any, out: Any) -> None:
    """16 rows per row tile. Tiles 0-3 hold sums, 4-5 rows, 6-7 weights; a step is 32 inner numbers."""
    for number in range(2 * row_tiles):
        call(builder, "llvm.x86.tilezero", VOID, [tile(number)])
    second = offset(builder, rows, (stride, 16))
    panel_bytes = builder.mul(steps, const(1024))
    with cgutils.for_range(builder, steps) as loop:
        here = offset(builder, weights, (loop.index, 1024))
        panels = [here, offset(builder, here, panel_bytes)]
        # The processor's own prefetching stops at pages; a few lines of the next one start it early.
        for panel in panels:
            _prefetch(builder, panel, 4096, 4)
        load_tile(builder, 4, offset(builder, rows, (loop.index, 64)), stride)
        if row_tiles == 2:
            load_tile(builder, 5, offset(builder, second, (loop.index, 64)), stride)
        for number, panel in enumerate(panels, 6):
            load_tile(builder, number, panel, const(64))
        for row in range(row_tiles):
            for n in range(2):
                call(builder, "llvm.x86.tdpbf16ps", VOID, [tile(2 * row + n), tile(4 + row), tile(6 + n)])
    following = offset(builder, weights, (panel_bytes, 2))
    for panel in (following, offset(builder, following, panel_bytes)):
        _prefetch(builder, panel, 0, NEXT_LINES)
    for row in range(row_tiles):
        for n in range(2):
            place = llvm.at(builder, offset(builder, out, row * 16 * 4 * GROUP + n * 64))
            call(builder, "llvm.x86.tilestored64", VOID, [tile(2 * row + n), place, const(4 * GROUP)])


def _on_tiles(builder: Any, weights: Any, rows: Any, stride: Any, steps: Any, count: Any, out: Any) -> None:
    with builder.if_else(builder.icmp_signed(">", count, const(16))) as (many, few):
        for row_tiles, branch in ((2, many), (1, few)):
            with branch:
                _tiles(builder, row_tiles, weights, rows, stride, steps, out)


class _BFloat(ir.types.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite does not know by name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self))

    def __hash__(self) -> int:
        return hash(type(self))


def _dot_pairs(builder: Any, part: Any, factor: Any, total: Any) -> Any:
    """The sum and the products of two bf16 numbers in each lane (AVX512-BF16)."""
    halves = ir.VectorType(_BFloat(), 32)
    a, b = (builder.bitcast(x, halves) for x in (factor, part))
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, [total, a, b])


def microkernel(numbers: Format) -> Any:
    """(weights, rows, stride, steps, count, out): sums (count, 32) fp32 of up to 32 rows with one group.

    ``rows`` lie ``stride`` bytes apart; ``steps`` are those of the format. In vectors a step is 4 bytes of a row.
    """
    if numbers.kind == "tiles":
        return llvm.emitted(_on_tiles, 6)
    pairs, narrow = numbers.kind == "pairs", numbers.stored.is_bf16
    vector_bytes = numbers.step * numbers.stored.bytes * LANES

    def emit(builder: Any, weights: Any, rows: Any, stride: Any, steps: Any, count: Any, out: Any) -> None:
        def parts(step: Any) -> list[Any]:
            here = offset(builder, weights, (step, VECTORS * vector_bytes))
            _prefetch(builder, here, 4096, 1)
            places = [offset(builder, here, v * vector_bytes) for v in range(VECTORS)]
            if pairs:
                return [llvm.load(builder, place, llvm.INTEGERS, 4) for place in places]
            return [load_numbers(builder, place, narrow) for place in places]

        kind = I32 if pairs else F32

        def some(size: int, first: Any) -> None:
            begin, place = offset(builder, rows, (stride, first)), offset(builder, out, (first, 4 * GROUP))
            llvm.accumulate(
                builder, size, VECTORS, steps, parts,
                lambda step, r: llvm.load(builder, offset(builder, begin, (stride, r), (step, 4)), kind, 4),
                lambda r, v: offset(builder, place, 4 * (r * GROUP + v * LANES)),
                multiply=_dot_pairs if pairs else llvm.multiply_add,
            )  # fmt: skip

        llvm.in_blocks(builder, count, [size for size in (8, 4, 2, 1) if size <= ROWS_AT_ONCE], some)

    return llvm.emitted(emit, 6)
