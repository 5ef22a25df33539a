"""Rows times weights that stay packed as in the file: 4 to 8 bits, in blocks of 32 with their own scales.

Each row of activations is quantized to 8 bits, in blocks of 32 with one fp32 scale each. The products of a block are
summed in 32-bit integers, and each block adds one fp32 term to a row's sum:

    y = sum over blocks b of   (scale_b * dx_b) * (sum of q * x)  +  offset_b * (dx_b * sum of x)

where w = scale * q + offset is the decoded weight and dx * x the quantized activation. Integer sums are exact, and
the fp32 terms are added in the order of the blocks, so a row is bit-identical regardless of the rows computed
alongside it.

Weights are stored in panels of 16 outputs (``packed``). A block of a panel is 8 vectors of 16 x 4 unsigned bytes:
vector t holds q of inner numbers 4t .. 4t+3 of each output, 4 bytes per lane. A kernel iterates over the blocks of
one panel. It unpacks the vectors of a block into registers and multiplies them with all rows while they are there:

    total += dot(vector t, row[4t .. 4t+3] in all lanes)         for each t
    sums of the row += (s * dx) * (total - zero * sum of x)      zero: 0 if there is none; s: the block's 16 scales
    sums of the row += o * (dx * sum of x)                       if the format has offsets o

With 32 registers of 16 words and instructions for products of bytes (VNNI), all 8 vectors fit into registers at once,
and one run covers all rows. Otherwise there are two runs, of vectors 0-3 and 4-7, and the totals of the first are
kept in memory. AVX2 and ARM multiply 8-bit weights as two digits of 4 bits, in two runs each.

An example with 2 outputs and a block of 4: q = (1 2 3 4), (5 6 7 8), x = (1 -1 2 0), so the totals are (5, 13); with
s = (.5, .25) and dx = 2 the block adds (.5 * 2 * 5, .25 * 2 * 13) = (5, 6.5).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...machine_code import compiled, entry
from ..formats import ROW_BLOCK
from ..packed import BLOCK, GROUP, PANEL, QUANTIZED, RECORD, SUPER, TENSOR_TYPES, TensorType
from .operations import call, integers_at, offsets_of, prefetch, record_at, stack_memory
from .processor import PAIRED_BYTES, SIGNED_DOT, VNNI, WIDTH
from .vector_math import inlined
from .vectors import (
    LANES,
    absolute,
    any_of,
    broadcast_float,
    broadcast_word,
    dot_u8_i8,
    floats,
    is_nan,
    largest,
    load_bf16,
    load_bytes,
    load_floats,
    load_fp16,
    load_signed_bytes,
    load_totals,
    load_words,
    multiply_add,
    rounded,
    select,
    store,
    store_bytes,
    sum_of,
    to_floats,
    to_words,
    totals,
    whole,
)

#: Prefetch distance in bytes.
AHEAD = 16384
#: Whether the eight vectors of a block fit into the registers.
ONE_RUN = VNNI and WIDTH == LANES
#: In all four bytes of a word: the lower half, bit 4, and bits 4 and 5.
LOWER, BIT_4, BITS_4_5 = 0x0F0F0F0F, 0x10101010, 0x30303030
#: Bytes of a row of sums.
LINE = 4 * GROUP
#: Bytes of a vector.
VECTOR = 64
#: Bytes of the totals of 32 rows, and of all totals kept between runs.
KEPT = VECTOR * ROW_BLOCK
ALL_KEPT = 2 * KEPT
#: Offsets in a row's quantized block of its scale, its scaled sum, and the initial totals by zero point.
_AT = offsets_of(QUANTIZED)
SCALE = _AT["scale"]
SCALED_SUM = _AT["scaled_sum"]
START = {n: _AT[f"start_{n}"] for n in (8, 16, 32, 128)}

quantized_at = record_at(QUANTIZED)


# The vectors of a block as unsigned bytes: 0 to 3 for ``half`` 0, 4 to 7 for ``half`` 1.


@inlined
def _four_bits(quants: int, half: int) -> Any:
    shift = 4 * half
    return (
        load_words(quants) >> shift & LOWER,
        load_words(quants + 64) >> shift & LOWER,
        load_words(quants + 128) >> shift & LOWER,
        load_words(quants + 192) >> shift & LOWER,
    )


@inlined
def _five_bits(quants: int, half: int) -> Any:
    w0, w1, w2, w3 = _four_bits(quants, half)
    fifth = load_words(quants + 256) >> 4 * half  # bit t of a byte belongs to vector t
    return w0 | fifth << 4 & BIT_4, w1 | fifth << 3 & BIT_4, w2 | fifth << 2 & BIT_4, w3 | fifth << 1 & BIT_4


@inlined
def _six_bits(quants: int, half: int) -> Any:
    w0, w1, w2, w3 = _four_bits(quants, half)
    # Bits 2t and 2t + 1 of a byte belong to vector t of the half.
    upper = load_words(quants + 256 + 64 * half)
    return (
        w0 | upper << 4 & BITS_4_5,
        w1 | upper << 2 & BITS_4_5,
        w2 | upper & BITS_4_5,
        w3 | upper >> 2 & BITS_4_5,
    )


@inlined
def _eight_bits(quants: int, half: int) -> Any:
    first = quants + 256 * half
    return load_words(first), load_words(first + 64), load_words(first + 128), load_words(first + 192)


@inlined
def _digits(quants: int, half: int, digit: int) -> Any:
    """The lower (0) or upper (1) 4 bits of 8-bit weights."""
    w0, w1, w2, w3 = _eight_bits(quants, half)
    shift = 4 * digit
    return w0 >> shift & LOWER, w1 >> shift & LOWER, w2 >> shift & LOWER, w3 >> shift & LOWER


UNPACK = {4: _four_bits, 5: _five_bits, 6: _six_bits, 8: _eight_bits}


@inlined
def _products(total: Any, weights: Any, row: int) -> Any:
    """total + the products of four vectors and the 16 bytes of a row that belong to them."""
    w0, w1, w2, w3 = weights
    total = dot_u8_i8(total, w0, broadcast_word(row))
    total = dot_u8_i8(total, w1, broadcast_word(row + 4))
    total = dot_u8_i8(total, w2, broadcast_word(row + 8))
    return dot_u8_i8(total, w3, broadcast_word(row + 12))


def _term_of(tensor_type: TensorType) -> tuple[Any, Any, Any]:
    """Make three functions: a block's scales, its offsets, and the addition of its term to a row's sums.

    The first two are (scales, factors, half) and (scales, factors): addresses of the block's scales and, if these are
    8-bit numbers, of the superblock's factors.
    """
    grouped = tensor_type.grouped
    signed = tensor_type.halves > 1
    zero = tensor_type.zero
    start = START.get(zero, 0)
    has_offsets = tensor_type.offsets

    def scales_of(scales: int, factors: int, half: int) -> Any:
        if not grouped:
            return load_fp16(scales)
        if signed:
            return to_floats(load_signed_bytes(scales + PANEL * half)) * load_fp16(factors)
        return to_floats(load_bytes(scales)) * load_fp16(factors)

    def offsets_of(scales: int, factors: int) -> Any:
        if not has_offsets:
            return floats(0)
        if not grouped:
            return load_fp16(scales + 2 * PANEL)
        return to_floats(load_bytes(scales + PANEL)) * -load_fp16(factors + 2 * PANEL)

    def add_term(line: int, row: int, total: Any, scales: Any, offsets: Any, half: int) -> None:
        if zero > 0:
            total = total + broadcast_word(row + start + 4 * half)
        value = multiply_add(to_floats(total), scales * broadcast_float(row + SCALE), load_floats(line))
        if has_offsets:
            value = multiply_add(offsets, broadcast_float(row + SCALED_SUM), value)
        store(line, value)

    return tuple(inlined(function, tensor_type.name) for function in (scales_of, offsets_of, add_term))  # type: ignore[return-value]


def _one_run(tensor_type: TensorType) -> Any:
    """Make (quants, scales, factors, row, stride, count, out), which adds a block's terms to the sums of all rows."""
    unpack = UNPACK[tensor_type.bits]
    scales_of, offsets_of, add_term = _term_of(tensor_type)
    two_scales = tensor_type.halves > 1

    def block(quants: int, scales: int, factors: int, row: int, stride: int, count: int, out: int) -> None:
        first_weights, second_weights = unpack(quants, 0), unpack(quants, 1)
        first_scales = scales_of(scales, factors, 0)
        offsets = offsets_of(scales, factors)
        second_scales = scales_of(scales, factors, 1)
        for _ in range(count):
            total = _products(totals(0), first_weights, row)
            if two_scales:
                add_term(out, row, total, first_scales, offsets, 0)
                total = _products(totals(0), second_weights, row + 16)
                add_term(out, row, total, second_scales, offsets, 1)
            else:
                # Two short chains of products keep the processor busier than a long one.
                total = total + _products(totals(0), second_weights, row + 16)
                add_term(out, row, total, first_scales, offsets, 0)
            row += stride
            out += LINE

    return inlined(block, tensor_type.name)


def _two_runs(tensor_type: TensorType) -> Any:
    """``_one_run`` for processors with few registers or without an instruction for four byte products."""
    unpack = UNPACK[tensor_type.bits]
    scales_of, offsets_of, add_term = _term_of(tensor_type)
    two_scales = tensor_type.halves > 1
    bits = tensor_type.bits
    in_digits = tensor_type.bits == 8 and (PAIRED_BYTES or SIGNED_DOT)
    # Whether the sums of eight vectors fit into AVX2's shorts, so that they are widened only once.
    eight_fit = bits == 4 or in_digits
    load_kept = load_totals if eight_fit else load_words

    def products(weights: Any, row: int) -> Any:
        """The products of four vectors, as sums that can be added to those of the other four."""
        if eight_fit:
            return _products(totals(0), weights, row)
        if bits == 6:  # the sums of two vectors fit
            w0, w1, w2, w3 = weights
            first = dot_u8_i8(dot_u8_i8(totals(0), w0, broadcast_word(row)), w1, broadcast_word(row + 4))
            second = dot_u8_i8(
                dot_u8_i8(totals(0), w2, broadcast_word(row + 8)), w3, broadcast_word(row + 12)
            )
            return whole(first) + whole(second)
        return whole(_products(totals(0), weights, row))

    # A run writes the totals of all rows to memory, or adds its own to those of an earlier run.
    def keep(weights: Any, row: int, stride: int, count: int, kept: int) -> None:
        for r in range(count):
            store(kept + VECTOR * r, products(weights, row + stride * r))

    def keep_more(weights: Any, row: int, stride: int, count: int, kept: int) -> None:
        for r in range(count):
            store(kept + VECTOR * r, load_kept(kept + VECTOR * r) + products(weights, row + stride * r))

    for function in (products, keep, keep_more):
        inlined(function, tensor_type.name)

    def block(quants: int, scales: int, factors: int, row: int, stride: int, count: int, out: int) -> None:
        if two_scales:  # each half of a block is treated as a block
            for half in range(2):
                weights = unpack(quants, half)
                half_scales = scales_of(scales, factors, half)
                for r in range(count):
                    x = row + stride * r
                    add_term(
                        out + LINE * r, x, products(weights, x + 16 * half), half_scales, floats(0), half
                    )
            return

        # Earlier runs keep their totals in memory; the last adds its own and writes the terms.
        kept = stack_memory(ALL_KEPT)
        if in_digits:
            keep(_digits(quants, 0, 1), row, stride, count, kept + KEPT)
            keep_more(_digits(quants, 1, 1), row + 16, stride, count, kept + KEPT)
            keep(_digits(quants, 0, 0), row, stride, count, kept)
            weights = _digits(quants, 1, 0)
        else:
            keep(unpack(quants, 0), row, stride, count, kept)
            weights = unpack(quants, 1)
        # The last run: complete the totals of each row, with those of the upper digits times 16, and add the terms.
        block_scales = scales_of(scales, factors, 0)
        offsets = offsets_of(scales, factors)
        for r in range(count):
            x, here = row + stride * r, kept + VECTOR * r
            total = whole(load_kept(here) + products(weights, x + 16))
            if in_digits:
                total = total + (whole(load_kept(here + KEPT)) << 4)
            add_term(out + LINE * r, x, total, block_scales, offsets, 0)

    return inlined(block, tensor_type.name)


def quantized_kernel(tensor_type: TensorType) -> Any:
    """Make the kernel of a tensor type of weights of 4 to 8 bits; see ``packed.kernel_address``."""
    block = _one_run(tensor_type) if ONE_RUN else _two_runs(tensor_type)
    quant_bytes, scale_bytes, factor_bytes = (
        tensor_type.quant_bytes,
        tensor_type.scale_bytes,
        tensor_type.super_bytes,
    )
    grouped = tensor_type.grouped

    def kernel(panel: int, rows: int, stride: int, blocks: int, count: int, out: int) -> None:
        for r in range(count):
            store(out + LINE * r, floats(0))
        row = rows + 4 * BLOCK * blocks
        scales = panel + quant_bytes * blocks
        factors = scales + scale_bytes * blocks
        for b in range(blocks):
            prefetch(panel + AHEAD, quant_bytes)
            prefetch(scales + AHEAD, scale_bytes)
            if grouped and b % SUPER == 0:
                prefetch(factors + AHEAD, factor_bytes)
            block(panel, scales, factors, row, stride, count, out)
            panel += quant_bytes
            scales += scale_bytes
            row += RECORD
            if grouped and b % SUPER == SUPER - 1:
                factors += factor_bytes

    return kernel


def plain_kernel(tensor_type: TensorType) -> Any:
    """Make the kernel of fp32, fp16 or bf16 weights, which reads the fp32 numbers of the rows."""
    size = tensor_type.bits // 8
    load = {"F32": load_floats, "F16": load_fp16, "BF16": load_bf16}[tensor_type.name]

    def kernel(panel: int, rows: int, stride: int, blocks: int, count: int, out: int) -> None:
        for r in range(count):
            row = rows + stride * r
            total = floats(0)
            for i in range(BLOCK * blocks):
                total = multiply_add(load(panel + PANEL * size * i), broadcast_float(row + 4 * i), total)
            store(out + LINE * r, total)

    return kernel


for _type in TENSOR_TYPES:
    entry(plain_kernel(_type) if _type.bits > 8 else quantized_kernel(_type), f"gemm_{_type.name}")


@compiled
def microkernel(panels: int, rows: int, stride: int, blocks: int, count: int, out: int) -> None:
    """Write the sums (count, 32) fp32 of rows times one group, which consists of two panels of any tensor type.

    Args:
        panels: address of four 64-bit integers: for each panel, its address and its kernel's address.
        rows: each has fp32 numbers (32 * blocks), then their quantized blocks; rows are ``stride`` bytes apart.
        count: at most ``ROW_BLOCK``.
    """
    entries = integers_at(panels)
    call(entries[1], entries[0], rows, stride, blocks, count, out)
    call(entries[3], entries[2], rows, stride, blocks, count, out + 4 * PANEL)


@compiled
def quantize(row: int, blocks: int, begin: int, end: int) -> None:
    """Quantize blocks begin..end of a row: ``blocks`` * 32 fp32 numbers, followed by a record for each block.

    dx = max |x| / 127, and each number is rounded to the nearest multiple of dx.
    """
    for b in range(begin, end):
        numbers = row + 4 * BLOCK * b
        address = row + 4 * BLOCK * blocks + RECORD * b
        first, second = load_floats(numbers), load_floats(numbers + 64)
        # Comparisons ignore NaN. A block with a NaN gets dx = NaN, which turns every sum with it into NaN.
        top = largest(select(absolute(first) > absolute(second), absolute(first), absolute(second)))
        if any_of(is_nan(first) | is_nan(second)):
            top = np.float32(np.nan)
        inverse = floats(np.float32(127) / (np.float32(1) if top == 0 else top))
        first, second = first * inverse, second * inverse
        low = to_words(rounded(select(is_nan(first), floats(0), first)))
        high = to_words(rounded(select(is_nan(second), floats(0), second)))
        store_bytes(address, low)
        store_bytes(address + 16, high)
        block, low_sum, high_sum = quantized_at(address), sum_of(low), sum_of(high)
        total = low_sum + high_sum
        block.scale = top * np.float32(1 / 127)
        block.scaled_sum = block.scale * np.float32(total)
        block.start_8, block.start_16, block.start_128 = -8 * total, -16 * total, -128 * total
        block.start_32, block.start_32_high = -32 * low_sum, -32 * high_sum
