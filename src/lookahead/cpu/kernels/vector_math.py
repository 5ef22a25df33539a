"""Elementwise mathematics on vectors of fp32 numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...machine_code import compiled
from .vectors import (
    bits_of,
    floats,
    floor,
    from_bits,
    is_nan,
    multiply_add,
    select,
    store,
    store_upper_halves,
    to_words,
    words,
)

inlined = partial(compiled, inline=True)


@inlined
def _between(low: float, x: Any, high: float) -> Any:
    """x clamped to the bounds. NaN stays NaN."""
    x = select(x < low, floats(low), x)
    return select(x > high, floats(high), x)


@inlined
def exponential(x: Any) -> Any:
    """e^x, with an error of about one unit in the last place.

    x = k log 2 + r, |r| <= log 2 / 2; e^r from its series up to the seventh power; 2^k from its bits.
    """
    x = _between(-87.0, x, 88.0)
    k = floor(multiply_add(x, floats(1.4426950408889634), floats(0.5)))
    # log 2 is split in two, so that k times the first part is exact.
    r = multiply_add(k, floats(-0.693359375), x)
    r = multiply_add(k, floats(2.12194440e-4), r)
    p = multiply_add(floats(1 / 5040), r, floats(1 / 720))
    p = multiply_add(p, r, floats(1 / 120))
    p = multiply_add(p, r, floats(1 / 24))
    p = multiply_add(p, r, floats(1 / 6))
    p = multiply_add(p, r, floats(1 / 2))
    p = multiply_add(p, r, floats(1.0))
    p = multiply_add(p, r, floats(1.0))
    return p * from_bits((to_words(k) + 127) << 23)


@inlined
def soft_cap(x: Any, cap: Any) -> Any:
    """cap * tanh(x / cap), where tanh(y) = 1 - 2 / (1 + e^2y)."""
    return cap * (1.0 - 2.0 / (1.0 + exponential(2.0 * x / cap)))


@inlined
def activation(x: Any, a: Any, b: Any) -> Any:
    """x * sigmoid(a x + b x^3)."""
    u = _between(-88.0, x, 88.0)  # the cube may overflow, and the sigmoid is constant out there
    u = u * multiply_add(b, u * u, a)
    return x / (1.0 + exponential(-u))


@inlined
def store_fp32(address: int, x: Any) -> Any:
    """Store 16 numbers, and return them."""
    store(address, x)
    return x


@inlined
def store_bf16(address: int, x: Any) -> Any:
    """Store 16 numbers rounded to the nearest bf16, ties to even; NaN stays NaN. Returns the rounded numbers."""
    bits = bits_of(x)
    bits = bits + 0x7FFF + (bits >> 16 & 1) & -65536
    bits = select(is_nan(x), words(0x7FC00000), bits)
    store_upper_halves(address, bits)
    return from_bits(bits)
