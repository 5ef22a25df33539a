"""Attention's inner loops, in LLVM's vectors: queries by keys, softmax, and weights by values.

Keys of 16 columns lie side by side, (column / 16, D, 16), so that a vector holds one dimension of many columns, or
for tiles (column / 16, D / 2, 16, 2); values lie as (column, D), so that a vector holds many dimensions of one
column. D is rounded up to whole vectors and tiles. A score is one chain of sums over the head; values are added
column after column. Softmax leaves exponentials and one over their sum, which the output is multiplied by.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import llvm
from .epilogue import exponential, store_rounded
from .execution_plan import KEY_BLOCK, SCORE_BLOCK
from .llvm import F32, VOID, ZEROS, call, const, load_numbers, offset
from .microkernel import load_tile, tile
from .numeric_format import Format
from .processor import LANES, REGISTERS

#: Queries that one call of the vector kernels serves, and vectors of values that one call holds.
QUERIES = 8 if LANES == 16 else 2
VALUES = 4 if REGISTERS == 32 or LANES == 8 else 2


def _scores_on_tiles(builder: Any, keys: Any, query: Any, out: Any, line: Any, head: Any, count: Any) -> None:
    """Of 16 queries (bf16), wanted or not; tiles 2-3 hold sums, 5 queries, 6-7 keys."""
    steps, stride = builder.lshr(head, const(5)), builder.mul(head, const(2))
    for first in range(0, SCORE_BLOCK // KEY_BLOCK, 2):
        for n in (2, 3):
            call(builder, "llvm.x86.tilezero", VOID, [tile(n)])
        blocks = [offset(builder, keys, (head, 2 * KEY_BLOCK * (first + n))) for n in range(2)]
        with cgutils.for_range(builder, steps) as loop:
            load_tile(builder, 5, offset(builder, query, (loop.index, 64)), stride)
            for n, block in enumerate(blocks):
                load_tile(builder, 6 + n, offset(builder, block, (loop.index, 1024)), const(64))
                call(builder, "llvm.x86.tdpbf16ps", VOID, [tile(2 + n), tile(5), tile(6 + n)])
        for n in range(2):
            place = llvm.at(builder, offset(builder, out, 4 * KEY_BLOCK * (first + n)))
            call(builder, "llvm.x86.tilestored64", VOID, [tile(2 + n), place, line])


def score_of(numbers: Format) -> Any:
    """(keys, query, out, line, head, count): dot products of queries with a score block; tiles write 16 lines.

    ``line`` is bytes from query to query of ``out``.
    """
    if numbers.kind == "tiles":
        return llvm.emitted(_scores_on_tiles, 6)
    size, narrow = numbers.stored.bytes, numbers.stored.is_bf16

    def emit(builder: Any, keys: Any, query: Any, out: Any, line: Any, head: Any, count: Any) -> None:
        def some(queries: int, q: Any) -> None:
            blocks = (2 if queries == 8 else 4) if LANES == 16 else 1
            mine, line_of = offset(builder, query, (builder.mul(head, q), 4)), offset(builder, out, (line, q))
            for first in range(0, SCORE_BLOCK // KEY_BLOCK, blocks):

                def parts(d: Any, first: int = first) -> list[Any]:
                    within = offset(builder, keys, (d, KEY_BLOCK * size))
                    starts = [
                        offset(builder, within, (head, KEY_BLOCK * size * (first + n))) for n in range(blocks)
                    ]
                    vectors = [
                        (start, v * LANES * size) for start in starts for v in range(KEY_BLOCK // LANES)
                    ]
                    return [load_numbers(builder, offset(builder, *place), narrow) for place in vectors]

                def factor(d: Any, q: int) -> Any:
                    return load_numbers(builder, offset(builder, mine, (head, 4 * q), (d, 4)), False, 1)

                def place(q: int, v: int, first: int = first) -> Any:
                    return offset(builder, line_of, (line, q), 4 * (KEY_BLOCK * first + LANES * v))

                llvm.accumulate(builder, queries, blocks * KEY_BLOCK // LANES, head, parts, factor, place)

        llvm.in_blocks(builder, count, [n for n in (8, 4, 2, 1) if n <= QUERIES], some)

    return llvm.emitted(emit, 6)


def weighted_sum_of(numbers: Format) -> Any:
    """(weights, line, values, columns, out, head, count): out (count, D) += weights (count, columns) values."""
    size, narrow = numbers.stored.bytes, numbers.stored.is_bf16

    def emit(
        builder: Any, weights: Any, line: Any, values: Any, columns: Any, out: Any, head: Any, count: Any
    ) -> None:
        step = builder.mul(head, const(size))

        def wide(vectors: int, first: Any) -> None:
            here = offset(builder, values, (first, LANES * size))

            def some(queries: int, q: Any) -> None:
                mine, sums = offset(builder, weights, (line, q)), offset(builder, out, (first, 4 * LANES))
                sums = offset(builder, sums, (builder.mul(head, q), 4))

                def parts(column: Any) -> list[Any]:
                    begin = offset(builder, here, (column, step))
                    places = [offset(builder, begin, size * LANES * v) for v in range(vectors)]
                    return [load_numbers(builder, place, narrow) for place in places]

                def factor(column: Any, q: int) -> Any:
                    return load_numbers(builder, offset(builder, mine, (line, q), (column, 4)), False, 1)

                def place(q: int, v: int) -> Any:
                    return offset(builder, sums, (head, 4 * q), 4 * LANES * v)

                llvm.accumulate(builder, queries, vectors, columns, parts, factor, place, add=True)

            most = QUERIES if vectors > 1 else 1
            llvm.in_blocks(builder, count, [n for n in (4, 2, 1) if n <= most], some)

        llvm.in_blocks(builder, builder.udiv(head, const(LANES)), (VALUES, 1), wide)

    return llvm.emitted(emit, 7)


def _softmax(builder: Any, scores: Any, vectors: Any) -> Any:
    largest = cgutils.alloca_once_value(builder, llvm.numbers(float("-inf")))
    with cgutils.for_range(builder, vectors) as loop:
        value = load_numbers(builder, offset(builder, scores, (loop.index, 4 * LANES)), False)
        before = builder.load(largest)
        builder.store(builder.select(builder.fcmp_ordered(">", value, before), value, before), largest)
    top = call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [builder.load(largest)], ("nnan",))
    top = llvm.broadcast(builder, top)
    total = cgutils.alloca_once_value(builder, ZEROS)
    with cgutils.for_range(builder, vectors) as loop:
        place = offset(builder, scores, (loop.index, 4 * LANES))
        value = builder.fsub(load_numbers(builder, place, False), top)
        power = exponential(builder, value)
        # What is too small to count is nothing at all, so that lanes behind the end are.
        power = builder.select(builder.fcmp_ordered("<", value, llvm.numbers(-87.0)), ZEROS, power)
        llvm.store_vector(builder, power, place)
        builder.store(builder.fadd(builder.load(total), power), total)
    arguments = [ir.Constant(F32, 0.0), builder.load(total)]
    summed = call(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", F32, arguments, ("reassoc",))
    return builder.fdiv(ir.Constant(F32, 1.0), summed)


def scaled_output(narrow: bool) -> Any:
    """(sums, factor, out, vectors): sums times the fp32 number at an address, as bf16 where ``narrow``."""

    def emit(builder: Any, sums: Any, factor: Any, out: Any, vectors: Any) -> None:
        scale = llvm.broadcast(builder, load_numbers(builder, factor, False, 1))
        with cgutils.for_range(builder, vectors) as loop:
            value = load_numbers(builder, offset(builder, sums, (loop.index, 4 * LANES)), False)
            line = offset(builder, out, (loop.index, (2 if narrow else 4) * LANES))
            store_rounded(builder, builder.fmul(value, scale), line, 0, narrow)

    return llvm.emitted(emit, 4)


#: (scores, vectors) -> one over the sum: exponentials of scores against their largest, in place.
softmax = llvm.emitted(_softmax, 2, types.float32)
