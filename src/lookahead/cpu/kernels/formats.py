"""The code for each type of numbers in memory (``cpu.formats``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...machine_code import compiled
from ..formats import BF16, FORMATS, FP16, FP32
from .operations import floats_at, shorts_at
from .processor import WIDTH
from .vector_math import store_bf16, store_fp32
from .vectors import load_columns, load_columns_bf16, load_columns_fp16


@compiled
def _to_bf16(value: Any) -> Any:
    """Round fp32 to the nearest bf16, ties to even. NaN stays NaN."""
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16)
    return np.uint16(rounded) if value == value else np.uint16(0x7FC0)


@compiled
def _from_bf16(value: Any) -> Any:
    return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


@compiled
def _to_fp16(value: Any) -> Any:
    """Round fp32 to the nearest fp16, ties to even. Larger numbers become the largest. NaN stays NaN."""
    bits = np.float32(value).view(np.uint32)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if magnitude < np.uint32(0x38800000):  # below 2^-14: a multiple of 2^-24, which is 0.5's last bit in fp32
        sum_ = np.float32(magnitude.view(np.float32) + np.float32(0.5))
        rounded = np.uint32(sum_.view(np.uint32) - np.uint32(0x3F000000))
    else:
        odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
        rounded = np.uint32(
            np.uint32(magnitude - np.uint32(112 << 23) + np.uint32(0xFFF)) + odd
        ) >> np.uint32(13)
        rounded = min(np.uint32(rounded), np.uint32(0x7BFF)) if value == value else np.uint32(0x7E00)
    return np.uint16(rounded | np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000)))


class NumberCode(NamedTuple):
    """How compiled code reads and writes a type of numbers.

    Attributes:
        pointer: (address) -> the numbers there.
        from_fp32, to_fp32: conversions of a number. Only keys and values are fp16, so what they do not need is None.
        load_columns: (address, stride, count) -> vectors of fp32 numbers.
        store: (address, vector of fp32 numbers) -> the numbers as they were stored, rounded.
    """

    pointer: Any
    from_fp32: Any
    to_fp32: Any
    load_columns: Any
    store: Any


CODE = {
    FP32: NumberCode(floats_at, np.float32, np.float32, load_columns, store_fp32),
    FP16: NumberCode(shorts_at, _to_fp16, None, load_columns_fp16, None),
    BF16: NumberCode(shorts_at, _to_bf16, _from_bf16, load_columns_bf16, store_bf16),
}
#: The formats of this level of processors.
COMPILED = [fmt for fmt in FORMATS.values() if WIDTH == 16 or fmt.product not in ("tiles", "pairs")]
