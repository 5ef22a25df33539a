"""Attention of a tree's rows, each with the bits that it would have as the only row of a step.

A row's columns are taken in the order of their positions: the committed prefix, then its own ancestors, root first,
exactly as if these had been committed. A score is one chain of sums over the head; exponentials are summed and values
added up column after column. What is shared among rows are loads of the prefix and nothing else.

Keys of 16 columns lie side by side, (column / 16, D, 16), so that a vector holds one dimension of many columns, or
for tiles (column / 16, D / 2, 16, 2); values lie as (column, D), so that a vector holds many dimensions of one
column. D is rounded up to whole vectors and tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from . import llvm
from .execution_plan import KEY_BLOCK, QUERY_BLOCK, SCORE_BLOCK
from .formats import Format
from .gemm import load_tile, tile
from .llvm import F32, LANES, VOID, ZEROS, call, const, floats_at, integers_at, load_numbers, offset
from .vector_math import exponential, soft_cap, store_rounded

#: Queries that one call of the vector kernels serves, and vectors of values that one call holds.
QUERIES = 8 if LANES == 16 else 2
VALUES = 4 if llvm.REGISTERS == 32 or LANES == 8 else 2


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


def _score_of(numbers: Format) -> Any:
    """(keys, query, out, line, head, count): dot products of queries with a score block; tiles write 16 lines.

    ``line`` is bytes from query to query of ``out``.
    """
    if numbers.kind == "tiles":
        return llvm.emitted(_scores_on_tiles, 6)
    size, narrow = numbers.stored.bytes, numbers.stored.is_bf16

    def emit(builder: Any, keys: Any, query: Any, out: Any, line: Any, head: Any, count: Any) -> None:
        row = builder.mul(head, const(4))

        def some(queries: int, q: Any) -> None:
            blocks = (2 if queries == 8 else 4) if LANES == 16 else 1
            for first in range(0, SCORE_BLOCK // KEY_BLOCK, blocks):

                def parts(d: Any, first: int = first) -> list[Any]:
                    within = offset(builder, keys, (d, KEY_BLOCK * size), (head, KEY_BLOCK * size * first))
                    starts = [offset(builder, within, (head, KEY_BLOCK * size * n)) for n in range(blocks)]
                    places = [(s, v * LANES * size) for s in starts for v in range(KEY_BLOCK // LANES)]
                    return [load_numbers(builder, offset(builder, *place), narrow) for place in places]

                factors = offset(builder, query, (row, q)), row
                sums = offset(builder, out, (line, q), 4 * KEY_BLOCK * first), line
                llvm.accumulate(builder, queries, blocks * KEY_BLOCK // LANES, head, parts, factors, sums)

        llvm.in_blocks(builder, count, [n for n in (8, 4, 2, 1) if n <= QUERIES], some)

    return llvm.emitted(emit, 6)


def _weighted_sum_of(numbers: Format) -> Any:
    """(weights, line, values, columns, out, head, count): out (count, D) += weights (count, columns) values."""
    size, narrow = numbers.stored.bytes, numbers.stored.is_bf16

    def emit(
        builder: Any, weights: Any, line: Any, values: Any, columns: Any, out: Any, head: Any, count: Any
    ) -> None:
        column_bytes, row = builder.mul(head, const(size)), builder.mul(head, const(4))

        def wide(vectors: int, first: Any) -> None:
            def parts(column: Any) -> list[Any]:
                begin = offset(builder, values, (first, LANES * size), (column, column_bytes))
                places = [offset(builder, begin, size * LANES * v) for v in range(vectors)]
                return [load_numbers(builder, place, narrow) for place in places]

            def some(queries: int, q: Any) -> None:
                factors = offset(builder, weights, (line, q)), line
                sums = offset(builder, out, (first, 4 * LANES), (row, q)), row
                llvm.accumulate(builder, queries, vectors, columns, parts, factors, sums, add=True)

            most = QUERIES if vectors > 1 else 1
            llvm.in_blocks(builder, count, [n for n in (4, 2, 1) if n <= most], some)

        llvm.in_blocks(builder, builder.udiv(head, const(LANES)), (VALUES, 1), wide)

    return llvm.emitted(emit, 7)


def _softmax(builder: Any, scores: Any, vectors: Any) -> Any:
    largest = cgutils.alloca_once_value(builder, llvm.lanes(float("-inf")))
    with cgutils.for_range(builder, vectors) as loop:
        value = load_numbers(builder, offset(builder, scores, (loop.index, 4 * LANES)))
        before = builder.load(largest)
        builder.store(builder.select(builder.fcmp_ordered(">", value, before), value, before), largest)
    top = call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [builder.load(largest)], ("nnan",))
    top = llvm.broadcast(builder, top)
    total = cgutils.alloca_once_value(builder, ZEROS)
    with cgutils.for_range(builder, vectors) as loop:
        place = offset(builder, scores, (loop.index, 4 * LANES))
        value = builder.fsub(load_numbers(builder, place), top)
        power = exponential(builder, value)
        # What is too small to count is nothing at all, so that lanes behind the end are.
        power = builder.select(builder.fcmp_ordered("<", value, llvm.lanes(-87.0)), ZEROS, power)
        llvm.store_vector(builder, power, place)
        builder.store(builder.fadd(builder.load(total), power), total)
    arguments = [ir.Constant(F32, 0.0), builder.load(total)]
    summed = call(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", F32, arguments, ("reassoc",))
    return builder.fdiv(ir.Constant(F32, 1.0), summed)


def _cap(builder: Any, scores: Any, vectors: Any, cap: Any) -> None:
    bound = llvm.load_everywhere(builder, cap)
    with cgutils.for_range(builder, vectors) as loop:
        place = offset(builder, scores, (loop.index, 4 * LANES))
        llvm.store_vector(builder, soft_cap(builder, load_numbers(builder, place), bound), place)


def _scaled_output(narrow: bool) -> Any:
    """(sums, factor, out, vectors): sums times the fp32 number at an address, as bf16 where ``narrow``."""

    def emit(builder: Any, sums: Any, factor: Any, out: Any, vectors: Any) -> None:
        scale = llvm.load_everywhere(builder, factor)
        with cgutils.for_range(builder, vectors) as loop:
            value = load_numbers(builder, offset(builder, sums, (loop.index, 4 * LANES)))
            line = offset(builder, out, (loop.index, (2 if narrow else 4) * LANES))
            store_rounded(builder, builder.fmul(value, scale), line, 0, narrow)

    return llvm.emitted(emit, 4)


#: (scores, vectors) -> one over the sum: exponentials of scores against their largest, in place.
softmax = llvm.emitted(_softmax, 2, types.float32)
#: (scores, vectors, cap): the soft cap of scores, in place; ``cap`` is the address of a number.
cap_scores = llvm.emitted(_cap, 3)


def attention_of(numbers: Format) -> Any:
    """The code of a format."""
    score, weighted_sum = _score_of(numbers), _weighted_sum_of(numbers)
    output = _scaled_output(numbers.input.is_bf16)
    out_at, narrow, out_bytes = numbers.input.pointer, numbers.input.narrow, numbers.input.bytes
    query_bytes, stored = numbers.query.bytes, numbers.stored.bytes

    def attend(
        p: Any, layer: Any, segment: Any, query: int, keys: int, values: int, out: int, first: int, last: int,
        scratch: int,
    ) -> None:  # fmt: skip
        """Attention of queries first..last of one key head of one sequence; query i belongs to row i / groups.

        Args:
            query: (rows * groups, padded head), scaled.
            keys, values: of the slot's head, from column 0 on.
            out: what the output gemm reads, at the sequence's first row and this key head.
            scratch: room for 16 lines of scores and 16 of a head's sums.
        """
        length, chain, window = segment.length, segment.is_chain != 0, layer.window
        groups, head, size, line = p.heads // p.key_heads, p.padded_head, p.head_size, p.score_line
        rows = last // groups + 1
        positions = carray(integers_at(p.positions + 8 * segment.first_row), (rows,))
        bounds = carray(integers_at(p.path_ends + 8 * segment.first_row), (rows + 1,))
        path = carray(integers_at(p.path_columns), (1 if chain else bounds[rows],))
        sums_at = scratch + QUERY_BLOCK * line
        factors_at = sums_at + 4 * QUERY_BLOCK * head
        sums = carray(floats_at(sums_at), (QUERY_BLOCK, head))
        factors = carray(floats_at(factors_at), (QUERY_BLOCK,))
        for i in range(first, last, QUERY_BLOCK):
            count = min(QUERY_BLOCK, last - i)
            top, bottom = i // groups, (i + count - 1) // groups
            # Columns begin..shared are computed for all queries of the block together.
            shared = length + top if chain else length
            begin = shared
            for r in range(top, bottom + 1):
                begin = min(begin, max(0, positions[r] + 1 - window))
            start = begin // SCORE_BLOCK * SCORE_BLOCK
            for column in range(start, length + bottom + 1, SCORE_BLOCK):
                block, place = keys + column * head * stored, scratch + 4 * (column - start)
                score(block, query + query_bytes * head * i, place, line, head, count)
            for q in range(count):
                r = (i + q) // groups
                if layer.cap != 0:
                    computed = (length + bottom - start) // SCORE_BLOCK * SCORE_BLOCK + SCORE_BLOCK
                    cap_scores(scratch + q * line, computed // LANES, layer.cap)
                scores = carray(floats_at(scratch + q * line), (line // 4,))
                seen = max(0, positions[r] + 1 - window)
                here, end = seen, length + r + 1 - start
                if not chain:
                    here, skipped, depth = min(seen, shared), max(0, seen - shared), bounds[r + 1] - bounds[r]
                    for t in range(skipped, depth):
                        scores[shared - start + t - skipped] = scores[path[bounds[r] + t] - start]
                    end = shared - start + depth - skipped
                vectors = (end - (here - start) + LANES - 1) // LANES
                for j in range(end, here - start + vectors * LANES):
                    scores[j] = -np.inf
                factors[q] = softmax(scratch + q * line + 4 * (here - start), vectors)
                for j in range(begin - start, min(here, shared) - start):
                    scores[j] = 0
            sums[:count] = 0
            if shared > begin:
                weights, block = scratch + 4 * (begin - start), values + begin * head * stored
                weighted_sum(weights, line, block, shared - begin, sums_at, head, count)
            for q in range(count):
                r, lane = (i + q) // groups, (i + q) % groups
                seen = max(0, positions[r] + 1 - window)
                weights = scratch + q * line + 4 * (shared - start)
                mine = sums_at + 4 * q * head
                if chain:
                    begin_at = max(seen, shared)
                    block, columns = values + begin_at * head * stored, length + r + 1 - begin_at
                    weighted_sum(weights + 4 * (begin_at - shared), line, block, columns, mine, head, 1)
                else:
                    t = bounds[r] + max(0, seen - shared)
                    while t < bounds[r + 1]:
                        run = 1
                        while t + run < bounds[r + 1] and path[t + run] == path[t] + run:
                            run += 1
                        weighted_sum(weights, line, values + path[t] * head * stored, run, mine, head, 1)
                        weights += 4 * run
                        t += run
                place = out + r * p.attended_stride + lane * size * out_bytes
                if size % LANES == 0:
                    output(mine, factors_at + 4 * q, place, size // LANES)
                else:
                    result = carray(out_at(place), (size,))
                    for d in range(size):
                        result[d] = narrow(sums[q, d] * factors[q])

    return llvm.jit(attend, numbers.name)
