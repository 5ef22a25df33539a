"""Weights as a quantized file holds them, in the order in which the kernel reads them (``packed_gemm``).

GGUF stores an output's inner numbers in blocks of 32, or in superblocks of 256 that hold eight of them. A number is

    w = scale * (q - zero) + offset      q has 4, 5, 6 or 8 bits; a format has a zero point or offsets, not both

A panel is 16 outputs. Its blocks lie one after another, and within a block one vector of 64 bytes holds 4 inner
numbers of each output, because that is what the processor multiplies at once:

    quants    (blocks, bytes)      4 vectors of low bits: byte (t, output, i) has number 4t+i in its low half and
                                   16+4t+i in its high half; then 1 vector with the fifth bits of all 8 vectors,
                                   or 2 with the upper two bits; or 8 vectors of whole bytes
    scales    (blocks, ...)        fp16 scales (16), then fp16 offsets (16); or 8-bit scales (16) and offsets (16)
    supers    (superblocks, ...)   fp16 factors of the 8-bit scales (16) and of the offsets (16)

So 16 outputs of one Q4_0 block take 256 bytes of quants and 32 of scales, as many as in the file.

``pack`` copies rows of a file into panels, ``decode_of`` reads one output back, for embeddings and for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray, njit, types

from . import llvm
from .llvm import address_as

#: Inner numbers of a block, outputs of a panel, and blocks of a superblock.
BLOCK, PANEL, SUPER = 32, 16, 8
#: Bytes of a quantized block of activations: 32 signed bytes; then fp32 dx and dx * sum; then, as 32-bit integers,
#: -8, -16 and -128 times the sum, and -32 times the sums of both halves (the starts of integer sums); 4 bytes unused.
RECORD = 64
SCALE_AT, SUM_AT, START_AT = 32, 36, {8: 40, 16: 44, 128: 48, 32: 52}


@dataclass(frozen=True)
class Kind:
    """How a tensor's numbers are stored.

    Attributes:
        number: of the type in GGUF.
        bits: of q; 16 or 32 for numbers that are not quantized.
        zero: the zero point; 0 where the format has offsets or none.
        offsets: whether blocks have offsets.
        grouped: whether scales are 8-bit numbers with a factor for each superblock.
        halves: scales of a block: 2 where each 16 numbers have their own.
        file_bytes: of a block, or of a superblock where ``grouped``.
    """

    name: str
    number: int
    bits: int
    zero: int
    offsets: bool
    grouped: bool
    halves: int
    file_bytes: int

    @property
    def quant_bytes(self) -> int:
        """Of a block of a panel."""
        return PANEL * BLOCK * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Of a block of a panel."""
        if self.bits > 8:
            return 0
        if self.grouped:
            return PANEL * 2
        return PANEL * 2 * (1 + self.offsets)

    @property
    def super_bytes(self) -> int:
        """Of a superblock of a panel."""
        return PANEL * 2 * (1 + self.offsets) if self.grouped else 0

    @property
    def unit(self) -> int:
        """The inner size is a multiple of this."""
        return BLOCK * SUPER if self.grouped else BLOCK

    def panel_bytes(self, inner: int) -> int:
        """Of a panel with ``inner`` numbers for each output."""
        blocks = -(-inner // BLOCK)
        size = blocks * (self.quant_bytes + self.scale_bytes) + blocks // SUPER * self.super_bytes
        return -(-size // 64) * 64

    def row_bytes(self, inner: int) -> int:
        """Of one output in the file."""
        return inner // self.unit * self.file_bytes


#: By their place here, which compiled code knows them by.
KINDS = (
    Kind("F32", 0, 32, 0, False, False, 1, 128),
    Kind("F16", 1, 16, 0, False, False, 1, 64),
    Kind("BF16", 30, 16, 0, False, False, 1, 64),
    Kind("Q4_0", 2, 4, 8, False, False, 1, 18),
    Kind("Q4_1", 3, 4, 0, True, False, 1, 20),
    Kind("Q5_0", 6, 5, 16, False, False, 1, 22),
    Kind("Q5_1", 7, 5, 0, True, False, 1, 24),
    Kind("Q8_0", 8, 8, 128, False, False, 1, 34),
    Kind("Q4_K", 12, 4, 0, True, True, 1, 144),
    Kind("Q5_K", 13, 5, 0, True, True, 1, 176),
    Kind("Q6_K", 14, 6, 32, False, True, 2, 210),
)
#: Outputs of a group of two panels; see ``formats.GROUP``.
GROUP = 2 * PANEL
PLACE = {kind.name: place for place, kind in enumerate(KINDS)}
F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K = range(len(KINDS))
BY_NUMBER = {kind.number: kind for kind in KINDS}


@dataclass(slots=True)
class PackedLinear:
    """A linear whose weights lie in panels.

    Attributes:
        panels: (groups, 2, 2) int64: of each panel of a group its address and the place of its kind in ``KINDS``.
        bias: (32 * groups,) fp32.
        inner: numbers of an output.
        memory: what the addresses point to.
    """

    panels: np.ndarray[Any, np.dtype[np.int64]]
    bias: np.ndarray[Any, np.dtype[np.float32]]
    inner: int
    memory: Any


_QUANT_BYTES = np.array([kind.quant_bytes for kind in KINDS])
_SCALE_BYTES = np.array([kind.scale_bytes for kind in KINDS])
_SUPER_BYTES = np.array([kind.super_bytes for kind in KINDS])
_FILE_BYTES = np.array([kind.file_bytes for kind in KINDS])
_BITS = np.array([kind.bits for kind in KINDS])
_GROUPED = np.array([kind.grouped for kind in KINDS])


def _load_half(builder: Any, address: Any) -> Any:
    return llvm.widen_halves(builder, llvm.load(builder, address, llvm.I16, 2))


#: (address) -> the fp16 number there, as fp32; and memory as bytes.
half_at = llvm.emitted(_load_half, 1, types.float32)
bytes_at = address_as(types.CPointer(types.uint8))
_floats_at, _shorts_at = (address_as(types.CPointer(kind)) for kind in (types.float32, types.uint16))


@njit(error_model="numpy")
def _number(raw: Any, place: int) -> int:
    """A byte as a signed integer, which shifts and sums of mixed types need."""
    return np.int64(raw[place])  # type: ignore[return-value]  # numba has one kind of integer


@njit(error_model="numpy")
def _scale_and_offset(raw: Any, start: int, j: int) -> tuple[int, int]:
    """The 6-bit scale and offset of block j of a Q4_K or Q5_K superblock, from its 12 bytes.

    Blocks 0-3 have theirs in the low 6 bits of bytes j and j+4. Blocks 4-7 have the low 4 bits in the halves of
    byte j+4, and the upper 2 bits in the upper bits of bytes j-4 and j.
    """
    if j < 4:
        return _number(raw, start + j) & 63, _number(raw, start + j + 4) & 63
    both, scale, shift = _number(raw, start + j + 4), _number(raw, start + j - 4), _number(raw, start + j)
    return (both & 15) | (scale >> 6) << 4, (both >> 4) | (shift >> 6) << 4


@njit(error_model="numpy")
def _read_block(kind: int, raw: Any, block: int, q: Any, scales: Any) -> None:
    """One block of an output: ``q`` (32,) as the kernel takes it, unsigned; ``scales`` (4,) as bytes.

    ``scales`` is an fp16 scale and an fp16 offset, or an 8-bit scale and its offset or a second scale.
    """
    if kind == Q8_0:
        start = block * 34
        scales[0], scales[1] = raw[start], raw[start + 1]
        for e in range(32):
            q[e] = _number(raw, start + 2 + e) ^ 128
    elif kind in (Q4_0, Q4_1, Q5_0, Q5_1):
        head = 4 if kind in (Q4_1, Q5_1) else 2
        five = kind in (Q5_0, Q5_1)
        start = block * (head + 16 + 4 * five)
        for e in range(head):
            scales[e] = raw[start + e]
        for e in range(16):
            both, low, high = _number(raw, start + head + 4 * five + e), 0, 0
            if five:
                low = _number(raw, start + head + e // 8) >> e % 8 & 1
                high = _number(raw, start + head + 2 + e // 8) >> e % 8 & 1
            q[e], q[16 + e] = (both & 15) | low << 4, (both >> 4) | high << 4
    elif kind in (Q4_K, Q5_K):
        five = kind == Q5_K
        start, j = block // 8 * (144 + 32 * five), block % 8
        scales[0], scales[1] = _scale_and_offset(raw, start + 4, j)
        for e in range(32):
            value = _number(raw, start + 16 + 32 * five + j // 2 * 32 + e) >> 4 * (j % 2) & 15
            if five:
                value |= (_number(raw, start + 16 + e) >> j & 1) << 4
            q[e] = value
    elif kind == Q6_K:
        start, j = block // 8 * 210, block % 8
        scales[0], scales[1] = raw[start + 192 + 2 * j], raw[start + 193 + 2 * j]
        n, j = j // 4, j % 4
        for e in range(32):
            value = _number(raw, start + 64 * n + 32 * (j % 2) + e) >> 4 * (j // 2) & 15
            q[e] = value | (_number(raw, start + 128 + 32 * n + e) >> 2 * j & 3) << 4


@njit(error_model="numpy", nogil=True, cache=True)
def pack_panel(kind: int, raw: Any, rows: Any, inner: int, out: Any) -> None:
    """Copy up to 16 outputs into a panel; places without an output decode to zeros.

    Args:
        raw: the tensor in the file, (outputs, bytes of an output).
        rows: the outputs that make up the panel, in order; -1 for a place that has none.
        out: (bytes of a panel,) of zeros.
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
                    low, high = _number(q, e) & 15, _number(q, 16 + e) & 15
                    quants[e // 4 * 64 + lane * 4 + e % 4] = low | high << 4
                for e in range(32 if bits > 4 else 0):
                    t, i = e // 4, e % 4
                    if bits == 5:  # bit t of byte (lane, i)
                        quants[256 + lane * 4 + i] |= np.uint8(_number(q, e) >> 4 << t)
                    else:
                        quants[256 + t // 4 * 64 + lane * 4 + i] |= np.uint8(
                            _number(q, e) >> 4 << 2 * (t % 4)
                        )
            place = scales_at + block * scale_bytes
            if grouped:
                out[place + lane], out[place + PANEL + lane] = scales[0], scales[1]
            else:
                for k in range(scale_bytes // PANEL):
                    out[place + k // 2 * 2 * PANEL + lane * 2 + k % 2] = scales[k]
        if grouped:
            size = _FILE_BYTES[kind]
            first = 208 if kind == Q6_K else 0
            for s in range(blocks // SUPER):
                for k in range(super_bytes // PANEL):
                    place = supers_at + s * super_bytes + k // 2 * 2 * PANEL + lane * 2 + k % 2
                    out[place] = source[s * size + first + k]


@njit(error_model="numpy", nogil=True, cache=True)
def pack_panels(kind: int, raw: Any, rows: Any, inner: int, out: Any) -> None:
    """``pack_panel`` for ``rows`` (panels, 16) into ``out`` (panels, bytes of a panel)."""
    for panel in range(len(rows)):
        pack_panel(kind, raw, rows[panel], inner, out[panel])


@llvm.jit
def decode_output(kind: int, panel: int, lane: int, inner: int, out: Any, factor: Any) -> None:
    """One output of a panel times ``factor``, (inner,) fp32.

    Args:
        panel: its address.
        lane: which of its 16 outputs.
    """
    blocks = inner // BLOCK
    if kind == F32:
        wide = carray(_floats_at(panel), (inner, PANEL))
        for i in range(inner):
            out[i] = wide[i, lane] * factor
        return
    if kind == BF16:
        shorts = carray(_shorts_at(panel), (inner, PANEL))
        for i in range(inner):
            out[i] = np.uint32(np.uint32(shorts[i, lane]) << np.uint32(16)).view(np.float32) * factor
        return
    if kind == F16:
        for i in range(inner):
            out[i] = half_at(panel + 2 * (i * PANEL + lane)) * factor
        return
    bits, grouped = _BITS[kind], _GROUPED[kind]
    scales_at = panel + blocks * _QUANT_BYTES[kind]
    supers_at = scales_at + blocks * _SCALE_BYTES[kind]
    zero = 8 if kind == Q4_0 else 16 if kind == Q5_0 else 128 if kind == Q8_0 else 32 if kind == Q6_K else 0
    for block in range(blocks):
        quants = carray(bytes_at(panel + block * _QUANT_BYTES[kind]), (512,))
        place = scales_at + block * _SCALE_BYTES[kind]
        shift = np.float32(0)
        if grouped:
            small = carray(bytes_at(place), (2 * PANEL,))
            unit = supers_at + block // SUPER * _SUPER_BYTES[kind]
            d = half_at(unit + 2 * lane)
            if kind == Q6_K:
                first = np.float32(np.int8(small[lane])) * d
                second = np.float32(np.int8(small[PANEL + lane])) * d
            else:
                first = second = np.float32(small[lane]) * d
                shift = -(np.float32(small[PANEL + lane]) * half_at(unit + 2 * PANEL + 2 * lane))
        else:
            first = second = half_at(place + 2 * lane)
            if _SCALE_BYTES[kind] > 2 * PANEL:
                shift = half_at(place + 2 * PANEL + 2 * lane)
        for e in range(BLOCK):
            t, i = e // 4, e % 4
            if bits == 8:
                q = _number(quants, t * 64 + lane * 4 + i)
            else:
                q = _number(quants, t % 4 * 64 + lane * 4 + i) >> t // 4 * 4 & 15
                if bits == 5:
                    q |= (_number(quants, 256 + lane * 4 + i) >> t & 1) << 4
                elif bits == 6:
                    q |= (_number(quants, 256 + t // 4 * 64 + lane * 4 + i) >> 2 * (t % 4) & 3) << 4
            scale = first if e < 16 else second
            out[block * BLOCK + e] = (scale * np.float32(q - zero) + shift) * factor
