"""One pass as one call for each thread: every layer's stages in turn, with a barrier where one waits for another.

Each thread takes its share of every stage: outputs of a gemm, rows of a norm, heads of attention. Who computes what
changes nothing in the result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import carray, cfunc, from_dtype, types
from numba.extending import overload

from .attention import attention_of
from .execution_plan import LAYER, PLAN
from .formats import FORMATS, Format
from .gemm import gemm_of
from .llvm import STAMP, VOID, address_as, at, call, emitted, floats_at, integers_at, jit
from .norm_and_rope import SEGMENT_BYTES, norms_of, rotate_of, segment_at
from .packed import PANEL, decode_output
from .packed_gemm import quantize
from .thread_pool import STAGES, barrier, restart, share

#: Counters of what is taken of each gemm of a layer, and of the LM head.
QKV, OUTPUT, UP, DOWN, HEAD = range(STAGES)
LAYER_BYTES = LAYER.itemsize
plan_at, layer_at = (address_as(from_dtype(record)) for record in (PLAN, LAYER))

configure_tiles = emitted(lambda b, place: call(b, "llvm.x86.ldtilecfg", VOID, [at(b, place)]) and None, 1)
release_tiles = emitted(lambda b: call(b, "llvm.x86.tilerelease", VOID, []) and None, 0)


def _embed_of(numbers: Format) -> Any:
    """Embeddings (V, hidden) of rows begin..end, in fp32, with those of their positions where these are learned."""
    weights_at, widen = numbers.stored.pointer, numbers.stored.widen
    is_packed = numbers.kind == "packed"

    def embed(p: Any, begin: int, end: int) -> None:
        tokens = carray(integers_at(p.tokens), (end,))
        positions = carray(integers_at(p.positions), (end,))
        weights = carray(weights_at(p.embedding), (p.vocabulary, p.hidden))
        for r in range(begin, end):
            out = carray(floats_at(p.x + p.x_stride * r), (p.hidden,))
            if is_packed:
                panel = carray(integers_at(p.embedding + 16 * (tokens[r] // PANEL)), (2,))
                decode_output(panel[1], panel[0], tokens[r] % PANEL, p.hidden, out, p.embedding_scale)
            else:
                for i in range(p.hidden):
                    out[i] = widen(weights[tokens[r], i]) * p.embedding_scale
            if p.position_embedding != 0:
                more = carray(weights_at(p.position_embedding), (positions[r] + 1, p.hidden))
                for i in range(p.hidden):
                    out[i] += widen(more[positions[r], i])

    return jit(embed, numbers.name)


def _quantize_rows(address: int, stride: int, rows: int, blocks: int, rank: int, size: int) -> None:
    """Quantize this thread's share of the blocks of rows that a product is about to read."""
    begin, end = share(rows * blocks, rank, size)
    while begin < end:
        row, block = begin // blocks, begin % blocks
        last = min(blocks, block + end - begin)
        quantize(address + stride * row, blocks, block, last)
        begin += last - block


quantize_rows = jit(_quantize_rows)


def _attend_of(numbers: Format) -> Any:
    attend = attention_of(numbers)
    query_bytes, out_bytes = numbers.query.bytes, numbers.input.bytes

    def attend_rows(p: Any, layer: Any, index: int, rank: int, size: int) -> None:
        """Attention of this thread's heads of rows, in layer ``index``."""
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
                    keys = segment.cache + index * segment.cache_layer + h * segment.cache_head
                    values = keys + p.key_heads * segment.cache_head
                    place = segment.first_row * p.heads + h * queries
                    out = p.attended + segment.first_row * p.attended_stride
                    out += h * groups * p.head_size * out_bytes
                    query = p.query + query_bytes * p.padded_head * place
                    attend(p, layer, segment, query, keys, values, out, first, last, scratch)
                seen += queries

    return jit(attend_rows, numbers.name)


def _pass_of(numbers: Format) -> Any:
    """The pass of one thread, for ``_run``; ``arrived`` threads were counted before it (``thread_pool``)."""
    store, add, gate, activate, keep_logits = gemm_of(numbers)
    embed, (norm_rows, add_normed) = _embed_of(numbers), norms_of(numbers)
    rotate, attend = rotate_of(numbers), _attend_of(numbers)
    on_tiles, is_packed = numbers.kind == "tiles", numbers.kind == "packed"

    def add_branch(
        p: Any, linear: Any, norm: Any, source: int, stride: int, scratch: int, control: int, stage: int,
        arrived: int, rank: int, size: int,
    ) -> Any:  # fmt: skip
        """Add a linear's outputs to the rows, or their norm where there is one; returns the count of arrivals."""
        if is_packed:
            quantize_rows(source, stride, p.rows, linear.steps, rank, size)
            arrived = barrier(control, arrived, size)
        if norm.kind == 0:
            add(linear, source, stride, p.rows, p.x, p.x_stride, 0, 0, scratch, control, stage, rank, size)
        else:
            store(
                linear, source, stride, p.rows, p.qkv, p.qkv_stride, 0, 0, scratch, control, stage, rank, size
            )
            arrived = barrier(control, arrived, size)
            add_normed(p, norm, rank, size)
        return barrier(control, arrived, size)

    add_branch = jit(add_branch, numbers.name)

    def run(address: int, control: int, rank: int, size: int, arrived: int, number: int) -> None:
        p = plan_at(address)
        rows, scratch = p.rows, p.scratch + rank * p.scratch_each
        if on_tiles:
            configure_tiles(p.tile_config)
        begin, end = share(rows, rank, size)
        embed(p, begin, end)
        arrived = barrier(control, arrived, size)
        for index in range(p.layer_count):
            layer = layer_at(p.layers + index * LAYER_BYTES)
            x, arrived = norm_rows(p, layer.attention_norm, rows, 0, control, arrived, rank, size)
            store(
                layer.qkv, x, p.normed_stride, rows, p.qkv, p.qkv_stride, 0, 0, scratch, control, QKV, rank, size,
            )  # fmt: skip
            arrived = barrier(control, arrived, size)
            restart(control, OUTPUT, STAGES, rank)
            rotate(p, layer, index, scratch, rank, size)
            arrived = barrier(control, arrived, size)
            restart(control, QKV, OUTPUT, rank)
            attend(p, layer, index, rank, size)
            arrived = barrier(control, arrived, size)
            arrived = add_branch(
                p, layer.output, layer.attention_post_norm, p.attended, p.attended_stride, scratch, control, OUTPUT,
                arrived, rank, size,
            )  # fmt: skip
            x, arrived = norm_rows(p, layer.feed_forward_norm, rows, 0, control, arrived, rank, size)
            if layer.gated != 0:
                gate(
                    layer.up, x, p.normed_stride, rows, p.gated, p.gated_stride, 0, 0, scratch, control, UP, rank,
                    size,
                )  # fmt: skip
            else:
                activate(
                    layer.up, x, p.normed_stride, rows, p.gated, p.gated_stride, 0, 0, scratch, control, UP, rank,
                    size,
                )  # fmt: skip
            arrived = barrier(control, arrived, size)
            arrived = add_branch(
                p, layer.down, layer.feed_forward_post_norm, p.gated, p.gated_stride, scratch, control, DOWN, arrived,
                rank, size,
            )  # fmt: skip
        reads = p.reads
        if reads > 0:
            x, arrived = norm_rows(p, p.final_norm, reads, p.read_rows, control, arrived, rank, size)
            keep_logits(
                p.lm_head, x, p.normed_stride, reads, p.logits, p.logits_stride, p.peaks, p.peaks_stride,
                scratch, control, HEAD, rank, size,
            )  # fmt: skip
        if on_tiles:
            release_tiles()
        barrier(control, arrived, size)

    return run


def _run(address: int, control: int, rank: int, size: int, arrived: int, number: int) -> None:
    raise NotImplementedError("compiled code only")


@overload(_run, prefer_literal=True)
def _run_code(address, control, rank, size, arrived, number):  # type: ignore[no-untyped-def]  # numba compares both
    # Python's function itself: one made by jit would be linked and optimized once more.
    run = _pass_of(tuple(FORMATS.values())[number.literal_value])
    run.__annotations__.clear()
    return run


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
