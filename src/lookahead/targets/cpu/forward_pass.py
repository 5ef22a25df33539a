"""One pass as one call for each thread: every layer's stages in turn, with a barrier where one waits for another.

Each thread takes its share of every stage: outputs of a gemm, rows of a norm, queries of attention. Who computes what
changes nothing in the result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, types
from numba.extending import overload

from .attention import attention_of
from .barrier import barrier, share
from .execution_plan import LAYER, PLAN, SEGMENT
from .gemm import gemm_of
from .llvm import VOID, at, call, emitted, floats_at, integers_at, jit, record_at, ticks
from .microkernel import GROUP
from .numeric_format import FORMATS, Format
from .processor import STAMP
from .rms_norm import rms_norm_of
from .rope import rope_of

#: Up to this many rows every thread norms all of them for itself, which is quicker than waiting for another.
FEW_ROWS = 2
LAYER_BYTES, SEGMENT_BYTES = LAYER.itemsize, SEGMENT.itemsize
plan_at, layer_at, segment_at = record_at(PLAN), record_at(LAYER), record_at(SEGMENT)

configure_tiles = emitted(lambda b, place: call(b, "llvm.x86.ldtilecfg", VOID, [at(b, place)]) and None, 1)
release_tiles = emitted(lambda b: call(b, "llvm.x86.tilerelease", VOID, []) and None, 0)


def _embed_of(numbers: Format) -> Any:
    """Rows begin..end of the embedding (V, hidden), in fp32; a token that is not there is reported."""
    weights_at, widen = numbers.stored.pointer, numbers.stored.widen

    def embed(p: Any, begin: int, end: int) -> None:
        tokens = carray(integers_at(p.tokens), (end,))
        weights = carray(weights_at(p.embedding), (p.vocabulary, p.hidden))
        for r in range(begin, end):
            out = carray(floats_at(p.x + p.x_stride * r), (p.hidden,))
            token = tokens[r]
            if token < 0 or token >= p.vocabulary:
                p.unknown_token = 1
                token = 0
            for i in range(p.hidden):
                out[i] = widen(weights[token, i])

    return jit(embed, numbers.name)


def _attention_stages(numbers: Format) -> tuple[Any, Any]:
    """Rotation with the cache write, and attention, of this thread's heads of rows."""
    rope, attend = rope_of(numbers), attention_of(numbers)
    query_bytes, out_bytes = numbers.query.bytes, numbers.input.bytes

    def rotate(p: Any, layer: Any, cache: int, rank: int, size: int) -> None:
        positions = carray(integers_at(p.positions), (p.rows,))
        lanes = p.heads + 2 * p.key_heads
        begin, end = share(p.rows * lanes, rank, size)
        s = 0
        for item in range(begin, end):
            row, lane = item // lanes, item % lanes
            segment = segment_at(p.segments + s * SEGMENT_BYTES)
            while row >= segment.first_row + segment.rows:
                s += 1
                segment = segment_at(p.segments + s * SEGMENT_BYTES)
            local = row - segment.first_row
            store = cache + segment.slot * p.cache_slot + (lane - p.heads) * p.cache_head
            angles = p.rotary + 4 * p.head_size * positions[row] if layer.rotates != 0 else 0
            y = p.qkv + p.qkv_stride * row + 4 * lane * p.head_size
            query = p.query + query_bytes * segment.first_row * p.heads * p.padded_head
            rope(p, layer, y, lane, angles, query, local, segment.rows, store, segment.length + local)

    def attend_rows(p: Any, layer: Any, cache: int, rank: int, size: int) -> None:
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

    return jit(rotate, numbers.name), jit(attend_rows, numbers.name)


def _best_token_of(numbers: Format) -> Any:
    """The token with the largest logit of a row, the first of equals; -1 where a logit is NaN."""
    logits_at, widen = numbers.stored.pointer, numbers.stored.widen
    group_bytes = GROUP * numbers.stored.bytes

    def best_token(p: Any, row: int) -> int:
        peaks = carray(floats_at(p.peaks + row * p.peaks_stride), (p.lm_head.groups,))
        nans, largest = np.int32(0), np.float32(-np.inf)
        for g in range(p.lm_head.groups):
            nans += np.int32(1) if peaks[g] != peaks[g] else np.int32(0)
            largest = peaks[g] if peaks[g] > largest else largest
        if nans > 0:
            return -1
        group, token = 0, 0
        while group < p.lm_head.groups - 1 and peaks[group] != largest:
            group += 1
        logits = carray(logits_at(p.logits + row * p.logits_stride + group * group_bytes), (GROUP,))
        while token < GROUP - 1 and widen(logits[token]) != largest:
            token += 1
        return group * GROUP + token

    return jit(best_token, numbers.name)


def _pass_of(numbers: Format) -> Any:
    """The pass of one thread; ``arrived`` threads were counted before it (``barrier``)."""
    store, add, gate, keep_logits = gemm_of(numbers)
    rms_norm, embed = rms_norm_of(numbers), _embed_of(numbers)
    rotate, attend = _attention_stages(numbers)
    best_token, on_tiles = _best_token_of(numbers), numbers.kind == "tiles"

    def norm_rows(
        p: Any, norm: Any, rows: int, row_numbers: int, control: int, arrived: int, rank: int, size: int
    ) -> tuple[int, int]:
        """Norm rows; returns where they lie for this thread, and the count of arrivals."""
        out, begin, end = p.normed, 0, rows
        if rows <= FEW_ROWS:
            out += rank * p.normed_each
        else:
            begin, end = share(rows, rank, size)
        rms_norm(p.x, p.x_stride, row_numbers, norm, out, p.normed_stride, begin, end, p.hidden)
        return out, arrived if rows <= FEW_ROWS else barrier(control, arrived, size)

    norm_rows = jit(norm_rows, numbers.name)

    def run(address: int, control: int, rank: int, size: int, arrived: int) -> None:
        p = plan_at(address)
        rows, scratch = p.rows, p.scratch + rank * p.scratch_each
        if on_tiles:
            configure_tiles(p.tile_config)
        gemm_ticks, attention_ticks, start = 0, 0, ticks()
        begin, end = share(rows, rank, size)
        embed(p, begin, end)
        arrived = barrier(control, arrived, size)
        for index in range(p.layer_count):
            layer, cache = layer_at(p.layers + index * LAYER_BYTES), p.cache + index * p.cache_layer
            x, arrived = norm_rows(p, layer.attention_norm, rows, 0, control, arrived, rank, size)
            mark = ticks()
            store(layer.qkv, x, p.normed_stride, rows, p.qkv, p.qkv_stride, 0, 0, scratch, rank, size)
            arrived = barrier(control, arrived, size)
            gemm_ticks += ticks() - mark
            rotate(p, layer, cache, rank, size)
            arrived = barrier(control, arrived, size)
            mark = ticks()
            attend(p, layer, cache, rank, size)
            arrived = barrier(control, arrived, size)
            attention_ticks += ticks() - mark
            mark = ticks()
            add(layer.output, p.attended, p.attended_stride, rows, p.x, p.x_stride, 0, 0, scratch, rank, size)
            arrived = barrier(control, arrived, size)
            gemm_ticks += ticks() - mark
            x, arrived = norm_rows(p, layer.feed_forward_norm, rows, 0, control, arrived, rank, size)
            mark = ticks()
            gate(layer.gate_up, x, p.normed_stride, rows, p.gated, p.gated_stride, 0, 0, scratch, rank, size)
            arrived = barrier(control, arrived, size)
            add(layer.down, p.gated, p.gated_stride, rows, p.x, p.x_stride, 0, 0, scratch, rank, size)
            arrived = barrier(control, arrived, size)
            gemm_ticks += ticks() - mark
        reads = p.reads
        if reads > 0:
            x, arrived = norm_rows(p, p.final_norm, reads, p.read_rows, control, arrived, rank, size)
            mark = ticks()
            keep_logits(
                p.lm_head, x, p.normed_stride, reads, p.logits, p.logits_stride, p.peaks, p.peaks_stride,
                scratch, rank, size,
            )  # fmt: skip
            arrived = barrier(control, arrived, size)
            gemm_ticks += ticks() - mark
            begin, end = share(reads, rank, size)
            winners = carray(integers_at(p.winners), (reads,))
            for r in range(begin, end):
                winners[r] = best_token(p, r)
        if on_tiles:
            release_tiles()
        if rank == 0:
            p.gemm_ticks, p.attention_ticks, p.total_ticks = gemm_ticks, attention_ticks, ticks() - start
        barrier(control, arrived, size)

    return jit(run, numbers.name)


# What is compiled for the disk may not close over compiled functions, so the format is told by a number's type.
_TAGS = {
    types.int8: FORMATS["tiles", torch.bfloat16],
    types.int16: FORMATS["pairs", torch.bfloat16],
    types.uint16: FORMATS["vectors", torch.bfloat16],
    types.int32: FORMATS["vectors", torch.float32],
}


def _run(address: int, control: int, rank: int, size: int, arrived: int, tag: Any) -> None:
    raise NotImplementedError("compiled code only")


def _run_code(address, control, rank, size, arrived, tag):  # type: ignore[no-untyped-def]  # numba compares both
    run = _pass_of(_TAGS[tag])
    return lambda address, control, rank, size, arrived, tag: run(address, control, rank, size, arrived)


overload(_run)(_run_code)


def _job(stamp: int, tag: Any, variant: str) -> Any:
    def job(address: int, control: int, rank: int, size: int, arrived: int) -> None:
        if address != stamp:  # never so: the stamp is here to name the code on disk
            _run(address, control, rank, size, arrived, tag)

    job.__qualname__ += variant  # see llvm.jit
    return cfunc(types.void(*[types.int64] * 5), cache=True)(job)


@cache
def _compiled(numbers: Format) -> Any:
    kind = next(kind for kind, known in _TAGS.items() if known is numbers)
    return _job(STAMP, np.dtype(str(kind)).type(0), numbers.name)


def pass_address(numbers: Format) -> int:
    """The compiled pass of a format, a job for a ``ThreadPool``; compiled once and kept on disk.

    Raises:
        RuntimeError: numba has no folder to keep compiled code in. Other errors where LLVM cannot compile it.
    """
    return int(_compiled(numbers).address)
