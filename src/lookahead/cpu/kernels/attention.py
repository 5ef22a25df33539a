"""Attention of a tree's rows. Each row is bit-identical to a single-row step.

A row's columns are processed in the order of their positions: the committed prefix, then the row's ancestors from the
root down, as if they had been committed. Every score is one chain of sums over the head. Exponentials and values are
summed column by column. Rows share only the loads of the prefix.

An example: a prefix of T = 3 columns and a tree whose root (column 3) has children 4 and 5, and 6 below 4:

    column    0 1 2   3 4 5 6
    row 0     x x x   x             bounds 0 .. 1    path_columns 3
    row 1     x x x   x x           bounds 1 .. 3                 3 4
    row 2     x x x   x   x         bounds 3 .. 5                 3 5
    row 3     x x x   x x   x       bounds 5 .. 8                 3 4 6

    The prefix is processed for all rows at once; then the columns of each row's path are appended to its scores.

Memory: 16 columns of keys are interleaved, (column / 16, D, 16), so a vector holds one dimension of many columns. For
tiles the order is (column / 16, D / 2, 16, 2). Values are (column, D), so a vector holds many dimensions of one
column. D is rounded up to whole vectors and tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...machine_code import compiled
from ..execution_plan import KEY_BLOCK, QUERY_BLOCK, SCORE_BLOCK
from ..formats import Format
from .formats import CODE
from .operations import floats_at, integers_at
from .processor import REGISTERS, WIDTH
from .tiles import load_tile, multiply_tiles, store_tile, zero_tile
from .vector_math import exponential, soft_cap
from .vectors import (
    LANES,
    add_outer,
    floats,
    largest,
    load_block,
    load_floats,
    select,
    store,
    store_block,
    sum_of,
    zero_block,
)

#: Queries per block of the vector kernels, and vectors of values per block, all kept in registers.
QUERIES, VALUES = {16: (8, 4), 8: (2, 2)}.get(WIDTH, (2, 2 if REGISTERS == 32 else 1))
#: Bytes of a vector of fp32 numbers.
VECTOR = 4 * LANES


@compiled
def _scores_on_tiles(keys: int, query: int, out: int, line: int, head: int, count: int) -> None:
    """Scores of 16 bf16 queries, regardless of ``count``. Tiles 2 and 3 hold sums, 5 queries, 6 and 7 keys."""
    stride = 2 * head
    block_bytes = 2 * KEY_BLOCK * head
    for pair in range(SCORE_BLOCK // KEY_BLOCK // 2):
        first = keys + 2 * pair * block_bytes
        zero_tile(2)
        zero_tile(3)
        for step in range(head // 32):
            load_tile(5, query + 64 * step, stride)
            load_tile(6, first + 1024 * step, 64)
            multiply_tiles(2, 5, 6)
            load_tile(7, first + block_bytes + 1024 * step, 64)
            multiply_tiles(3, 5, 7)
        store_tile(2, out + 2 * VECTOR * pair, line)
        store_tile(3, out + 2 * VECTOR * pair + VECTOR, line)


def _score_of(fmt: Format) -> Any:
    """Make (keys, query, out, line, head, count): dot products of ``count`` queries with a block of keys.

    ``line`` is the stride of ``out`` in bytes, ``head`` the padded head size. Tiles always write 16 lines.
    """
    if fmt.product == "tiles":
        return _scores_on_tiles
    load = CODE[fmt.cached].load_columns
    key_bytes = KEY_BLOCK * fmt.cached.bytes

    # The scores of a fixed number of queries, whose sums stay in registers over all dimensions of the head.
    def queries_of(queries: int) -> Any:
        columns = (2 if queries == 8 else 4) if WIDTH == LANES else 1  # blocks of keys at once

        def score(keys: int, query: int, out: int, line: int, head: int) -> None:
            block_bytes = key_bytes * head
            for first in range(0, SCORE_BLOCK // KEY_BLOCK, columns):
                sums = zero_block(queries, columns)
                start = keys + block_bytes * first
                for d in range(head):
                    sums = add_outer(
                        sums, load(start + key_bytes * d, block_bytes, columns), query + 4 * d, 4 * head
                    )
                store_block(out + VECTOR * first, line, sums, columns)

        return compiled(score, f"{fmt.name}_{queries}")

    eight, four, two, one = (queries_of(queries) for queries in (8, 4, 2, 1))
    most = QUERIES

    # Any number of queries: the largest of these functions first, because more queries share each load of keys.
    def score(keys: int, query: int, out: int, line: int, head: int, count: int) -> None:
        q = 0
        while q < count:
            left = count - q
            x = query + 4 * head * q
            scores = out + line * q
            if most >= 8 and left >= 8:
                eight(keys, x, scores, line, head)
                q += 8
            elif most >= 4 and left >= 4:
                four(keys, x, scores, line, head)
                q += 4
            elif left >= 2:
                two(keys, x, scores, line, head)
                q += 2
            else:
                one(keys, x, scores, line, head)
                q += 1

    return compiled(score, fmt.name)


def _weighted_sum_of(fmt: Format) -> Any:
    """Make (weights, line, values, columns, out, head, count): out (count, D) += weights @ values of columns."""
    load, size = CODE[fmt.cached].load_columns, fmt.cached.bytes

    # A fixed block of queries and vectors of values, whose sums stay in registers over all columns.
    def sums_of(queries: int, vectors: int) -> Any:
        def weighted_sum(weights: int, line: int, values: int, columns: int, out: int, head: int) -> None:
            sums = load_block(out, 4 * head, queries, vectors)
            for _ in range(columns):
                sums = add_outer(sums, load(values, LANES * size, vectors), weights, line)
                values += size * head
                weights += 4
            store_block(out, 4 * head, sums, vectors)

        return compiled(weighted_sum, f"{fmt.name}_{queries}_{vectors}")

    most = QUERIES
    vectors = VALUES
    four, two, one = (sums_of(queries, vectors) for queries in (4, 2, 1))
    narrow = sums_of(1, 1)

    def weighted_sum(
        weights: int, line: int, values: int, columns: int, out: int, head: int, count: int
    ) -> None:
        # The vectors of a head, ``vectors`` at a time; those that remain, one at a time.
        first = 0
        while first < head // LANES:
            block = values + LANES * size * first
            sums = out + VECTOR * first
            wide = first + vectors <= head // LANES
            # As many queries at once as possible, because they share each load of values.
            q = 0
            while q < count:
                left = count - q
                w = weights + line * q
                here = sums + 4 * head * q
                if not wide:
                    narrow(w, line, block, columns, here, head)
                    q += 1
                elif most >= 4 and left >= 4:
                    four(w, line, block, columns, here, head)
                    q += 4
                elif left >= 2:
                    two(w, line, block, columns, here, head)
                    q += 2
                else:
                    one(w, line, block, columns, here, head)
                    q += 1
            first += vectors if wide else 1

    return compiled(weighted_sum, fmt.name)


@compiled
def softmax(scores: int, vectors: int) -> Any:
    """Replace scores with exp(score - largest score), in place. Returns 1 / sum."""
    top = floats(-np.inf)
    for v in range(vectors):
        value = load_floats(scores + VECTOR * v)
        top = select(value > top, value, top)
    top = floats(largest(top))
    total = floats(0)
    for v in range(vectors):
        value = load_floats(scores + VECTOR * v) - top
        # Tiny weights become exactly 0: ``exponential`` has a lower bound, and padding has the score -inf.
        power = select(value < -87.0, floats(0), exponential(value))
        store(scores + VECTOR * v, power)
        total = total + power
    return np.float32(1) / sum_of(total)


@compiled
def cap_scores(scores: int, vectors: int, cap: Any) -> None:
    """Apply the soft cap to scores, in place."""
    for v in range(vectors):
        store(scores + VECTOR * v, soft_cap(load_floats(scores + VECTOR * v), floats(cap)))


def _weigh_of(fmt: Format) -> Any:
    """Make ``weigh`` of a format."""
    score = _score_of(fmt)
    query_bytes, stored = fmt.query.bytes, fmt.cached.bytes

    def weigh(
        p: Any,
        layer: Any,
        segment: Any,
        query: int,
        keys: int,
        i: int,
        count: int,
        begin: int,
        shared: int,
        scratch: int,
    ) -> None:
        """Write the weights of queries i..i + count, not yet normalized, and their factors to the scratch space.

        Arguments as in ``attend``; columns ``begin``..``shared`` are evaluated for all of the queries.
        """
        # Sizes, and the positions and paths of the sequence's rows.
        length = segment.length
        groups = p.heads // p.key_heads
        head = p.padded_head
        line = p.score_line
        positions = integers_at(p.positions + 8 * segment.first_row)
        bounds = integers_at(p.path_ends + 8 * segment.first_row)
        path = integers_at(p.path_columns)
        factors = floats_at(scratch + QUERY_BLOCK * (line + 4 * head))
        # Scores of all columns from ``start`` on, for all queries at once.
        bottom = (i + count - 1) // groups
        start = begin // SCORE_BLOCK * SCORE_BLOCK
        for column in range(start, length + bottom + 1, SCORE_BLOCK):
            block = keys + column * head * stored
            scores_at = scratch + 4 * (column - start)
            score(block, query + query_bytes * head * i, scores_at, line, head, count)
        # The weights of each query: cap its scores, select its columns, apply the softmax.
        for q in range(count):
            r = (i + q) // groups
            if layer.cap != 0:
                computed = (length + bottom - start) // SCORE_BLOCK * SCORE_BLOCK + SCORE_BLOCK
                cap_scores(scratch + q * line, computed // LANES, layer.cap)
            scores = floats_at(scratch + q * line)
            # The query's own columns. Unless rows form a chain, append the scores of its path to those of the prefix.
            oldest = max(0, positions[r] + 1 - layer.window)  # position of the oldest key in the window
            from_column = oldest
            end = length + r + 1 - start
            if segment.is_chain == 0:
                from_column = min(oldest, shared)
                skipped = max(0, oldest - shared)
                depth = bounds[r + 1] - bounds[r]
                for t in range(skipped, depth):
                    scores[shared - start + t - skipped] = scores[path[bounds[r] + t] - start]
                end = shared - start + depth - skipped
            # The softmax of these columns; columns that only other queries see have the weight 0.
            vectors = (end - (from_column - start) + LANES - 1) // LANES
            for j in range(end, from_column - start + vectors * LANES):
                scores[j] = -np.inf
            factors[q] = softmax(scratch + q * line + 4 * (from_column - start), vectors)
            for j in range(begin - start, min(from_column, shared) - start):
                scores[j] = 0

    return compiled(weigh, fmt.name)


def _sum_values_of(fmt: Format) -> Any:
    """Make ``sum_values`` of a format."""
    weighted_sum = _weighted_sum_of(fmt)
    stored = fmt.cached.bytes

    def sum_values(
        p: Any,
        layer: Any,
        segment: Any,
        values: int,
        i: int,
        count: int,
        begin: int,
        shared: int,
        scratch: int,
    ) -> None:
        """Sum values by the weights that ``weigh`` wrote, into the scratch space. Arguments as in ``weigh``."""
        # Sizes, and the positions and paths of the sequence's rows.
        length = segment.length
        groups = p.heads // p.key_heads
        head = p.padded_head
        line = p.score_line
        positions = integers_at(p.positions + 8 * segment.first_row)
        bounds = integers_at(p.path_ends + 8 * segment.first_row)
        path = integers_at(p.path_columns)
        sums_at = scratch + QUERY_BLOCK * line
        sums = floats_at(sums_at)
        start = begin // SCORE_BLOCK * SCORE_BLOCK
        # Shared columns, for all queries at once.
        for j in range(count * head):
            sums[j] = 0
        if shared > begin:
            block = values + begin * head * stored
            weighted_sum(scratch + 4 * (begin - start), line, block, shared - begin, sums_at, head, count)
        # Each query's own columns: adjacent ones in a chain, else runs of adjacent columns of its path.
        for q in range(count):
            r = (i + q) // groups
            oldest = max(0, positions[r] + 1 - layer.window)
            weights = scratch + q * line + 4 * (shared - start)
            sums_of_q = sums_at + 4 * q * head
            if segment.is_chain != 0:
                first_own = max(oldest, shared)
                block = values + first_own * head * stored
                columns = length + r + 1 - first_own
                weighted_sum(weights + 4 * (first_own - shared), line, block, columns, sums_of_q, head, 1)
            else:
                t = bounds[r] + max(0, oldest - shared)
                while t < bounds[r + 1]:
                    run = 1
                    while t + run < bounds[r + 1] and path[t + run] == path[t] + run:
                        run += 1
                    block = values + path[t] * head * stored
                    weighted_sum(weights, line, block, run, sums_of_q, head, 1)
                    weights += 4 * run
                    t += run

    return compiled(sum_values, fmt.name)


def _store_outputs_of(fmt: Format) -> Any:
    """Make ``store_outputs`` of a format."""
    out_at, from_fp32, out_bytes, store_rounded = (
        CODE[fmt.input].pointer,
        CODE[fmt.input].from_fp32,
        fmt.input.bytes,
        CODE[fmt.input].store,
    )

    def store_outputs(p: Any, out: int, i: int, count: int, scratch: int) -> None:
        """Normalize the sums of queries i..i + count, round them and store them. Arguments as in ``attend``."""
        groups = p.heads // p.key_heads
        head = p.padded_head
        size = p.head_size
        sums_at = scratch + QUERY_BLOCK * p.score_line
        factors = floats_at(sums_at + 4 * QUERY_BLOCK * head)
        for q in range(count):
            sums_of_q = sums_at + 4 * q * head
            out_row = out + (i + q) // groups * p.attended_stride + (i + q) % groups * size * out_bytes
            # Whole vectors if possible; a vector past the end of the head would overwrite the next one.
            if size % LANES == 0:
                for d in range(0, size, LANES):
                    total = load_floats(sums_of_q + 4 * d) * floats(factors[q])
                    store_rounded(out_row + out_bytes * d, total)
            else:
                sums = floats_at(sums_of_q)
                result = out_at(out_row)
                for d in range(size):
                    result[d] = from_fp32(sums[d] * factors[q])

    return compiled(store_outputs, fmt.name)


def attention_of(fmt: Format) -> Any:
    """Make the attention of a format."""
    weigh, sum_values, store_outputs = _weigh_of(fmt), _sum_values_of(fmt), _store_outputs_of(fmt)

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
            out: address in the output gemm's input, at the sequence's first row and this key head.
            first, last: the range of queries.
            scratch: address of space for 16 lines of scores, and 16 sums of a head with their factors.
        """
        groups = p.heads // p.key_heads
        positions = integers_at(p.positions + 8 * segment.first_row)
        for i in range(first, last, QUERY_BLOCK):
            # Columns begin .. shared are evaluated for all queries of the block at once.
            count = min(QUERY_BLOCK, last - i)
            top, bottom = i // groups, (i + count - 1) // groups
            shared = segment.length + top if segment.is_chain != 0 else segment.length
            begin = shared
            for r in range(top, bottom + 1):
                begin = min(begin, max(0, positions[r] + 1 - layer.window))
            # The weights of all columns, the sums of values, and the outputs.
            weigh(p, layer, segment, query, keys, i, count, begin, shared, scratch)
            sum_values(p, layer, segment, values, i, count, begin, shared, scratch)
            store_outputs(p, out, i, count, scratch)

    return compiled(attend, fmt.name)
