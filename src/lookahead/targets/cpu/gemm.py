"""Rows times packed weights, group by group, and what is done with each block of sums while it is in the cache.

The microkernel sums up to 32 rows with one group of 32 outputs. Every sum is one chain over the inner size, in an
order that depends on neither the number of rows nor a row's place among them: so a row has the same bits in any step.
One pass over a matrix tile costs about as much for 16 rows as for one, and less than its kilobyte takes to come from
memory: up to 32 rows run at nearly the memory's speed. In vectors it holds the sums of 8 rows in registers, goes over
a chunk of the weights with all rows while it is in the first cache, and asks memory for the next chunk as it goes.

The epilogue stores, adds, activates or keeps sums as logits, in LLVM's vectors, because these few hundred nanoseconds
are what keeps a gemm from the memory's speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from . import llvm, packed_gemm
from .formats import Format
from .llvm import LANES, VECTOR, VOID, call, const, lanes, load_numbers, multiply_add, offset
from .packed import GROUP
from .thread_pool import share, take
from .vector_math import activation, soft_cap, store_rounded

#: Vectors of a group, and most rows of a call of the microkernel.
VECTORS, ROW_BLOCK = GROUP // LANES, 32
#: Rows whose sums fit the register file.
ROWS_AT_ONCE = {(16, 32): 8, (8, 16): 2, (4, 32): 2}.get((LANES, llvm.REGISTERS), 1)
#: Steps that all rows take in vectors before the next ones: 16 KiB of weights, which stay in the first cache.
CHUNK = 128
#: Lines of each of the next group's panels that are asked for before a group is done.
NEXT_LINES = 16


def tile(number: int) -> ir.Constant:
    """The name of a tile register."""
    return ir.Constant(llvm.I8, number)


def load_tile(builder: Any, number: int, address: Any, stride: Any) -> None:
    """Up to 16 rows of 64 bytes."""
    call(builder, "llvm.x86.tileloadd64", VOID, [tile(number), llvm.at(builder, address), stride])


def _prefetch(builder: Any, address: Any, distance: int, lines: int) -> None:
    """Ask for some cache lines at a distance, into the second level."""
    for line in range(lines):
        ahead = llvm.at(builder, offset(builder, address, distance + 64 * line))
        call(builder, "llvm.prefetch.p0", VOID, [ahead, *(ir.Constant(llvm.I32, n) for n in (0, 2, 1))])


def _tiles(builder: Any, row_tiles: int, weights: Any, rows: Any, stride: Any, steps: Any, out: Any) -> None:
    """16 rows per row tile. Tiles 0-3 hold sums, 4-5 rows, 6-7 weights; a step is 32 inner numbers."""
    for number in range(2 * row_tiles):
        call(builder, "llvm.x86.tilezero", VOID, [tile(number)])
    second = offset(builder, rows, (stride, 16))
    panel_bytes = builder.mul(steps, const(1024))
    with cgutils.for_range(builder, steps) as loop:
        here = offset(builder, weights, (loop.index, 1024))
        panels = [here, offset(builder, here, panel_bytes)]
        # The processor's own prefetching stops at pages; a few lines of the next one start it early.
        for panel in panels:
            _prefetch(builder, panel, 4096, 4)
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
        _prefetch(builder, panel, 0, NEXT_LINES)
    for row in range(row_tiles):
        for n in range(2):
            place = llvm.at(builder, offset(builder, out, row * 16 * 4 * GROUP + n * 64))
            call(builder, "llvm.x86.tilestored64", VOID, [tile(2 * row + n), place, const(4 * GROUP)])


def _on_tiles(builder: Any, weights: Any, rows: Any, stride: Any, steps: Any, count: Any, out: Any) -> None:
    with builder.if_else(builder.icmp_signed(">", count, const(16))) as (many, few):
        for row_tiles, branch in ((2, many), (1, few)):
            with branch:
                _tiles(builder, row_tiles, weights, rows, stride, steps, out)


class _BFloat(ir.types.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite does not know by name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self))

    def __hash__(self) -> int:
        return hash(type(self))


def _dot_pairs(builder: Any, part: Any, factor: Any, total: Any) -> Any:
    """The sum and the products of two bf16 numbers in each lane (AVX512-BF16)."""
    halves = ir.VectorType(_BFloat(), 32)
    a, b = (builder.bitcast(x, halves) for x in (factor, part))
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, [total, a, b])


def _microkernel(numbers: Format) -> Any:
    """(weights, rows, stride, steps, count, out): sums (count, 32) fp32 of up to 32 rows with one group.

    ``rows`` lie ``stride`` bytes apart; ``steps`` are those of the format. In vectors a step is 4 bytes of a row.
    """
    if numbers.kind == "packed":
        return packed_gemm.microkernel
    if numbers.kind == "tiles":
        return llvm.emitted(_on_tiles, 6)
    pairs = numbers.kind == "pairs"
    narrow = numbers.stored.is_bf16 and not pairs
    vector_bytes = numbers.step * numbers.stored.bytes * LANES
    step_bytes = VECTORS * vector_bytes

    def emit(builder: Any, weights: Any, rows: Any, stride: Any, steps: Any, count: Any, out: Any) -> None:
        with cgutils.for_range(builder, builder.mul(count, const(VECTORS))) as loop:
            llvm.store_vector(builder, llvm.ZEROS, offset(builder, out, (loop.index, 4 * LANES)))
        with cgutils.for_range_slice(builder, const(0), steps, const(CHUNK)) as (begin, _):
            rest = builder.sub(steps, begin)
            length = builder.select(builder.icmp_signed("<", rest, const(CHUNK)), rest, const(CHUNK))
            chunk = offset(builder, weights, (begin, step_bytes))

            def some(size: int, first: Any) -> None:
                # Every block of rows asks for its share of the chunk that follows.
                each = builder.udiv(const(step_bytes * size), count)
                share = builder.udiv(builder.mul(first, length), const(size))
                ahead = offset(builder, chunk, CHUNK * step_bytes, (each, share))
                half = builder.lshr(each, const(1))

                def parts(step: Any) -> list[Any]:
                    here, line = (
                        offset(builder, chunk, (step, step_bytes)),
                        offset(builder, ahead, (step, each)),
                    )
                    for place in (line, builder.add(line, half)):
                        _prefetch(builder, place, 0, 1)
                    places = [offset(builder, here, v * vector_bytes) for v in range(VECTORS)]
                    return [load_numbers(builder, place, narrow) for place in places]

                factors = offset(builder, rows, (stride, first), (begin, 4)), stride
                sums = offset(builder, out, (first, 4 * GROUP)), 4 * GROUP
                multiply = _dot_pairs if pairs else multiply_add
                llvm.accumulate(
                    builder, size, VECTORS, length, parts, factors, sums, add=True, multiply=multiply
                )

            llvm.in_blocks(builder, count, [size for size in (8, 4, 2, 1) if size <= ROWS_AT_ONCE], some)

    return llvm.emitted(emit, 6)


def _epilogue(emit_line: Callable[[Any, list[Any], Any, Any, tuple[Any, Any, Any]], None]) -> Any:
    """(sums, bias, numbers, out, stride, peaks, peak stride, count): by row, ``emit_line`` of sums * factor + bias.

    Its arguments: builder, vectors, where they go, the place of their peak, and the other three numbers of
    ``execution_plan.LINEAR``.
    """

    def emit(
        builder: Any, sums: Any, bias: Any, numbers: Any, out: Any, stride: Any, peaks: Any, peak_stride: Any,
        count: Any,
    ) -> None:  # fmt: skip
        factor, a, b, cap = (llvm.load_everywhere(builder, offset(builder, numbers, 4 * n)) for n in range(4))
        with cgutils.for_range(builder, count) as loop:
            row, values = offset(builder, sums, (loop.index, 4 * GROUP)), []
            for v in range(VECTORS):
                total, more = (load_numbers(builder, offset(builder, x, 4 * LANES * v)) for x in (row, bias))
                values.append(builder.fadd(builder.fmul(total, factor), more))
            line = offset(builder, out, (loop.index, stride))
            emit_line(builder, values, line, offset(builder, peaks, (loop.index, peak_stride)), (a, b, cap))

    return llvm.emitted(emit, 8)


def _store(builder: Any, values: list[Any], line: Any, peak: Any, numbers: Any) -> None:
    for v, value in enumerate(values):
        store_rounded(builder, value, line, v, False)


def _add(builder: Any, values: list[Any], line: Any, peak: Any, numbers: Any) -> None:
    for v, value in enumerate(values):
        before = load_numbers(builder, offset(builder, line, 4 * LANES * v))
        store_rounded(builder, builder.fadd(value, before), line, v, False)


def _activate(narrow: bool, gated: bool) -> Any:
    """The activation of all, or of the first 16 times the last 16 of each row, as bf16 where ``narrow``."""

    def emit_line(builder: Any, values: list[Any], line: Any, peak: Any, numbers: Any) -> None:
        half = VECTORS // 2 if gated else VECTORS
        for v, value in enumerate(values[:half]):
            value = activation(builder, value, numbers[0], numbers[1])
            store_rounded(builder, builder.fmul(value, values[half + v]) if gated else value, line, v, narrow)

    return emit_line


def _logits(narrow: bool) -> Any:
    """Logits, and the largest of each row of the group as its peak, which is NaN where one of its logits is."""

    def emit_line(builder: Any, values: list[Any], line: Any, peak: Any, numbers: Any) -> None:
        largest, nan = lanes(float("-inf")), ir.Constant(ir.VectorType(ir.IntType(1), LANES), None)
        places = [cgutils.alloca_once_value(builder, value) for value in values]
        cap = builder.extract_element(numbers[2], ir.Constant(llvm.I32, 0))
        with builder.if_then(builder.fcmp_ordered("!=", cap, ir.Constant(llvm.F32, 0.0))):
            for place, value in zip(places, values, strict=True):
                builder.store(soft_cap(builder, value, numbers[2]), place)
        for v, place in enumerate(places):
            value = store_rounded(builder, builder.load(place), line, v, narrow)
            nan = builder.or_(nan, builder.fcmp_unordered("uno", value, value))
            largest = builder.select(builder.fcmp_ordered(">", value, largest), value, largest)
        top = call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", llvm.F32, [largest], ("nnan",))
        bits = builder.bitcast(nan, ir.IntType(LANES))
        is_nan = builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))
        top = builder.select(is_nan, ir.Constant(llvm.F32, float("nan")), top)
        builder.store(top, llvm.at(builder, peak, llvm.F32)).align = 4

    return emit_line


def gemm_of(numbers: Format) -> tuple[Any, Any, Any, Any, Any]:
    """W x + b of some groups of outputs: stored, added, gated, activated, or kept as logits with their peaks.

    Each takes (linear, x, stride, rows, out, out stride, peaks, peak stride, scratch, control, stage, rank, size) and
    does this thread's share, then what others have left of theirs (work stealing), since cores are seldom equally
    quick; strides are bytes from row to row; ``linear`` is a record of ``execution_plan.LINEAR``.
    """
    kernel = _microkernel(numbers)

    def ending_in(name: str, emit_line: Any, group_bytes: int) -> Any:
        epilogue = _epilogue(emit_line)

        def gemm(
            linear: Any, x: int, stride: int, rows: int, out: int, out_stride: int, peaks: int, peak_stride: int,
            scratch: int, control: int, stage: int, rank: int, size: int,
        ) -> None:  # fmt: skip
            for turn in range(size):
                owner = (rank + turn) % size
                begin, end = share(linear.groups, owner, size)
                g = begin + take(control, stage, owner, end - begin)
                while g < end:
                    bias, weights = linear.bias + 4 * g * GROUP, linear.weights + g * linear.group_bytes
                    for r in range(0, rows, ROW_BLOCK):
                        count = min(ROW_BLOCK, rows - r)
                        kernel(weights, x + r * stride, stride, linear.steps, count, scratch)
                        here, peak = out + g * group_bytes + r * out_stride, peaks + 4 * g + r * peak_stride
                        epilogue(scratch, bias, linear.numbers, here, out_stride, peak, peak_stride, count)
                    g = begin + take(control, stage, owner, end - begin)

        return llvm.jit(gemm, name + numbers.name)

    return (
        ending_in("store", _store, 4 * GROUP),
        ending_in("add", _add, 4 * GROUP),
        ending_in("gate", _activate(numbers.input.is_bf16, True), numbers.input.bytes * GROUP // 2),
        ending_in("activate", _activate(numbers.input.is_bf16, False), numbers.input.bytes * GROUP),
        ending_in("logits", _logits(numbers.stored.is_bf16), numbers.stored.bytes * GROUP),
    )
