"""RMS norms: x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from .llvm import REASSOCIATE, floats_at, integers_at, jit
from .numeric_format import Format


def _inverse_rms(address: int, size: int, epsilon: float) -> Any:
    """1 / sqrt(mean(x^2) + epsilon) of fp32 numbers."""
    xs = carray(floats_at(address), (size,))
    total = np.float32(0)
    for i in range(size):
        total += xs[i] * xs[i]
    return np.float32(1) / np.sqrt(total / np.float32(size) + epsilon)


inverse_rms = jit(_inverse_rms, fastmath=REASSOCIATE)


def rms_norm_of(numbers: Format) -> Any:
    """The norm of rows for a format."""
    element, narrow = numbers.input.pointer, numbers.input.narrow

    def rms_norm(
        x: int, x_stride: int, row_numbers: int, norm: Any, out: int, out_stride: int, begin: int, end: int,
        size: int,
    ) -> None:  # fmt: skip
        """Norm rows begin..end, as a gemm reads them.

        Args:
            x, x_stride: fp32 rows.
            row_numbers: row r of the result is row ``row_numbers[r]`` of x; 0 where it is row r.
        """
        ws = carray(floats_at(norm.weight), (size,))
        rows = carray(integers_at(row_numbers), (end,))
        for r in range(begin, end):
            source = x + x_stride * (rows[r] if row_numbers != 0 else r)
            xs, outs = carray(floats_at(source), (size,)), carray(element(out + out_stride * r), (size,))
            factor = inverse_rms(source, size, norm.epsilon)
            for i in range(size):
                outs[i] = narrow(xs[i] * factor * ws[i])

    return jit(rms_norm, numbers.name, fastmath=REASSOCIATE)
