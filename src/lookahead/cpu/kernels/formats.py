"""The code for each type of numbers in memory (``cpu.formats``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...machine_code import compiled
from ..formats import BF16, FORMATS, FP32
from .operations import floats_at, shorts_at
from .processor import WIDTH
from .vector_math import store_bf16, store_fp32
from .vectors import load_columns, load_columns_bf16


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


class NumberCode(NamedTuple):
    """How compiled code reads and writes a type of numbers.

    Attributes:
        pointer: (address) -> the numbers there.
        from_fp32, to_fp32: conversions of a number.
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
    BF16: NumberCode(shorts_at, _to_bf16, _from_bf16, load_columns_bf16, store_bf16),
}
#: The formats of this level of processors.
COMPILED = [fmt for fmt in FORMATS.values() if WIDTH == 16 or fmt.kind not in ("tiles", "pairs")]
