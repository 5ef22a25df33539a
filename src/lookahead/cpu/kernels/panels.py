"""Writing and reading panels of packed weights (``cpu.packed`` has their order)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...machine_code import compiled, entry
from ..packed import BLOCK, PANEL, SUPER, TENSOR_TYPES, TensorType
from .operations import bytes_at, call, floats_at, integers_at, shorts_at, stack_memory
from .vectors import fp16_at


@compiled
def _byte(numbers: Any, index: int) -> int:
    """A byte as a signed 64-bit integer, because numba makes a float of the sum of an unsigned and a signed
    integer."""
    return np.int64(numbers[index])  # type: ignore[return-value]  # an int to compiled code


@compiled
def _scale_and_offset(raw: Any, start: int, j: int) -> tuple[int, int]:
    """The 6-bit scale and offset of block j of a Q4_K or Q5_K superblock, from the 12 bytes at ``start``.

    For blocks 0-3, they are the low 6 bits of bytes j and j+4. For blocks 4-7, their low 4 bits are the halves of
    byte j+4, and their upper 2 bits are the upper bits of bytes j-4 and j.
    """
    if j < 4:
        return _byte(raw, start + j) & 63, _byte(raw, start + j + 4) & 63
    both, scale, shift = _byte(raw, start + j + 4), _byte(raw, start + j - 4), _byte(raw, start + j)
    return (both & 15) | (scale >> 6) << 4, (both >> 4) | (shift >> 6) << 4


def _read_block_of(tensor_type: TensorType) -> Any:
    """Make (raw, block, q, scales), which reads a block of an output's bytes ``raw`` into q (32 bytes) and scales (4
    bytes).

    ``scales`` gets an fp16 scale and an fp16 offset, or an 8-bit scale and its offset, or two 8-bit scales.
    """
    size = tensor_type.file_bytes
    head = 4 if tensor_type.offsets else 2
    five = tensor_type.bits == 5
    upper = 32 if five else 0  # bytes of fifth bits in a superblock

    # Q8_0: an fp16 scale, then signed bytes, which become unsigned ones.
    def bytes_with_a_scale(raw: Any, block: int, q: Any, scales: Any) -> None:
        start = block * size
        scales[0], scales[1] = raw[start], raw[start + 1]
        for e in range(32):
            q[e] = _byte(raw, start + 2 + e) ^ 128

    # Q4_0, Q4_1, Q5_0, Q5_1: fp16 scale and offset, fifth bits, then bytes of which each has numbers e and e + 16.
    def halves_with_fp16_scales(raw: Any, block: int, q: Any, scales: Any) -> None:
        fifth = block * size + head
        start = fifth + (4 if five else 0)
        for e in range(head):
            scales[e] = raw[fifth - head + e]
        for e in range(16):
            both = _byte(raw, start + e)
            low = 0
            high = 0
            if five:
                low = _byte(raw, fifth + e // 8) >> e % 8 & 1
                high = _byte(raw, fifth + 2 + e // 8) >> e % 8 & 1
            q[e], q[16 + e] = (both & 15) | low << 4, (both >> 4) | high << 4

    # Q4_K, Q5_K: 4 bytes of factors, 12 of scales and offsets, 32 of fifth bits, then two blocks in each 32 bytes.
    def superblock_of_4_or_5_bits(raw: Any, block: int, q: Any, scales: Any) -> None:
        start, j = block // 8 * size, block % 8
        scales[0], scales[1] = _scale_and_offset(raw, start + 4, j)
        for e in range(32):
            value = _byte(raw, start + 16 + upper + j // 2 * 32 + e) >> 4 * (j % 2) & 15
            if five:
                value |= (_byte(raw, start + 16 + e) >> j & 1) << 4
            q[e] = value

    # Q6_K: 128 bytes of lower halves, 64 of upper bits, then a scale for each half of a block. Half a superblock has
    # four blocks in its 64 bytes of lower halves and 32 of upper bits.
    def superblock_of_6_bits(raw: Any, block: int, q: Any, scales: Any) -> None:
        start, j = block // 8 * size, block % 8
        scales[0], scales[1] = raw[start + 192 + 2 * j], raw[start + 193 + 2 * j]
        n, j = j // 4, j % 4
        for e in range(32):
            value = _byte(raw, start + 64 * n + 32 * (j % 2) + e) >> 4 * (j // 2) & 15
            q[e] = value | (_byte(raw, start + 128 + 32 * n + e) >> 2 * j & 3) << 4

    # The reader of this tensor type.
    if tensor_type.bits == 8:
        read = bytes_with_a_scale
    elif not tensor_type.grouped:
        read = halves_with_fp16_scales
    else:
        read = superblock_of_6_bits if tensor_type.bits == 6 else superblock_of_4_or_5_bits
    return compiled(read, tensor_type.name)


def _packer(tensor_type: TensorType) -> Any:
    """Make the compiled part of ``pack_panels``, with addresses instead of arrays."""
    bits, grouped = tensor_type.bits, tensor_type.grouped
    quant_bytes, scale_bytes, super_bytes = (
        tensor_type.quant_bytes,
        tensor_type.scale_bytes,
        tensor_type.super_bytes,
    )
    size = tensor_type.file_bytes
    number_bytes = tensor_type.bits // 8
    first_super = 208 if tensor_type.bits == 6 else 0  # offset of the factors in a superblock of the file
    read_block = _read_block_of(tensor_type)

    # Numbers that are not quantized are only transposed.
    def pack_plain(source: int, lane: int, inner: int, out: int) -> None:
        raw, panel = bytes_at(source), bytes_at(out)
        for i in range(inner):  # (inner, 16)
            for k in range(number_bytes):
                panel[(i * PANEL + lane) * number_bytes + k] = raw[i * number_bytes + k]

    # A panel has the quants of all blocks, then their scales, then the factors of the superblocks.
    def pack_quantized(source: int, lane: int, inner: int, out: int) -> None:
        blocks = inner // BLOCK
        raw = bytes_at(source)
        scales_at = out + blocks * quant_bytes
        supers = bytes_at(scales_at + blocks * scale_bytes)
        room = stack_memory(64)
        q = bytes_at(room)
        scales = bytes_at(room + 32)
        for block in range(blocks):
            read_block(raw, block, q, scales)
            quants, at = bytes_at(out + block * quant_bytes), bytes_at(scales_at + block * scale_bytes)
            # The quants.
            if bits == 8:
                for e in range(32):
                    quants[e // 4 * 64 + lane * 4 + e % 4] = q[e]
            else:
                for e in range(16):
                    low, high = _byte(q, e) & 15, _byte(q, 16 + e) & 15
                    quants[e // 4 * 64 + lane * 4 + e % 4] = low | high << 4
            if bits == 5:  # bit t of byte (lane, i)
                for e in range(32):
                    place = 256 + lane * 4 + e % 4
                    quants[place] = _byte(quants, place) | _byte(q, e) >> 4 << e // 4
            if bits == 6:
                for e in range(32):
                    place = 256 + e // 16 * 64 + lane * 4 + e % 4
                    quants[place] = _byte(quants, place) | _byte(q, e) >> 4 << 2 * (e // 4 % 4)
            # The scales.
            if grouped:
                at[lane], at[PANEL + lane] = scales[0], scales[1]
            else:
                for k in range(scale_bytes // PANEL):
                    at[k // 2 * 2 * PANEL + lane * 2 + k % 2] = scales[k]
        # The factors of the superblocks.
        if grouped:
            for s in range(blocks // SUPER):
                for k in range(super_bytes // PANEL):
                    place = s * super_bytes + k // 2 * 2 * PANEL + lane * 2 + k % 2
                    supers[place] = raw[s * size + first_super + k]

    pack_output = compiled(pack_plain if bits > 8 else pack_quantized, tensor_type.name)

    # Output n goes to lane n % 16 of panel n // 16.
    def pack(
        raw: int, row_bytes: int, rows: int, panels: int, inner: int, out: int, panel_bytes: int
    ) -> None:
        outputs = integers_at(rows)
        for n in range(panels * PANEL):
            if outputs[n] >= 0:
                pack_output(raw + row_bytes * outputs[n], n % PANEL, inner, out + panel_bytes * (n // PANEL))

    return pack


def _decoder(tensor_type: TensorType) -> Any:
    quant_bytes, scale_bytes, super_bytes = (
        tensor_type.quant_bytes,
        tensor_type.scale_bytes,
        tensor_type.super_bytes,
    )
    bits = tensor_type.bits
    zero = tensor_type.zero
    grouped = tensor_type.grouped
    offsets = tensor_type.offsets
    two_scales = tensor_type.halves > 1

    # Numbers that are not quantized are only widened.
    def decode_plain(panel: int, lane: int, inner: int, out: int) -> None:
        numbers, wide, shorts = floats_at(out), floats_at(panel), shorts_at(panel)
        for i in range(inner):
            place = i * PANEL + lane
            if bits == 32:
                numbers[i] = wide[place]
            elif is_bf16:
                numbers[i] = np.uint32(np.uint32(shorts[place]) << np.uint32(16)).view(np.float32)
            else:
                numbers[i] = fp16_at(panel + 2 * place)

    # A number is scale * (quant - zero point) + offset.
    def decode_quantized(panel: int, lane: int, inner: int, out: int) -> None:
        blocks = inner // BLOCK
        numbers = floats_at(out)
        scales_at = panel + blocks * quant_bytes
        supers_at = scales_at + blocks * scale_bytes
        for block in range(blocks):
            quants = bytes_at(panel + block * quant_bytes)
            at = scales_at + block * scale_bytes
            unit = supers_at + block // SUPER * super_bytes
            small = bytes_at(at)
            # The scales of both halves, and the offset.
            shift = np.float32(0)
            if two_scales:
                first = np.float32(np.int8(small[lane])) * fp16_at(unit + 2 * lane)
                second = np.float32(np.int8(small[PANEL + lane])) * fp16_at(unit + 2 * lane)
            elif grouped:
                first = second = np.float32(small[lane]) * fp16_at(unit + 2 * lane)
                shift = -(np.float32(small[PANEL + lane]) * fp16_at(unit + 2 * PANEL + 2 * lane))
            else:
                first = second = fp16_at(at + 2 * lane)
                if offsets:
                    shift = fp16_at(at + 2 * PANEL + 2 * lane)
            # The numbers.
            for e in range(BLOCK):
                t, i = e // 4, e % 4
                if bits == 8:
                    q = _byte(quants, t * 64 + lane * 4 + i)
                else:
                    q = _byte(quants, t % 4 * 64 + lane * 4 + i) >> t // 4 * 4 & 15
                    if bits == 5:
                        q |= (_byte(quants, 256 + lane * 4 + i) >> t & 1) << 4
                    elif bits == 6:
                        q |= (_byte(quants, 256 + t // 4 * 64 + lane * 4 + i) >> 2 * (t % 4) & 3) << 4
                scale = first if e < 16 else second
                numbers[block * BLOCK + e] = scale * np.float32(q - zero) + shift

    is_bf16 = tensor_type.name == "BF16"
    return decode_plain if bits > 8 else decode_quantized


@entry
def _decode_outputs(table: int, outputs: int, count: int, inner: int, out: int) -> None:
    """Decode outputs of a linear to fp32 (count, inner) at ``out``. ``table`` has the panels with their decoders."""
    panels, numbers = integers_at(table), integers_at(outputs)
    for n in range(count):
        panel = 2 * (numbers[n] // PANEL)
        call(panels[panel + 1], panels[panel], numbers[n] % PANEL, inner, out + 4 * inner * n)


for _type in TENSOR_TYPES:
    entry(_packer(_type), f"pack_{_type.name}")
    entry(_decoder(_type), f"decode_{_type.name}")
