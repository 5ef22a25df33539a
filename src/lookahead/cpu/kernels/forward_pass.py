"""One pass: the stages of every layer, run by each thread, with a barrier wherever a stage needs the results of other
threads.

Each thread computes its share of every stage: outputs of a gemm, rows of a norm, heads of attention. The division of
work does not affect the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...machine_code import compiled, entry
from ...sampling.top import search_row_of
from ..execution_plan import LAYER, PLAN
from ..formats import Format
from ..packed import PANEL
from ..thread_pool import STAGES
from .attention import attention_of
from .formats import CODE, COMPILED
from .gemm import gemm_of
from .norm_and_rope import SEGMENT_BYTES, norms_of, rotate_of, segment_at
from .operations import call, floats_at, integers_at, numbers_at, record_at, words_at
from .packed_gemm import quantize
from .tiles import configure_tiles, release_tiles
from .workers import Worker, barrier, restart, share

#: The stages with work stealing: the gemms of a layer, and the LM head.
QKV, OUTPUT, UP, DOWN, HEAD = range(STAGES)
LAYER_BYTES = LAYER.itemsize
plan_at, layer_at = record_at(PLAN), record_at(LAYER)


def _embed_of(fmt: Format) -> Any:
    weights_at, to_fp32, stored_bytes = CODE[fmt.stored].pointer, CODE[fmt.stored].to_fp32, fmt.stored.bytes
    is_packed = fmt.product == "packed"

    def embed(p: Any, begin: int, end: int) -> None:
        """Write the embeddings of rows begin..end to x, in fp32, with learned positions added."""
        tokens, positions = integers_at(p.tokens), integers_at(p.positions)
        for r in range(begin, end):
            x = p.x + p.x_stride * r
            out = floats_at(x)
            if is_packed:
                panel = integers_at(p.embedding + 16 * (tokens[r] // PANEL))
                call(panel[1], panel[0], tokens[r] % PANEL, p.hidden, x)
                for i in range(p.hidden):
                    out[i] *= p.embedding_scale
            else:
                weights = weights_at(p.embedding + stored_bytes * p.hidden * tokens[r])
                for i in range(p.hidden):
                    out[i] = to_fp32(weights[i]) * p.embedding_scale
            if p.position_embedding != 0:
                learned = weights_at(p.position_embedding + stored_bytes * p.hidden * positions[r])
                for i in range(p.hidden):
                    out[i] += to_fp32(learned[i])

    return compiled(embed, fmt.name)


@compiled
def quantize_rows(address: int, stride: int, rows: int, blocks: int, worker: Any) -> None:
    """Quantize this thread's share of the input blocks of the next product."""
    begin, end = share(rows * blocks, worker.rank, worker.size)
    while begin < end:
        row, block = begin // blocks, begin % blocks
        last = min(blocks, block + end - begin)
        quantize(address + stride * row, blocks, block, last)
        begin += last - block


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

    return compiled(attend_rows, fmt.name)


def _find_top_of(fmt: Format) -> Any:
    bits = np.int16 if fmt.stored.is_bf16 else np.int32
    search_row = search_row_of(bits)
    values_at = numbers_at(bits)

    def find_top(p: Any, worker: Any) -> None:
        """Find the best tokens of this thread's share of the rows that are read."""
        begin, end = share(p.reads, worker.rank, worker.size)
        for r in range(begin, end):
            search_row(
                values_at(p.logits + r * p.logits_stride),
                0,
                p.vocabulary,
                words_at(p.peaks + r * p.peaks_stride),
                0,
                True,
                integers_at(p.scratch + worker.rank * p.scratch_each),
                p.top,
                words_at(p.top_ids),
                floats_at(p.top_odds),
                r * p.top,
            )

    return compiled(find_top, fmt.name)


def _pass_of(fmt: Format) -> Any:
    """Make one thread's part of a pass: (address of the plan, control, rank, size, arrived).

    ``control``, ``rank`` and ``size`` as in ``thread_pool.Worker``; ``arrived`` counts arrivals at barriers before
    the pass.
    """
    store, add, gate, activate, keep_logits = gemm_of(fmt)
    embed = _embed_of(fmt)
    norm_rows, add_normed, keep_states = norms_of(fmt)
    rotate, attend, find_top = rotate_of(fmt), _attend_of(fmt), _find_top_of(fmt)
    on_tiles = fmt.product == "tiles"
    is_packed = fmt.product == "packed"

    # A linear whose outputs are added to x, for attention and feed-forward.
    def add_branch(
        p: Any, linear: Any, norm: Any, source: int, stride: int, worker: Any, stage: int, arrived: int
    ) -> Any:
        """Add a linear's outputs to the rows, after ``norm`` if the layer has one. Returns the count of arrivals."""
        if is_packed:
            quantize_rows(source, stride, p.rows, linear.steps, worker)
            arrived = barrier(worker, arrived)
        if norm.type == 0:
            add(p, linear, source, stride, p.rows, p.x, p.x_stride, worker, stage)
        else:
            store(p, linear, source, stride, p.rows, p.qkv, p.qkv_stride, worker, stage)
            arrived = barrier(worker, arrived)
            add_normed(p, norm, worker)
        return barrier(worker, arrived)

    add_branch = compiled(add_branch, fmt.name)

    # The whole pass. There is a barrier before each stage that reads what other threads wrote.
    def run(address: int, control: int, rank: int, size: int, arrived: int) -> None:
        p = plan_at(address)
        worker = Worker(control, rank, size)
        rows = p.rows
        stride = p.normed_stride
        if on_tiles:
            configure_tiles(p.tile_config)
        # Embeddings.
        begin, end = share(rows, rank, size)
        embed(p, begin, end)
        arrived = barrier(worker, arrived)
        for index in range(p.layer_count):
            layer = layer_at(p.layers + index * LAYER_BYTES)
            # Attention. ``restart`` resets the counters of stages that no thread is in.
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
            # Feed-forward.
            x, arrived = norm_rows(p, layer.feed_forward_norm, rows, 0, worker, arrived)
            if layer.gated != 0:
                gate(p, layer.up, x, stride, rows, p.gated, p.gated_stride, worker, UP)
            else:
                activate(p, layer.up, x, stride, rows, p.gated, p.gated_stride, worker, UP)
            arrived = barrier(worker, arrived)
            arrived = add_branch(
                p, layer.down, layer.feed_forward_post_norm, p.gated, p.gated_stride, worker, DOWN, arrived
            )
        # Logits and best tokens of the rows that are read.
        reads = p.reads
        if reads > 0:
            x, arrived = norm_rows(p, p.final_norm, reads, p.read_rows, worker, arrived)
            if p.states != 0:
                keep_states(p, x, worker)
            keep_logits(p, p.lm_head, x, stride, reads, p.logits, p.logits_stride, worker, HEAD)
            arrived = barrier(worker, arrived)
            find_top(p, worker)
        if on_tiles:
            release_tiles()
        barrier(worker, arrived)

    return run


for _format in COMPILED:
    entry(_pass_of(_format), f"pass_{_format.name}")
