"""Attention of a tree's rows, each with the bits that it would have as the only row of a step.

A row's columns are taken in the order of their positions: the committed prefix, then its own ancestors, root first,
exactly as if these had been committed. A score is one chain of sums over the head; the exponentials are summed and
the values added up in the order of positions. What is shared among rows are loads of the prefix and nothing else.

Keys of 16 columns lie side by side, (column / 16, D, 16), so that a vector holds one dimension of many columns, or
for tiles (column / 16, D / 2, 16, 2); values lie as (column, D), so that a vector holds many dimensions of one
column. D is rounded up to whole vectors and tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import overload, register_jitable

from .finish import exponential, number, rounded_bits, store_bits
from .intrinsics import (
    F32,
    ON_TILES,
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
    narrow,
    pointer,
    query_tag,
    spread,
    store_vector,
    zeros,
)
from .machine import LANES, REGISTERS
from .products import load_tile, tile

#: Columns side by side in memory, and columns of one turn of the score kernels.
SIDE = 16
TURN = 64
#: Queries that are attended together, and that one turn of the vector kernels serves.
MOST = 16
QUERIES = 8 if LANES == 16 else 2
#: Vectors of values that one pass holds.
VALUES = 4 if REGISTERS == 32 or LANES == 8 else 2


def _scores(queries: int, narrow_keys: bool) -> Any:
    """Dot products of some queries with 64 columns; ``line`` is bytes from query to query of ``out``."""
    sides = {8: 2, 4: 4, 2: 4, 1: 4}[queries] if LANES == 16 else 1
    count = sides * SIDE // LANES
    size = 2 if narrow_keys else 4

    def emit(builder: Any, keys: Any, query: Any, out: Any, line: Any, head: Any) -> None:
        width = builder.mul(head, const(4))
        side_bytes = builder.mul(head, const(SIDE * size))
        for first in range(0, TURN // SIDE, sides):
            sums = _sums(builder, queries, count)
            with cgutils.for_range(builder, head) as loop:
                within = builder.add(keys, builder.mul(loop.index, const(SIDE * size)))
                parts = []
                for side in range(first, first + sides):
                    here = builder.add(within, builder.mul(side_bytes, const(side)))
                    for v in range(SIDE // LANES):
                        place = builder.add(here, const(v * LANES * size))
                        parts.append(load_vector(builder, place, narrow_keys))
                for q in range(queries):
                    place = builder.add(query, builder.mul(width, const(q)))
                    place = builder.add(place, builder.mul(loop.index, const(4)))
                    factor = spread(builder, load_single(builder, place, False))
                    for v, part in enumerate(parts):
                        total = multiply_add(builder, part, factor, builder.load(sums[q][v]))
                        builder.store(total, sums[q][v])
            for q in range(queries):
                for v in range(count):
                    place = builder.add(out, builder.mul(line, const(q)))
                    place = builder.add(place, const(4 * (SIDE * first + LANES * v)))
                    store_vector(builder, builder.load(sums[q][v]), place)

    return emitted(emit, 5)


def _sums(builder: Any, queries: int, count: int) -> list[list[Any]]:
    """Variables for sums, zero."""
    sums = [[cgutils.alloca_once(builder, zeros().type) for _ in range(count)] for _ in range(queries)]
    for row in sums:
        for place in row:
            builder.store(zeros(), place)
    return sums


def _values(queries: int, count: int, narrow_values: bool) -> Any:
    """Add the values of ``columns`` columns, weighted, to the sums of some queries; ``count`` vectors of a head."""
    size = 2 if narrow_values else 4

    def emit(builder: Any, weights: Any, line: Any, values: Any, columns: Any, out: Any, head: Any) -> None:
        sums = _sums(builder, queries, count)
        width = builder.mul(head, const(4))
        for q in range(queries):
            for v in range(count):
                place = builder.add(builder.add(out, builder.mul(width, const(q))), const(4 * LANES * v))
                builder.store(load_vector(builder, place, False), sums[q][v])
        step = builder.mul(head, const(size))
        with cgutils.for_range(builder, columns) as loop:
            here = builder.add(values, builder.mul(loop.index, step))
            parts = [
                load_vector(builder, builder.add(here, const(size * LANES * v)), narrow_values)
                for v in range(count)
            ]
            for q in range(queries):
                place = builder.add(weights, builder.mul(line, const(q)))
                place = builder.add(place, builder.mul(loop.index, const(4)))
                factor = spread(builder, load_single(builder, place, False))
                for v in range(count):
                    total = multiply_add(builder, parts[v], factor, builder.load(sums[q][v]))
                    builder.store(total, sums[q][v])
        for q in range(queries):
            for v in range(count):
                place = builder.add(builder.add(out, builder.mul(width, const(q))), const(4 * LANES * v))
                store_vector(builder, builder.load(sums[q][v]), place)

    return emitted(emit, 6)


scores_wide = [_scores(n, False) for n in (1, 2, 4, 8)]
scores_bits = [_scores(n, True) for n in (1, 2, 4, 8)]
values_wide = [_values(n, VALUES, False) for n in (1, 2, 4)]
values_bits = [_values(n, VALUES, True) for n in (1, 2, 4)]
single_wide, single_bits = _values(1, 1, False), _values(1, 1, True)


def _score_tiles(builder: Any, keys: Any, query: Any, out: Any, line: Any, head: Any) -> None:
    """Dot products of 16 queries (bf16) with 64 columns; tiles 2-3 hold sums, 5 queries, 6-7 keys."""
    side_bytes = builder.mul(head, const(2 * SIDE))
    steps, stride = builder.lshr(head, const(5)), builder.mul(head, const(2))
    for first in range(0, TURN // SIDE, 2):
        for n in (2, 3):
            call(builder, "llvm.x86.tilezero", VOID, [tile(n)])
        sides = [builder.add(keys, builder.mul(side_bytes, const(first + n))) for n in range(2)]
        with cgutils.for_range(builder, steps) as loop:
            load_tile(builder, 5, builder.add(query, builder.mul(loop.index, const(64))), stride)
            for n, side in enumerate(sides):
                load_tile(builder, 6 + n, builder.add(side, builder.mul(loop.index, const(1024))), const(64))
                call(builder, "llvm.x86.tdpbf16ps", VOID, [tile(2 + n), tile(5), tile(6 + n)])
        for n in range(2):
            place = at(builder, builder.add(out, const(4 * SIDE * (first + n))))
            call(builder, "llvm.x86.tilestored64", VOID, [tile(2 + n), place, line])


score_tiles = emitted(_score_tiles, 5)


def score(keys: int, query: int, out: int, line: int, head: int, count: int, kind: Any, tag: Any) -> None:
    raise NotImplementedError("compiled code only")


@overload(score)
def _score_code(keys, query, out, line, head, count, kind, tag):  # type: ignore[no-untyped-def]
    """Scores of ``count`` queries with 64 columns; tiles always write 16 lines."""
    if kind in ON_TILES:
        return lambda keys, query, out, line, head, count, kind, tag: score_tiles(
            keys, query, out, line, head
        )
    one, two, four, eight = scores_bits if tag == types.uint16 else scores_wide

    def by_queries(keys, query, out, line, head, count, kind, tag):  # type: ignore[no-untyped-def]
        q = 0
        while QUERIES >= 8 and count - q >= 8:
            eight(keys, query + 4 * head * q, out + line * q, line, head)
            q += 8
        while QUERIES >= 4 and count - q >= 4:
            four(keys, query + 4 * head * q, out + line * q, line, head)
            q += 4
        while count - q >= 2:
            two(keys, query + 4 * head * q, out + line * q, line, head)
            q += 2
        if count > q:
            one(keys, query + 4 * head * q, out + line * q, line, head)

    return by_queries


def weigh(
    weights: int, line: int, values: int, columns: int, out: int, head: int, count: int, tag: Any
) -> None:
    raise NotImplementedError("compiled code only")


@overload(weigh)
def _weigh_code(weights, line, values, columns, out, head, count, tag):  # type: ignore[no-untyped-def]
    """out (count, D) += weights (count, columns) values (columns, D), column after column."""
    one, two, four = values_bits if tag == types.uint16 else values_wide
    single = single_bits if tag == types.uint16 else single_wide
    size = 2 if tag == types.uint16 else 4
    wide = VALUES * LANES

    def by_queries(weights, line, values, columns, out, head, count, tag):  # type: ignore[no-untyped-def]
        d = 0
        while head - d >= wide:
            q = 0
            while QUERIES >= 4 and count - q >= 4:
                four(weights + q * line, line, values + d * size, columns, out + 4 * (q * head + d), head)
                q += 4
            while count - q >= 2:
                two(weights + q * line, line, values + d * size, columns, out + 4 * (q * head + d), head)
                q += 2
            if count > q:
                one(weights + q * line, line, values + d * size, columns, out + 4 * (q * head + d), head)
            d += wide
        while head - d > 0:
            for q in range(count):
                single(weights + q * line, line, values + d * size, columns, out + 4 * (q * head + d), head)
            d += LANES

    return by_queries


@register_jitable
def first_seen(position: int, window: int) -> int:
    """The first position that a row sees."""
    return max(0, position + 1 - window) if window > 0 else 0


def _soften(builder: Any, scores: Any, vectors: Any) -> Any:
    lowest = number(float("-inf"))
    largest = cgutils.alloca_once_value(builder, lowest)
    with cgutils.for_range(builder, vectors) as loop:
        place = builder.add(scores, builder.mul(loop.index, const(4 * LANES)))
        value, before = load_vector(builder, place, False), builder.load(largest)
        builder.store(builder.select(builder.fcmp_ordered(">", value, before), value, before), largest)
    top = call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [builder.load(largest)], ("nnan",))
    top = spread(builder, top)
    total = cgutils.alloca_once_value(builder, zeros())
    with cgutils.for_range(builder, vectors) as loop:
        place = builder.add(scores, builder.mul(loop.index, const(4 * LANES)))
        value = builder.fsub(load_vector(builder, place, False), top)
        power = exponential(builder, value)
        # What is too small to count is nothing at all, so that lanes behind the end are.
        power = builder.select(builder.fcmp_ordered("<", value, number(-87.0)), zeros(), power)
        store_vector(builder, power, place)
        builder.store(builder.fadd(builder.load(total), power), total)
    none = ir.Constant(F32, 0.0)
    summed = call(
        builder, f"llvm.vector.reduce.fadd.v{LANES}f32", F32, [none, builder.load(total)], ("reassoc",)
    )
    return builder.fdiv(ir.Constant(F32, 1.0), summed)


def _clear(builder: Any, out: Any, vectors: Any) -> None:
    with cgutils.for_range(builder, vectors) as loop:
        store_vector(builder, zeros(), builder.add(out, builder.mul(loop.index, const(4 * LANES))))


def _scaled(narrow_out: bool) -> Any:
    def emit(builder: Any, sums: Any, share: Any, out: Any, vectors: Any) -> None:
        factor = spread(builder, load_single(builder, share, False))
        with cgutils.for_range(builder, vectors) as loop:
            place = builder.add(sums, builder.mul(loop.index, const(4 * LANES)))
            value = builder.fmul(load_vector(builder, place, False), factor)
            place = builder.add(out, builder.mul(loop.index, const((2 if narrow_out else 4) * LANES)))
            if narrow_out:
                store_bits(builder, rounded_bits(builder, value), place)
            else:
                store_vector(builder, value, place)

    return emitted(emit, 4)


#: (scores, vectors) -> one over the sum: exponentials of scores against their largest, in place.
soften = emitted(_soften, 2, types.float32)
clear = emitted(_clear, 2)
_scaled_bits, _scaled_wide = _scaled(True), _scaled(False)


def write_out(sums: int, share: int, out: int, vectors: int, kind: Any) -> None:
    raise NotImplementedError("compiled code only")


@overload(write_out)
def _write_code(sums, share, out, vectors, kind):  # type: ignore[no-untyped-def]
    """sums times the number at ``share``, as products read it."""
    scaled = _scaled_wide if kind == types.int32 else _scaled_bits
    return lambda sums, share, out, vectors, kind: scaled(sums, share, out, vectors)


@njit(nogil=True, error_model="numpy")
def attend(
    query: int, keys: int, values: int, out: int, out_stride: int, scratch: int, line: int,
    length: int, first: int, last: int, groups: int, head: int, size: int, chain: bool, window: int,
    positions: int, ends: int, columns: int, kind: Any, tag: Any,
) -> None:  # fmt: skip
    """Attention of queries first..last of one key head of one sequence; query i belongs to row i / groups.

    Args:
        query: (rows * groups, D), scaled; bf16 for tiles, else fp32.
        keys, values: of the slot's head, from column 0 on.
        out: what the output product reads, at the sequence's first row and this key head; rows are
            ``out_stride`` bytes apart, and hold ``size`` numbers for each query.
        scratch, line: room for 16 lines of ``line`` bytes of scores and 16 of D sums.
        length: T.
        chain: whether each row sees all rows before it, as in a prompt; otherwise ``columns[ends[r - 1]:ends[r]]``.
        positions, ends: of the sequence's rows; ends[-1] is there.
    """
    single, wide = np.float32(0), np.int64(0)
    target = input_tag(kind)
    stored, element = bytes_of(tag), bytes_of(target)
    places = carray(pointer(positions, wide), (last // groups + 1,))
    bounds = carray(pointer(ends - 8, wide), (last // groups + 2,))
    path = carray(pointer(columns, wide), (bounds[last // groups + 1] if not chain else 1,))
    sums_at = scratch + MOST * line
    sums = carray(pointer(sums_at, single), (MOST, head))
    shares_at = sums_at + 4 * MOST * head
    shares = carray(pointer(shares_at, single), (MOST,))
    for i in range(first, last, MOST):
        count = min(MOST, last - i)
        top, bottom = i // groups, (i + count - 1) // groups
        shared = length + top if chain else length
        begin = shared
        for r in range(top, bottom + 1):
            begin = min(begin, first_seen(places[r], window))
        start = begin // TURN * TURN
        for turn in range(start, length + bottom + 1, TURN):
            score(
                keys + turn * head * stored, query + bytes_of(query_tag(kind)) * head * i,
                scratch + 4 * (turn - start), line, head, count, kind, tag,
            )  # fmt: skip
        for q in range(count):
            r = (i + q) // groups
            row = carray(pointer(scratch + q * line, single), (line // 4,))
            mine = first_seen(places[r], window)
            here = min(mine, shared)
            skipped = max(0, mine - shared)
            if chain:
                end = length + r + 1 - start
                here = min(mine, length + r)
            else:
                depth = bounds[r + 1] - bounds[r]
                for t in range(skipped, depth):
                    row[shared - start + t - skipped] = row[path[bounds[r] + t] - start]
                end = shared - start + depth - skipped
            vectors = (end - (here - start) + LANES - 1) // LANES
            for j in range(end, here - start + vectors * LANES):
                row[j] = -np.inf
            shares[q] = soften(scratch + q * line + 4 * (here - start), vectors)
            for j in range(begin - start, min(here, shared) - start):
                row[j] = 0
        clear(sums_at, count * head // LANES)
        if shared > begin:
            weigh(
                scratch + 4 * (begin - start),
                line,
                values + begin * head * stored,
                shared - begin,
                sums_at,
                head,
                count,
                tag,
            )
        for q in range(count):
            r = (i + q) // groups
            mine = first_seen(places[r], window)
            tail = scratch + q * line + 4 * (shared - start)
            mysums = sums_at + 4 * q * head
            if chain:
                skip = max(0, min(mine, length + r) - shared)
                weigh(
                    tail + 4 * skip,
                    line,
                    values + (shared + skip) * head * stored,
                    length + r + 1 - shared - skip,
                    mysums,
                    head,
                    1,
                    tag,
                )
            else:
                t = bounds[r] + max(0, mine - shared)
                while t < bounds[r + 1]:
                    run = 1
                    while t + run < bounds[r + 1] and path[t + run] == path[t] + run:
                        run += 1
                    weigh(tail, line, values + path[t] * head * stored, run, mysums, head, 1, tag)
                    tail += 4 * run
                    t += run
            lane = (i + q) % groups
            place = out + r * out_stride + lane * size * element
            if size % LANES == 0:
                write_out(sums_at + 4 * q * head, shares_at + 4 * q, place, size // LANES, kind)
            else:
                result = carray(pointer(place, target), (size,))
                for d in range(size):
                    result[d] = narrow(sums[q, d] * shares[q], target)
