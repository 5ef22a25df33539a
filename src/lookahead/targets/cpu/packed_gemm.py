"""Rows times weights that stay as a file has packed them: 4 to 8 bits, in blocks of 32 with scales of their own.

A row of activations is quantized too, to 8 bits in blocks of 32 with one fp32 scale each. The products of one block
are summed in 32-bit integers, and each block adds one fp32 term to a row's sum:

    y = sum over blocks b of   (scale_b * dx_b) * (sum of q * x)  +  offset_b * (dx_b * sum of x)

where w = scale * q + offset is the decoded weight and dx * x the quantized activation. Integer sums have no rounding,
and the fp32 terms are added in the order of the blocks, so a row has the same bits in any company.

Weights lie in panels of 16 outputs (``packed``). For one block of a panel the kernel unpacks 8 vectors of 16 x 4
unsigned bytes into registers, and then runs through all rows with them:

    registers   w0 .. w7   vector t holds q of inner numbers 4t .. 4t+3 for each of the 16 outputs, 4 bytes a lane
                s, o       the block's scale and offset of each output (a second scale where a half block has its own)
    per row     i = start                        -zero * sum of x, read from the row's record; 0 without a zero point
                i += dot(w_t, x[4t .. 4t+3])     8 times; the row's 4 bytes are broadcast to all lanes
                out[row] += (s * dx) * i         16 fp32 sums, which stay in the first cache
                out[row] += o * (dx * sum of x)  where the format has offsets

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
from .llvm import F32, I8, I16, I32, I64, STAMP, call, const, integers_at, offset
from .packed import BLOCK, GROUP, KINDS, PANEL, RECORD, SCALE_AT, START_AT, SUM_AT, SUPER, Kind

#: Bytes that are asked for ahead of a block.
AHEAD = 8192

#: Columns of a panel that a pass over the rows computes. With 16 vector registers 8: their weights take 8 of them.
WIDTH = PANEL if llvm.LANES == 16 and llvm.VNNI else 8

WORDS = ir.VectorType(I32, PANEL)
FLOATS = ir.VectorType(F32, PANEL)
BYTES = ir.VectorType(I8, PANEL)
NO_FLOATS = ir.Constant(FLOATS, None)


def _words(value: int, width: int = PANEL) -> ir.Constant:
    return ir.Constant(ir.VectorType(I32, width), [ir.Constant(I32, value)] * width)


def _everywhere(builder: Any, value: Any, width: int = PANEL) -> Any:
    kind = ir.VectorType(value.type, width)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, one, _words(0, width))


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return llvm.load(builder, address, kind, 1)


def _broadcast_at(builder: Any, address: Any, kind: Any, width: int = PANEL) -> Any:
    return _everywhere(builder, llvm.load(builder, address, kind, 4), width)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    if llvm.FUSED:
        return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])
    return builder.fadd(builder.fmul(a, b), c)


def _columns(builder: Any, first: int, value: Any) -> Any:
    """``WIDTH`` of the 16 columns of a vector."""
    order = [ir.Constant(I32, first + n) for n in range(WIDTH)]
    undefined = ir.Constant(value.type, ir.Undefined)
    return builder.shuffle_vector(value, undefined, ir.Constant(ir.VectorType(I32, WIDTH), order))


def _dot_vnni(builder: Any, total: Any, weights: list[Any], row: list[Any]) -> Any:
    name = f"llvm.x86.avx512.vpdpbusd.{32 * WIDTH}"
    for w, x in zip(weights, row, strict=True):
        total = call(builder, name, total.type, [total, w, x])
    return total


def _dot_pairs(builder: Any, total: Any, weights: list[Any], row: list[Any], bits: int) -> Any:
    """AVX2: bytes times bytes as 16-bit sums of two, then as 32-bit sums of four.

    A 16-bit sum holds the products of several vectors before it is widened: 2 * 15 * 127 * 8 = 30,480 of all eight
    vectors of 4-bit weights, 2 * 31 * 127 * 4 of four of 5 bits, 2 * 63 * 127 * 2 of two of 6 bits.
    """
    shorts, bytes_ = ir.VectorType(I16, 16), ir.VectorType(I8, 32)
    ones = ir.Constant(shorts, [ir.Constant(I16, 1)] * 16)
    products = [
        call(
            builder,
            "llvm.x86.avx2.pmadd.ub.sw",
            shorts,
            [builder.bitcast(w, bytes_), builder.bitcast(x, bytes_)],
        )
        for w, x in zip(weights, row, strict=True)
    ]
    together = {4: 8, 5: 4, 6: 2}[bits]
    for first in range(0, len(products), together):
        two = reduce(builder.add, products[first : first + together])
        total = builder.add(total, call(builder, "llvm.x86.avx2.pmadd.wd", total.type, [two, ones]))
    return total


def _dot_plain(builder: Any, total: Any, weights: list[Any], row: list[Any]) -> Any:
    """Any processor: one byte of each lane at a time."""
    for w, x in zip(weights, row, strict=True):
        for n in range(4):
            weight = builder.and_(builder.lshr(w, _words(8 * n, WIDTH)), _words(255, WIDTH))
            number = builder.ashr(builder.shl(x, _words(24 - 8 * n, WIDTH)), _words(24, WIDTH))
            total = builder.add(total, builder.mul(weight, number))
    return total


def _dot(builder: Any, total: Any, weights: list[Any], row: list[Any], bits: int) -> Any:
    """total + the products of each lane: unsigned bytes of ``weights``, signed ones of ``row``, 4 in each vector."""
    if llvm.VNNI:
        return _dot_vnni(builder, total, weights, row)
    if not llvm.PAIRED_BYTES:
        return _dot_plain(builder, total, weights, row)
    if bits < 8:
        return _dot_pairs(builder, total, weights, row, bits)
    # 255 * 127 twice does not fit 16 bits: the halves of the byte one after the other.
    low, high = (
        [builder.and_(builder.lshr(w, _words(shift, WIDTH)), _words(0x0F0F0F0F, WIDTH)) for w in weights]
        for shift in (0, 4)
    )
    upper = builder.shl(_dot_pairs(builder, _words(0, WIDTH), high, row, 4), _words(4, WIDTH))
    return builder.add(_dot_pairs(builder, total, low, row, 4), upper)


def _unpacked(builder: Any, kind: Kind, quants: Any) -> list[Any]:
    """The 8 vectors of a block, unsigned bytes."""

    def vector(number: int) -> Any:
        return _load(builder, offset(builder, quants, 64 * number), WORDS)

    if kind.bits == 8:
        return [vector(t) for t in range(8)]
    low = [vector(t) for t in range(4)]
    nibbles = [builder.and_(x, _words(0x0F0F0F0F)) for x in low]
    nibbles += [builder.and_(builder.lshr(x, _words(4)), _words(0x0F0F0F0F)) for x in low]
    if kind.bits == 4:
        return nibbles
    made = []
    per_vector, mask = (8, 0x10101010) if kind.bits == 5 else (4, 0x30303030)
    upper = [vector(4 + n) for n in range(8 // per_vector)]
    for t, nibble in enumerate(nibbles):
        # The upper bits of vector t lie at bit t or 2t of a byte, and belong at bit 4.
        at = t if kind.bits == 5 else 2 * (t % 4)
        bits = upper[t // per_vector]
        bits = builder.shl(bits, _words(4 - at)) if at < 4 else builder.lshr(bits, _words(at - 4))
        made.append(builder.or_(nibble, builder.and_(bits, _words(mask))))
    return made


def _small(builder: Any, address: Any, signed: bool) -> Any:
    """16 bytes as fp32."""
    value = _load(builder, address, BYTES)
    if signed:
        return builder.sitofp(builder.sext(value, WORDS), FLOATS)
    return builder.uitofp(builder.zext(value, WORDS), FLOATS)


def _half(builder: Any, address: Any) -> Any:
    return llvm.widen_halves(builder, _load(builder, address, ir.VectorType(I16, PANEL)))


def _quantized(
    builder: Any, kind: Kind, panel: Any, rows: Any, stride: Any, blocks: Any, count: Any, out: Any
) -> None:
    """Add the products of one panel to ``out``, (count, 32) fp32 of which it fills 16 columns."""
    each = SUPER if kind.grouped else 1
    scales_at = offset(builder, panel, (blocks, kind.quant_bytes))
    supers_at = offset(builder, scales_at, (blocks, kind.scale_bytes))
    with cgutils.for_range(builder, builder.udiv(blocks, const(each))) as outer:
        factor = minimum = None
        if kind.grouped:
            unit = offset(builder, supers_at, (outer.index, kind.super_bytes))
            factor = _half(builder, unit)
            if kind.offsets:
                minimum = builder.fneg(_half(builder, offset(builder, unit, 2 * PANEL)))

        def block(b: Any) -> None:
            quants = offset(builder, panel, (b, kind.quant_bytes))
            for line in range(0, kind.quant_bytes, 64):
                llvm.prefetch(builder, offset(builder, quants, AHEAD + line))
            weights, place = (
                _unpacked(builder, kind, quants),
                offset(builder, scales_at, (b, kind.scale_bytes)),
            )
            shift = None
            if kind.grouped:
                scales = [
                    builder.fmul(_small(builder, offset(builder, place, PANEL * h), kind.halves > 1), factor)
                    for h in range(kind.halves)
                ]
                if kind.offsets:
                    shift = builder.fmul(_small(builder, offset(builder, place, PANEL), False), minimum)
            else:
                scales = [_half(builder, place)]
                if kind.offsets:
                    shift = _half(builder, offset(builder, place, 2 * PANEL))
            first = offset(builder, rows, (b, RECORD))
            for column in range(0, PANEL, WIDTH):
                part_of = partial(_columns, builder, column)
                columns(
                    first, 4 * column, [part_of(w) for w in weights], [part_of(x) for x in scales],
                    None if shift is None else part_of(shift),
                )  # fmt: skip

        def columns(first: Any, at: int, weights: list[Any], scales: list[Any], shift: Any) -> None:
            part = 8 // kind.halves
            with cgutils.for_range(builder, count) as loop:
                record = offset(builder, first, (loop.index, stride))
                line = offset(builder, out, (loop.index, 4 * GROUP), at)
                total = _load(builder, line, ir.VectorType(F32, WIDTH))
                dx = _broadcast_at(builder, offset(builder, record, SCALE_AT), F32, WIDTH)
                for half, scale in enumerate(scales):
                    start = _words(0, WIDTH)
                    if kind.zero:
                        at_start = offset(builder, record, START_AT[kind.zero] + 4 * half)
                        start = _broadcast_at(builder, at_start, I32, WIDTH)
                    mine = range(half * part, (half + 1) * part)
                    row = [_broadcast_at(builder, offset(builder, record, 4 * t), I32, WIDTH) for t in mine]
                    start = _dot(builder, start, [weights[t] for t in mine], row, kind.bits)
                    total = _fma(builder, builder.sitofp(start, total.type), builder.fmul(scale, dx), total)
                if shift is not None:
                    sums = _broadcast_at(builder, offset(builder, record, SUM_AT), F32, WIDTH)
                    total = _fma(builder, shift, sums, total)
                builder.store(total, llvm.at(builder, line, total.type)).align = 4

        if each == 1:
            block(outer.index)
        else:
            with cgutils.for_range(builder, const(each)) as inner:
                block(offset(builder, inner.index, (outer.index, each)))


def _plain(
    builder: Any, kind: Kind, panel: Any, rows: Any, stride: Any, blocks: Any, count: Any, out: Any
) -> None:
    """The same for fp32, fp16 and bf16 weights, from the fp32 numbers of the rows."""
    size = kind.bits // 8
    with cgutils.for_range(builder, count) as loop:
        row, line = offset(builder, rows, (loop.index, stride)), offset(builder, out, (loop.index, 4 * GROUP))
        total = cgutils.alloca_once(builder, FLOATS)
        builder.store(_load(builder, line, FLOATS), total)
        with cgutils.for_range(builder, builder.mul(blocks, const(BLOCK))) as inner:
            place = offset(builder, panel, (inner.index, PANEL * size))
            if kind.name == "F32":
                weights = _load(builder, place, FLOATS)
            elif kind.name == "F16":
                weights = _half(builder, place)
            else:
                bits = builder.zext(_load(builder, place, ir.VectorType(I16, PANEL)), WORDS)
                weights = builder.bitcast(builder.shl(bits, _words(16)), FLOATS)
            x = _broadcast_at(builder, offset(builder, row, (inner.index, 4)), F32)
            builder.store(_fma(builder, weights, x, builder.load(total)), total)
        builder.store(builder.load(total), llvm.at(builder, line, FLOATS)).align = 4


def _emit_kernel(kind: Kind) -> Any:
    """(panel, rows, stride, blocks, count, out): sums of rows with one panel, (count, 16) fp32 in lines of 32."""

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


def _kernel(panel: int, rows: int, stride: int, blocks: int, count: int, out: int, place: int) -> None:
    raise NotImplementedError("compiled code only")


@overload(_kernel, prefer_literal=True)
def _kernel_code(panel, rows, stride, blocks, count, out, place):  # type: ignore[no-untyped-def]  # numba compares both
    kernel = _KERNELS[place.literal_value]
    return lambda panel, rows, stride, blocks, count, out, place: kernel(
        panel, rows, stride, blocks, count, out
    )


@cache
def _compiled(place: int) -> Any:
    # What is compiled for the disk may not close over compiled functions, so the kind is told by its number.
    number, stamp = place, STAMP

    def kernel(panel: int, rows: int, stride: int, blocks: int, count: int, out: int) -> None:
        if panel != stamp:  # never so: the stamp is here to name the code on disk
            _kernel(panel, rows, stride, blocks, count, out, number)

    kernel.__qualname__ += KINDS[place].name  # see llvm.jit
    return cfunc(types.void(*[types.int64] * 6), cache=True)(kernel)


def kernel_address(place: int) -> int:
    """The compiled kernel of a kind, by its place in ``KINDS``; compiled once and kept on disk.

    The gemms call kernels by their addresses, so that a model's first start compiles the kinds that it has, and each
    of them once and not within every gemm.
    """
    return int(_compiled(int(place)).address)


def _call(builder: Any, address: Any, *arguments: Any) -> None:
    kind = ir.FunctionType(llvm.VOID, [I64] * len(arguments))
    builder.call(builder.inttoptr(address, kind.as_pointer()), list(arguments))


_call_kernel = llvm.emitted(_call, 7)


@llvm.jit
def microkernel(panels: int, rows: int, stride: int, blocks: int, count: int, out: int) -> None:
    """Sums (count, 32) fp32 of rows with one group, which is two panels of any kinds.

    Args:
        panels: of each of the two, its address and that of its kernel, as 64-bit integers.
        rows: fp32 numbers (32 * blocks), then their quantized blocks; ``stride`` bytes from row to row.
    """
    entries = carray(integers_at(panels), (2, 2))
    for n in range(2):
        _call_kernel(entries[n, 1], entries[n, 0], rows, stride, blocks, count, out + 4 * PANEL * n)


def _quantize(builder: Any, row: Any, blocks: Any, begin: Any, end: Any) -> None:
    """Quantize blocks begin..end of a row of fp32 numbers, which lie before the records (``RECORD``).

    dx = max |x| / 127, and each number is rounded to the nearest multiple of dx.
    """
    records = offset(builder, row, (blocks, 4 * BLOCK))
    half = PANEL
    with cgutils.for_range_slice(builder, begin, end, const(1)) as (b, _):
        values = [
            _load(builder, offset(builder, row, (b, 4 * BLOCK), 4 * half * n), FLOATS) for n in range(2)
        ]
        sizes = [call(builder, f"llvm.fabs.v{PANEL}f32", FLOATS, [value]) for value in values]
        larger = builder.select(builder.fcmp_ordered(">", sizes[0], sizes[1]), sizes[0], sizes[1])
        top = call(builder, f"llvm.vector.reduce.fmax.v{PANEL}f32", F32, [larger], ("nnan",))
        # Comparisons pass over NaN: a block that holds one gets dx = NaN, and so does every sum that it is part of.
        bits = builder.bitcast(builder.fcmp_unordered("uno", *values), ir.IntType(PANEL))
        has_nan = builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))
        top = builder.select(has_nan, ir.Constant(F32, float("nan")), top)
        dx = builder.fmul(top, ir.Constant(F32, 1 / 127))
        is_zero = builder.fcmp_ordered("==", top, ir.Constant(F32, 0.0))
        inverse = builder.fdiv(ir.Constant(F32, 127.0), builder.select(is_zero, ir.Constant(F32, 1.0), top))
        inverse = _everywhere(builder, inverse)
        record, sums = offset(builder, records, (b, RECORD)), []
        for n, value in enumerate(values):
            scaled = builder.fmul(value, inverse)
            scaled = builder.select(builder.fcmp_ordered("ord", scaled, scaled), scaled, NO_FLOATS)
            words = builder.fptosi(call(builder, f"llvm.rint.v{PANEL}f32", FLOATS, [scaled]), WORDS)
            place = llvm.at(builder, offset(builder, record, half * n), BYTES)
            builder.store(builder.trunc(words, BYTES), place).align = 1
            sums.append(call(builder, f"llvm.vector.reduce.add.v{PANEL}i32", I32, [words]))
        total = builder.add(*sums)

        def put(value: Any, at: int) -> None:
            builder.store(value, llvm.at(builder, offset(builder, record, at), value.type)).align = 4

        put(dx, SCALE_AT)
        put(builder.fmul(dx, builder.sitofp(total, F32)), SUM_AT)
        for zero in (8, 16, 128):
            put(builder.mul(total, ir.Constant(I32, -zero)), START_AT[zero])
        for n, part in enumerate(sums):
            put(builder.mul(part, ir.Constant(I32, -32)), START_AT[32] + 4 * n)


_emitted_quantize = llvm.emitted(_quantize, 4)


@llvm.jit
def quantize(row: int, blocks: int, begin: int, end: int) -> None:
    """``_quantize`` as a function of its own."""
    _emitted_quantize(row, blocks, begin, end)
