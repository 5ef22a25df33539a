"""The weights of quantized files, in the order in which the kernel reads them (``packed_gemm``).

GGUF stores the inner numbers of an output in blocks of 32; formats with K in their names join eight blocks into a
superblock of 256. A number is

    w = scale * (q - zero) + offset      q has 4, 5, 6 or 8 bits; a format has a zero point or offsets, not both

A panel has 16 outputs. Its blocks are consecutive. Within a block, a vector of 64 bytes holds 4 inner numbers of
each output, which the processor multiplies at once. A panel consists of three parts:

    quants    (blocks, bytes)      4 vectors of low bits: byte (t, output, i) has number 4t+i in its low half and
                                   16+4t+i in its high half; then 1 vector with the fifth bits of all 8 vectors,
                                   or 2 with the upper two bits. With 8 bits: 8 vectors of whole bytes
    scales    (blocks, ...)        fp16 scales (16), then fp16 offsets (16); or 8-bit scales (16) and offsets (16)
    supers    (superblocks, ...)   fp16 factors of the 8-bit scales (16) and of the offsets (16)

So a Q4_0 block of 16 outputs takes 256 bytes of quants and 32 of scales, as in the file.

``pack_panels`` copies outputs of a file into panels; ``decode_output`` decodes an output, for embeddings and tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit, types

from . import llvm
from .llvm import address_as

#: Inner numbers of a block, outputs of a panel, blocks of a superblock.
BLOCK, PANEL, SUPER = 32, 16, 8
#: Size of a quantized block of activations in bytes, and offsets in it: 32 signed bytes; fp32 dx; fp32 dx * sum; and,
#: as 32-bit integers by zero point, the start of integer sums: -zero times the sum (for 32, that of each half block).
RECORD = 64
SCALE_AT, SUM_AT, START_AT = 32, 36, {8: 40, 16: 44, 128: 48, 32: 52}


@dataclass(frozen=True)
class Kind:
    """A type of GGUF tensors.

    Attributes:
        name: its name in GGUF.
        bits: bits of q; 16 or 32 for numbers that are not quantized.
        zero: the zero point; 0 for none.
        offsets: whether blocks have offsets.
        grouped: whether scales are 8-bit numbers with a factor for each superblock.
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

    @property
    def unit(self) -> int:
        """The inner size must be a multiple of this."""
        return BLOCK * SUPER if self.grouped else BLOCK

    def panel_bytes(self, inner: int) -> int:
        """Bytes of a panel with ``inner`` numbers per output."""
        blocks = -(-inner // BLOCK)
        size = blocks * (self.quant_bytes + self.scale_bytes) + blocks // SUPER * self.super_bytes
        return -(-size // 64) * 64


#: Compiled code identifies a kind by its index in this tuple.
KINDS = (
    Kind("F32", 32, 0, False, False, 1, 128),
    Kind("F16", 16, 0, False, False, 1, 64),
    Kind("BF16", 16, 0, False, False, 1, 64),
    Kind("Q4_0", 4, 8, False, False, 1, 18),
    Kind("Q4_1", 4, 0, True, False, 1, 20),
    Kind("Q5_0", 5, 16, False, False, 1, 22),
    Kind("Q5_1", 5, 0, True, False, 1, 24),
    Kind("Q8_0", 8, 128, False, False, 1, 34),
    Kind("Q4_K", 4, 0, True, True, 1, 144),
    Kind("Q5_K", 5, 0, True, True, 1, 176),
    Kind("Q6_K", 6, 32, False, True, 2, 210),
)
#: Outputs of a group, which is two panels.
GROUP = 2 * PANEL
KIND_INDEX = {kind.name: index for index, kind in enumerate(KINDS)}
F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K = range(len(KINDS))


@dataclass(slots=True)
class PackedLinear:
    """A linear whose weights are stored in panels.

    Attributes:
        panels: (groups, 2, 2) int64: for each panel of a group, its address and the index of its kind in ``KINDS``.
        bias: (32 * groups,) fp32.
        inner: numbers of an output.
        memory: the object that owns the memory of the panels.
    """

    panels: np.ndarray[Any, np.dtype[np.int64]]
    bias: np.ndarray[Any, np.dtype[np.float32]]
    inner: int
    memory: Any

    def rows(self, outputs: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The weights of some outputs, decoded, fp32 (n, inner)."""
        decoded = np.empty((len(outputs), self.inner), np.float32)
        _decode_outputs(self.panels, np.asarray(outputs, np.int64), self.inner, decoded.ctypes.data)
        return decoded


_QUANT_BYTES = np.array([kind.quant_bytes for kind in KINDS])
_SCALE_BYTES = np.array([kind.scale_bytes for kind in KINDS])
_SUPER_BYTES = np.array([kind.super_bytes for kind in KINDS])
_FILE_BYTES = np.array([kind.file_bytes for kind in KINDS])
_BITS = np.array([kind.bits for kind in KINDS])
_ZERO = np.array([kind.zero for kind in KINDS])
_GROUPED = np.array([kind.grouped for kind in KINDS])


def _load_half(builder: Any, address: Any) -> Any:
    return llvm.widen_halves(builder, llvm.load(builder, address, llvm.I16, 2))


#: (address) -> the fp16 number there as fp32, and (address) -> pointer to bytes.
half_at = llvm.emitted(_load_half, 1, types.float32)
bytes_at = address_as(types.CPointer(types.uint8))
_floats_at, _shorts_at = (address_as(types.CPointer(kind)) for kind in (types.float32, types.uint16))


@llvm.jit
def _integer(raw: Any, index: int) -> int:
    """A byte as a signed 64-bit integer. In numba, sums of unsigned and signed integers would be floats."""
    return np.int64(raw[index])  # type: ignore[return-value]  # an int to compiled code


@llvm.jit
def _scale_and_offset(raw: Any, start: int, j: int) -> tuple[int, int]:
    """The 6-bit scale and offset of block j of a Q4_K or Q5_K superblock, from the 12 bytes at ``start``.

    For blocks 0-3, they are the low 6 bits of bytes j and j+4. For blocks 4-7, their low 4 bits are the halves of
    byte j+4, and their upper 2 bits are the upper bits of bytes j-4 and j.
    """
    if j < 4:
        return _integer(raw, start + j) & 63, _integer(raw, start + j + 4) & 63
    both, scale, shift = _integer(raw, start + j + 4), _integer(raw, start + j - 4), _integer(raw, start + j)
    return (both & 15) | (scale >> 6) << 4, (both >> 4) | (shift >> 6) << 4


@llvm.jit
def _read_block(kind: int, raw: Any, block: int, q: Any, scales: Any) -> None:
    """Read a block of an output into ``q`` (32,) and ``scales`` (4,), both unsigned bytes.

    ``scales`` holds an fp16 scale and an fp16 offset, or an 8-bit scale and its offset, or two 8-bit scales.
    """
    if kind == Q8_0:
        start = block * 34
        scales[0], scales[1] = raw[start], raw[start + 1]
        for e in range(32):
            q[e] = _integer(raw, start + 2 + e) ^ 128
    elif kind in (Q4_0, Q4_1, Q5_0, Q5_1):
        head = 4 if kind in (Q4_1, Q5_1) else 2
        five = kind in (Q5_0, Q5_1)
        start = block * (head + 16 + 4 * five)
        for e in range(head):
            scales[e] = raw[start + e]
        for e in range(16):
            both, low, high = _integer(raw, start + head + 4 * five + e), 0, 0
            if five:
                low = _integer(raw, start + head + e // 8) >> e % 8 & 1
                high = _integer(raw, start + head + 2 + e // 8) >> e % 8 & 1
            q[e], q[16 + e] = (both & 15) | low << 4, (both >> 4) | high << 4
    elif kind in (Q4_K, Q5_K):
        five = kind == Q5_K
        start, j = block // 8 * (144 + 32 * five), block % 8
        scales[0], scales[1] = _scale_and_offset(raw, start + 4, j)
        for e in range(32):
            value = _integer(raw, start + 16 + 32 * five + j // 2 * 32 + e) >> 4 * (j % 2) & 15
            if five:
                value |= (_integer(raw, start + 16 + e) >> j & 1) << 4
            q[e] = value
    elif kind == Q6_K:
        start, j = block // 8 * 210, block % 8
        scales[0], scales[1] = raw[start + 192 + 2 * j], raw[start + 193 + 2 * j]
        n, j = j // 4, j % 4
        for e in range(32):
            value = _integer(raw, start + 64 * n + 32 * (j % 2) + e) >> 4 * (j // 2) & 15
            q[e] = value | (_integer(raw, start + 128 + 32 * n + e) >> 2 * j & 3) << 4


@llvm.jit
def pack_panel(kind: int, raw: Any, rows: Any, inner: int, out: Any) -> None:
    """Copy up to 16 outputs into a panel. Missing outputs decode to zeros.

    Args:
        kind: index in ``KINDS``.
        raw: the tensor in the file, (outputs, bytes of an output).
        rows: the outputs of the panel, in order; -1 for a missing output.
        inner: numbers of an output.
        out: (bytes of a panel,), all zero.
    """
    blocks, bits, grouped = inner // BLOCK, _BITS[kind], _GROUPED[kind]
    quant_bytes, scale_bytes, super_bytes = _QUANT_BYTES[kind], _SCALE_BYTES[kind], _SUPER_BYTES[kind]
    scales_at = blocks * quant_bytes
    supers_at = scales_at + blocks * scale_bytes
    q, scales = np.zeros(BLOCK, np.uint8), np.zeros(4, np.uint8)
    for lane in range(len(rows)):
        if rows[lane] < 0:
            continue
        source = raw[rows[lane]]
        if bits > 8:  # (inner, 16)
            size = bits // 8
            for i in range(inner):
                for k in range(size):
                    out[(i * PANEL + lane) * size + k] = source[i * size + k]
            continue
        for block in range(blocks):
            _read_block(kind, source, block, q, scales)
            quants = out[block * quant_bytes : (block + 1) * quant_bytes]
            if bits == 8:
                for e in range(32):
                    quants[e // 4 * 64 + lane * 4 + e % 4] = q[e]
            else:
                for e in range(16):
                    low, high = _integer(q, e) & 15, _integer(q, 16 + e) & 15
                    quants[e // 4 * 64 + lane * 4 + e % 4] = low | high << 4
                for e in range(32 if bits > 4 else 0):
                    t, i = e // 4, e % 4
                    if bits == 5:  # bit t of byte (lane, i)
                        quants[256 + lane * 4 + i] |= np.uint8(_integer(q, e) >> 4 << t)
                    else:
                        quants[256 + t // 4 * 64 + lane * 4 + i] |= np.uint8(
                            _integer(q, e) >> 4 << 2 * (t % 4)
                        )
            at = scales_at + block * scale_bytes
            if grouped:
                out[at + lane], out[at + PANEL + lane] = scales[0], scales[1]
            else:
                for k in range(scale_bytes // PANEL):
                    out[at + k // 2 * 2 * PANEL + lane * 2 + k % 2] = scales[k]
        if grouped:
            size = _FILE_BYTES[kind]
            first = 208 if kind == Q6_K else 0
            for s in range(blocks // SUPER):
                for k in range(super_bytes // PANEL):
                    at = supers_at + s * super_bytes + k // 2 * 2 * PANEL + lane * 2 + k % 2
                    out[at] = source[s * size + first + k]


@njit(error_model="numpy", nogil=True, cache=True)
def pack_panels(kind: int, raw: Any, rows: Any, inner: int, out: Any) -> None:
    """``pack_panel`` for several panels: ``rows`` (panels, 16), ``out`` (panels, bytes of a panel)."""
    for panel in range(len(rows)):
        pack_panel(kind, raw, rows[panel], inner, out[panel])


@llvm.jit
def decode_output(kind: int, panel: int, lane: int, inner: int, out: Any, factor: Any) -> None:
    """Decode an output of a panel and multiply it by ``factor``.

    Args:
        kind: index in ``KINDS``.
        panel: address of the panel.
        lane: which of its 16 outputs.
        inner: numbers of the output.
        out: (inner,) fp32, a pointer.
    """
    blocks = inner // BLOCK
    if kind == F32:
        wide = _floats_at(panel)
        for i in range(inner):
            out[i] = wide[i * PANEL + lane] * factor
        return
    if kind == BF16:
        shorts = _shorts_at(panel)
        for i in range(inner):
            out[i] = np.uint32(np.uint32(shorts[i * PANEL + lane]) << np.uint32(16)).view(np.float32) * factor
        return
    if kind == F16:
        for i in range(inner):
            out[i] = half_at(panel + 2 * (i * PANEL + lane)) * factor
        return
    bits, grouped = _BITS[kind], _GROUPED[kind]
    scales_at = panel + blocks * _QUANT_BYTES[kind]
    supers_at = scales_at + blocks * _SCALE_BYTES[kind]
    zero = _ZERO[kind]
    for block in range(blocks):
        quants = bytes_at(panel + block * _QUANT_BYTES[kind])
        scale_at = scales_at + block * _SCALE_BYTES[kind]
        shift = np.float32(0)
        if grouped:
            small = bytes_at(scale_at)
            unit = supers_at + block // SUPER * _SUPER_BYTES[kind]
            d = half_at(unit + 2 * lane)
            if kind == Q6_K:
                first = np.float32(np.int8(small[lane])) * d
                second = np.float32(np.int8(small[PANEL + lane])) * d
            else:
                first = second = np.float32(small[lane]) * d
                shift = -(np.float32(small[PANEL + lane]) * half_at(unit + 2 * PANEL + 2 * lane))
        else:
            first = second = half_at(scale_at + 2 * lane)
            if _SCALE_BYTES[kind] > 2 * PANEL:
                shift = half_at(scale_at + 2 * PANEL + 2 * lane)
        for e in range(BLOCK):
            t, i = e // 4, e % 4
            if bits == 8:
                q = _integer(quants, t * 64 + lane * 4 + i)
            else:
                q = _integer(quants, t % 4 * 64 + lane * 4 + i) >> t // 4 * 4 & 15
                if bits == 5:
                    q |= (_integer(quants, 256 + lane * 4 + i) >> t & 1) << 4
                elif bits == 6:
                    q |= (_integer(quants, 256 + t // 4 * 64 + lane * 4 + i) >> 2 * (t % 4) & 3) << 4
            scale = first if e < 16 else second
            out[block * BLOCK + e] = (scale * np.float32(q - zero) + shift) * factor


@njit(error_model="numpy", nogil=True, cache=True)
def _decode_outputs(panels: Any, outputs: Any, inner: int, address: int) -> None:
    """Decode outputs of a linear, whose table is ``PackedLinear.panels``, into fp32 (n, inner) at an address."""
    for number in range(len(outputs)):
        group, lane = outputs[number] // GROUP, outputs[number] % GROUP
        panel = panels[group, lane // PANEL]
        row = _floats_at(address + 4 * inner * number)
        decode_output(panel[1], panel[0], lane % PANEL, inner, row, np.float32(1))
