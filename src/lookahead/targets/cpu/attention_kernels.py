"""The two products of attention, in LLVM's vectors: queries by keys, and weights by values.

Keys of 16 columns lie side by side, (column / 16, D, 16), so that a vector holds one dimension of many columns, or
for tiles (column / 16, D / 2, 16, 2); values lie as (column, D), so that a vector holds many dimensions of one
column. D is rounded up to whole vectors and tiles. A score is one chain of sums over the head; values are added
column after column.
"""

from __future__ import annotations

from typing import Any

from numba.core import cgutils

from . import llvm
from .execution_plan import KEY_BLOCK, SCORE_BLOCK
from .llvm import VOID, call, const, load_numbers, offset
from .microkernel import load_tile, tile
from .numeric_format import Format
from .processor import LANES, REGISTERS

#: Queries that one call of the vector kernels serves, and vectors of values that one call holds.
QUERIES = 8 if LANES == 16 else 2
VALUES = 4 if REGISTERS == 32 or LANES == 8 else 2


def _scores(queries: int, narrow: bool) -> Any:
    """Dot products of some queries with a score block; ``line`` is bytes from query to query of ``out``."""
    blocks = {8: 2, 4: 4, 2: 4, 1: 4}[queries] if LANES == 16 else 1
    count = blocks * KEY_BLOCK // LANES
    size = 2 if narrow else 4

    def emit(builder: Any, keys: Any, query: Any, out: Any, line: Any, head: Any) -> None:
        for first in range(0, SCORE_BLOCK // KEY_BLOCK, blocks):
            sums = llvm.zero_vectors(builder, queries, count)
            with cgutils.for_range(builder, head) as loop:
                within = offset(builder, keys, (loop.index, KEY_BLOCK * size))
                parts = []
                for block in range(first, first + blocks):
                    here = offset(builder, within, (head, KEY_BLOCK * size * block))
                    for v in range(KEY_BLOCK // LANES):
                        parts.append(load_numbers(builder, offset(builder, here, v * LANES * size), narrow))
                for q in range(queries):
                    place = offset(builder, query, (head, 4 * q), (loop.index, 4))
                    factor = llvm.broadcast(builder, load_numbers(builder, place, False, 1))
                    for v, part in enumerate(parts):
                        total = llvm.multiply_add(builder, part, factor, builder.load(sums[q][v]))
                        builder.store(total, sums[q][v])
            for q in range(queries):
                for v in range(count):
                    place = offset(builder, out, (line, q), 4 * (KEY_BLOCK * first + LANES * v))
                    llvm.store_vector(builder, builder.load(sums[q][v]), place)

    return llvm.emitted(emit, 5)


def _scores_on_tiles(builder: Any, keys: Any, query: Any, out: Any, line: Any, head: Any) -> None:
    """Dot products of 16 queries (bf16) with a score block; tiles 2-3 hold sums, 5 queries, 6-7 keys."""
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
    """(keys, query, out, line, head, count): scores of some queries with a score block; tiles write 16 lines."""
    if numbers.kind == "tiles":
        on_tiles = llvm.emitted(_scores_on_tiles, 5)

        def score_tiles(keys: int, query: int, out: int, line: int, head: int, count: int) -> None:
            on_tiles(keys, query, out, line, head)

        return llvm.jit(score_tiles, numbers.name)
    one, two, four, eight = (_scores(n, numbers.stored.is_bf16) for n in (1, 2, 4, 8))

    def score(keys: int, query: int, out: int, line: int, head: int, count: int) -> None:
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

    return llvm.jit(score, numbers.name)


def _weighted(queries: int, count: int, narrow: bool) -> Any:
    """Add the values of ``columns`` columns, weighted, to the sums of some queries; ``count`` vectors of a head."""
    size = 2 if narrow else 4

    def emit(builder: Any, weights: Any, line: Any, values: Any, columns: Any, out: Any, head: Any) -> None:
        sums = llvm.zero_vectors(builder, queries, count)
        places = [
            [offset(builder, out, (head, 4 * q), 4 * LANES * v) for v in range(count)] for q in range(queries)
        ]
        for q in range(queries):
            for v in range(count):
                builder.store(load_numbers(builder, places[q][v], False), sums[q][v])
        step = builder.mul(head, const(size))
        with cgutils.for_range(builder, columns) as loop:
            here = offset(builder, values, (loop.index, step))
            parts = [
                load_numbers(builder, offset(builder, here, size * LANES * v), narrow) for v in range(count)
            ]
            for q in range(queries):
                place = offset(builder, weights, (line, q), (loop.index, 4))
                factor = llvm.broadcast(builder, load_numbers(builder, place, False, 1))
                for v in range(count):
                    total = llvm.multiply_add(builder, parts[v], factor, builder.load(sums[q][v]))
                    builder.store(total, sums[q][v])
        for q in range(queries):
            for v in range(count):
                llvm.store_vector(builder, builder.load(sums[q][v]), places[q][v])

    return llvm.emitted(emit, 6)


def weighted_sum_of(numbers: Format) -> Any:
    """(weights, line, values, columns, out, head, count): out (count, D) += weights (count, columns) values."""
    size, narrow = numbers.stored.bytes, numbers.stored.is_bf16
    one, two, four = (_weighted(n, VALUES, narrow) for n in (1, 2, 4))
    rest = _weighted(1, 1, narrow)
    wide = VALUES * LANES

    def weighted_sum(
        weights: int, line: int, values: int, columns: int, out: int, head: int, count: int
    ) -> None:
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
                rest(weights + q * line, line, values + d * size, columns, out + 4 * (q * head + d), head)
            d += LANES

    return llvm.jit(weighted_sum, numbers.name)
