"""The weights of quantized files, in the order in which kernels read them (``packed_gemm``).

GGUF stores the inner numbers of an output in blocks of 32; formats with K in their names join eight blocks into a
superblock of 256. A number is

    w = scale * (q - zero) + offset      q has 4, 5, 6 or 8 bits; a format has a zero point or offsets, never both

A panel has 16 outputs. Its blocks are consecutive. Within a block, a vector of 64 bytes holds 4 inner numbers of
each output, which the processor multiplies at once. A panel consists of three parts:

    quants    (blocks, bytes)      4 vectors of low bits: byte (t, output, i) has number 4t+i in its low half and
                                   16+4t+i in its high half; then 1 vector with the fifth bits of all 8 vectors,
                                   or 2 with the upper two bits. With 8 bits: 8 vectors of whole bytes
    scales    (blocks, ...)        fp16 scales (16), then fp16 offsets (16); or 8-bit scales (16) and offsets (16)
    supers    (superblocks, ...)   fp16 factors of the 8-bit scales (16) and of the offsets (16)

So a Q4_0 block of 16 outputs takes 256 bytes of quants and 32 of scales, as in the file.

``pack_panels`` copies outputs of a file into panels. The function at ``decoder_address`` decodes an output, for
embeddings and tests. Each tensor type has its own compiled code (``kernels.panels``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..machine_code import address, kernel

#: Inner numbers per block.
BLOCK = 32
#: Outputs per panel.
PANEL = 16
#: Blocks per superblock.
SUPER = 8
#: A quantized block of activations: the numbers; dx; dx times the sum of the numbers; and, for each zero point, the
#: start of the integer sums, which is -zero times the sum of the numbers (for 32, that of each half of the block).
QUANTIZED = np.dtype(
    {
        "names": [
            "numbers",
            "scale",
            "scaled_sum",
            "start_8",
            "start_16",
            "start_128",
            "start_32",
            "start_32_high",
        ],
        "formats": ["(32,)i1", "f4", "f4", "i4", "i4", "i4", "i4", "i4"],
        "itemsize": 64,
    }
)
RECORD = QUANTIZED.itemsize


@dataclass(frozen=True)
class TensorType:
    """A type of GGUF tensor.

    Attributes:
        name: its name in GGUF.
        bits: bits of q; 16 or 32 for numbers that are not quantized.
        zero: the zero point; 0 for none.
        offsets: whether blocks have offsets.
        grouped: whether scales are 8-bit numbers with one factor per superblock.
        halves: number of scales of a block: 2 if each half block has its own, else 1.
        file_bytes: bytes of a block in the file, or of a superblock if ``grouped``.
    """

    name: str
    bits: int
    zero: int
    offsets: bool
    grouped: bool
    halves: int
    file_bytes: int

    @property
    def quant_bytes(self) -> int:
        """Bytes of the quants of a panel's block."""
        return PANEL * BLOCK * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a panel's block."""
        if self.bits > 8:
            return 0
        if self.grouped:
            return PANEL * 2
        return PANEL * 2 * (1 + self.offsets)

    @property
    def super_bytes(self) -> int:
        """Bytes of the factors of a panel's superblock."""
        return PANEL * 2 * (1 + self.offsets) if self.grouped else 0

    def panel_bytes(self, inner: int) -> int:
        """Bytes of a panel with ``inner`` numbers per output."""
        blocks = -(-inner // BLOCK)
        size = blocks * (self.quant_bytes + self.scale_bytes) + blocks // SUPER * self.super_bytes
        return -(-size // 64) * 64


#: Compiled code refers to a tensor type by its index in this tuple.
TENSOR_TYPES = (
    TensorType("F32", 32, 0, False, False, 1, 128),
    TensorType("F16", 16, 0, False, False, 1, 64),
    TensorType("BF16", 16, 0, False, False, 1, 64),
    TensorType("Q4_0", 4, 8, False, False, 1, 18),
    TensorType("Q4_1", 4, 0, True, False, 1, 20),
    TensorType("Q5_0", 5, 16, False, False, 1, 22),
    TensorType("Q5_1", 5, 0, True, False, 1, 24),
    TensorType("Q8_0", 8, 128, False, False, 1, 34),
    TensorType("Q4_K", 4, 0, True, True, 1, 144),
    TensorType("Q5_K", 5, 0, True, True, 1, 176),
    TensorType("Q6_K", 6, 32, False, True, 2, 210),
)
#: Outputs of a group, which is two panels.
GROUP = 2 * PANEL
TYPE_INDEX = {tensor_type.name: index for index, tensor_type in enumerate(TENSOR_TYPES)}
F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K = range(len(TENSOR_TYPES))


@dataclass(slots=True)
class PackedLinear:
    """A linear whose weights are stored in panels.

    Attributes:
        panels: (groups, 2, 2) int64: for each panel of a group, its address and its type's index in ``TENSOR_TYPES``.
        bias: (32 * groups,) fp32.
        inner: numbers of an output.
        memory: the object that owns the memory of the panels.
    """

    panels: np.ndarray[Any, np.dtype[np.int64]]
    bias: np.ndarray[Any, np.dtype[np.float32]]
    inner: int
    memory: Any
    _decoders: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def rows(self, outputs: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The weights of some outputs, decoded, fp32 (n, inner)."""
        decoded = np.empty((len(outputs), self.inner), np.float32)
        numbers = np.asarray(outputs, np.int64)
        addresses = self.decoders.ctypes.data, numbers.ctypes.data
        kernel("decode_outputs")(*addresses, len(numbers), self.inner, decoded.ctypes.data)
        return decoded

    @property
    def decoders(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """``panels`` with the address of each panel's decoder instead of its tensor type."""
        if self._decoders is None:
            self._decoders = self.with_code(decoder_address)
        return self._decoders

    def with_code(self, address_of: Callable[[TensorType], int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """``panels`` with the address of compiled code instead of each panel's tensor type."""
        table = self.panels.copy()
        for tensor_type in np.unique(table[..., 1]):
            table[..., 1][self.panels[..., 1] == tensor_type] = address_of(TENSOR_TYPES[tensor_type])
        return table


def pack_panels(
    tensor_type: TensorType,
    raw: np.ndarray[Any, np.dtype[np.uint8]],
    rows: np.ndarray[Any, np.dtype[np.int64]],
    inner: int,
    out: np.ndarray[Any, np.dtype[np.uint8]],
) -> None:
    """Copy outputs of a file into panels.

    Args:
        raw: the tensor in the file, (outputs, bytes of an output).
        rows: the outputs of each panel, in order, (panels, 16); -1 for a missing output, which decodes to zeros.
        inner: numbers of an output.
        out: (panels, bytes of a panel), all zero.
    """
    rows = np.ascontiguousarray(rows, np.int64)
    assert raw.strides[1] == out.strides[1] == 1
    addresses = raw.ctypes.data, raw.strides[0], rows.ctypes.data
    kernel(f"pack_{tensor_type.name}")(*addresses, len(rows), inner, out.ctypes.data, out.strides[0])


def decoder_address(tensor_type: TensorType) -> int:
    """The address of a tensor type's compiled decoder.

    Its arguments are (panel, lane, inner, out). It decodes output ``lane`` of a panel to fp32 (inner,) at ``out``.
    """
    return address(f"decode_{tensor_type.name}")


def kernel_address(tensor_type: TensorType) -> int:
    """The address of a tensor type's compiled kernel.

    A kernel is (panel, rows, stride, blocks, count, out); see ``packed_gemm.microkernel``. It writes 16 of 32 columns
    of ``out``. Gemms call kernels by address, so there is one of each, not one in every gemm.
    """
    return address(f"gemm_{tensor_type.name}")
