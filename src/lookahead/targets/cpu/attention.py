"""Attention of a tree's rows; each row has the same bits as if it were the only row of a step.

A row's columns are processed in the order of their positions: the committed prefix, then the row's ancestors from the
root down, as if these had been committed. Every score is one chain of sums over the head. Exponentials are summed and
values are added up column by column. Rows share loads of the prefix and nothing else.

An example: a prefix of T = 3 columns and a tree whose root (column 3) has children 4 and 5, and 6 below 4:

    column    0 1 2   3 4 5 6
    row 0     x x x   x             bounds 0 .. 1    path_columns 3
    row 1     x x x   x x           bounds 1 .. 3                 3 4
    row 2     x x x   x   x         bounds 3 .. 5                 3 5
    row 3     x x x   x x   x       bounds 5 .. 8                 3 4 6

    The prefix is processed for all rows together; then the columns of each row's path are appended to its scores.

Memory: 16 columns of keys are interleaved, (column / 16, D, 16), so a vector holds one dimension of many columns; for
tiles the order is (column / 16, D / 2, 16, 2). Values are (column, D), so a vector holds many dimensions of one
column. D is rounded up to whole vectors and tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import llvm
from .execution_plan import KEY_BLOCK, QUERY_BLOCK, SCORE_BLOCK
from .formats import Format
from .gemm import load_tile, tile
from .llvm import F32, LANES, VOID, ZEROS, call, const, floats_at, integers_at, load_numbers, offset
from .vector_math import exponential, soft_cap, store_rounded

#: Queries per block of the vector kernels, and vectors of values that a block keeps in registers.
QUERIES = 8 if LANES == 16 else 2
VALUES = 4 if llvm.REGISTERS == 32 or LANES == 8 else 2


def _scores_on_tiles(builder: Any, keys: Any, query: Any, out: Any, line: Any, head: Any, count: Any) -> None:
    """Scores of 16 queries (bf16), whatever ``count`` is; tiles 2 and 3 hold sums, 5 queries, 6 and 7 keys."""
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
            address = llvm.at(builder, offset(builder, out, 4 * KEY_BLOCK * (first + n)))
            call(builder, "llvm.x86.tilestored64", VOID, [tile(2 + n), address, line])


def _score_of(fmt: Format) -> Any:
    """Make (keys, query, out, line, head, count): dot products of ``count`` queries with a block of keys.

    ``line`` is the bytes between queries in ``out``, ``head`` the padded head size. Tiles always write 16 lines.
    """
    if fmt.kind == "tiles":
        return llvm.emitted(_scores_on_tiles, 6)
    size, is_bf16 = fmt.stored.bytes, fmt.stored.is_bf16

    def emit(builder: Any, keys: Any, query: Any, out: Any, line: Any, head: Any, count: Any) -> None:
        row = builder.mul(head, const(4))

        def query_block(queries: int, q: Any) -> None:
            blocks = (2 if queries == 8 else 4) if LANES == 16 else 1
            for first in range(0, SCORE_BLOCK // KEY_BLOCK, blocks):

                def load_keys(d: Any, first: int = first) -> list[Any]:
                    start = offset(builder, keys, (d, KEY_BLOCK * size), (head, KEY_BLOCK * size * first))
                    starts = [offset(builder, start, (head, KEY_BLOCK * size * n)) for n in range(blocks)]
                    pairs = [(s, v * LANES * size) for s in starts for v in range(KEY_BLOCK // LANES)]
                    return [load_numbers(builder, offset(builder, *pair), is_bf16) for pair in pairs]

                factors = offset(builder, query, (row, q)), row
                sums = offset(builder, out, (line, q), 4 * KEY_BLOCK * first), line
                llvm.accumulate(builder, queries, blocks * KEY_BLOCK // LANES, head, load_keys, factors, sums)

        llvm.in_blocks(builder, count, [n for n in (8, 4, 2, 1) if n <= QUERIES], query_block)

    return llvm.emitted(emit, 6)


def _weighted_sum_of(fmt: Format) -> Any:
    """Make (weights, line, values, columns, out, head, count): out (count, D) += weights @ values of columns."""
    size, is_bf16 = fmt.stored.bytes, fmt.stored.is_bf16

    def emit(
        builder: Any, weights: Any, line: Any, values: Any, columns: Any, out: Any, head: Any, count: Any
    ) -> None:
        column_bytes, row = builder.mul(head, const(size)), builder.mul(head, const(4))

        def dimension_block(vectors: int, first: Any) -> None:
            def load_values(column: Any) -> list[Any]:
                start = offset(builder, values, (first, LANES * size), (column, column_bytes))
                addresses = [offset(builder, start, size * LANES * v) for v in range(vectors)]
                return [load_numbers(builder, address, is_bf16) for address in addresses]

            def query_block(queries: int, q: Any) -> None:
                factors = offset(builder, weights, (line, q)), line
                sums = offset(builder, out, (first, 4 * LANES), (row, q)), row
                llvm.accumulate(builder, queries, vectors, columns, load_values, factors, sums, add=True)

            most = QUERIES if vectors > 1 else 1
            llvm.in_blocks(builder, count, [n for n in (4, 2, 1) if n <= most], query_block)

        llvm.in_blocks(builder, builder.udiv(head, const(LANES)), (VALUES, 1), dimension_block)

    return llvm.emitted(emit, 7)


def _softmax(builder: Any, scores: Any, vectors: Any) -> Any:
    largest = cgutils.alloca_once_value(builder, llvm.floats(float("-inf")))
    with cgutils.for_range(builder, vectors) as loop:
        value = load_numbers(builder, offset(builder, scores, (loop.index, 4 * LANES)))
        before = builder.load(largest)
        builder.store(builder.select(builder.fcmp_ordered(">", value, before), value, before), largest)
    top = call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [builder.load(largest)], ("nnan",))
    top = llvm.broadcast(builder, top)
    total = cgutils.alloca_once_value(builder, ZEROS)
    with cgutils.for_range(builder, vectors) as loop:
        address = offset(builder, scores, (loop.index, 4 * LANES))
        value = builder.fsub(load_numbers(builder, address), top)
        power = exponential(builder, value)
        # Tiny weights become exactly 0, because ``exponential`` has a lower bound and padding has the score -inf.
        power = builder.select(builder.fcmp_ordered("<", value, llvm.floats(-87.0)), ZEROS, power)
        llvm.store_vector(builder, power, address)
        builder.store(builder.fadd(builder.load(total), power), total)
    arguments = [ir.Constant(F32, 0.0), builder.load(total)]
    summed = call(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", F32, arguments, ("reassoc",))
    return builder.fdiv(ir.Constant(F32, 1.0), summed)


def _cap(builder: Any, scores: Any, vectors: Any, cap: Any) -> None:
    bound = llvm.load_broadcast(builder, cap)
    with cgutils.for_range(builder, vectors) as loop:
        address = offset(builder, scores, (loop.index, 4 * LANES))
        llvm.store_vector(builder, soft_cap(builder, load_numbers(builder, address), bound), address)


def _scaled_output(as_bf16: bool) -> Any:
    """Make (sums, factor, out, vectors), which stores sums times the fp32 number at the address ``factor``."""

    def emit(builder: Any, sums: Any, factor: Any, out: Any, vectors: Any) -> None:
        scale = llvm.load_broadcast(builder, factor)
        with cgutils.for_range(builder, vectors) as loop:
            value = load_numbers(builder, offset(builder, sums, (loop.index, 4 * LANES)))
            line = offset(builder, out, (loop.index, (2 if as_bf16 else 4) * LANES))
            store_rounded(builder, builder.fmul(value, scale), line, 0, as_bf16)

    return llvm.emitted(emit, 4)


#: (scores, vectors) -> 1 / sum: replaces scores by exp(score - largest score), in place.
softmax = llvm.emitted(_softmax, 2, types.float32)
#: (scores, vectors, cap): applies the soft cap to scores, in place; ``cap`` is the address of the number.
cap_scores = llvm.emitted(_cap, 3)


def attention_of(fmt: Format) -> Any:
    """Make the attention of a format."""
    score, weighted_sum = _score_of(fmt), _weighted_sum_of(fmt)
    output = _scaled_output(fmt.input.is_bf16)
    out_at, from_fp32, out_bytes = fmt.input.pointer, fmt.input.from_fp32, fmt.input.bytes
    query_bytes, stored = fmt.query.bytes, fmt.stored.bytes

    def attend(
        p: Any,
        layer: Any,
        segment: Any,
        query: int,
        keys: int,
        values: int,
        out: int,
        first: int,
        last: int,
        scratch: int,
    ) -> None:
        """Attention of queries first..last of one key head of one sequence. Query i belongs to row i // groups.

        Args:
            p, layer, segment: records of ``execution_plan``.
            query: address of (rows * groups, padded head), scaled.
            keys, values: addresses of the slot's head, from column 0 on.
            out: address of the output gemm's input, at the sequence's first row and this key head.
            first, last: the range of queries.
            scratch: address of room for 16 lines of scores, and 16 sums of a head with their factors.
        """
        length, chain, window = segment.length, segment.is_chain != 0, layer.window
        groups, head, size, line = p.heads // p.key_heads, p.padded_head, p.head_size, p.score_line
        positions = integers_at(p.positions + 8 * segment.first_row)
        bounds = integers_at(p.path_ends + 8 * segment.first_row)
        path = integers_at(p.path_columns)
        sums_at = scratch + QUERY_BLOCK * line
        factors_at = sums_at + 4 * QUERY_BLOCK * head
        sums, factors = floats_at(sums_at), floats_at(factors_at)
        for i in range(first, last, QUERY_BLOCK):
            count = min(QUERY_BLOCK, last - i)
            top, bottom = i // groups, (i + count - 1) // groups
            # Columns begin .. shared are evaluated for all queries of the block together.
            shared = length + top if chain else length
            begin = shared
            for r in range(top, bottom + 1):
                begin = min(begin, max(0, positions[r] + 1 - window))
            # 1. Scores of all columns from ``start`` on, and the weights of each query's own columns.
            start = begin // SCORE_BLOCK * SCORE_BLOCK
            for column in range(start, length + bottom + 1, SCORE_BLOCK):
                block, scores_at = keys + column * head * stored, scratch + 4 * (column - start)
                score(block, query + query_bytes * head * i, scores_at, line, head, count)
            for q in range(count):
                r = (i + q) // groups
                if layer.cap != 0:
                    computed = (length + bottom - start) // SCORE_BLOCK * SCORE_BLOCK + SCORE_BLOCK
                    cap_scores(scratch + q * line, computed // LANES, layer.cap)
                scores = floats_at(scratch + q * line)
                oldest = max(0, positions[r] + 1 - window)  # position of the oldest key in the window
                from_column, end = oldest, length + r + 1 - start
                if not chain:  # move the scores of the row's path behind those of the prefix
                    from_column = min(oldest, shared)
                    skipped, depth = max(0, oldest - shared), bounds[r + 1] - bounds[r]
                    for t in range(skipped, depth):
                        scores[shared - start + t - skipped] = scores[path[bounds[r] + t] - start]
                    end = shared - start + depth - skipped
                vectors = (end - (from_column - start) + LANES - 1) // LANES
                for j in range(end, from_column - start + vectors * LANES):
                    scores[j] = -np.inf
                factors[q] = softmax(scratch + q * line + 4 * (from_column - start), vectors)
                for j in range(begin - start, min(from_column, shared) - start):
                    scores[j] = 0
            # 2. Weighted values: shared columns for all queries together, then each query's own columns.
            for j in range(count * head):
                sums[j] = 0
            if shared > begin:
                weights, block = scratch + 4 * (begin - start), values + begin * head * stored
                weighted_sum(weights, line, block, shared - begin, sums_at, head, count)
            for q in range(count):
                r, lane = (i + q) // groups, (i + q) % groups
                oldest = max(0, positions[r] + 1 - window)
                weights = scratch + q * line + 4 * (shared - start)
                sums_of_q = sums_at + 4 * q * head
                if chain:
                    first_own = max(oldest, shared)
                    block, columns = values + first_own * head * stored, length + r + 1 - first_own
                    weighted_sum(weights + 4 * (first_own - shared), line, block, columns, sums_of_q, head, 1)
                else:
                    t = bounds[r] + max(0, oldest - shared)
                    while t < bounds[r + 1]:
                        run = 1  # adjacent columns of the path
                        while t + run < bounds[r + 1] and path[t + run] == path[t] + run:
                            run += 1
                        block = values + path[t] * head * stored
                        weighted_sum(weights, line, block, run, sums_of_q, head, 1)
                        weights += 4 * run
                        t += run
                out_row = out + r * p.attended_stride + lane * size * out_bytes
                if size % LANES == 0:
                    output(sums_of_q, factors_at + 4 * q, out_row, size // LANES)
                else:
                    result = out_at(out_row)
                    for d in range(size):
                        result[d] = from_fp32(sums[q * head + d] * factors[q])

    return llvm.jit(attend, fmt.name)
