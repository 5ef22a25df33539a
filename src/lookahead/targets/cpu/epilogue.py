"""What is done with sums (rows, 32) fp32 while they are in the cache: stored, added, gated, or kept as logits.

Written in LLVM's vectors, because these few hundred nanoseconds are what keeps a gemm from the memory's speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from . import llvm
from .llvm import F32, I16, INTEGERS, VECTOR, call, integers, load_numbers, multiply_add, numbers, offset
from .microkernel import GROUP, VECTORS
from .processor import LANES


def exponential(builder: Any, x: Any) -> Any:
    """e^x in every lane, to about one unit in the last place.

    x = k log 2 + r, |r| <= log 2 / 2; e^r by its series to the seventh power; 2^k by its bits.
    """
    for bound, outside in ((-87.0, "<"), (88.0, ">")):
        # Not min and max, which would turn NaN into a number.
        x = builder.select(builder.fcmp_ordered(outside, x, numbers(bound)), numbers(bound), x)
    k = multiply_add(builder, x, numbers(1.4426950408889634), numbers(0.5))
    k = call(builder, f"llvm.floor.v{LANES}f32", VECTOR, [k])
    # log 2 in two parts, so that k times the first is exact.
    r = multiply_add(builder, k, numbers(-0.693359375), x)
    r = multiply_add(builder, k, numbers(2.12194440e-4), r)
    p = numbers(1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        p = multiply_add(builder, p, r, numbers(1 / divisor))
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
    """(sums, bias, out, stride, peaks, peak stride, count): ``emit_line(builder, sums + bias, out, peak)`` a row."""

    def emit(
        builder: Any, sums: Any, bias: Any, out: Any, stride: Any, peaks: Any, peak_stride: Any, count: Any
    ) -> None:
        with cgutils.for_range(builder, count) as loop:
            row, values = offset(builder, sums, (loop.index, 4 * GROUP)), []
            for v in range(VECTORS):
                value, add = (
                    load_numbers(builder, offset(builder, x, 4 * LANES * v), False) for x in (row, bias)
                )
                values.append(builder.fadd(value, add))
            line, peak = (
                offset(builder, out, (loop.index, stride)),
                offset(builder, peaks, (loop.index, peak_stride)),
            )
            emit_line(builder, values, line, peak)

    return llvm.emitted(emit, 7)


def _store(builder: Any, values: list[Any], line: Any, peak: Any) -> None:
    for v, value in enumerate(values):
        store_rounded(builder, value, line, v, False)


def _add(builder: Any, values: list[Any], line: Any, peak: Any) -> None:
    for v, value in enumerate(values):
        before = load_numbers(builder, offset(builder, line, 4 * LANES * v), False)
        store_rounded(builder, builder.fadd(value, before), line, v, False)


#: sums + bias are stored, or added to out, in fp32.
store_sums, add_sums = _epilogue(_store), _epilogue(_add)


def gate_sums(narrow: bool) -> Any:
    """silu(first 16 + bias) * (last 16 + bias) of each row, as bf16 where ``narrow``."""

    def emit_line(builder: Any, values: list[Any], line: Any, peak: Any) -> None:
        half = VECTORS // 2
        for v, (gate, up) in enumerate(zip(values[:half], values[half:], strict=True)):
            below = builder.fadd(numbers(1.0), exponential(builder, builder.fneg(gate)))
            store_rounded(builder, builder.fmul(builder.fdiv(gate, below), up), line, v, narrow)

    return _epilogue(emit_line)


def keep_logits(narrow: bool) -> Any:
    """Logits, and the largest of each row of the group as its peak, which is NaN where one of its logits is."""

    def emit_line(builder: Any, values: list[Any], line: Any, peak: Any) -> None:
        largest, nan = numbers(float("-inf")), ir.Constant(ir.VectorType(ir.IntType(1), LANES), None)
        for v, value in enumerate(values):
            value = store_rounded(builder, value, line, v, narrow)
            nan = builder.or_(nan, builder.fcmp_unordered("uno", value, value))
            largest = builder.select(builder.fcmp_ordered(">", value, largest), value, largest)
        top = call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [largest], ("nnan",))
        lanes = builder.bitcast(nan, ir.IntType(LANES))
        is_nan = builder.icmp_unsigned("!=", lanes, ir.Constant(lanes.type, 0))
        top = builder.select(is_nan, ir.Constant(F32, float("nan")), top)
        builder.store(top, llvm.at(builder, peak, F32)).align = 4

    return _epilogue(emit_line)
