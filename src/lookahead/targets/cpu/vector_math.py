"""Elementwise mathematics on vectors of fp32 numbers, written as LLVM instructions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from . import llvm
from .llvm import INTEGERS, LANES, VECTOR, call, floats, integers, multiply_add, offset


def exponential(builder: Any, x: Any) -> Any:
    """e^x in every lane, with an error of about one unit in the last place.

    x = k log 2 + r, |r| <= log 2 / 2; e^r from its series up to the seventh power; 2^k from its bits.
    """
    for bound, outside in ((-87.0, "<"), (88.0, ">")):
        # LLVM's min and max would turn NaN into a number.
        x = builder.select(builder.fcmp_ordered(outside, x, floats(bound)), floats(bound), x)
    k = multiply_add(builder, x, floats(1.4426950408889634), floats(0.5))
    k = call(builder, f"llvm.floor.v{LANES}f32", VECTOR, [k])
    # log 2 is split in two, so that k times the first part is exact.
    r = multiply_add(builder, k, floats(-0.693359375), x)
    r = multiply_add(builder, k, floats(2.12194440e-4), r)
    p = floats(1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        p = multiply_add(builder, p, r, floats(1 / divisor))
    power = builder.shl(builder.add(builder.fptosi(k, INTEGERS), integers(127)), integers(23))
    return builder.fmul(p, builder.bitcast(power, VECTOR))


def store_rounded(builder: Any, value: Any, line: Any, v: int, as_bf16: bool) -> Any:
    """Store vector ``v`` of a line as fp32 or bf16; bf16 is rounded to the nearest, ties to even; NaN stays NaN.

    Returns:
        The stored numbers, as fp32.
    """
    if not as_bf16:
        llvm.store_vector(builder, value, offset(builder, line, 4 * LANES * v))
        return value
    bits = builder.bitcast(value, INTEGERS)
    odd = builder.and_(builder.lshr(bits, integers(16)), integers(1))
    bits = builder.and_(builder.add(builder.add(bits, integers(0x7FFF)), odd), integers(-65536))
    bits = builder.select(builder.fcmp_unordered("uno", value, value), integers(0x7FC00000), bits)
    kind = ir.VectorType(llvm.I16, LANES)
    half = builder.trunc(builder.lshr(bits, integers(16)), kind)
    builder.store(half, llvm.at(builder, offset(builder, line, 2 * LANES * v), kind)).align = 2
    return builder.bitcast(bits, VECTOR)


def soft_cap(builder: Any, x: Any, cap: Any) -> Any:
    """cap * tanh(x / cap) in every lane, where tanh(y) = 1 - 2 / (1 + e^2y)."""
    power = exponential(builder, builder.fdiv(builder.fmul(floats(2.0), x), cap))
    part = builder.fdiv(floats(2.0), builder.fadd(floats(1.0), power))
    return builder.fmul(cap, builder.fsub(floats(1.0), part))


def activation(builder: Any, x: Any, a: Any, b: Any) -> Any:
    """x * sigmoid(a x + b x^3) in every lane."""
    u = x  # clipped to bounds beyond which the sigmoid is constant, because the cube may overflow
    for bound, outside in ((-88.0, "<"), (88.0, ">")):
        u = builder.select(builder.fcmp_ordered(outside, u, floats(bound)), floats(bound), u)
    u = builder.fmul(u, multiply_add(builder, b, builder.fmul(u, u), a))
    below = builder.fadd(floats(1.0), exponential(builder, builder.fneg(u)))
    return builder.fdiv(x, below)
