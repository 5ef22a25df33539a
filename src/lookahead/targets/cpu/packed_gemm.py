"""Rows times weights that stay packed as in the file: 4 to 8 bits, in blocks of 32 with their own scales.

Each row of activations is quantized to 8 bits, in blocks of 32 with one fp32 scale each. The products of a block are
summed in 32-bit integers, and each block adds one fp32 term to a row's sum:

    y = sum over blocks b of   (scale_b * dx_b) * (sum of q * x)  +  offset_b * (dx_b * sum of x)

where w = scale * q + offset is the decoded weight and dx * x the quantized activation. Integer sums are exact, and
the fp32 terms are added in the order of the blocks, so a row has the same bits whatever rows are computed with it.

Weights are stored in panels of 16 outputs (``packed``). A block of a panel is 8 vectors of 16 x 4 unsigned bytes:
vector t holds q of inner numbers 4t .. 4t+3 of each output, 4 bytes per lane. With 32 registers, all vectors are
unpacked into registers, and one run goes through all rows. With 16 registers, a vector takes two registers, so a
block takes two runs:

    registers   w0 .. w7   vectors 0-3 in the first run, 4-7 in the second, each for outputs 0-7 and 8-15
    per row     x = row[4t .. 4t+3] in all lanes; total += dot(w, x)    4 times, for both halves of the outputs
                first run:   the totals are kept in memory
                second run:  i = total - zero * sum of x                0 without a zero point
                             out[row] += (s * dx) * i                   s, o: the block's scales and offsets
                             out[row] += o * (dx * sum of x)            if the format has offsets

Every broadcast number of a row is thus multiplied with the weights of 16 outputs; with only 8 outputs in a run, loads
rather than products would be the limit. AVX2 multiplies 8-bit weights as two digits of 4 bits, in two runs each.

An example with 2 outputs and a block of 4: q = (1 2 3 4), (5 6 7 8), x = (1 -1 2 0), so i = (5, 13); with
s = (.5, .25) and dx = 2 the block adds (.5 * 2 * 5, .25 * 2 * 13) = (5, 6.5).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from . import llvm
from .formats import ROW_BLOCK
from .llvm import (
    F32,
    I8,
    I16,
    I32,
    I64,
    broadcast,
    call,
    const,
    integers,
    integers_at,
    load_broadcast,
    multiply_add,
    offset,
    prefetch,
)
from .packed import BLOCK, GROUP, KINDS, PANEL, RECORD, SCALE_AT, START_AT, SUM_AT, SUPER, Kind

#: Prefetch distance in bytes.
AHEAD = 16384
#: Lanes of the integer products, registers per vector of a block, and the most registers that hold weights.
WIDTH = PANEL if llvm.LANES == 16 and llvm.VNNI else 8
COLUMNS, HELD = PANEL // WIDTH, 16 if llvm.REGISTERS == 32 else 8
#: Whether products are summed by AVX2's instructions, in 16 bits.
PAIRED = llvm.PAIRED_BYTES and not llvm.VNNI

WORDS = ir.VectorType(I32, PANEL)
FLOATS = ir.VectorType(F32, PANEL)
BYTES = ir.VectorType(I8, PANEL)
TOTAL, SHORTS = ir.VectorType(I32, WIDTH), ir.VectorType(I16, 2 * WIDTH)
NO_FLOATS = ir.Constant(FLOATS, None)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return llvm.load(builder, address, kind, 1)


@dataclass(frozen=True)
class _Run:
    """A run through the rows: their products with some vectors of a block.

    Attributes:
        vectors: the numbers of the vectors.
        digit: which 4 bits of 8-bit weights; 0 otherwise.
        half: which half of a block with two scales; 0 otherwise.
        opens, ends: whether it is the first run of its digit, and the last of its half.
    """

    vectors: range
    digit: int
    half: int
    opens: bool
    ends: bool


def _runs(kind: Kind) -> list[_Run]:
    size, runs = 8 // kind.halves, []
    step = min(HELD // COLUMNS, size)
    for half in range(kind.halves):
        for digit in reversed(range(_digits(kind))):
            for first in range(0, size, step):
                vectors = range(half * size + first, half * size + first + step)
                runs.append(_Run(vectors, digit, half, first == 0, digit == 0 and first + step == size))
    return runs


def _digits(kind: Kind) -> int:
    """2 if products of whole bytes would overflow: 2 * 255 * 127 does not fit into 16 bits."""
    return 2 if kind.bits == 8 and PAIRED else 1


def _weights(builder: Any, kind: Kind, quants: Any, run: _Run, column: int) -> list[Any]:
    """The vectors of a run as unsigned bytes, for ``WIDTH`` outputs."""

    def vector(number: int) -> Any:
        return _load(builder, offset(builder, quants, 64 * number + 4 * column), TOTAL)

    def part(value: Any, position: int, mask: int, to: int = 0) -> Any:
        """The bits of ``mask``, which lie ``position - to`` bits higher in each byte."""
        if position > to:
            value = builder.lshr(value, integers(position - to, WIDTH))
        elif position < to:
            value = builder.shl(value, integers(to - position, WIDTH))
        return builder.and_(value, integers(mask, WIDTH))

    if kind.bits == 8:
        vectors = [vector(t) for t in run.vectors]
        return [part(v, 4 * run.digit, 0x0F0F0F0F) for v in vectors] if _digits(kind) > 1 else vectors
    weights = []
    for t in run.vectors:
        weight = part(vector(t % 4), t // 4 * 4, 0x0F0F0F0F)
        # The upper bits of vector t are at bit t or 2 * (t % 4) of a byte; they belong at bit 4.
        if kind.bits == 5:
            weight = builder.or_(weight, part(vector(4), t, 0x10101010, 4))
        elif kind.bits == 6:
            weight = builder.or_(weight, part(vector(4 + t // 4), 2 * (t % 4), 0x30303030, 4))
        weights.append(weight)
    return weights


def _add_products(builder: Any, kind: Kind, total: Any, weights: list[Any], row: list[Any]) -> Any:
    """A total, or None, plus the products of unsigned bytes of ``weights`` and signed bytes of ``row``.

    AVX2 sums two products of bytes in 16 bits. The sums of several vectors fit into 16 bits before they are widened:
    8 vectors of 4-bit weights give at most 2 * 15 * 127 * 8 = 30,480; 4 of 5 bits 2 * 31 * 127 * 4; 2 of 6 bits
    2 * 63 * 127 * 2. So totals of 4-bit weights and digits are 16-bit numbers, which ``_whole`` widens; other totals
    are 32-bit numbers.
    """
    if PAIRED:
        products = []
        for w, x in zip(weights, row, strict=True):
            factors = [builder.bitcast(value, ir.VectorType(I8, 4 * WIDTH)) for value in (w, x)]
            products.append(call(builder, "llvm.x86.avx2.pmadd.ub.sw", SHORTS, factors))
        if kind.bits in (4, 8):
            return reduce(builder.add, products if total is None else [total, *products])
        together = {5: 4, 6: 2}[kind.bits]
        sums = [reduce(builder.add, products[n : n + together]) for n in range(0, len(products), together)]
        widened = [_widened(builder, two) for two in sums]
        return reduce(builder.add, widened if total is None else [total, *widened])
    total = integers(0, WIDTH) if total is None else total
    for w, x in zip(weights, row, strict=True):
        if llvm.VNNI:
            total = call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * WIDTH}", TOTAL, [total, w, x])
            continue
        for n in range(4):  # any other processor: one byte of each lane at a time
            weight = builder.and_(builder.lshr(w, integers(8 * n, WIDTH)), integers(255, WIDTH))
            number = builder.ashr(builder.shl(x, integers(24 - 8 * n, WIDTH)), integers(24, WIDTH))
            total = builder.add(total, builder.mul(weight, number))
    return total


def _widened(builder: Any, shorts: Any) -> Any:
    """Sums of two adjacent 16-bit numbers in 32 bits."""
    ones = ir.Constant(SHORTS, [ir.Constant(I16, 1)] * SHORTS.count)
    return call(builder, "llvm.x86.avx2.pmadd.wd", TOTAL, [shorts, ones])


def _whole(builder: Any, totals: list[Any], start: Any) -> Any:
    """The integer sum of a block, from the totals of its digits, lowest first; ``start`` may be None."""
    whole = [_widened(builder, total) if total.type == SHORTS else total for total in totals]
    shifted = [whole[0], *(builder.shl(total, integers(4, WIDTH)) for total in whole[1:])]
    return reduce(builder.add, shifted if start is None else [*shifted, start])


def _small(builder: Any, address: Any, signed: bool) -> Any:
    """``WIDTH`` bytes, converted to fp32."""
    value, floats = _load(builder, address, ir.VectorType(I8, WIDTH)), ir.VectorType(F32, WIDTH)
    if signed:
        return builder.sitofp(builder.sext(value, TOTAL), floats)
    return builder.uitofp(builder.zext(value, TOTAL), floats)


def _half(builder: Any, address: Any, width: int = WIDTH) -> Any:
    return llvm.widen_halves(builder, _load(builder, address, ir.VectorType(I16, width)))


def _quantized(
    builder: Any, kind: Kind, panel: Any, rows: Any, stride: Any, blocks: Any, count: Any, out: Any
) -> None:
    """Add the products of one panel to 16 columns of ``out``, (count, 32) fp32."""
    blocks_at_once = SUPER if kind.grouped else 1
    scales_at = offset(builder, panel, (blocks, kind.quant_bytes))
    supers_at = offset(builder, scales_at, (blocks, kind.scale_bytes))
    runs, digits = _runs(kind), _digits(kind)
    kept_bytes = 4 * PANEL * digits
    kept = None
    if len(runs) > kind.halves:
        memory = cgutils.alloca_once(builder, ir.ArrayType(I8, kept_bytes * ROW_BLOCK))
        memory.align = 64
        kept = builder.ptrtoint(memory, I64)

    def scale_of(b: Any, unit: Any, half: int, column: int) -> Any:
        at = offset(builder, scales_at, (b, kind.scale_bytes))
        if not kind.grouped:
            return _half(builder, offset(builder, at, 2 * column))
        small = _small(builder, offset(builder, at, PANEL * half + column), kind.halves > 1)
        return builder.fmul(small, _half(builder, offset(builder, unit, 2 * column)))

    def shift_of(b: Any, unit: Any, column: int) -> Any:
        at = offset(builder, scales_at, (b, kind.scale_bytes))
        if not kind.grouped:
            return _half(builder, offset(builder, at, 2 * PANEL + 2 * column))
        small = _small(builder, offset(builder, at, PANEL + column), False)
        minimum = builder.fneg(_half(builder, offset(builder, unit, 2 * PANEL + 2 * column)))
        return builder.fmul(small, minimum)

    def block(b: Any, unit: Any) -> None:
        quants = offset(builder, panel, (b, kind.quant_bytes))
        scale = offset(builder, scales_at, (b, kind.scale_bytes))
        for part, size in ((quants, kind.quant_bytes), (scale, kind.scale_bytes)):
            prefetch(builder, part, AHEAD, -(-size // 64))
        for run in runs:
            run_through(run, b, unit, quants)

    def run_through(run: _Run, b: Any, unit: Any, quants: Any) -> None:
        columns = range(0, PANEL, WIDTH)
        weights = [_weights(builder, kind, quants, run, column) for column in columns]
        scales, shifts = [], []
        if run.ends:
            scales = [scale_of(b, unit, run.half, column) for column in columns]
            if kind.offsets:
                shifts = [shift_of(b, unit, column) for column in columns]
        first = offset(builder, rows, (b, RECORD))
        with cgutils.for_range(builder, count) as loop:
            record = offset(builder, first, (loop.index, stride))
            row = [load_broadcast(builder, offset(builder, record, 4 * t), I32, WIDTH) for t in run.vectors]

            def kept_at(digit: int, n: int) -> Any:
                address = offset(builder, kept, (loop.index, kept_bytes), 4 * (PANEL * digit + WIDTH * n))
                return llvm.at(builder, address, SHORTS if kind.bits in (4, 8) and PAIRED else TOTAL)

            totals = []
            for n, part in enumerate(weights):
                before = None if run.opens else builder.load(kept_at(run.digit, n))
                totals.append(_add_products(builder, kind, before, part, row))
            if not run.ends:
                for n, total in enumerate(totals):
                    builder.store(total, kept_at(run.digit, n))
                return
            dx = load_broadcast(builder, offset(builder, record, SCALE_AT), F32, WIDTH)
            start = sums = None
            if kind.zero:
                at_start = offset(builder, record, START_AT[kind.zero] + 4 * run.half)
                start = load_broadcast(builder, at_start, I32, WIDTH)
            if shifts:
                sums = load_broadcast(builder, offset(builder, record, SUM_AT), F32, WIDTH)
            for n, total in enumerate(totals):
                others = [builder.load(kept_at(digit, n)) for digit in range(1, digits)]
                line = offset(builder, out, (loop.index, 4 * GROUP), 4 * WIDTH * n)
                value = _load(builder, line, scales[n].type)
                whole = builder.sitofp(_whole(builder, [total, *others], start), value.type)
                value = multiply_add(builder, whole, builder.fmul(scales[n], dx), value)
                if shifts:
                    value = multiply_add(builder, shifts[n], sums, value)
                builder.store(value, llvm.at(builder, line, value.type)).align = 4

    with cgutils.for_range(builder, builder.udiv(blocks, const(blocks_at_once))) as outer:
        unit = offset(builder, supers_at, (outer.index, kind.super_bytes))
        prefetch(builder, unit, AHEAD, -(-kind.super_bytes // 64))
        if blocks_at_once == 1:
            block(outer.index, unit)
        else:
            with cgutils.for_range(builder, const(blocks_at_once)) as inner:
                block(offset(builder, inner.index, (outer.index, blocks_at_once)), unit)


def _plain(
    builder: Any, kind: Kind, panel: Any, rows: Any, stride: Any, blocks: Any, count: Any, out: Any
) -> None:
    """Like ``_quantized``, but for fp32, fp16 and bf16 weights; it reads the fp32 numbers of the rows."""
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
                weights = _half(builder, address, PANEL)
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


@cache
def _compiled(kind: Kind) -> Any:
    emitted = _emit_kernel(kind)

    def kernel(panel: int, rows: int, stride: int, blocks: int, count: int, out: int) -> None:
        emitted(panel, rows, stride, blocks, count, out)

    return llvm.machine_code(kernel, 6, kind.name)


def kernel_address(kind: int) -> int:
    """The address of the compiled kernel of ``KINDS[kind]``. It is compiled once and cached on disk.

    Gemms call kernels by address, so only the kinds that a model has are compiled, and each only once.
    """
    return int(_compiled(KINDS[kind]).address)


_call_kernel = llvm.emitted(llvm.call_address, 7)


@llvm.jit
def microkernel(panels: int, rows: int, stride: int, blocks: int, count: int, out: int) -> None:
    """Write the sums (count, 32) fp32 of rows with one group, which consists of two panels of any kind.

    Args:
        panels: address of four 64-bit integers: for each panel, its address and its kernel's address.
        rows: each has fp32 numbers (32 * blocks), then their quantized blocks; ``stride`` bytes from row to row.
        count: at most ``ROW_BLOCK``.
    """
    entries = integers_at(panels)
    for n in range(2):
        _call_kernel(entries[2 * n + 1], entries[2 * n], rows, stride, blocks, count, out + 4 * PANEL * n)


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
        # Comparisons ignore NaN. A block with a NaN gets dx = NaN, which makes every sum with it NaN.
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
