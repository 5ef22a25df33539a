"""Attention of a tree's rows, each with the bits that it would have as the only row of a step.

A row's columns are taken in the order of their positions: the committed prefix, then its own ancestors, root first,
exactly as if these had been committed. The exponentials are summed and the values added up in that order. What is
shared among rows are loads of the prefix and nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from .attention_kernels import scaled_output, score_of, softmax, weighted_sum_of
from .execution_plan import QUERY_BLOCK, SCORE_BLOCK
from .llvm import floats_at, inlined, integers_at, jit
from .numeric_format import Format
from .processor import LANES


@inlined
def _first_seen(position: int, window: int) -> int:
    """The first position that a row sees."""
    return max(0, position + 1 - window) if window > 0 else 0


def attention_of(numbers: Format) -> Any:
    """The code of a format."""
    score, weighted_sum = score_of(numbers), weighted_sum_of(numbers)
    output = scaled_output(numbers.input.is_bf16)
    out_at, narrow, out_bytes = numbers.input.pointer, numbers.input.narrow, numbers.input.bytes
    query_bytes, stored = numbers.query.bytes, numbers.stored.bytes

    def attend(
        p: Any, segment: Any, window: int, query: int, keys: int, values: int, out: int, first: int, last: int,
        scratch: int,
    ) -> None:  # fmt: skip
        """Attention of queries first..last of one key head of one sequence; query i belongs to row i / groups.

        Args:
            query: (rows * groups, padded head), scaled.
            keys, values: of the slot's head, from column 0 on.
            out: what the output gemm reads, at the sequence's first row and this key head.
            scratch: room for 16 lines of scores and 16 of a head's sums.
        """
        length, chain = segment.length, segment.is_chain != 0
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
                begin = min(begin, _first_seen(positions[r], window))
            start = begin // SCORE_BLOCK * SCORE_BLOCK
            for column in range(start, length + bottom + 1, SCORE_BLOCK):
                block, place = keys + column * head * stored, scratch + 4 * (column - start)
                score(block, query + query_bytes * head * i, place, line, head, count)
            for q in range(count):
                r = (i + q) // groups
                scores = carray(floats_at(scratch + q * line), (line // 4,))
                seen = _first_seen(positions[r], window)
                here = min(seen, shared)
                skipped = max(0, seen - shared)
                if chain:
                    end = length + r + 1 - start
                    here = min(seen, length + r)
                else:
                    depth = bounds[r + 1] - bounds[r]
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
                seen = _first_seen(positions[r], window)
                weights = scratch + q * line + 4 * (shared - start)
                mine = sums_at + 4 * q * head
                if chain:
                    skip = max(0, min(seen, length + r) - shared)
                    block = values + (shared + skip) * head * stored
                    columns = length + r + 1 - shared - skip
                    weighted_sum(weights + 4 * skip, line, block, columns, mine, head, 1)
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

    return jit(attend, numbers.name)
