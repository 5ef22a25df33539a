"""Rows times packed weights, group by group, and what is done with each block of sums while it is in the cache.

Sums (rows, 32) fp32 are stored, added, gated, or kept as logits: in LLVM's vectors, because these few hundred
nanoseconds are what keeps a gemm from the memory's speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from . import llvm
from .llvm import F32, I16, INTEGERS, VECTOR, call, integers, jit, lanes, load_numbers, multiply_add, offset
from .microkernel import GROUP, ROW_BLOCK, VECTORS, microkernel
from .numeric_format import Format
from .processor import LANES
from .thread_pool import share


def exponential(builder: Any, x: Any) -> Any:
    """e^x in every lane, to about one unit in the last place.

    x = k log 2 + r, |r| <= log 2 / 2; e^r by its series to the seventh power; 2^k by its bits.
    """
    for bound, outside in ((-87.0, "<"), (88.0, ">")):
        # Not min and max, which would turn NaN into a number.
        x = builder.select(builder.fcmp_ordered(outside, x, lanes(bound)), lanes(bound), x)
    k = multiply_add(builder, x, lanes(1.4426950408889634), lanes(0.5))
    k = call(builder, f"llvm.floor.v{LANES}f32", VECTOR, [k])
    # log 2 in two parts, so that k times the first is exact.
    r = multiply_add(builder, k, lanes(-0.693359375), x)
    r = multiply_add(builder, k, lanes(2.12194440e-4), r)
    p = lanes(1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        p = multiply_add(builder, p, r, lanes(1 / divisor))
    power = builder.shl(builder.add(builder.fptosi(k, INTEGERS), integers(127)), integers(23))
    return builder.fmul(p, builder.bitcast(power, VECTOR))


def _rounded(builder: Any, value: Any) -> Any:
    """bf16 in the upper halves of integers: to the nearest, ties to even; NaN stays NaN."""
    bits = builder.bitcast(value, INTEGERS)
    odd = builder.and_(builder.lshr(bits, integers(16)), integers(1))
    rounded = builder.and_(builder.add(builder.add(bits, integers(0x7FFF)), odd), integers(-65536))
    return builder.select(builder.fcmp_unordered("uno", value, value), integers(0x7FC00000), rounded)


def store_rounded(builder: Any, value: Any, line: Any, v: int, narrow: bool) -> Any:
    """Vector ``v`` of a line to memory, as bf16 where ``narrow``; returns what was stored, as fp32."""
    if not narrow:
        llvm.store_vector(builder, value, offset(builder, line, 4 * LANES * v))
        return value
    bits = _rounded(builder, value)
    kind = ir.VectorType(I16, LANES)
    half = builder.trunc(builder.lshr(bits, integers(16)), kind)
    builder.store(half, llvm.at(builder, offset(builder, line, 2 * LANES * v), kind)).align = 2
    return builder.bitcast(bits, VECTOR)


def _epilogue(emit_line: Callable[[Any, list[Any], Any, Any], None]) -> Any:
    """(sums, bias, out, stride, peaks, peak stride, count): ``emit_line(builder, sums + bias, out, peak)`` by row."""

    def emit(
        builder: Any, sums: Any, bias: Any, out: Any, stride: Any, peaks: Any, peak_stride: Any, count: Any
    ) -> None:
        with cgutils.for_range(builder, count) as loop:
            row, values = offset(builder, sums, (loop.index, 4 * GROUP)), []
            for v in range(VECTORS):
                both = (load_numbers(builder, offset(builder, x, 4 * LANES * v), False) for x in (row, bias))
                values.append(builder.fadd(*both))
            line = offset(builder, out, (loop.index, stride))
            emit_line(builder, values, line, offset(builder, peaks, (loop.index, peak_stride)))

    return llvm.emitted(emit, 7)


def _store(builder: Any, values: list[Any], line: Any, peak: Any) -> None:
    for v, value in enumerate(values):
        store_rounded(builder, value, line, v, False)


def _add(builder: Any, values: list[Any], line: Any, peak: Any) -> None:
    for v, value in enumerate(values):
        before = load_numbers(builder, offset(builder, line, 4 * LANES * v), False)
        store_rounded(builder, builder.fadd(value, before), line, v, False)


def _gate(narrow: bool) -> Any:
    """silu(first 16 + bias) * (last 16 + bias) of each row, as bf16 where ``narrow``."""

    def emit_line(builder: Any, values: list[Any], line: Any, peak: Any) -> None:
        half = VECTORS // 2
        for v, (gate, up) in enumerate(zip(values[:half], values[half:], strict=True)):
            below = builder.fadd(lanes(1.0), exponential(builder, builder.fneg(gate)))
            store_rounded(builder, builder.fmul(builder.fdiv(gate, below), up), line, v, narrow)

    return emit_line


def _logits(narrow: bool) -> Any:
    """Logits, and the largest of each row of the group as its peak, which is NaN where one of its logits is."""

    def emit_line(builder: Any, values: list[Any], line: Any, peak: Any) -> None:
        largest, nan = lanes(float("-inf")), ir.Constant(ir.VectorType(ir.IntType(1), LANES), None)
        for v, value in enumerate(values):
            value = store_rounded(builder, value, line, v, narrow)
            nan = builder.or_(nan, builder.fcmp_unordered("uno", value, value))
            largest = builder.select(builder.fcmp_ordered(">", value, largest), value, largest)
        top = call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [largest], ("nnan",))
        bits = builder.bitcast(nan, ir.IntType(LANES))
        is_nan = builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))
        top = builder.select(is_nan, ir.Constant(F32, float("nan")), top)
        builder.store(top, llvm.at(builder, peak, F32)).align = 4

    return emit_line


def gemm_of(numbers: Format) -> tuple[Any, Any, Any, Any]:
    """W x + b of some groups of outputs: stored, added to what is there, gated, or kept as logits with their peaks.

    Each takes (linear, x, stride, rows, out, out stride, peaks, peak stride, scratch, rank, size) and does this
    thread's share; strides are bytes from row to row; ``linear`` is a record of ``execution_plan.LINEAR``.
    """
    kernel = microkernel(numbers)

    def ending_in(name: str, emit_line: Any, group_bytes: int) -> Any:
        epilogue = _epilogue(emit_line)

        def gemm(
            linear: Any, x: int, stride: int, rows: int, out: int, out_stride: int, peaks: int, peak_stride: int,
            scratch: int, rank: int, size: int,
        ) -> None:  # fmt: skip
            begin, end = share(linear.groups, rank, size)
            for g in range(begin, end):
                bias, weights = linear.bias + 4 * g * GROUP, linear.weights + g * linear.group_bytes
                for r in range(0, rows, ROW_BLOCK):
                    count = min(ROW_BLOCK, rows - r)
                    kernel(weights, x + r * stride, stride, linear.steps, count, scratch)
                    here, peak = out + g * group_bytes + r * out_stride, peaks + 4 * g + r * peak_stride
                    epilogue(scratch, bias, here, out_stride, peak, peak_stride, count)

        return jit(gemm, name + numbers.name)

    return (
        ending_in("store", _store, 4 * GROUP),
        ending_in("add", _add, 4 * GROUP),
        ending_in("gate", _gate(numbers.input.is_bf16), numbers.input.bytes * GROUP // 2),
        ending_in("logits", _logits(numbers.stored.is_bf16), numbers.stored.bytes * GROUP),
    )
