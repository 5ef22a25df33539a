"""One pass as one call for each thread: every layer's stages in turn, with a barrier where one waits for another.

Each thread takes its share of every stage: outputs of a gemm, rows of an RMS norm (Zhang and Sennrich 2019), heads of
rotary positions (Su et al. 2021) and of attention. Who computes what changes nothing in the result. Rotary pairs
(i, i + D/2) of a head are neighbours (2i, 2i + 1) here: the weights' rows are packed in that order.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
from numba import carray, cfunc, from_dtype, types
from numba.extending import overload

from .attention import attention_of
from .execution_plan import KEY_BLOCK, LAYER, PLAN, SEGMENT
from .formats import FORMATS, Format
from .gemm import gemm_of
from .llvm import REASSOCIATE, STAMP, VOID, address_as, at, call, emitted, floats_at, integers_at, jit
from .thread_pool import barrier, share

#: Up to this many rows every thread norms all of them for itself, which is quicker than waiting for another.
FEW_ROWS = 2
LAYER_BYTES, SEGMENT_BYTES = LAYER.itemsize, SEGMENT.itemsize
plan_at, layer_at, segment_at = (address_as(from_dtype(record)) for record in (PLAN, LAYER, SEGMENT))

configure_tiles = emitted(lambda b, place: call(b, "llvm.x86.ldtilecfg", VOID, [at(b, place)]) and None, 1)
release_tiles = emitted(lambda b: call(b, "llvm.x86.tilerelease", VOID, []) and None, 0)


def _embed_of(numbers: Format) -> Any:
    """Rows begin..end of the embedding (V, hidden), in fp32."""
    weights_at, widen = numbers.stored.pointer, numbers.stored.widen

    def embed(p: Any, begin: int, end: int) -> None:
        tokens = carray(integers_at(p.tokens), (end,))
        weights = carray(weights_at(p.embedding), (p.vocabulary, p.hidden))
        for r in range(begin, end):
            out = carray(floats_at(p.x + p.x_stride * r), (p.hidden,))
            for i in range(p.hidden):
                out[i] = widen(weights[tokens[r], i])

    return jit(embed, numbers.name)


@partial(jit, fastmath=REASSOCIATE)
def inverse_rms(address: int, size: int, epsilon: float) -> Any:
    """1 / sqrt(mean(x^2) + epsilon) of fp32 numbers; a norm is x times this times the weight."""
    xs = carray(floats_at(address), (size,))
    total = np.float32(0)
    for i in range(size):
        total += xs[i] * xs[i]
    return np.float32(1) / np.sqrt(total / np.float32(size) + epsilon)


def _norm_rows_of(numbers: Format) -> Any:
    element, narrow = numbers.input.pointer, numbers.input.narrow

    def norm_rows(
        p: Any, norm: Any, rows: int, row_numbers: int, control: int, arrived: int, rank: int, size: int
    ) -> tuple[int, int]:
        """Norm rows of x, as a gemm reads them; returns where they lie for this thread, and the count of arrivals.

        Args:
            row_numbers: row r of the result is row ``row_numbers[r]`` of x; 0 where it is row r.
        """
        out, begin, end = p.normed, 0, rows
        if rows <= FEW_ROWS:
            out += rank * p.normed_each
        else:
            begin, end = share(rows, rank, size)
        ws = carray(floats_at(norm.weight), (p.hidden,))
        chosen = carray(integers_at(row_numbers), (rows,))
        for r in range(begin, end):
            source = p.x + p.x_stride * (chosen[r] if row_numbers != 0 else r)
            xs = carray(floats_at(source), (p.hidden,))
            outs = carray(element(out + p.normed_stride * r), (p.hidden,))
            factor = inverse_rms(source, p.hidden, norm.epsilon)
            for i in range(p.hidden):
                outs[i] = narrow(xs[i] * factor * ws[i])
        return out, arrived if rows <= FEW_ROWS else barrier(control, arrived, size)

    return jit(norm_rows, numbers.name, fastmath=REASSOCIATE)


def _rotate_of(numbers: Format) -> Any:
    query_at, to_query, query_bytes = numbers.query.pointer, numbers.query.narrow, numbers.query.bytes
    stored_at, to_stored, stored_bytes = numbers.stored.pointer, numbers.stored.narrow, numbers.stored.bytes
    pair = numbers.key_pair

    def rotate(p: Any, layer: Any, cache: int, rank: int, size: int) -> None:
        """Norm and rotate this thread's heads of rows; queries go out scaled, keys and values into the cache.

        Queries of a sequence are (K, rows, H / K, padded head).
        """
        positions = carray(integers_at(p.positions), (p.rows,))
        heads, key_heads, head, padded = p.heads, p.key_heads, p.head_size, p.padded_head
        lanes, groups = heads + 2 * key_heads, heads // key_heads
        begin, end = share(p.rows * lanes, rank, size)
        s = 0
        for item in range(begin, end):
            row, lane = item // lanes, item % lanes
            segment = segment_at(p.segments + s * SEGMENT_BYTES)
            while row >= segment.first_row + segment.rows:
                s += 1
                segment = segment_at(p.segments + s * SEGMENT_BYTES)
            local = row - segment.first_row
            column = segment.length + local
            y = p.qkv + p.qkv_stride * row + 4 * lane * head
            ys = carray(floats_at(y), (head,))
            if lane < heads + key_heads:
                if layer.head_norm.weight != 0:
                    ws = carray(floats_at(layer.head_norm.weight + 4 * lane * head), (head,))
                    factor = inverse_rms(y, head, layer.head_norm.epsilon)
                    for i in range(head):
                        ys[i] *= factor * ws[i]
                if layer.rotates != 0:
                    angles = carray(floats_at(p.rotary + 4 * head * positions[row]), (head,))
                    for i in range(0, head, 2):
                        a, b = ys[i], ys[i + 1]
                        ys[i] = a * angles[i] - b * angles[i + 1]
                        ys[i + 1] = a * angles[i + 1] + b * angles[i]
            store = cache + segment.slot * p.cache_slot + (lane - heads) * p.cache_head
            if lane < heads:
                place = segment.first_row * heads + ((lane // groups) * segment.rows + local) * groups
                place += lane % groups
                out = carray(query_at(p.query + query_bytes * place * padded), (head,))
                scale = layer.scale
                for i in range(head):
                    out[i] = to_query(ys[i] * scale)
            elif lane < heads + key_heads:
                place = column // KEY_BLOCK * padded * KEY_BLOCK + column % KEY_BLOCK * pair
                keys = carray(stored_at(store + place * stored_bytes), (head * KEY_BLOCK,))
                for i in range(head):
                    keys[i // pair * (KEY_BLOCK * pair) + i % pair] = to_stored(ys[i])
            else:
                values = carray(stored_at(store + column * padded * stored_bytes), (head,))
                for i in range(head):
                    values[i] = to_stored(ys[i])

    return jit(rotate, numbers.name, fastmath=REASSOCIATE)


def _attend_of(numbers: Format) -> Any:
    attend = attention_of(numbers)
    query_bytes, out_bytes = numbers.query.bytes, numbers.input.bytes

    def attend_rows(p: Any, layer: Any, cache: int, rank: int, size: int) -> None:
        """Attention of this thread's heads of rows."""
        groups = p.heads // p.key_heads
        scratch = p.scratch + rank * p.scratch_each
        begin, end = share(p.rows * p.heads, rank, size)
        seen = 0
        for s in range(p.segment_count):
            segment = segment_at(p.segments + s * SEGMENT_BYTES)
            queries = segment.rows * groups
            for h in range(p.key_heads):
                first, last = max(begin - seen, 0), min(end - seen, queries)
                if first < last:
                    keys = cache + segment.slot * p.cache_slot + h * p.cache_head
                    values = keys + p.key_heads * p.cache_head
                    place = segment.first_row * p.heads + h * queries
                    out = p.attended + segment.first_row * p.attended_stride
                    out += h * groups * p.head_size * out_bytes
                    query = p.query + query_bytes * p.padded_head * place
                    attend(p, segment, layer.window, query, keys, values, out, first, last, scratch)
                seen += queries

    return jit(attend_rows, numbers.name)


def _pass_of(numbers: Format) -> Any:
    """The pass of one thread; ``arrived`` threads were counted before it (``thread_pool``)."""
    store, add, gate, keep_logits = gemm_of(numbers)
    embed, norm_rows = _embed_of(numbers), _norm_rows_of(numbers)
    rotate, attend = _rotate_of(numbers), _attend_of(numbers)
    on_tiles = numbers.kind == "tiles"

    def run(address: int, control: int, rank: int, size: int, arrived: int) -> None:
        p = plan_at(address)
        rows, scratch = p.rows, p.scratch + rank * p.scratch_each
        if on_tiles:
            configure_tiles(p.tile_config)
        begin, end = share(rows, rank, size)
        embed(p, begin, end)
        arrived = barrier(control, arrived, size)
        for index in range(p.layer_count):
            layer, cache = layer_at(p.layers + index * LAYER_BYTES), p.cache + index * p.cache_layer
            x, arrived = norm_rows(p, layer.attention_norm, rows, 0, control, arrived, rank, size)
            store(layer.qkv, x, p.normed_stride, rows, p.qkv, p.qkv_stride, 0, 0, scratch, rank, size)
            arrived = barrier(control, arrived, size)
            rotate(p, layer, cache, rank, size)
            arrived = barrier(control, arrived, size)
            attend(p, layer, cache, rank, size)
            arrived = barrier(control, arrived, size)
            add(layer.output, p.attended, p.attended_stride, rows, p.x, p.x_stride, 0, 0, scratch, rank, size)
            arrived = barrier(control, arrived, size)
            x, arrived = norm_rows(p, layer.feed_forward_norm, rows, 0, control, arrived, rank, size)
            gate(layer.gate_up, x, p.normed_stride, rows, p.gated, p.gated_stride, 0, 0, scratch, rank, size)
            arrived = barrier(control, arrived, size)
            add(layer.down, p.gated, p.gated_stride, rows, p.x, p.x_stride, 0, 0, scratch, rank, size)
            arrived = barrier(control, arrived, size)
        reads = p.reads
        if reads > 0:
            x, arrived = norm_rows(p, p.final_norm, reads, p.read_rows, control, arrived, rank, size)
            keep_logits(
                p.lm_head, x, p.normed_stride, reads, p.logits, p.logits_stride, p.peaks, p.peaks_stride,
                scratch, rank, size,
            )  # fmt: skip
        if on_tiles:
            release_tiles()
        barrier(control, arrived, size)

    return jit(run, numbers.name)


def _run(address: int, control: int, rank: int, size: int, arrived: int, number: int) -> None:
    raise NotImplementedError("compiled code only")


@overload(_run, prefer_literal=True)
def _run_code(address, control, rank, size, arrived, number):  # type: ignore[no-untyped-def]  # numba compares both
    run = _pass_of(tuple(FORMATS.values())[number.literal_value])
    return lambda address, control, rank, size, arrived, number: run(address, control, rank, size, arrived)


@cache
def _compiled(numbers: Format) -> Any:
    # What is compiled for the disk may not close over compiled functions, so the format is told by its number.
    number, stamp = tuple(FORMATS.values()).index(numbers), STAMP

    def job(address: int, control: int, rank: int, size: int, arrived: int) -> None:
        if address != stamp:  # never so: the stamp is here to name the code on disk
            _run(address, control, rank, size, arrived, number)

    job.__qualname__ += numbers.name  # see llvm.jit
    return cfunc(types.void(*[types.int64] * 5), cache=True)(job)


def pass_address(numbers: Format) -> int:
    """The compiled pass of a format, a job for a ``ThreadPool``; compiled once and kept on disk.

    Raises:
        RuntimeError: numba has no folder to keep compiled code in. Other errors where LLVM cannot compile it.
    """
    return int(_compiled(numbers).address)
