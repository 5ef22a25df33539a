"""Rows times weights, group by group, with an epilogue on each block of sums while it is cached.

The microkernel computes the sums of up to 32 rows with one group of 32 outputs. Every sum is one chain over the inner
size, whose order depends neither on the number of rows nor on a row's index, so a row is bit-identical in any step. A
product of matrix tiles takes about as long for 16 rows as for one, and less time than loading its kilobyte of weights
from memory, so up to 32 rows run at nearly memory bandwidth. The vector kernels keep the sums of a few rows in
registers, apply a chunk of the weights to all rows while it is in the L1 cache, and prefetch the next chunk.

The epilogue stores the sums, adds or activates them, or keeps them as logits. It works on vectors, because these few
hundred nanoseconds decide whether a gemm reaches memory bandwidth.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...machine_code import compiled
from ..formats import ROW_BLOCK, Format
from ..packed import GROUP
from . import packed_gemm
from .formats import CODE
from .operations import floats_at, prefetch
from .processor import REGISTERS, WIDTH
from .tiles import load_tile, multiply_tiles, store_tile, zero_tile
from .vector_math import activation, inlined, soft_cap
from .vectors import (
    LANES,
    add_outer,
    any_of,
    floats,
    is_nan,
    largest,
    load_block,
    load_column_pairs,
    load_floats,
    select,
    store,
    store_block,
)
from .workers import share, take

#: Vectors in a group, and row stride of the sums in bytes.
VECTORS, LINE = GROUP // LANES, packed_gemm.LINE
#: Number of rows whose sums fit into the registers, by (numbers in a register, registers).
ROWS_AT_ONCE = {(16, 32): 8, (8, 16): 2, (4, 32): 2}.get((WIDTH, REGISTERS), 1)
#: Steps that the vector kernels apply to all rows before moving on: at most 16 KiB of weights.
CHUNK = 128
#: Prefetched bytes of each panel of the next group at the end of a group.
NEXT_BYTES = 16 * 64


@compiled
def _tile_kernel(weights: int, rows: int, stride: int, steps: int, count: int, out: int) -> None:
    """The kernel for 16 or 32 rows. A step is 32 inner numbers.

    Tiles 4 and 5 hold rows, 6 and 7 the weights of 16 outputs each. The sums:

                  outputs 0-15   outputs 16-31
    rows 0-15     tile 0         tile 1
    rows 16-31    tile 2         tile 3
    """
    both = count > 16
    zero_tile(0)
    zero_tile(1)
    if both:
        zero_tile(2)
        zero_tile(3)
    panel_bytes = 1024 * steps
    for step in range(steps):
        first = weights + 1024 * step
        second = first + panel_bytes
        # The hardware prefetcher stops at the end of a page; a few lines of the next page restart it.
        prefetch(first + 4096, 256)
        prefetch(second + 4096, 256)
        row = rows + 64 * step
        load_tile(4, row, stride)
        load_tile(6, first, 64)
        load_tile(7, second, 64)
        multiply_tiles(0, 4, 6)
        multiply_tiles(1, 4, 7)
        if both:
            load_tile(5, row + 16 * stride, stride)
            multiply_tiles(2, 5, 6)
            multiply_tiles(3, 5, 7)
    following = weights + 2 * panel_bytes
    prefetch(following, NEXT_BYTES)
    prefetch(following + panel_bytes, NEXT_BYTES)
    store_tile(0, out, LINE)
    store_tile(1, out + 64, LINE)
    if both:
        store_tile(2, out + 16 * LINE, LINE)
        store_tile(3, out + 16 * LINE + 64, LINE)


def _rows_of(fmt: Format, rows: int) -> Any:
    """Make (chunk, x, stride, steps, out, r, share), which adds the products of ``rows`` rows and a chunk.

    A step is 4 bytes of a row. For example, 8 rows use these of 32 registers with 16 numbers:

        16 sums: row r has sums[r, 0] for outputs 0-15 and sums[r, 1] for outputs 16-31
        2 weights w0, w1 of one inner number; 1 broadcast x
        per step    for each row: x = row[step] in every lane; sums[r, 0] += w0 * x; sums[r, 1] += w1 * x

    Each row also prefetches its part of the next chunk. ``share`` is the part of 8 rows, in bytes per step.
    """
    load = load_column_pairs if fmt.product == "pairs" else CODE[fmt.stored].load_columns
    column_bytes = fmt.step * fmt.stored.bytes * LANES
    step_bytes = VECTORS * column_bytes

    def add_rows(chunk: int, x: int, stride: int, steps: int, out: int, r: int, share: int) -> None:
        each = share * rows // 8
        ahead = chunk + step_bytes * CHUNK + each * (r * steps // rows)
        sums = load_block(out, LINE, rows, VECTORS)
        end = chunk + step_bytes * steps
        while chunk < end:  # ``range`` would take one more instruction of 28
            prefetch(ahead, 64)  # two cache lines at a time
            prefetch(ahead + each // 2, 64)
            sums = add_outer(sums, load(chunk, column_bytes, VECTORS), x, stride)
            chunk += step_bytes
            x += 4
            ahead += each
        store_block(out, LINE, sums, VECTORS)

    return inlined(add_rows, f"{fmt.name}_{rows}")


def _vector_kernel(fmt: Format) -> Any:
    step_bytes = VECTORS * fmt.step * fmt.stored.bytes * LANES
    most = ROWS_AT_ONCE
    eight, four, two, one = (_rows_of(fmt, rows) for rows in (8, 4, 2, 1))

    def kernel(weights: int, rows: int, stride: int, steps: int, count: int, out: int) -> None:
        for v in range(VECTORS * count):
            store(out + 4 * LANES * v, floats(0))
        share = 8 * step_bytes // count
        for begin in range(0, steps, CHUNK):
            length = min(CHUNK, steps - begin)
            chunk = weights + step_bytes * begin
            row = rows + 4 * begin
            r = 0  # as many rows at once as possible
            if most >= 8:
                while r + 8 <= count:
                    eight(chunk, row + stride * r, stride, length, out + LINE * r, r, share)
                    r += 8
            if most >= 4:
                while r + 4 <= count:
                    four(chunk, row + stride * r, stride, length, out + LINE * r, r, share)
                    r += 4
            if most >= 2:
                while r + 2 <= count:
                    two(chunk, row + stride * r, stride, length, out + LINE * r, r, share)
                    r += 2
            while r < count:
                one(chunk, row + stride * r, stride, length, out + LINE * r, r, share)
                r += 1

    return compiled(kernel, fmt.name)


def _microkernel(fmt: Format) -> Any:
    """(weights, rows, stride, steps, count, out), which writes the sums (count, 32) fp32 of rows times one group.

    There are up to 32 rows, ``stride`` bytes apart, and ``steps`` counts the format's steps.
    """
    if fmt.product == "packed":
        return packed_gemm.microkernel
    return _tile_kernel if fmt.product == "tiles" else _vector_kernel(fmt)


# Epilogues of a row of a group: (first, second, line, peak, a, b, cap), with the 32 sums as two vectors, the
# addresses of the row in the output and of its peak, and the parameters of activation and cap.


@inlined
def _store(first: Any, second: Any, line: int, peak: int, a: Any, b: Any, cap: Any) -> None:
    store(line, first)
    store(line + 64, second)


@inlined
def _add(first: Any, second: Any, line: int, peak: int, a: Any, b: Any, cap: Any) -> None:
    store(line, first + load_floats(line))
    store(line + 64, second + load_floats(line + 64))


def _gate_of(fmt: Format) -> Any:
    """Make the function that stores the activations of the first 16 outputs times the last 16."""
    store_rounded = CODE[fmt.input].store

    def gate(first: Any, second: Any, line: int, peak: int, a: Any, b: Any, cap: Any) -> None:
        store_rounded(line, activation(first, a, b) * second)

    return inlined(gate, fmt.name)


def _activate_of(fmt: Format) -> Any:
    """Make the function that stores the activations."""
    store_rounded = CODE[fmt.input].store
    vector_bytes = LANES * fmt.input.bytes

    def activate(first: Any, second: Any, line: int, peak: int, a: Any, b: Any, cap: Any) -> None:
        store_rounded(line, activation(first, a, b))
        store_rounded(line + vector_bytes, activation(second, a, b))

    return inlined(activate, fmt.name)


def _keep_logits_of(fmt: Format) -> Any:
    """Make the function that stores logits, and their maximum as the peak; NaN if any logit is NaN."""
    store_rounded = CODE[fmt.stored].store
    vector_bytes = LANES * fmt.stored.bytes

    def keep_logits(first: Any, second: Any, line: int, peak: int, a: Any, b: Any, cap: Any) -> None:
        if cap != 0:
            first, second = soft_cap(first, floats(cap)), soft_cap(second, floats(cap))
        first = store_rounded(line, first)
        second = store_rounded(line + vector_bytes, second)
        top = largest(select(first > second, first, second))
        if any_of(is_nan(first) | is_nan(second)):
            top = np.float32(np.nan)
        floats_at(peak)[0] = top

    return inlined(keep_logits, fmt.name)


def gemm_of(fmt: Format) -> tuple[Any, Any, Any, Any, Any]:
    """Make a format's gemms: W x + b is stored, added, gated, activated, or kept as logits with their peaks.

    Each takes (p, linear, x, x_stride, rows, out, out_stride, worker, stage). It computes this thread's share of the
    output groups, then what remains of the other threads' shares (work stealing), because cores are seldom equally
    fast.

        p, linear   records of ``execution_plan``: PLAN and LINEAR
        x, out      addresses of the rows that are read and written; strides are in bytes
        stage       the stage of ``thread_pool.take``
    """
    kernel = _microkernel(fmt)

    def ending_in(name: str, finish: Any, group_bytes: int) -> Any:
        def gemm(
            p: Any,
            linear: Any,
            x: int,
            x_stride: int,
            rows: int,
            out: int,
            out_stride: int,
            worker: Any,
            stage: int,
        ) -> None:
            # This thread's scratch space for sums, and the parameters of the linear in every lane.
            sums = p.scratch + worker.rank * p.scratch_each
            factor, a, b = floats(linear.factor), floats(linear.a), floats(linear.b)
            # This thread's share of the groups, then the shares of the other threads.
            for turn in range(worker.size):
                owner = (worker.rank + turn) % worker.size
                begin, end = share(linear.groups, owner, worker.size)
                g = begin + take(worker.control, stage, owner, end - begin)
                while g < end:
                    # All rows times one group of weights, while the group is cached.
                    weights, bias = linear.weights + g * linear.group_bytes, linear.bias + 4 * g * GROUP
                    for r in range(0, rows, ROW_BLOCK):
                        count = min(ROW_BLOCK, rows - r)
                        kernel(weights, x + r * x_stride, x_stride, linear.steps, count, sums)
                        # The epilogue of each row, while its sums are cached.
                        line = out + g * group_bytes + r * out_stride
                        peak = p.peaks + 4 * g + r * p.peaks_stride
                        for n in range(count):
                            total = sums + LINE * n
                            first = load_floats(total) * factor + load_floats(bias)
                            second = load_floats(total + 64) * factor + load_floats(bias + 64)
                            finish(first, second, line, peak, a, b, linear.cap)
                            line += out_stride
                            peak += p.peaks_stride
                    g = begin + take(worker.control, stage, owner, end - begin)

        return compiled(gemm, name + fmt.name)

    # One gemm for each epilogue, with the bytes that it writes per row and group.
    return (
        ending_in("store", _store, 4 * GROUP),
        ending_in("add", _add, 4 * GROUP),
        ending_in("gate", _gate_of(fmt), fmt.input.bytes * GROUP // 2),
        ending_in("activate", _activate_of(fmt), fmt.input.bytes * GROUP),
        ending_in("logits", _keep_logits_of(fmt), fmt.stored.bytes * GROUP),
    )
