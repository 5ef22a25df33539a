"""One pass: every layer's stages in turn, called once in each thread, with a barrier wherever a stage needs the
results of other threads.

Each thread computes its share of every stage: outputs of a gemm, rows of a norm, heads of attention. How the work is
divided does not change the result.
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
from .thread_pool import STAGES, Worker, barrier, restart, share

#: The stages whose work threads take from each other: the gemms of a layer, and the LM head.
QKV, OUTPUT, UP, DOWN, HEAD = range(STAGES)
LAYER_BYTES = LAYER.itemsize
plan_at, layer_at = (address_as(from_dtype(record)) for record in (PLAN, LAYER))

configure_tiles = emitted(
    lambda builder, address: call(builder, "llvm.x86.ldtilecfg", VOID, [at(builder, address)]) and None, 1
)
release_tiles = emitted(lambda builder: call(builder, "llvm.x86.tilerelease", VOID, []) and None, 0)


def _embed_of(fmt: Format) -> Any:
    weights_at, to_fp32 = fmt.stored.pointer, fmt.stored.to_fp32
    is_packed = fmt.kind == "packed"

    def embed(p: Any, begin: int, end: int) -> None:
        """Write the embeddings of rows begin..end to x, in fp32; learned positions are added."""
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
                    out[i] = to_fp32(weights[tokens[r], i]) * p.embedding_scale
            if p.position_embedding != 0:
                learned = carray(weights_at(p.position_embedding), (positions[r] + 1, p.hidden))
                for i in range(p.hidden):
                    out[i] += to_fp32(learned[positions[r], i])

    return jit(embed, fmt.name)


def _quantize_rows(address: int, stride: int, rows: int, blocks: int, worker: Any) -> None:
    """Quantize this thread's share of the blocks of the rows that the next product reads."""
    begin, end = share(rows * blocks, worker.rank, worker.size)
    while begin < end:
        row, block = begin // blocks, begin % blocks
        last = min(blocks, block + end - begin)
        quantize(address + stride * row, blocks, block, last)
        begin += last - block


quantize_rows = jit(_quantize_rows)


def _attend_of(fmt: Format) -> Any:
    attend = attention_of(fmt)
    query_bytes, out_bytes = fmt.query.bytes, fmt.input.bytes

    def attend_rows(p: Any, layer: Any, index: int, worker: Any) -> None:
        """Attention of this thread's (head, row) pairs, in layer ``index``."""
        groups = p.heads // p.key_heads
        scratch = p.scratch + worker.rank * p.scratch_each
        begin, end = share(p.rows * p.heads, worker.rank, worker.size)
        passed = 0  # queries of earlier segments and key heads
        for s in range(p.segment_count):
            segment = segment_at(p.segments + s * SEGMENT_BYTES)
            queries = segment.rows * groups
            for h in range(p.key_heads):
                first, last = max(begin - passed, 0), min(end - passed, queries)
                if first < last:
                    keys = segment.cache + index * segment.cache_layer + h * segment.cache_head
                    values = keys + p.key_heads * segment.cache_head
                    first_query = segment.first_row * p.heads + h * queries
                    query = p.query + query_bytes * p.padded_head * first_query
                    out = p.attended + segment.first_row * p.attended_stride
                    out += h * groups * p.head_size * out_bytes
                    attend(p, layer, segment, query, keys, values, out, first, last, scratch)
                passed += queries

    return jit(attend_rows, fmt.name)


def _pass_of(fmt: Format) -> Any:
    """The pass of one thread; its arguments are those of ``_run``."""
    store, add, gate, activate, keep_logits = gemm_of(fmt)
    embed, (norm_rows, add_normed) = _embed_of(fmt), norms_of(fmt)
    rotate, attend = rotate_of(fmt), _attend_of(fmt)
    on_tiles, is_packed = fmt.kind == "tiles", fmt.kind == "packed"

    def add_branch(
        p: Any, linear: Any, norm: Any, source: int, stride: int, worker: Any, stage: int, arrived: int
    ) -> Any:
        """Add a linear's outputs to the rows, after ``norm`` if the layer has it. Returns the count of arrivals."""
        if is_packed:
            quantize_rows(source, stride, p.rows, linear.steps, worker)
            arrived = barrier(worker, arrived)
        if norm.kind == 0:
            add(p, linear, source, stride, p.rows, p.x, p.x_stride, worker, stage)
        else:
            store(p, linear, source, stride, p.rows, p.qkv, p.qkv_stride, worker, stage)
            arrived = barrier(worker, arrived)
            add_normed(p, norm, worker)
        return barrier(worker, arrived)

    add_branch = jit(add_branch, fmt.name)

    def run(address: int, control: int, rank: int, size: int, arrived: int, number: int) -> None:
        p, worker = plan_at(address), Worker(control, rank, size)
        rows, stride = p.rows, p.normed_stride
        if on_tiles:
            configure_tiles(p.tile_config)
        begin, end = share(rows, rank, size)
        embed(p, begin, end)
        arrived = barrier(worker, arrived)
        for index in range(p.layer_count):
            layer = layer_at(p.layers + index * LAYER_BYTES)
            x, arrived = norm_rows(p, layer.attention_norm, rows, 0, worker, arrived)
            store(p, layer.qkv, x, stride, rows, p.qkv, p.qkv_stride, worker, QKV)
            arrived = barrier(worker, arrived)
            restart(worker, OUTPUT, STAGES)
            rotate(p, layer, index, worker)
            arrived = barrier(worker, arrived)
            restart(worker, QKV, OUTPUT)
            attend(p, layer, index, worker)
            arrived = barrier(worker, arrived)
            arrived = add_branch(
                p,
                layer.output,
                layer.attention_post_norm,
                p.attended,
                p.attended_stride,
                worker,
                OUTPUT,
                arrived,
            )
            x, arrived = norm_rows(p, layer.feed_forward_norm, rows, 0, worker, arrived)
            if layer.gated != 0:
                gate(p, layer.up, x, stride, rows, p.gated, p.gated_stride, worker, UP)
            else:
                activate(p, layer.up, x, stride, rows, p.gated, p.gated_stride, worker, UP)
            arrived = barrier(worker, arrived)
            arrived = add_branch(
                p, layer.down, layer.feed_forward_post_norm, p.gated, p.gated_stride, worker, DOWN, arrived
            )
        reads = p.reads
        if reads > 0:
            x, arrived = norm_rows(p, p.final_norm, reads, p.read_rows, worker, arrived)
            keep_logits(p, p.lm_head, x, stride, reads, p.logits, p.logits_stride, worker, HEAD)
        if on_tiles:
            release_tiles()
        barrier(worker, arrived)

    return run


def _run(address: int, control: int, rank: int, size: int, arrived: int, number: int) -> None:
    """One thread's part of a pass.

    Args:
        address: the address of the plan.
        control, rank, size: see ``thread_pool.Worker``.
        arrived: arrivals counted at barriers before the pass.
        number: index of the format in ``FORMATS``, a constant.
    """
    raise NotImplementedError("compiled code only")


@overload(_run, prefer_literal=True)
def _run_code(address, control, rank, size, arrived, number):  # type: ignore[no-untyped-def]  # numba compares both
    # The Python function itself: a function made by jit would be linked and optimized a second time.
    run = _pass_of(tuple(FORMATS.values())[number.literal_value])
    run.__annotations__.clear()
    return run


@cache
def _compiled(fmt: Format) -> Any:
    # A function that is cached on disk cannot close over compiled functions, so it names the format by its index.
    number, stamp = tuple(FORMATS.values()).index(fmt), STAMP

    def job(address: int, control: int, rank: int, size: int, arrived: int) -> None:
        _ = stamp  # part of the name of the code on disk (llvm.STAMP)
        _run(address, control, rank, size, arrived, number)

    job.__qualname__ += fmt.name  # see llvm.jit
    return cfunc(types.void(*[types.int64] * 5), cache=True)(job)


def pass_address(fmt: Format) -> int:
    """The address of a format's compiled pass, a job for a ``ThreadPool``. It is compiled once and cached on disk.

    Raises:
        RuntimeError: numba has no folder for compiled code. If LLVM cannot compile the pass, it raises its own error.
    """
    return int(_compiled(fmt).address)
