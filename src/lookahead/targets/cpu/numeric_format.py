"""How numbers are kept and multiplied: the dtype of a model, and the kind of its products on this processor.

    tiles     bf16 on matrix tiles (AMX)
    pairs     bf16 in vectors, two products at a time (AVX512-BF16)
    vectors   fp32 in vectors; bf16 weights are widened on the way

Code for each format is made by closures over a ``Format``, so that nothing is decided while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import types

from .llvm import floats_at, inlined, pointer_to
from .processor import LANES, PAIRS, TILES


@inlined
def _to_bf16(value: Any) -> Any:
    """From fp32 to the nearest, ties to even; NaN stays NaN."""
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16)
    return np.uint16(rounded) if value == value else np.uint16(0x7FC0)


@inlined
def _from_bf16(value: Any) -> Any:
    return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


@dataclass(frozen=True)
class Number:
    """A number in memory: its bytes, (address) -> pointer, and to and from fp32."""

    bytes: int
    pointer: Any
    narrow: Any
    widen: Any

    @property
    def is_bf16(self) -> bool:
        return self.bytes == 2


FP32 = Number(4, floats_at, np.float32, np.float32)
BF16 = Number(2, pointer_to(types.uint16), _to_bf16, _from_bf16)


@dataclass(frozen=True)
class Format:
    """A kind of product and the numbers around it.

    Attributes:
        kind: "tiles", "pairs" or "vectors".
        stored: weights, keys, values and logits, in the model's dtype.
        input: what a product reads.
        query: what attention's scores read.
        step: inner numbers that a product takes at once.
        key_pair: neighbours of a key that lie together in the cache.
    """

    kind: str
    stored: Number
    input: Number
    query: Number
    step: int
    key_pair: int

    @property
    def name(self) -> str:
        """Different for every format."""
        return f"{self.kind}_{self.stored.bytes}"

    def __str__(self) -> str:
        names = {"tiles": "AMX tiles", "pairs": "AVX512-BF16 pairs"}
        return names.get(self.kind, f"{LANES}-lane vectors")


FORMATS = {
    ("tiles", torch.bfloat16): Format("tiles", BF16, BF16, BF16, 32, 2),
    ("pairs", torch.bfloat16): Format("pairs", BF16, BF16, FP32, 2, 1),
    ("vectors", torch.bfloat16): Format("vectors", BF16, FP32, FP32, 1, 1),
    ("vectors", torch.float32): Format("vectors", FP32, FP32, FP32, 1, 1),
}


def format_for(dtype: torch.dtype) -> Format:
    """The quickest format of a dtype on this processor; KeyError where there is none."""
    kind = "tiles" if TILES else "pairs" if PAIRS else "vectors"
    return FORMATS[kind if dtype == torch.bfloat16 else "vectors", dtype]
