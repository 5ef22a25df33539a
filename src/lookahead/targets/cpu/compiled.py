"""Numba code of ``NumbaKernels``. Imported only where numba is there; compiled once and kept on disk.

A tag argument (an unsigned 16-bit zero for bf16's bits, a float zero for fp32) tells what an address points to.
Sums may be formed in vector lanes, in an order that depends on the length of a row alone.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import carray, njit
from numba.extending import register_jitable

from .native.intrinsics import narrow, pointer, widen

#: Sums in lanes and fused multiply-adds; NaN and infinity keep their meaning.
MATHS = {"reassoc", "contract", "nsz"}


@register_jitable
def _exp(x: Any) -> Any:
    """e^x in fp32 to about one unit in the last place, without a call, so that loops over it are vectors.

    x = k log 2 + r, |r| <= log 2 / 2; e^r by its series to the seventh power; 2^k by its bits.
    """
    # Not min and max, which would turn NaN into a number.
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    k = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    # log 2 in two parts, so that k times the first is exact.
    r = x - k * np.float32(0.693359375) + k * np.float32(2.12194440e-4)
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    return p * np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(cache=True, fastmath=MATHS, error_model="numpy")
def norm(x: int, weight: int, out: int, rows: int, size: int, epsilon: float, tag: Any) -> None:
    """x (rows, size) / sqrt(mean(x^2) + epsilon) * weight -> out."""
    xs = carray(pointer(x, tag), (rows, size))
    ws = carray(pointer(weight, np.float32(0)), (size,))
    outs = carray(pointer(out, tag), (rows, size))
    for r in range(rows):
        total = np.float32(0)
        for i in range(size):
            value = widen(xs[r, i])
            total += value * value
        factor = np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(epsilon))
        for i in range(size):
            outs[r, i] = narrow(widen(xs[r, i]) * factor * ws[i], tag)


@njit(cache=True, fastmath=MATHS, error_model="numpy")
def gate(both: int, out: int, rows: int, size: int, tag: Any) -> None:
    """silu(both[:, :size]) * both[:, size:] -> out (rows, size)."""
    ins = carray(pointer(both, tag), (rows, 2 * size))
    outs = carray(pointer(out, tag), (rows, size))
    for r in range(rows):
        for i in range(size):
            value = widen(ins[r, i])
            outs[r, i] = narrow(value / (np.float32(1) + _exp(-value)) * widen(ins[r, size + i]), tag)


@njit(cache=True, fastmath=MATHS, error_model="numpy")
def turn(
    y: int,
    turns: int,
    weight: int,
    epsilon: float,
    query: int,
    cache: int,
    capacity: int,
    start: int,
    rows: int,
    heads: int,
    key_heads: int,
    size: int,
    tag: Any,
) -> None:
    """Norm and rotate queries and keys of rows start.. of y; queries go out, keys and values to the cache.

    Args:
        y: (any, H + 2K, D), pairs side by side.
        turns: (any, D) fp32, cosine and sine by turns; 0 for no rotation.
        weight: (H + K, D) fp32 of the norm over each head; 0 for none.
        query: (any, H, D) fp32.
        cache: (2K, capacity, D) fp32 from the first free row on.
    """
    lanes = heads + 2 * key_heads
    single = np.float32(0)
    ys = carray(pointer(y, tag), (start + rows, lanes, size))
    queries = carray(pointer(query, single), (start + rows, heads, size))
    stored = carray(pointer(cache, single), (2 * key_heads, capacity, size))
    angles = carray(pointer(turns, single), (start + rows, size))
    weights = carray(pointer(weight, single), (heads + key_heads, size))
    one = np.empty(size, np.float32)
    for row in range(rows):
        r = start + row
        for h in range(heads + key_heads):
            for i in range(size):
                one[i] = widen(ys[r, h, i])
            if weight != 0:
                total = np.float32(0)
                for i in range(size):
                    total += one[i] * one[i]
                factor = np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(epsilon))
                for i in range(size):
                    one[i] *= factor * weights[h, i]
            if turns != 0:
                for i in range(0, size, 2):
                    a, b = one[i], one[i + 1]
                    one[i] = a * angles[r, i] - b * angles[r, i + 1]
                    one[i + 1] = a * angles[r, i + 1] + b * angles[r, i]
            if h < heads:
                for i in range(size):
                    queries[r, h, i] = one[i]
            else:
                for i in range(size):
                    stored[h - heads, row, i] = one[i]
        for h in range(key_heads):
            for i in range(size):
                stored[key_heads + h, row, i] = widen(ys[r, heads + key_heads + h, i])


@njit(cache=True, fastmath=MATHS, error_model="numpy")
def quantise(x: int, out: int, scales: int, rows: int, size: int, tag: Any) -> None:
    """Rows x (rows, size) to unsigned bytes around 128, each row by its own scale: x = (out - 128) * scale."""
    xs = carray(pointer(x, tag), (rows, size))
    outs = carray(pointer(out, np.uint8(0)), (rows, size))
    steps = carray(pointer(scales, np.float32(0)), (rows,))
    for r in range(rows):
        largest = np.float32(0)
        for i in range(size):
            largest = max(largest, abs(widen(xs[r, i])))
        steps[r] = largest / np.float32(127)
        inverse = np.float32(127) / largest if largest > 0 else np.float32(0)
        for i in range(size):
            outs[r, i] = np.uint8(np.int32(widen(xs[r, i]) * inverse + np.float32(128.5)))


@njit(cache=True, fastmath=MATHS, error_model="numpy")
def rescale(y: int, scales: int, bias: int, other: int, out: int, rows: int, size: int, tag: Any) -> None:
    """y (rows, size) fp32 * scale of the row + bias + other -> out; bias and other may be 0 for none."""
    ys = carray(pointer(y, np.float32(0)), (rows, size))
    steps = carray(pointer(scales, np.float32(0)), (rows,))
    biases = carray(pointer(bias, tag), (size,))
    others = carray(pointer(other, tag), (rows, size))
    outs = carray(pointer(out, tag), (rows, size))
    for r in range(rows):
        step = steps[r]
        if other != 0 and bias != 0:
            for i in range(size):
                outs[r, i] = narrow(ys[r, i] * step + widen(biases[i]) + widen(others[r, i]), tag)
        elif other != 0:
            for i in range(size):
                outs[r, i] = narrow(ys[r, i] * step + widen(others[r, i]), tag)
        elif bias != 0:
            for i in range(size):
                outs[r, i] = narrow(ys[r, i] * step + widen(biases[i]), tag)
        else:
            for i in range(size):
                outs[r, i] = narrow(ys[r, i] * step, tag)


#: For reports.
VERSION = numba.__version__
