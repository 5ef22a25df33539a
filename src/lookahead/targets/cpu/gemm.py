"""Rows times weights, group by group, with an epilogue on each block of sums while it is in the cache.

The microkernel computes the sums of up to 32 rows with one group of 32 outputs. Every sum is one chain over the inner
size, whose order depends neither on the number of rows nor on a row's index, so a row has the same bits in any step.
A product of matrix tiles takes about as long for 16 rows as for one, and less time than its kilobyte of weights takes
to arrive from memory, so up to 32 rows run at nearly the memory bandwidth. The vector kernels keep the sums of a few
rows in registers, apply a chunk of the weights to all rows while it is in the first-level cache, and prefetch the
next chunk.

The epilogue stores the sums, adds or activates them, or keeps them as logits. It is written with LLVM vectors,
because these few hundred nanoseconds decide whether a gemm reaches the memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from . import llvm, packed_gemm
from .formats import ROW_BLOCK, Format
from .llvm import LANES, VECTOR, VOID, call, const, floats, load_numbers, multiply_add, offset, prefetch
from .packed import GROUP
from .thread_pool import share, take
from .vector_math import activation, soft_cap, store_rounded

#: Vectors in a group.
VECTORS = GROUP // LANES
#: Rows whose sums fit into the registers, by (LANES, REGISTERS).
ROWS_AT_ONCE = {(16, 32): 8, (8, 16): 2, (4, 32): 2}.get((LANES, llvm.REGISTERS), 1)
#: Steps of the vector kernels that are applied to all rows before the next steps: 16 KiB of weights.
CHUNK = 128
#: Cache lines of each panel of the next group that are prefetched when a group is finished.
NEXT_LINES = 16


def tile(number: int) -> ir.Constant:
    """A tile register, as LLVM's intrinsics name it."""
    return ir.Constant(llvm.I8, number)


def load_tile(builder: Any, number: int, address: Any, stride: Any) -> None:
    """Load up to 16 rows of 64 bytes, ``stride`` bytes apart."""
    call(builder, "llvm.x86.tileloadd64", VOID, [tile(number), llvm.at(builder, address), stride])


def _tiles(builder: Any, row_tiles: int, weights: Any, rows: Any, stride: Any, steps: Any, out: Any) -> None:
    """The kernel for 16 or 32 rows, 16 per row tile; a step is 32 inner numbers.

    Tiles 4 and 5 hold rows, 6 and 7 the weights of 16 outputs each. The sums:

                  outputs 0-15   outputs 16-31
    rows 0-15     tile 0         tile 1
    rows 16-31    tile 2         tile 3
    """
    for number in range(2 * row_tiles):
        call(builder, "llvm.x86.tilezero", VOID, [tile(number)])
    second = offset(builder, rows, (stride, 16))
    panel_bytes = builder.mul(steps, const(1024))
    with cgutils.for_range(builder, steps) as loop:
        here = offset(builder, weights, (loop.index, 1024))
        panels = [here, offset(builder, here, panel_bytes)]
        # The processor's prefetcher stops at the end of a page; a few lines of the next page restart it.
        for panel in panels:
            prefetch(builder, panel, 4096, 4)
        load_tile(builder, 4, offset(builder, rows, (loop.index, 64)), stride)
        if row_tiles == 2:
            load_tile(builder, 5, offset(builder, second, (loop.index, 64)), stride)
        for number, panel in enumerate(panels, 6):
            load_tile(builder, number, panel, const(64))
        for row in range(row_tiles):
            for n in range(2):
                call(builder, "llvm.x86.tdpbf16ps", VOID, [tile(2 * row + n), tile(4 + row), tile(6 + n)])
    following = offset(builder, weights, (panel_bytes, 2))
    for panel in (following, offset(builder, following, panel_bytes)):
        prefetch(builder, panel, 0, NEXT_LINES)
    for row in range(row_tiles):
        for n in range(2):
            address = llvm.at(builder, offset(builder, out, row * 16 * 4 * GROUP + n * 64))
            call(builder, "llvm.x86.tilestored64", VOID, [tile(2 * row + n), address, const(4 * GROUP)])


def _on_tiles(builder: Any, weights: Any, rows: Any, stride: Any, steps: Any, count: Any, out: Any) -> None:
    with builder.if_else(builder.icmp_signed(">", count, const(16))) as (many, few):
        for row_tiles, branch in ((2, many), (1, few)):
            with branch:
                _tiles(builder, row_tiles, weights, rows, stride, steps, out)


class _BFloat(ir.types.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self))

    def __hash__(self) -> int:
        return hash(type(self))


def _dot_pairs(builder: Any, part: Any, factor: Any, total: Any) -> Any:
    """total + the products of two pairs of bf16 numbers in each lane (AVX512-BF16)."""
    halves = ir.VectorType(_BFloat(), 32)
    a, b = (builder.bitcast(x, halves) for x in (factor, part))
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, [total, a, b])


def _microkernel(fmt: Format) -> Any:
    """Make (weights, rows, stride, steps, count, out), which writes the sums (count, 32) fp32 of rows with one group.

    There are up to 32 rows, ``stride`` bytes apart, and ``steps`` counts the format's steps. In the vector kernels, a
    step is 4 bytes of a row. For example, with 16 lanes, 32 registers and fp32 weights, 8 rows at once:

        registers   16 sums: row r has s[r, 0] for outputs 0-15 and s[r, 1] for outputs 16-31
                    2 weights w0, w1 of one inner number; 1 broadcast x
        per step    for each row: x = rows[r, step] in every lane; s[r, 0] += w0 * x; s[r, 1] += w1 * x
    """
    if fmt.kind == "packed":
        return packed_gemm.microkernel
    if fmt.kind == "tiles":
        return llvm.emitted(_on_tiles, 6)
    pairs = fmt.kind == "pairs"
    widened = fmt.stored.is_bf16 and not pairs
    vector_bytes = fmt.step * fmt.stored.bytes * LANES
    step_bytes = VECTORS * vector_bytes

    def emit(builder: Any, weights: Any, rows: Any, stride: Any, steps: Any, count: Any, out: Any) -> None:
        with cgutils.for_range(builder, builder.mul(count, const(VECTORS))) as loop:
            llvm.store_vector(builder, llvm.ZEROS, offset(builder, out, (loop.index, 4 * LANES)))
        with cgutils.for_range_slice(builder, const(0), steps, const(CHUNK)) as (begin, _):
            rest = builder.sub(steps, begin)
            length = builder.select(builder.icmp_signed("<", rest, const(CHUNK)), rest, const(CHUNK))
            chunk = offset(builder, weights, (begin, step_bytes))

            def row_block(size: int, first: Any) -> None:
                # Each block of rows prefetches its share of the next chunk, two cache lines in each step.
                each = builder.udiv(const(step_bytes * size), count)
                share = builder.udiv(builder.mul(first, length), const(size))
                ahead = offset(builder, chunk, CHUNK * step_bytes, (each, share))
                half = builder.lshr(each, const(1))

                def load_columns(step: Any) -> list[Any]:
                    vectors = offset(builder, chunk, (step, step_bytes))
                    line = offset(builder, ahead, (step, each))
                    prefetch(builder, line)
                    prefetch(builder, builder.add(line, half))
                    addresses = [offset(builder, vectors, v * vector_bytes) for v in range(VECTORS)]
                    return [load_numbers(builder, address, widened) for address in addresses]

                factors = offset(builder, rows, (stride, first), (begin, 4)), stride
                sums = offset(builder, out, (first, 4 * GROUP)), 4 * GROUP
                multiply = _dot_pairs if pairs else multiply_add
                llvm.accumulate(
                    builder, size, VECTORS, length, load_columns, factors, sums, add=True, multiply=multiply
                )

            llvm.in_blocks(builder, count, [size for size in (8, 4, 2, 1) if size <= ROWS_AT_ONCE], row_block)

    return llvm.emitted(emit, 6)


def _epilogue(emit_line: Callable[[Any, list[Any], Any, Any, tuple[Any, Any, Any]], None]) -> Any:
    """Make (sums, bias, scalars, out, stride, peaks, peaks stride, count), which finishes a block of ``count`` rows.

    It calls ``emit_line`` for each row with: builder; the vectors of sums * factor + bias; the address of the row in
    ``out`` and of its number in ``peaks``; (a, b, cap), broadcast. ``scalars`` is the address of (factor, a, b, cap).
    """

    def emit(
        builder: Any,
        sums: Any,
        bias: Any,
        scalars: Any,
        out: Any,
        stride: Any,
        peaks: Any,
        peaks_stride: Any,
        count: Any,
    ) -> None:
        factor, a, b, cap = (llvm.load_broadcast(builder, offset(builder, scalars, 4 * n)) for n in range(4))
        with cgutils.for_range(builder, count) as loop:
            row, values = offset(builder, sums, (loop.index, 4 * GROUP)), []
            for v in range(VECTORS):
                total, shift = (load_numbers(builder, offset(builder, x, 4 * LANES * v)) for x in (row, bias))
                values.append(builder.fadd(builder.fmul(total, factor), shift))
            line = offset(builder, out, (loop.index, stride))
            emit_line(builder, values, line, offset(builder, peaks, (loop.index, peaks_stride)), (a, b, cap))

    return llvm.emitted(emit, 8)


def _store(builder: Any, values: list[Any], line: Any, peak: Any, scalars: Any) -> None:
    for v, value in enumerate(values):
        store_rounded(builder, value, line, v, False)


def _add(builder: Any, values: list[Any], line: Any, peak: Any, scalars: Any) -> None:
    for v, value in enumerate(values):
        before = load_numbers(builder, offset(builder, line, 4 * LANES * v))
        store_rounded(builder, builder.fadd(value, before), line, v, False)


def _activate(as_bf16: bool, gated: bool) -> Any:
    """Make the function that stores activations; if ``gated``, those of the first 16 outputs, times the last 16."""

    def emit_line(builder: Any, values: list[Any], line: Any, peak: Any, scalars: Any) -> None:
        half = VECTORS // 2 if gated else VECTORS
        for v, value in enumerate(values[:half]):
            value = activation(builder, value, scalars[0], scalars[1])
            store_rounded(
                builder, builder.fmul(value, values[half + v]) if gated else value, line, v, as_bf16
            )

    return emit_line


def _logits(as_bf16: bool) -> Any:
    """Make the function that stores a line of logits, and the largest as the row's peak; NaN if any logit is NaN."""

    def emit_line(builder: Any, values: list[Any], line: Any, peak: Any, scalars: Any) -> None:
        largest, nan = floats(float("-inf")), ir.Constant(ir.VectorType(ir.IntType(1), LANES), None)
        variables = [cgutils.alloca_once_value(builder, value) for value in values]
        cap = builder.extract_element(scalars[2], ir.Constant(llvm.I32, 0))
        with builder.if_then(builder.fcmp_ordered("!=", cap, ir.Constant(llvm.F32, 0.0))):
            for variable, value in zip(variables, values, strict=True):
                builder.store(soft_cap(builder, value, scalars[2]), variable)
        for v, variable in enumerate(variables):
            value = store_rounded(builder, builder.load(variable), line, v, as_bf16)
            nan = builder.or_(nan, builder.fcmp_unordered("uno", value, value))
            largest = builder.select(builder.fcmp_ordered(">", value, largest), value, largest)
        top = call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", llvm.F32, [largest], ("nnan",))
        bits = builder.bitcast(nan, ir.IntType(LANES))
        is_nan = builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))
        top = builder.select(is_nan, ir.Constant(llvm.F32, float("nan")), top)
        builder.store(top, llvm.at(builder, peak, llvm.F32)).align = 4

    return emit_line


def gemm_of(fmt: Format) -> tuple[Any, Any, Any, Any, Any]:
    """Make a format's gemms: W x + b is stored, added, gated, activated, or kept as logits with their peaks.

    Each takes (p, linear, x, x_stride, rows, out, out_stride, worker, stage) and computes this thread's share of the
    groups of outputs, then what remains of the other threads' shares (work stealing), because cores are seldom
    equally fast.

        p, linear   records of ``execution_plan``: PLAN and LINEAR
        x, out      addresses of the rows that are read and written; strides are bytes from row to row
        stage       the stage of ``thread_pool.take``
    """
    kernel = _microkernel(fmt)

    def ending_in(name: str, emit_line: Any, group_bytes: int) -> Any:
        epilogue = _epilogue(emit_line)

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
            sums = p.scratch + worker.rank * p.scratch_each
            for turn in range(worker.size):
                owner = (worker.rank + turn) % worker.size
                begin, end = share(linear.groups, owner, worker.size)
                g = begin + take(worker.control, stage, owner, end - begin)
                while g < end:
                    bias, weights = linear.bias + 4 * g * GROUP, linear.weights + g * linear.group_bytes
                    for r in range(0, rows, ROW_BLOCK):
                        count = min(ROW_BLOCK, rows - r)
                        kernel(weights, x + r * x_stride, x_stride, linear.steps, count, sums)
                        block = out + g * group_bytes + r * out_stride
                        peaks = p.peaks + 4 * g + r * p.peaks_stride
                        epilogue(sums, bias, linear.scalars, block, out_stride, peaks, p.peaks_stride, count)
                    g = begin + take(worker.control, stage, owner, end - begin)

        return llvm.jit(gemm, name + fmt.name)

    return (
        ending_in("store", _store, 4 * GROUP),
        ending_in("add", _add, 4 * GROUP),
        ending_in("gate", _activate(fmt.input.is_bf16, True), fmt.input.bytes * GROUP // 2),
        ending_in("activate", _activate(fmt.input.is_bf16, False), fmt.input.bytes * GROUP),
        ending_in("logits", _logits(fmt.stored.is_bf16), fmt.stored.bytes * GROUP),
    )
