"""What is done with a block of sums (rows, 32) fp32 while it is in the cache: added, stored, gated, scored.

Written in LLVM's vectors, because these few hundred nanoseconds are what keeps a block from the memory's speed.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import overload

from .intrinsics import (
    F32,
    I16,
    I32,
    VECTOR,
    at,
    call,
    const,
    emitted,
    load_vector,
    multiply_add,
    store_vector,
)
from .machine import LANES

#: Outputs in a group.
GROUP = 32
VECTORS = GROUP // LANES
INTEGERS = ir.VectorType(I32, LANES)


def number(value: float) -> ir.Constant:
    """One fp32 number in every lane."""
    return ir.Constant(VECTOR, [ir.Constant(F32, value)] * LANES)


def integer(value: int) -> ir.Constant:
    """One integer in every lane."""
    return ir.Constant(INTEGERS, [ir.Constant(I32, value)] * LANES)


def exponential(builder: Any, x: Any) -> Any:
    """e^x in every lane, to about one unit in the last place.

    x = k log 2 + r, |r| <= log 2 / 2; e^r by its series to the seventh power; 2^k by its bits.
    """
    for bound, outside in ((-87.0, "<"), (88.0, ">")):
        # Not min and max, which would turn NaN into a number.
        x = builder.select(builder.fcmp_ordered(outside, x, number(bound)), number(bound), x)
    k = call(
        builder,
        f"llvm.floor.v{LANES}f32",
        VECTOR,
        [multiply_add(builder, x, number(1.4426950408889634), number(0.5))],
    )
    # log 2 in two parts, so that k times the first is exact.
    r = multiply_add(builder, k, number(-0.693359375), x)
    r = multiply_add(builder, k, number(2.12194440e-4), r)
    p = number(1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        p = multiply_add(builder, p, r, number(1 / divisor))
    power = builder.shl(builder.add(builder.fptosi(k, INTEGERS), integer(127)), integer(23))
    return builder.fmul(p, builder.bitcast(power, VECTOR))


def rounded_bits(builder: Any, value: Any) -> Any:
    """bf16 in the upper halves of integers: to the nearest, ties to even; NaN stays NaN."""
    bits = builder.bitcast(value, INTEGERS)
    odd = builder.and_(builder.lshr(bits, integer(16)), integer(1))
    rounded = builder.add(builder.add(bits, integer(0x7FFF)), odd)
    rounded = builder.and_(rounded, integer(-65536))
    return builder.select(builder.fcmp_unordered("uno", value, value), integer(0x7FC00000), rounded)


def store_bits(builder: Any, bits: Any, address: Any) -> None:
    """The upper halves of integers to memory."""
    kind = ir.VectorType(I16, LANES)
    half = builder.trunc(builder.lshr(bits, integer(16)), kind)
    builder.store(half, at(builder, address, kind)).align = 2


def _with_bias(builder: Any, sums: Any, row: Any, bias: Any, v: int) -> Any:
    place = builder.add(builder.add(sums, builder.mul(row, const(4 * GROUP))), const(4 * LANES * v))
    return builder.fadd(
        load_vector(builder, place, False),
        load_vector(builder, builder.add(bias, const(4 * LANES * v)), False),
    )


def _written(add: bool) -> Any:
    def emit(builder: Any, sums: Any, bias: Any, out: Any, stride: Any, count: Any) -> None:
        with cgutils.for_range(builder, count) as loop:
            line = builder.add(out, builder.mul(loop.index, stride))
            for v in range(VECTORS):
                value = _with_bias(builder, sums, loop.index, bias, v)
                place = builder.add(line, const(4 * LANES * v))
                if add:
                    value = builder.fadd(value, load_vector(builder, place, False))
                store_vector(builder, value, place)

    return emitted(emit, 5)


def _gated(narrow: bool) -> Any:
    def emit(builder: Any, sums: Any, bias: Any, out: Any, stride: Any, count: Any) -> None:
        half = VECTORS // 2
        with cgutils.for_range(builder, count) as loop:
            line = builder.add(out, builder.mul(loop.index, stride))
            for v in range(half):
                gate = _with_bias(builder, sums, loop.index, bias, v)
                up = _with_bias(builder, sums, loop.index, bias, v + half)
                below = builder.fadd(number(1.0), exponential(builder, builder.fneg(gate)))
                value = builder.fmul(builder.fdiv(gate, below), up)
                place = builder.add(line, const((2 if narrow else 4) * LANES * v))
                if narrow:
                    store_bits(builder, rounded_bits(builder, value), place)
                else:
                    store_vector(builder, value, place)

    return emitted(emit, 5)


def _scored(narrow: bool) -> Any:
    def emit(
        builder: Any, sums: Any, out: Any, stride: Any, peaks: Any, peak_stride: Any, count: Any
    ) -> None:
        with cgutils.for_range(builder, count) as loop:
            line = builder.add(out, builder.mul(loop.index, stride))
            largest, odd = None, None
            for v in range(VECTORS):
                place = builder.add(
                    builder.add(sums, builder.mul(loop.index, const(4 * GROUP))), const(4 * LANES * v)
                )
                value = load_vector(builder, place, False)
                place = builder.add(line, const((2 if narrow else 4) * LANES * v))
                if narrow:
                    bits = rounded_bits(builder, value)
                    store_bits(builder, bits, place)
                    value = builder.bitcast(bits, VECTOR)
                else:
                    store_vector(builder, value, place)
                nan = builder.fcmp_unordered("uno", value, value)
                odd = nan if odd is None else builder.or_(odd, nan)
                largest = (
                    value
                    if largest is None
                    else builder.select(builder.fcmp_ordered(">", value, largest), value, largest)
                )
            top = call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [largest], ("nnan",))
            mask = builder.bitcast(odd, ir.IntType(LANES))
            any_odd = builder.icmp_unsigned("!=", mask, ir.Constant(mask.type, 0))
            top = builder.select(any_odd, ir.Constant(F32, float("nan")), top)
            place = builder.add(peaks, builder.mul(loop.index, peak_stride))
            builder.store(top, at(builder, place, F32)).align = 4

    return emitted(emit, 6)


#: (sums, bias, out, bytes from row to row of it, rows): sums + bias are added to out, or stored.
add_sums, store_sums = _written(True), _written(False)
_gate_bits, _gate_wide = _gated(True), _gated(False)
_score_bits, _score_wide = _scored(True), _scored(False)


def gate_sums(sums: int, bias: int, out: int, stride: int, count: int, kind: Any) -> None:
    raise NotImplementedError("compiled code only")


@overload(gate_sums)
def _gate_code(sums, bias, out, stride, count, kind):  # type: ignore[no-untyped-def]
    """silu(first 16 + bias) * (last 16 + bias) of each row, as products read it."""
    gate = _gate_wide if kind == types.int32 else _gate_bits
    return lambda sums, bias, out, stride, count, kind: gate(sums, bias, out, stride, count)


def score_sums(sums: int, out: int, stride: int, peaks: int, peak_stride: int, count: int, tag: Any) -> None:
    raise NotImplementedError("compiled code only")


@overload(score_sums)
def _score_code(sums, out, stride, peaks, peak_stride, count, tag):  # type: ignore[no-untyped-def]
    """Sums as logits of the tag's type, and the largest of each row; NaN where there is one."""
    score = _score_bits if tag == types.uint16 else _score_wide
    return lambda sums, out, stride, peaks, peak_stride, count, tag: score(
        sums, out, stride, peaks, peak_stride, count
    )
