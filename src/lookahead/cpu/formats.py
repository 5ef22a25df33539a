"""How numbers are stored and multiplied: the dtype of a model, and how its products are computed on this processor.

    tiles     bf16 on matrix tiles (AMX)
    pairs     bf16 in vectors, two products at a time (AVX512-BF16)
    vectors   fp32 in vectors; bf16 weights are widened as they are read
    packed    weights of 4 to 8 bits as in the file, times 8-bit activations, summed in integers (``packed``)

Each format has its own compiled code (``kernels``), because a ``Format`` is a constant of the functions that close
over it. Weights are stored in the order in which a gemm reads them, in contiguous groups of 32 outputs (``dense``,
``packed``).
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .. import processor
from ..core import OutOfMemory
from .packed import BLOCK, RECORD

LARGE_PAGE = 1 << 21
#: Maximum rows in one call of a microkernel.
ROW_BLOCK = 32


class NumberType(NamedTuple):
    """A type of numbers in memory: its name, and the bytes of a number."""

    name: str
    bytes: int

    @property
    def is_bf16(self) -> bool:
        return self == BF16


FP32, BF16, FP16 = NumberType("f32", 4), NumberType("bf16", 2), NumberType("f16", 2)


@dataclass(frozen=True)
class Format:
    """How products are computed, and the types of the numbers that it reads and writes.

    Attributes:
        product: "tiles", "pairs", "vectors" or "packed".
        stored: type of weights and logits; the model's dtype.
        cached: type of keys and values. With packed weights they are fp16: attention reads half as many bytes, and
            their rounding is small beside that of 8-bit activations.
        input: type of the rows that a product reads.
        query: type of the queries that attention reads.
        step: inner numbers that a product consumes at once.
        key_pair: number of consecutive key elements that are adjacent in the cache.
    """

    product: str
    stored: NumberType
    cached: NumberType
    input: NumberType
    query: NumberType
    step: int
    key_pair: int

    @property
    def name(self) -> str:
        """A unique name."""
        return f"{self.product}_{self.stored.bytes}"

    def row_bytes(self, inner: int) -> int:
        """Bytes of an input row of a product. With packed weights, rows are followed by their quantized blocks."""
        size = round_up(inner, self.step) * self.input.bytes
        return size + (-(-inner // BLOCK) * RECORD if self.product == "packed" else 0)

    def __str__(self) -> str:
        level = processor.level()
        names = {
            "tiles": "AMX tiles",
            "pairs": "AVX512-BF16 pairs",
            "packed": f"packed weights, 8-bit {level.products} products",
        }
        return names.get(self.product, f"{level.width}-lane vectors")


FORMATS = {
    ("tiles", "bfloat16"): Format("tiles", BF16, BF16, BF16, BF16, 32, 2),
    ("pairs", "bfloat16"): Format("pairs", BF16, BF16, BF16, FP32, 2, 1),
    ("vectors", "bfloat16"): Format("vectors", BF16, BF16, FP32, FP32, 1, 1),
    ("vectors", "float32"): Format("vectors", FP32, FP32, FP32, FP32, 1, 1),
    ("packed", "float32"): Format("packed", FP32, FP16, FP32, FP32, BLOCK, 1),
}


def format_for(dtype: str) -> Format:
    """The fastest format of "float32" or "bfloat16" on this processor; KeyError for another dtype."""
    product = "tiles" if processor.has_tiles() else "pairs" if processor.has_pairs() else "vectors"
    return FORMATS[product if dtype == "bfloat16" else "vectors", dtype]


def round_up(number: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-number // multiple) * multiple


class ArrayMemory:
    """Contiguous memory of ``size`` bytes for many arrays, each of which starts on a cache line.

    It uses huge pages if the system provides them, because fewer pages cause fewer stalls.

    Raises:
        OutOfMemory: the system has no room.
    """

    def __init__(self, size: int) -> None:
        # One extra huge page is for alignment, the other because kernels read a little past the last weight.
        # It is private, because forked processes would overwrite each other's rows in shared memory.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        try:
            self._map = mmap.mmap(-1, size + 2 * LARGE_PAGE, **private)
        except OSError as error:
            raise OutOfMemory(
                f"{size / 1e9:.1f} GB must fit in memory ({error.strerror}); use a smaller model, fewer bits per "
                "weight or a shorter context"
            ) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # the system has no huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._used = self._begin = -self._bytes.ctypes.data % LARGE_PAGE

    @property
    def used(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """All bytes taken so far, uint8 (bytes,)."""
        return self._bytes[self._begin : self._used]

    def take(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The next ``size`` bytes, uint8 (size,), all zero."""
        begin = self._used
        self._used += round_up(size, 64)
        return self._bytes[begin : begin + size]


def paired(size: int, rotary: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The order of a head's ``size`` outputs that puts the pairs (i, i + R/2), which rotate together, next to each
    other.

    The first ``rotary`` = R outputs rotate; the others keep their places. With size 6 and R = 4: 0 2 1 3 4 5.
    """
    return np.concatenate([np.arange(rotary).reshape(2, -1).T.reshape(-1), np.arange(rotary, size)])


@cache
def tile_config(rows: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The 64 bytes that configure tile registers: palette 1 and, for each tile, its rows and bytes per row.

    All tiles have 16 rows of 64 bytes; those of activations and their sums have fewer if the pass has fewer rows.

    Args:
        rows: number of rows of the pass, at most 16.
    """
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32].view(np.uint16)[:] = 64
    config[48:56] = 16
    config[[48, 49, 52]] = max(1, rows)
    return config
