"""Rows times weights that stay as the file packs them: 4 to 8 bits, in blocks of 32 with their own scales.

Each row of activations is quantized to 8 bits, in blocks of 32 with one fp32 scale each. The products of a block are
summed in 32-bit integers, and each block adds one fp32 term to a row's sum:

    y = sum over blocks b of   (scale_b * dx_b) * (sum of q * x)  +  offset_b * (dx_b * sum of x)

where w = scale * q + offset is the decoded weight and dx * x the quantized activation. Integer sums are exact, and
the fp32 terms are added in the order of the blocks, so a row has the same bits whatever rows are computed with it.

Weights lie in panels of 16 outputs (``packed``). For one block of a panel the kernel unpacks 8 vectors of 16 x 4
unsigned bytes into registers and then runs through all rows:

    registers   w0 .. w7   vector t holds q of inner numbers 4t .. 4t+3 of each of the 16 outputs, 4 bytes per lane
                s, o       the block's scale and offset of each output (two scales if each half block has its own)
    per row     i = start                        -zero * sum of x, read from the row's record; 0 without a zero point
                i += dot(w_t, x[4t .. 4t+3])     8 times; the row's 4 bytes are broadcast to all lanes
                out[row] += (s * dx) * i         16 fp32 sums, which stay in the first-level cache
                out[row] += o * (dx * sum of x)  if the format has offsets

An example with 2 outputs and a block of 4: q = (1 2 3 4), (5 6 7 8), x = (1 -1 2 0), so i = (5, 13); with
s = (.5, .25) and dx = 2 the block adds (.5 * 2 * 5, .25 * 2 * 13) = (5, 6.5).
"""

from __future__ import annotations

from functools import cache, partial, reduce
from typing import Any

from llvmlite import ir
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.extending import overload

from . import llvm
from .llvm import (
    F32,
    I8,
    I16,
    I32,
    STAMP,
    broadcast,
    call,
    const,
    integers,
    integers_at,
    load_broadcast,
    multiply_add,
    offset,
)
from .packed import BLOCK, GROUP, KINDS, PANEL, RECORD, SCALE_AT, START_AT, SUM_AT, SUPER, Kind

#: Prefetch distance in bytes.
AHEAD = 16384
#: Outputs of a panel that one run through the rows computes. 8 with 16 vector registers: the weights take 8 of them.
WIDTH = PANEL if llvm.LANES == 16 and llvm.VNNI else 8

WORDS = ir.VectorType(I32, PANEL)
FLOATS = ir.VectorType(F32, PANEL)
BYTES = ir.VectorType(I8, PANEL)
NO_FLOATS = ir.Constant(FLOATS, None)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return llvm.load(builder, address, kind, 1)


def _columns(builder: Any, first: int, value: Any) -> Any:
    """``WIDTH`` of the 16 lanes of a vector."""
    order = [ir.Constant(I32, first + n) for n in range(WIDTH)]
    undefined = ir.Constant(value.type, ir.Undefined)
    return builder.shuffle_vector(value, undefined, ir.Constant(ir.VectorType(I32, WIDTH), order))


def _dot_vnni(builder: Any, total: Any, weights: list[Any], row: list[Any]) -> Any:
    name = f"llvm.x86.avx512.vpdpbusd.{32 * WIDTH}"
    for w, x in zip(weights, row, strict=True):
        total = call(builder, name, total.type, [total, w, x])
    return total


def _dot_pairs(builder: Any, total: Any, weights: list[Any], row: list[Any], bits: int) -> Any:
    """AVX2: sums of two products of bytes in 16 bits, then sums of four in 32 bits.

    The products of several vectors fit into 16 bits before they are widened: 8 vectors of 4-bit weights come to at
    most 2 * 15 * 127 * 8 = 30,480; 4 of 5 bits to 2 * 31 * 127 * 4; 2 of 6 bits to 2 * 63 * 127 * 2.
    """
    shorts, bytes_ = ir.VectorType(I16, 16), ir.VectorType(I8, 32)
    ones = ir.Constant(shorts, [ir.Constant(I16, 1)] * 16)
    products = []
    for w, x in zip(weights, row, strict=True):
        factors = [builder.bitcast(w, bytes_), builder.bitcast(x, bytes_)]
        products.append(call(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, factors))
    together = {4: 8, 5: 4, 6: 2}[bits]
    for first in range(0, len(products), together):
        two = reduce(builder.add, products[first : first + together])
        total = builder.add(total, call(builder, "llvm.x86.avx2.pmadd.wd", total.type, [two, ones]))
    return total


def _dot_plain(builder: Any, total: Any, weights: list[Any], row: list[Any]) -> Any:
    """Any other processor: one byte of each lane at a time."""
    for w, x in zip(weights, row, strict=True):
        for n in range(4):
            weight = builder.and_(builder.lshr(w, integers(8 * n, WIDTH)), integers(255, WIDTH))
            number = builder.ashr(builder.shl(x, integers(24 - 8 * n, WIDTH)), integers(24, WIDTH))
            total = builder.add(total, builder.mul(weight, number))
    return total


def _dot(builder: Any, total: Any, weights: list[Any], row: list[Any], bits: int) -> Any:
    """total + the products of unsigned bytes of ``weights`` and signed bytes of ``row``, 4 per lane and vector."""
    if llvm.VNNI:
        return _dot_vnni(builder, total, weights, row)
    if not llvm.PAIRED_BYTES:
        return _dot_plain(builder, total, weights, row)
    if bits < 8:
        return _dot_pairs(builder, total, weights, row, bits)
    # 2 * 255 * 127 does not fit into 16 bits, so the low and high halves of the bytes are multiplied separately.
    low, high = (
        [builder.and_(builder.lshr(w, integers(shift, WIDTH)), integers(0x0F0F0F0F, WIDTH)) for w in weights]
        for shift in (0, 4)
    )
    upper = builder.shl(_dot_pairs(builder, integers(0, WIDTH), high, row, 4), integers(4, WIDTH))
    return builder.add(_dot_pairs(builder, total, low, row, 4), upper)


def _unpacked(builder: Any, kind: Kind, quants: Any) -> list[Any]:
    """The 8 vectors of a block as unsigned bytes, from the panel's quants."""

    def vector(number: int) -> Any:
        return _load(builder, offset(builder, quants, 64 * number), WORDS)

    if kind.bits == 8:
        return [vector(t) for t in range(8)]
    low = [vector(t) for t in range(4)]
    nibbles = [builder.and_(x, integers(0x0F0F0F0F, PANEL)) for x in low]
    nibbles += [builder.and_(builder.lshr(x, integers(4, PANEL)), integers(0x0F0F0F0F, PANEL)) for x in low]
    if kind.bits == 4:
        return nibbles
    joined = []
    per_vector, mask = (8, 0x10101010) if kind.bits == 5 else (4, 0x30303030)
    upper = [vector(4 + n) for n in range(8 // per_vector)]
    for t, nibble in enumerate(nibbles):
        # The upper bits of vector t are at bit t or 2 * (t % 4) of a byte; they belong at bit 4.
        position = t if kind.bits == 5 else 2 * (t % 4)
        bits = upper[t // per_vector]
        if position < 4:
            bits = builder.shl(bits, integers(4 - position, PANEL))
        else:
            bits = builder.lshr(bits, integers(position - 4, PANEL))
        joined.append(builder.or_(nibble, builder.and_(bits, integers(mask, PANEL))))
    return joined


def _small(builder: Any, address: Any, signed: bool) -> Any:
    """16 bytes, converted to fp32."""
    value = _load(builder, address, BYTES)
    if signed:
        return builder.sitofp(builder.sext(value, WORDS), FLOATS)
    return builder.uitofp(builder.zext(value, WORDS), FLOATS)


def _half(builder: Any, address: Any) -> Any:
    return llvm.widen_halves(builder, _load(builder, address, ir.VectorType(I16, PANEL)))


def _quantized(
    builder: Any, kind: Kind, panel: Any, rows: Any, stride: Any, blocks: Any, count: Any, out: Any
) -> None:
    """Add the products of one panel to 16 columns of ``out``, (count, 32) fp32."""
    blocks_at_once = SUPER if kind.grouped else 1
    scales_at = offset(builder, panel, (blocks, kind.quant_bytes))
    supers_at = offset(builder, scales_at, (blocks, kind.scale_bytes))
    with cgutils.for_range(builder, builder.udiv(blocks, const(blocks_at_once))) as outer:
        factor = minimum = None
        if kind.grouped:
            unit = offset(builder, supers_at, (outer.index, kind.super_bytes))
            factor = _half(builder, unit)
            if kind.offsets:
                minimum = builder.fneg(_half(builder, offset(builder, unit, 2 * PANEL)))

        def block(b: Any) -> None:
            quants = offset(builder, panel, (b, kind.quant_bytes))
            scale = offset(builder, scales_at, (b, kind.scale_bytes))
            for part, size in ((quants, kind.quant_bytes), (scale, kind.scale_bytes)):
                llvm.prefetch(builder, part, AHEAD, -(-size // 64))
            weights = _unpacked(builder, kind, quants)
            shift = None
            if kind.grouped:
                small = [offset(builder, scale, PANEL * half) for half in range(kind.halves)]
                scales = [builder.fmul(_small(builder, s, kind.halves > 1), factor) for s in small]
                if kind.offsets:
                    shift = builder.fmul(_small(builder, offset(builder, scale, PANEL), False), minimum)
            else:
                scales = [_half(builder, scale)]
                if kind.offsets:
                    shift = _half(builder, offset(builder, scale, 2 * PANEL))
            first = offset(builder, rows, (b, RECORD))
            for column in range(0, PANEL, WIDTH):
                part = partial(_columns, builder, column)
                part_shift = None if shift is None else part(shift)
                rows_times_columns(first, column, [*map(part, weights)], [*map(part, scales)], part_shift)

        def rows_times_columns(
            first: Any, column: int, weights: list[Any], scales: list[Any], shift: Any
        ) -> None:
            vectors = 8 // kind.halves
            with cgutils.for_range(builder, count) as loop:
                record = offset(builder, first, (loop.index, stride))
                line = offset(builder, out, (loop.index, 4 * GROUP), 4 * column)
                total = _load(builder, line, ir.VectorType(F32, WIDTH))
                dx = load_broadcast(builder, offset(builder, record, SCALE_AT), F32, WIDTH)
                for half, scale in enumerate(scales):
                    start = integers(0, WIDTH)
                    if kind.zero:
                        at_start = offset(builder, record, START_AT[kind.zero] + 4 * half)
                        start = load_broadcast(builder, at_start, I32, WIDTH)
                    part = range(half * vectors, (half + 1) * vectors)
                    row = [load_broadcast(builder, offset(builder, record, 4 * t), I32, WIDTH) for t in part]
                    start = _dot(builder, start, [weights[t] for t in part], row, kind.bits)
                    total = multiply_add(
                        builder, builder.sitofp(start, total.type), builder.fmul(scale, dx), total
                    )
                if shift is not None:
                    sums = load_broadcast(builder, offset(builder, record, SUM_AT), F32, WIDTH)
                    total = multiply_add(builder, shift, sums, total)
                builder.store(total, llvm.at(builder, line, total.type)).align = 4

        if blocks_at_once == 1:
            block(outer.index)
        else:
            with cgutils.for_range(builder, const(blocks_at_once)) as inner:
                block(offset(builder, inner.index, (outer.index, blocks_at_once)))


def _plain(
    builder: Any, kind: Kind, panel: Any, rows: Any, stride: Any, blocks: Any, count: Any, out: Any
) -> None:
    """Like ``_quantized``, for fp32, fp16 and bf16 weights; it reads the fp32 numbers of the rows."""
    size = kind.bits // 8
    with cgutils.for_range(builder, count) as loop:
        row, line = offset(builder, rows, (loop.index, stride)), offset(builder, out, (loop.index, 4 * GROUP))
        total = cgutils.alloca_once(builder, FLOATS)
        builder.store(_load(builder, line, FLOATS), total)
        with cgutils.for_range(builder, builder.mul(blocks, const(BLOCK))) as inner:
            address = offset(builder, panel, (inner.index, PANEL * size))
            if kind.name == "F32":
                weights = _load(builder, address, FLOATS)
            elif kind.name == "F16":
                weights = _half(builder, address)
            else:
                bits = builder.zext(_load(builder, address, ir.VectorType(I16, PANEL)), WORDS)
                weights = builder.bitcast(builder.shl(bits, integers(16, PANEL)), FLOATS)
            x = load_broadcast(builder, offset(builder, row, (inner.index, 4)), F32, PANEL)
            builder.store(multiply_add(builder, weights, x, builder.load(total)), total)
        builder.store(builder.load(total), llvm.at(builder, line, FLOATS)).align = 4


def _emit_kernel(kind: Kind) -> Any:
    """Make (panel, rows, stride, blocks, count, out): sums of rows with one panel, in 16 columns of ``out``."""

    def emit(builder: Any, panel: Any, rows: Any, stride: Any, blocks: Any, count: Any, out: Any) -> None:
        with cgutils.for_range(builder, count) as loop:
            line = llvm.at(builder, offset(builder, out, (loop.index, 4 * GROUP)), FLOATS)
            builder.store(NO_FLOATS, line).align = 4
        if kind.bits > 8:
            _plain(builder, kind, panel, rows, stride, blocks, count, out)
        else:
            quantized = offset(builder, rows, (blocks, 4 * BLOCK))
            _quantized(builder, kind, panel, quantized, stride, blocks, count, out)

    return llvm.emitted(emit, 6)


_KERNELS = [_emit_kernel(kind) for kind in KINDS]


def _kernel(panel: int, rows: int, stride: int, blocks: int, count: int, out: int, kind: int) -> None:
    raise NotImplementedError("compiled code only")


@overload(_kernel, prefer_literal=True)
def _kernel_code(panel, rows, stride, blocks, count, out, kind):  # type: ignore[no-untyped-def]  # numba compares both
    kernel = _KERNELS[kind.literal_value]
    return lambda panel, rows, stride, blocks, count, out, kind: kernel(
        panel, rows, stride, blocks, count, out
    )


@cache
def _compiled(kind: int) -> Any:
    # A function whose code is kept on disk cannot close over compiled functions, so it names the kind by its index.
    stamp = STAMP

    def kernel(panel: int, rows: int, stride: int, blocks: int, count: int, out: int) -> None:
        _ = stamp  # part of the name of the code on disk (llvm.STAMP)
        _kernel(panel, rows, stride, blocks, count, out, kind)

    kernel.__qualname__ += KINDS[kind].name  # see llvm.jit
    return cfunc(types.void(*[types.int64] * 6), cache=True)(kernel)


def kernel_address(kind: int) -> int:
    """The address of the compiled kernel of ``KINDS[kind]``. It is compiled once and kept on disk.

    Gemms call kernels by address, so only the kinds that a model has are compiled, each once and not in every gemm.
    """
    return int(_compiled(int(kind)).address)


_call_kernel = llvm.emitted(llvm.call_address, 7)


@llvm.jit
def microkernel(panels: int, rows: int, stride: int, blocks: int, count: int, out: int) -> None:
    """Write the sums (count, 32) fp32 of rows with one group, which consists of two panels of any kinds.

    Args:
        panels: address of four 64-bit integers: for each panel, its address and that of its kernel.
        rows: each has fp32 numbers (32 * blocks), then their quantized blocks; ``stride`` bytes from row to row.
    """
    entries = carray(integers_at(panels), (2, 2))
    for n in range(2):
        _call_kernel(entries[n, 1], entries[n, 0], rows, stride, blocks, count, out + 4 * PANEL * n)


def _quantize(builder: Any, row: Any, blocks: Any, begin: Any, end: Any) -> None:
    """Quantize blocks begin..end of a row: ``blocks`` * 32 fp32 numbers, followed by a record for each block.

    dx = max |x| / 127, and each number is rounded to the nearest multiple of dx.
    """
    records = offset(builder, row, (blocks, 4 * BLOCK))
    half = PANEL  # a block is two vectors
    with cgutils.for_range_slice(builder, begin, end, const(1)) as (b, _):
        values = [
            _load(builder, offset(builder, row, (b, 4 * BLOCK), 4 * half * n), FLOATS) for n in range(2)
        ]
        sizes = [call(builder, f"llvm.fabs.v{PANEL}f32", FLOATS, [value]) for value in values]
        larger = builder.select(builder.fcmp_ordered(">", sizes[0], sizes[1]), sizes[0], sizes[1])
        top = call(builder, f"llvm.vector.reduce.fmax.v{PANEL}f32", F32, [larger], ("nnan",))
        # Comparisons ignore NaN. A block that holds one gets dx = NaN, and so does every sum that it enters.
        bits = builder.bitcast(builder.fcmp_unordered("uno", *values), ir.IntType(PANEL))
        has_nan = builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))
        top = builder.select(has_nan, ir.Constant(F32, float("nan")), top)
        dx = builder.fmul(top, ir.Constant(F32, 1 / 127))
        is_zero = builder.fcmp_ordered("==", top, ir.Constant(F32, 0.0))
        inverse = builder.fdiv(ir.Constant(F32, 127.0), builder.select(is_zero, ir.Constant(F32, 1.0), top))
        inverse = broadcast(builder, inverse, PANEL)
        record, sums = offset(builder, records, (b, RECORD)), []
        for n, value in enumerate(values):
            scaled = builder.fmul(value, inverse)
            scaled = builder.select(builder.fcmp_ordered("ord", scaled, scaled), scaled, NO_FLOATS)
            words = builder.fptosi(call(builder, f"llvm.rint.v{PANEL}f32", FLOATS, [scaled]), WORDS)
            address = llvm.at(builder, offset(builder, record, half * n), BYTES)
            builder.store(builder.trunc(words, BYTES), address).align = 1
            sums.append(call(builder, f"llvm.vector.reduce.add.v{PANEL}i32", I32, [words]))
        total = builder.add(*sums)

        def put(value: Any, position: int) -> None:
            builder.store(value, llvm.at(builder, offset(builder, record, position), value.type)).align = 4

        put(dx, SCALE_AT)
        put(builder.fmul(dx, builder.sitofp(total, F32)), SUM_AT)
        for zero in (8, 16, 128):
            put(builder.mul(total, ir.Constant(I32, -zero)), START_AT[zero])
        for n, part in enumerate(sums):
            put(builder.mul(part, ir.Constant(I32, -32)), START_AT[32] + 4 * n)


_emitted_quantize = llvm.emitted(_quantize, 4)


@llvm.jit
def quantize(row: int, blocks: int, begin: int, end: int) -> None:
    """Quantize blocks begin..end of a row (``_quantize``); compiled separately from its callers."""
    _emitted_quantize(row, blocks, begin, end)
