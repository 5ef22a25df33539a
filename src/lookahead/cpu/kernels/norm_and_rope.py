"""The stages between gemms: RMS norms (Zhang and Sennrich 2019) and layer norms (Ba et al. 2016) of rows. After the
query, key and value gemm: head norms, rotary positions (Su et al. 2021) and cache writes.

The rotary pairs (i, i + R/2) of a head are adjacent here, (2i, 2i + 1), because the weight rows are packed in that
order (``formats.paired``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...machine_code import compiled
from ..execution_plan import KEY_BLOCK, SEGMENT
from ..formats import Format
from ..packed import BLOCK
from .formats import CODE
from .operations import floats_at, integers_at, record_at
from .packed_gemm import quantize
from .workers import barrier, share

#: Up to this many rows, every thread normalizes all rows, which is faster than waiting for the other threads.
FEW_ROWS = 2
SEGMENT_BYTES = SEGMENT.itemsize
segment_at = record_at(SEGMENT)
#: Lets LLVM sum in lanes and fuse multiply-adds, without assumptions about NaN and infinity.
REASSOCIATE = {"reassoc", "contract", "nsz"}


@partial(compiled, fastmath=REASSOCIATE)
def statistics(address: int, size: int, norm: Any) -> Any:
    """(m, f) of fp32 numbers: a norm is (x - m) * f * weight + bias, f = 1 / sqrt(mean((x - m)^2) + epsilon).

    A layer norm subtracts the mean m; an RMS norm has m = 0; without a norm, m = 0 and f = 1.
    """
    xs = floats_at(address)
    mean, total = np.float32(0), np.float32(0)
    if norm.type == 0:
        return mean, np.float32(1)
    if norm.type == 2:
        for i in range(size):
            total += xs[i]
        mean = total / np.float32(size)
        total = np.float32(0)
    for i in range(size):
        total += (xs[i] - mean) * (xs[i] - mean)
    return mean, np.float32(1) / np.sqrt(total / np.float32(size) + norm.epsilon)


def norms_of(fmt: Format) -> tuple[Any, Any, Any]:
    """``norm_rows``, ``add_normed`` and ``keep_states`` of a format."""
    input_at, from_fp32 = CODE[fmt.input].pointer, CODE[fmt.input].from_fp32
    is_packed = fmt.product == "packed"

    def norm_rows(
        p: Any, norm: Any, rows: int, row_numbers: int, worker: Any, arrived: int
    ) -> tuple[int, int]:
        """Write the norm of rows of x to a gemm's input.

        Args:
            row_numbers: address of the row numbers in x, as 64-bit integers; 0 for the first ``rows`` rows.

        Returns:
            the input's address for this thread, and the count of arrivals.
        """
        # If there are few rows, every thread normalizes all of them for itself; otherwise the threads divide them.
        out = p.normed
        begin = 0
        end = rows
        if rows <= FEW_ROWS:
            out += worker.rank * p.normed_each
        else:
            begin, end = share(rows, worker.rank, worker.size)
        # Normalize each row in fp32, and write it in the format's type.
        ws, bs = floats_at(norm.weight), floats_at(norm.bias)
        chosen = integers_at(row_numbers)
        for r in range(begin, end):
            source = p.x + p.x_stride * (chosen[r] if row_numbers != 0 else r)
            xs = floats_at(source)
            outs = input_at(out + p.normed_stride * r)
            mean, factor = statistics(source, p.hidden, norm)
            for i in range(p.hidden):
                outs[i] = from_fp32((xs[i] - mean) * factor * ws[i] + bs[i])
            # A gemm with packed weights reads quantized rows.
            if is_packed:
                blocks = (p.hidden + BLOCK - 1) // BLOCK
                quantize(out + p.normed_stride * r, blocks, 0, blocks)
        return out, arrived if rows <= FEW_ROWS else barrier(worker, arrived)

    def add_normed(p: Any, norm: Any, worker: Any) -> None:
        """Add the norm of this thread's rows of ``p.qkv`` to x."""
        # No two threads write to the same row, so no barrier is needed in between.
        ws, bs = floats_at(norm.weight), floats_at(norm.bias)
        begin, end = share(p.rows, worker.rank, worker.size)
        for r in range(begin, end):
            source = p.qkv + p.qkv_stride * r
            ys = floats_at(source)
            xs = floats_at(p.x + p.x_stride * r)
            mean, factor = statistics(source, p.hidden, norm)
            for i in range(p.hidden):
                xs[i] += (ys[i] - mean) * factor * ws[i] + bs[i]

    def keep_states(p: Any, source: int, worker: Any) -> None:
        """Copy this thread's share of the rows that ``norm_rows`` wrote to ``p.states``."""
        begin, end = share(p.reads, worker.rank, worker.size)
        for r in range(begin, end):
            numbers = input_at(source + p.normed_stride * r)
            outs = input_at(p.states + p.states_stride * r)
            for i in range(p.hidden):
                outs[i] = numbers[i]

    # As in ``statistics``, LLVM may fuse multiply-adds.
    for function in (norm_rows, add_normed, keep_states):
        compiled(function, fmt.name, fastmath=REASSOCIATE)
    return norm_rows, add_normed, keep_states


def rotate_of(fmt: Format) -> Any:
    """``rotate`` of a format."""
    query_at, to_query, query_bytes = CODE[fmt.query].pointer, CODE[fmt.query].from_fp32, fmt.query.bytes
    stored_at, to_stored, stored_bytes = (
        CODE[fmt.cached].pointer,
        CODE[fmt.cached].from_fp32,
        fmt.cached.bytes,
    )
    pair = fmt.key_pair

    def rotate(p: Any, layer: Any, index: int, worker: Any) -> None:
        """Normalize and rotate this thread's (head, row) pairs of ``p.qkv``, and write keys and values to the cache.

        Queries are scaled and written to ``p.query``; a sequence's queries are (K, rows, H / K, padded head).
        """
        scratch = p.scratch + worker.rank * p.scratch_each
        positions = integers_at(p.positions)
        heads, key_heads, head, padded = p.heads, p.key_heads, p.head_size, p.padded_head
        all_heads = heads + 2 * key_heads
        groups = heads // key_heads
        begin, end = share(p.rows * all_heads, worker.rank, worker.size)
        s = 0
        for item in range(begin, end):
            # Head by head, because the gemm divided its outputs among threads in this order. So most of what a thread
            # reads is in its cache, and no two threads write to the same cache line, which holds keys of many
            # columns.
            lane, row = item // p.rows, item % p.rows
            s = 0 if row == 0 else s
            segment = segment_at(p.segments + s * SEGMENT_BYTES)
            while row >= segment.first_row + segment.rows:
                s += 1
                segment = segment_at(p.segments + s * SEGMENT_BYTES)
            local = row - segment.first_row
            column = segment.length + local
            y = p.qkv + p.qkv_stride * row + 4 * lane * head
            # Copy the head, because a joint norm of another head of this row reads the original.
            source, ys = floats_at(y), floats_at(scratch)
            for i in range(head):
                ys[i] = source[i]
            # Normalize and rotate queries and keys.
            if lane < heads + key_heads:
                if layer.head_norm.type != 0:
                    ws = floats_at(layer.head_norm.weight + 4 * lane * head)
                    width = head
                    if layer.joint_norm != 0:
                        y -= 4 * head * (lane if lane < heads else lane - heads)
                        width *= heads if lane < heads else key_heads
                    _, factor = statistics(y, width, layer.head_norm)
                    for i in range(head):
                        ys[i] *= factor * ws[i]
                if layer.rotates != 0:
                    table = p.rotary + p.rotary_each * (layer.rotates - 1)
                    angles = floats_at(table + 4 * head * positions[row])
                    for i in range(0, head, 2):
                        a, b = ys[i], ys[i + 1]
                        ys[i] = a * angles[i] - b * angles[i + 1]
                        ys[i + 1] = a * angles[i + 1] + b * angles[i]
            # Store the query, or the key or value in the cache.
            store = segment.cache + index * segment.cache_layer + (lane - heads) * segment.cache_head
            if lane < heads:
                number = segment.first_row * heads + ((lane // groups) * segment.rows + local) * groups
                number += lane % groups
                out = query_at(p.query + query_bytes * number * padded)
                scale = layer.scale
                for i in range(head):
                    out[i] = to_query(ys[i] * scale)
            elif lane < heads + key_heads:
                position = column // KEY_BLOCK * padded * KEY_BLOCK + column % KEY_BLOCK * pair
                keys = stored_at(store + position * stored_bytes)
                for i in range(head):
                    keys[i // pair * (KEY_BLOCK * pair) + i % pair] = to_stored(ys[i])
            else:
                values = stored_at(store + column * padded * stored_bytes)
                for i in range(head):
                    values[i] = to_stored(ys[i])

    return compiled(rotate, fmt.name, fastmath=REASSOCIATE)
