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
from .llvm import I8, I32, VECTOR, VOID, call, const, load_numbers, offset
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


def _tiles(row_tiles: int) -> Any:
    """16 rows per row tile. Tiles 0-3 hold sums, 4-5 rows, 6-7 weights; a step is 32 inner numbers."""

    def emit(builder: Any, weights: Any, rows: Any, stride: Any, steps: Any, out: Any) -> None:
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

    return llvm.emitted(emit, 5)


def _in_vectors(rows_at_once: int, step_bytes: int, load_part: Any, load_factor: Any, multiply: Any) -> Any:
    """Sums of some rows; ``step_bytes`` of weights go with 4 bytes of a row at a time."""

    def emit(builder: Any, weights: Any, rows: Any, stride: Any, steps: Any, out: Any) -> None:
        sums = llvm.zero_vectors(builder, rows_at_once, VECTORS)
        with cgutils.for_range(builder, steps) as loop:
            here = offset(builder, weights, (loop.index, step_bytes))
            _prefetch(builder, here, 4096, 1)
            vector_bytes = step_bytes // VECTORS
            parts = [load_part(builder, offset(builder, here, v * vector_bytes)) for v in range(VECTORS)]
            for r in range(rows_at_once):
                place = offset(builder, rows, (stride, r), (loop.index, 4))
                factor = llvm.broadcast(builder, load_factor(builder, place))
                for v in range(VECTORS):
                    builder.store(multiply(builder, parts[v], factor, builder.load(sums[r][v])), sums[r][v])
        for r in range(rows_at_once):
            for v in range(VECTORS):
                place = offset(builder, out, 4 * (r * GROUP + v * LANES))
                llvm.store_vector(builder, builder.load(sums[r][v]), place)

    return llvm.emitted(emit, 5)


class _BFloat(ir.types.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite does not know by name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self))

    def __hash__(self) -> int:
        return hash(type(self))


def _pairs(rows_at_once: int) -> Any:
    """bf16 rows; a step is two inner numbers, whose products AVX512-BF16 adds to a sum at once."""
    halves = ir.VectorType(_BFloat(), 32)

    def dot(builder: Any, part: Any, factor: Any, total: Any) -> Any:
        a, b = (builder.bitcast(x, halves) for x in (factor, part))
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, [total, a, b])

    return _in_vectors(
        rows_at_once,
        4 * GROUP,
        lambda builder, place: llvm.load(builder, place, llvm.INTEGERS, 4),
        lambda builder, place: llvm.load(builder, place, I32, 4),
        dot,
    )


def _vectors(rows_at_once: int, narrow: bool) -> Any:
    """fp32 rows; a step is one inner number."""
    return _in_vectors(
        rows_at_once,
        (2 if narrow else 4) * GROUP,
        lambda builder, place: load_numbers(builder, place, narrow),
        lambda builder, place: load_numbers(builder, place, False, 1),
        llvm.multiply_add,
    )


def microkernel(numbers: Format) -> Any:
    """(weights, rows, stride, steps, count, out): sums (count, 32) fp32 of up to 32 rows with one group.

    ``rows`` lie ``stride`` bytes apart; ``steps`` are those of the format.
    """
    if numbers.kind == "tiles":
        few, many = _tiles(1), _tiles(2)

        def on_tiles(weights: int, rows: int, stride: int, steps: int, count: int, out: int) -> None:
            if count > 16:
                many(weights, rows, stride, steps, out)
            else:
                few(weights, rows, stride, steps, out)

        return llvm.jit(on_tiles, numbers.name)
    make = _pairs if numbers.kind == "pairs" else lambda n: _vectors(n, numbers.stored.is_bf16)
    one, two, four, eight = (make(n) for n in (1, 2, 4, 8))
    line = 4 * GROUP

    def in_vectors(weights: int, rows: int, stride: int, steps: int, count: int, out: int) -> None:
        r = 0
        while ROWS_AT_ONCE >= 8 and count - r >= 8:
            eight(weights, rows + r * stride, stride, steps, out + r * line)
            r += 8
        while ROWS_AT_ONCE >= 4 and count - r >= 4:
            four(weights, rows + r * stride, stride, steps, out + r * line)
            r += 4
        while ROWS_AT_ONCE >= 2 and count - r >= 2:
            two(weights, rows + r * stride, stride, steps, out + r * line)
            r += 2
        while count - r >= 1:
            one(weights, rows + r * stride, stride, steps, out + r * line)
            r += 1

    return llvm.jit(in_vectors, numbers.name)
