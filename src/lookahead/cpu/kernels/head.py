"""The compiled half of ``compiled_head``: a light head's guesses, as one job of all threads."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...machine_code import compiled, entry
from ...sampling.top import search_row_of
from ..compiled_head import EPSILON, FORMAT, PLAN
from ..packed import BLOCK, PANEL
from ..thread_pool import STAGES
from .attention import VECTOR, softmax
from .forward_pass import DOWN, HEAD, OUTPUT, QKV, quantize_rows
from .gemm import gemm_of
from .norm_and_rope import REASSOCIATE
from .operations import call, floats_at, integers_at, record_at, words_at
from .packed_gemm import quantize
from .workers import Worker, barrier, restart, share


@partial(compiled, fastmath=REASSOCIATE)
def _norm(source: int, size: int, weights: int, out: int) -> None:
    """RMS norm of fp32 numbers."""
    xs, ws, outs = floats_at(source), floats_at(weights), floats_at(out)
    total = np.float32(0)
    for i in range(size):
        total += xs[i] * xs[i]
    factor = np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(EPSILON))
    for i in range(size):
        outs[i] = xs[i] * factor * ws[i]


plan_at = record_at(PLAN)
_search_row = search_row_of(np.int32)


@compiled
def _best(p: Any, worker: Any) -> None:
    """The best tokens of this thread's share of the rows, and their log-probabilities. Destroys the logits."""
    begin, end = share(p.rows, worker.rank, worker.size)
    ids, odds, shortlist = words_at(p.top_ids), floats_at(p.top_odds), words_at(p.shortlist)
    for r in range(begin, end):
        logits = p.logits + p.logits_stride * r
        peaks = words_at(p.peaks + p.peaks_stride * r)
        scratch = integers_at(p.best + p.best_each * worker.rank)
        _search_row(words_at(logits), 0, p.size, peaks, 0, True, scratch, p.top, ids, odds, r * p.top)
        log_share = np.log(softmax(logits, p.logits_stride // VECTOR))
        for i in range(r * p.top, (r + 1) * p.top):
            ids[i] = shortlist[ids[i]]
            odds[i] += log_share


def _job() -> Any:
    _, add, gate, _, keep_logits = gemm_of(FORMAT)

    def run(address: int, control: int, rank: int, size: int, arrived: int) -> None:
        p = plan_at(address)
        worker = Worker(control, rank, size)
        # Every thread normalizes all rows, which is faster than waiting for the others.
        z = p.z + p.z_each * rank
        blocks = 2 * p.hidden // BLOCK
        tokens = integers_at(p.tokens)
        for r in range(p.rows):
            row = z + p.z_stride * r
            _norm(p.x + p.x_stride * r, p.hidden, p.hidden_norm, row)
            embedded = p.embedded + p.embedded_stride * r
            if p.embedding != 0:
                embedded = row + 4 * p.hidden
                panel = integers_at(p.embedding + 16 * (tokens[r] // PANEL))
                call(panel[1], panel[0], tokens[r] % PANEL, p.hidden, embedded)
            _norm(embedded, p.hidden, p.embedding_norm, row + 4 * p.hidden)
            quantize(row, blocks, 0, blocks)
        # The stages. ``restart`` resets the counters of stages that no thread is in.
        gate(p, p.gate, z, p.z_stride, p.rows, p.gated, p.gated_stride, worker, QKV)
        arrived = barrier(worker, arrived)
        restart(worker, OUTPUT, STAGES)
        quantize_rows(p.gated, p.gated_stride, p.rows, p.width // BLOCK, worker)
        arrived = barrier(worker, arrived)
        restart(worker, QKV, OUTPUT)
        add(p, p.down, p.gated, p.gated_stride, p.rows, p.x, p.x_stride, worker, DOWN)
        arrived = barrier(worker, arrived)
        quantize_rows(p.x, p.x_stride, p.rows, p.hidden // BLOCK, worker)
        arrived = barrier(worker, arrived)
        keep_logits(p, p.output, p.x, p.x_stride, p.rows, p.logits, p.logits_stride, worker, HEAD)
        arrived = barrier(worker, arrived)
        _best(p, worker)
        barrier(worker, arrived)

    return run


entry(_job(), "head")
