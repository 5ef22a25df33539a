"""One pass as one call for each thread: every layer's stages in turn, with a barrier where one waits for another.

``plan`` is an array of 64-bit integers whose entries the names below count: sizes, and addresses of what the model,
the cache and the step hold. Each thread takes its share of every stage: outputs of a product, rows of a norm, queries
of attention. Who computes what changes nothing in the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from numba.extending import overload, register_jitable

from .attention import attend
from .control import meet
from .intrinsics import (
    KINDS,
    ON_TILES,
    TAGS,
    VOID,
    at,
    bytes_of,
    call,
    emitted,
    input_tag,
    pointer,
    query_tag,
    ticks,
)
from .machine import STAMP
from .products import gated, product, scored, share
from .stages import best, embed, norm, top, turn

# The plan: sizes, ...
(
    ROWS, READS, HIDDEN, WIDTH, HEADS, KEY_HEADS, SIZE, HEAD, INNER, VOCABULARY, LAYERS, SCALE,
    # ... what the model holds, ...
    TABLE, EMBEDDING, FINAL, TURNS, TILE_SHAPES,
    # ... buffers: the rows, what products read and write, queries, scratch of each thread, ...
    X, NORMED, NORMED_STRIDE, NORMED_EACH, ATTENDED, ATTENDED_STRIDE, MIDDLE, MIDDLE_WIDTH, QKV, QKV_WIDTH,
    QUERY, SCRATCH, SCRATCH_EACH, LINE,
    # ... the cache, bytes from layer to layer, slot to slot and head to head, ...
    CACHE, CACHE_LAYER, CACHE_SLOT, CACHE_HEAD,
    # ... and the step.
    TOKENS, POSITIONS, BLOCKS, BLOCK_COUNT, ENDS, COLUMNS, CHOSEN, LOGITS, LOGITS_WIDTH, PEAKS, BEST,
    STATUS, TIMES, TOP, TOP_IDS, TOP_ODDS, PLAN_SIZE,
) = range(52)  # fmt: skip
# A layer in the table; a linear takes five: weights, bytes of a group, bias, steps, groups.
(
    FIRST_NORM, FIRST_EPSILON, HEAD_NORM, HEAD_EPSILON, SECOND_NORM, SECOND_EPSILON, WINDOW, ROTATES,
) = range(8)  # fmt: skip
QKV_LINEAR, OUTPUT_LINEAR, GATE_LINEAR, DOWN_LINEAR, LAYER_SIZE = 8, 13, 18, 23, 28
# The table's last line is the final norm and, in place of QKV_LINEAR, the LM head.
# A block: the rows of one sequence.
SLOT, LENGTH, FIRST_ROW, BLOCK_ROWS, CHAIN, BLOCK_SIZE = range(6)
#: Up to this many rows every thread norms all of them for itself, which is quicker than waiting for another.
FEW = 2


configure = emitted(
    lambda builder, address: call(builder, "llvm.x86.ldtilecfg", VOID, [at(builder, address)]) and None, 1
)
forget = emitted(lambda builder: call(builder, "llvm.x86.tilerelease", VOID, []) and None, 0)


def shape_tiles(address: int, kind: Any) -> None:
    raise NotImplementedError("compiled code only")


@overload(shape_tiles)
def _shape_code(address, kind):  # type: ignore[no-untyped-def]
    """Set this thread's tile registers up, where products use them; address 0 gives them back."""
    if kind not in ON_TILES:
        return lambda address, kind: None

    def code(address, kind):  # type: ignore[no-untyped-def]
        if address != 0:
            configure(address)
        else:
            forget()

    return code


@register_jitable
def single_of(bits: int) -> float:
    """An fp32 number that travels as the lower half of a 64-bit integer."""
    return np.uint32(bits).view(np.float32)


@njit(nogil=True, error_model="numpy")
def turn_rows(p: Any, layer: Any, storage: int, rank: int, team: int, kind: Any, tag: Any) -> None:
    """Rotation and cache writes of this thread's heads of rows."""
    blocks = carray(pointer(p[BLOCKS], np.int64(0)), (p[BLOCK_COUNT], BLOCK_SIZE))
    positions = carray(pointer(p[POSITIONS], np.int64(0)), (p[ROWS],))
    lanes = p[HEADS] + 2 * p[KEY_HEADS]
    begin, end = share(p[ROWS] * lanes, rank, team)
    b = 0
    for item in range(begin, end):
        row, lane = item // lanes, item % lanes
        while row >= blocks[b, FIRST_ROW] + blocks[b, BLOCK_ROWS]:
            b += 1
        local = row - blocks[b, FIRST_ROW]
        store = storage + blocks[b, SLOT] * p[CACHE_SLOT] + (lane - p[HEADS]) * p[CACHE_HEAD]
        angles = p[TURNS] + 4 * p[SIZE] * positions[row] if layer[ROTATES] else 0
        turn(
            p[QKV] + 4 * (p[QKV_WIDTH] * row + lane * p[SIZE]), lane, angles, layer[HEAD_NORM],
            single_of(layer[HEAD_EPSILON]), single_of(p[SCALE]),
            p[QUERY] + bytes_of(query_tag(kind)) * blocks[b, FIRST_ROW] * p[HEADS] * p[HEAD],
            local, blocks[b, BLOCK_ROWS],
            store, blocks[b, LENGTH] + local, p[HEADS], p[KEY_HEADS], p[SIZE], p[HEAD], kind, tag,
        )  # fmt: skip


@njit(nogil=True, error_model="numpy")
def attend_rows(p: Any, layer: Any, storage: int, rank: int, team: int, kind: Any, tag: Any) -> None:
    """Attention of this thread's queries."""
    blocks = carray(pointer(p[BLOCKS], np.int64(0)), (p[BLOCK_COUNT], BLOCK_SIZE))
    groups = p[HEADS] // p[KEY_HEADS]
    element = bytes_of(input_tag(kind))
    begin, end = share(p[ROWS] * p[HEADS], rank, team)
    seen = 0
    for b in range(p[BLOCK_COUNT]):
        first_row = blocks[b, FIRST_ROW]
        queries = blocks[b, BLOCK_ROWS] * groups
        for h in range(p[KEY_HEADS]):
            first, last = max(begin - seen, 0), min(end - seen, queries)
            if first < last:
                keys = storage + blocks[b, SLOT] * p[CACHE_SLOT] + h * p[CACHE_HEAD]
                attend(
                    p[QUERY] + bytes_of(query_tag(kind)) * p[HEAD] * (first_row * p[HEADS] + h * queries),
                    keys, keys + p[KEY_HEADS] * p[CACHE_HEAD],
                    p[ATTENDED] + first_row * p[ATTENDED_STRIDE] + h * groups * p[SIZE] * element,
                    p[ATTENDED_STRIDE], p[SCRATCH] + rank * p[SCRATCH_EACH], p[LINE],
                    blocks[b, LENGTH], first, last, groups, p[HEAD], p[SIZE], blocks[b, CHAIN] != 0,
                    layer[WINDOW], p[POSITIONS] + 8 * first_row, p[ENDS] + 8 * (first_row + 1), p[COLUMNS],
                    kind, tag,
                )  # fmt: skip
            seen += queries


@njit(nogil=True, error_model="numpy")
def norm_rows(
    p: Any,
    control: int,
    arrived: int,
    rank: int,
    team: int,
    rows: int,
    chosen: int,
    weight: int,
    epsilon: int,
    kind: Any,
) -> tuple[int, int]:
    """Norm ``rows`` rows; returns where they lie for this thread and the barriers passed so far."""
    if rows <= FEW:
        out = p[NORMED] + rank * p[NORMED_EACH]
        norm(
            p[X],
            p[WIDTH],
            chosen,
            weight,
            single_of(epsilon),
            out,
            p[NORMED_STRIDE],
            0,
            rows,
            p[HIDDEN],
            kind,
        )
        return out, arrived
    begin, end = share(rows, rank, team)
    norm(
        p[X],
        p[WIDTH],
        chosen,
        weight,
        single_of(epsilon),
        p[NORMED],
        p[NORMED_STRIDE],
        begin,
        end,
        p[HIDDEN],
        kind,
    )
    meet(control, arrived + team)
    return p[NORMED], arrived + team


@njit(nogil=True, error_model="numpy")
def evaluate(argument: int, control: int, rank: int, team: int, base: int, kind: Any, tag: Any) -> None:
    """The pass of one thread; ``base`` arrivals were counted before it."""
    p = carray(pointer(argument, np.int64(0)), (PLAN_SIZE,))
    table = carray(pointer(p[TABLE], np.int64(0)), (p[LAYERS] + 1, LAYER_SIZE))
    times = carray(pointer(p[TIMES], np.int64(0)), (3,))
    scratch = p[SCRATCH] + rank * p[SCRATCH_EACH]
    rows, arrived = p[ROWS], base
    shape_tiles(p[TILE_SHAPES], kind)
    linears, attention, start = 0, 0, ticks()
    begin, end = share(rows, rank, team)
    if not embed(p[TOKENS], p[EMBEDDING], p[HIDDEN], p[VOCABULARY], p[X], p[WIDTH], begin, end, tag):
        carray(pointer(p[STATUS], np.int64(0)), (1,))[0] = 1
    arrived += team
    meet(control, arrived)
    for index in range(p[LAYERS]):
        layer = table[index]
        storage = p[CACHE] + index * p[CACHE_LAYER]
        x, arrived = norm_rows(
            p, control, arrived, rank, team, rows, 0, layer[FIRST_NORM], layer[FIRST_EPSILON], kind
        )
        mark = ticks()
        q = layer[QKV_LINEAR : QKV_LINEAR + 5]
        begin, end = share(q[4], rank, team)
        product(
            q[0],
            q[1],
            q[2],
            x,
            p[NORMED_STRIDE],
            q[3],
            rows,
            begin,
            end,
            scratch,
            p[QKV],
            p[QKV_WIDTH],
            False,
            kind,
            tag,
        )
        arrived += team
        meet(control, arrived)
        linears += ticks() - mark
        turn_rows(p, layer, storage, rank, team, kind, tag)
        arrived += team
        meet(control, arrived)
        mark = ticks()
        attend_rows(p, layer, storage, rank, team, kind, tag)
        arrived += team
        meet(control, arrived)
        attention += ticks() - mark
        mark = ticks()
        q = layer[OUTPUT_LINEAR : OUTPUT_LINEAR + 5]
        begin, end = share(q[4], rank, team)
        product(
            q[0],
            q[1],
            q[2],
            p[ATTENDED],
            p[ATTENDED_STRIDE],
            q[3],
            rows,
            begin,
            end,
            scratch,
            p[X],
            p[WIDTH],
            True,
            kind,
            tag,
        )
        arrived += team
        meet(control, arrived)
        linears += ticks() - mark
        x, arrived = norm_rows(
            p, control, arrived, rank, team, rows, 0, layer[SECOND_NORM], layer[SECOND_EPSILON], kind
        )
        mark = ticks()
        q = layer[GATE_LINEAR : GATE_LINEAR + 5]
        begin, end = share(q[4], rank, team)
        gated(
            q[0],
            q[1],
            q[2],
            x,
            p[NORMED_STRIDE],
            q[3],
            rows,
            begin,
            end,
            scratch,
            p[MIDDLE],
            p[MIDDLE_WIDTH],
            kind,
            tag,
        )
        arrived += team
        meet(control, arrived)
        q = layer[DOWN_LINEAR : DOWN_LINEAR + 5]
        begin, end = share(q[4], rank, team)
        product(
            q[0], q[1], q[2], p[MIDDLE], p[MIDDLE_WIDTH] * bytes_of(input_tag(kind)), q[3], rows, begin, end, scratch,
            p[X], p[WIDTH], True, kind, tag,
        )  # fmt: skip
        arrived += team
        meet(control, arrived)
        linears += ticks() - mark
    if p[READS] > 0:
        last = table[p[LAYERS]]
        x, arrived = norm_rows(
            p, control, arrived, rank, team, p[READS], p[CHOSEN], last[FIRST_NORM], last[FIRST_EPSILON], kind
        )
        mark = ticks()
        q = last[QKV_LINEAR : QKV_LINEAR + 5]
        begin, end = share(q[4], rank, team)
        scored(
            q[0], q[1], q[2], x, p[NORMED_STRIDE], q[3], p[READS], begin, end, scratch, p[LOGITS], p[LOGITS_WIDTH],
            p[PEAKS], p[VOCABULARY], kind, tag,
        )  # fmt: skip
        arrived += team
        meet(control, arrived)
        linears += ticks() - mark
        begin, end = share(p[READS], rank, team)
        winners = carray(pointer(p[BEST], np.int64(0)), (p[READS],))
        for r in range(begin, end):
            winners[r] = best(p[LOGITS], p[LOGITS_WIDTH], p[PEAKS], r, tag)
    shape_tiles(0, kind)
    if rank == 0:
        times[0], times[1], times[2] = linears, attention, ticks() - start
    meet(control, arrived + team)


@njit(nogil=True, error_model="numpy")
def rank_tokens(argument: int, control: int, rank: int, team: int, base: int, tag: Any) -> None:
    """The best tokens of every row that is read."""
    p = carray(pointer(argument, np.int64(0)), (PLAN_SIZE,))
    begin, end = share(p[READS], rank, team)
    for r in range(begin, end):
        top(p[LOGITS], p[LOGITS_WIDTH], p[VOCABULARY], p[PEAKS], r, p[TOP], p[TOP_IDS], p[TOP_ODDS], tag)
    meet(control, base + team)


_JOB = types.void(*[types.int64] * 5)
_known: dict[Any, Any] = {}


def pass_job(dtype: torch.dtype, kind: str) -> int:
    """The address of ``evaluate`` for a dtype and a kind of product; compiled once and kept on disk."""
    key = (dtype, kind)
    if key not in _known:
        _known[key] = _pass(STAMP, TAGS[dtype], KINDS[kind])
    return int(_known[key].address)


def top_job(dtype: torch.dtype) -> int:
    """The address of ``rank_tokens`` for a dtype."""
    if dtype not in _known:
        _known[dtype] = _top(STAMP, TAGS[dtype])
    return int(_known[dtype].address)


def _pass(stamp: int, tag: Any, kind: Any) -> Any:
    @cfunc(_JOB, cache=True, nopython=True)
    def job(argument, control, rank, team, base):  # type: ignore[no-untyped-def]
        if argument != stamp:  # never so: the stamp is here to name the code on disk
            evaluate(argument, control, rank, team, base, kind, tag)

    return job


def _top(stamp: int, tag: Any) -> Any:
    @cfunc(_JOB, cache=True, nopython=True)
    def job(argument, control, rank, team, base):  # type: ignore[no-untyped-def]
        if argument != stamp:
            rank_tokens(argument, control, rank, team, base, tag)

    return job
