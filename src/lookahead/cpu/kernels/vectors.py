"""Vectors of 16 numbers as values of compiled functions, with the operations that kernels are written in.

A kernel is an ordinary function compiled by numba. A vector is a value of its own type, and each operation below is
one instruction or a few; on processors with shorter registers, LLVM makes two or four of each:

    total = multiply_add(load_floats(weights), broadcast_float(row), total)

Uncompiled, Python runs the bodies of the operations, and vectors are arrays.

    FLOATS    16 fp32 numbers
    WORDS     16 integers of 32 bits, or 64 bytes, four in each word
    SHORTS    32 integers of 16 bits, two per word: sums of two products of bytes
    MASK      16 truth values, from comparisons of FLOATS

Operators take two vectors, or a vector and a number, which applies to every lane. Memory need not be aligned.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir
from llvmlite.ir import IRBuilder
from numba import types
from numba.extending import lower_builtin, models, register_model, type_callable

from .operations import (
    CONSTANT,
    F32,
    I8,
    I16,
    I32,
    I64,
    call_intrinsic,
    float32,
    int32,
    int64,
    memory,
    operation,
    pointer_to,
    void,
)
from .processor import FUSED, HALVES, PAIRED_BYTES, SIGNED_DOT, VNNI, WIDTH

#: Numbers in a vector.
LANES = 16
Array = np.ndarray[Any, np.dtype[Any]]


class Vector(types.Type):  # type: ignore[misc]  # numba has no types
    """A numba type: one of LLVM's vectors."""

    def __init__(self, name: str, element: Any, lanes: int) -> None:
        self.vector = ir.VectorType(element, lanes)
        super().__init__(name)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, type_: Vector) -> None:
        super().__init__(manager, type_, type_.vector)


FLOATS, WORDS = Vector("floats", F32, LANES), Vector("words", I32, LANES)
SHORTS, MASK = Vector("shorts", I16, 2 * LANES), Vector("mask", ir.IntType(1), LANES)
_BYTES, _HALVES = ir.VectorType(I8, LANES), ir.VectorType(I16, LANES)


def _load(builder: Any, address: Any, type_: Any) -> Any:
    value = builder.load(pointer_to(builder, address, type_))
    value.align = 1
    return value


def _store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, pointer_to(builder, address, value.type)).align = 1


def _spread(builder: Any, value: Any, lanes: int = LANES) -> Any:
    """A scalar in every lane."""
    type_ = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(type_, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, lanes), None))


def _constant(type_: Any, value: Any) -> Any:
    """A constant: a vector with the value in every lane, or a scalar."""
    if isinstance(type_, ir.VectorType):
        return ir.Constant(type_, [ir.Constant(type_.element, value)] * type_.count)
    return ir.Constant(type_, value)


# Loads and stores.


@operation(FLOATS(int64), lambda b, address: _load(b, address, FLOATS.vector))
def load_floats(address: int) -> Any:
    """16 fp32 numbers."""
    return memory(address, np.float32, LANES).copy()


@operation(WORDS(int64), lambda b, address: _load(b, address, WORDS.vector))
def load_words(address: int) -> Any:
    """16 integers of 32 bits, or 64 bytes."""
    return memory(address, np.int32, LANES).copy()


@operation(SHORTS(int64), lambda b, address: _load(b, address, SHORTS.vector))
def load_shorts(address: int) -> Any:
    """32 integers of 16 bits."""
    return memory(address, np.int16, 2 * LANES).copy()


@operation(WORDS(int64), lambda b, address: b.zext(_load(b, address, _BYTES), WORDS.vector))
def load_bytes(address: int) -> Any:
    """16 unsigned bytes, widened."""
    return memory(address, np.uint8, LANES).astype(np.int32)


@operation(WORDS(int64), lambda b, address: b.sext(_load(b, address, _BYTES), WORDS.vector))
def load_signed_bytes(address: int) -> Any:
    """16 signed bytes, widened."""
    return memory(address, np.int8, LANES).astype(np.int32)


def _load_bf16(builder: Any, address: Any) -> Any:
    """Load register by register, because an instruction widens what it loads, but not the upper half of a
    register."""
    parts = []
    wide = ir.VectorType(I32, WIDTH)
    for n in range(0, LANES, WIDTH):
        place = builder.add(address, ir.Constant(I64, 2 * n))
        bits = builder.zext(_load(builder, place, ir.VectorType(I16, WIDTH)), wide)
        bits = builder.shl(bits, _constant(wide, 16))
        parts.append(builder.bitcast(bits, ir.VectorType(F32, WIDTH)))
    return _joined(builder, parts)


def _joined(builder: Any, parts: list[Any]) -> Any:
    """One vector from a power of two of equal vectors."""
    while len(parts) > 1:
        size = 2 * parts[0].type.count
        lanes = ir.Constant(ir.VectorType(I32, size), list(range(size)))
        parts = [builder.shuffle_vector(a, b, lanes) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@operation(FLOATS(int64), _load_bf16)
def load_bf16(address: int) -> Any:
    """16 numbers in bf16, widened."""
    return (memory(address, np.uint16, LANES).astype(np.uint32) << 16).view(np.float32)


def widen_fp16(builder: Any, bits: Any) -> Any:
    """fp16 to fp32; ``bits`` is a 16-bit integer or a vector of them.

    Without an instruction for this, exponent and fraction are shifted to their positions in fp32, and multiplying by
    2^112 corrects the exponent's bias (127 instead of 15), even for subnormal numbers. Infinity and NaN become large
    numbers, but scales of weights are neither.
    """
    is_vector = isinstance(bits.type, ir.VectorType)
    wide, floats, half = (
        ir.VectorType(type_, bits.type.count) if is_vector else type_ for type_ in (I32, F32, ir.HalfType())
    )
    if HALVES:
        return builder.fpext(builder.bitcast(bits, half), floats)
    bits = builder.zext(bits, wide)
    number = builder.shl(builder.and_(bits, _constant(wide, 0x7FFF)), _constant(wide, 13))
    number = builder.fmul(builder.bitcast(number, floats), _constant(floats, 2.0**112))
    sign = builder.shl(builder.and_(bits, _constant(wide, 0x8000)), _constant(wide, 16))
    return builder.bitcast(builder.or_(builder.bitcast(number, wide), sign), floats)


def _load_fp16(builder: Any, address: Any) -> Any:
    """Load register by register, as in ``_load_bf16``."""
    places = [builder.add(address, ir.Constant(I64, 2 * n)) for n in range(0, LANES, WIDTH)]
    type_ = ir.VectorType(I16, WIDTH)
    return _joined(builder, [widen_fp16(builder, _load(builder, place, type_)) for place in places])


@operation(FLOATS(int64), _load_fp16)
def load_fp16(address: int) -> Any:
    """16 numbers in fp16, widened."""
    return memory(address, np.float16, LANES).astype(np.float32)


@operation(float32(int64), lambda b, address: widen_fp16(b, _load(b, address, I16)))
def fp16_at(address: int) -> Any:
    """One number in fp16, widened."""
    return memory(address, np.float16, 1).astype(np.float32)[0]


@operation(FLOATS(int64), lambda b, address: _spread(b, _load(b, address, F32)))
def broadcast_float(address: int) -> Any:
    """The fp32 number at an address in every lane."""
    return memory(address, np.float32, 1).repeat(LANES)


@operation(WORDS(int64), lambda b, address: _spread(b, _load(b, address, I32)))
def broadcast_word(address: int) -> Any:
    """The integer of 32 bits, or the four bytes, at an address in every lane."""
    return memory(address, np.int32, 1).repeat(LANES)


@operation(void(int64, FLOATS), _store, void(int64, WORDS), void(int64, SHORTS))
def store(address: int, vector: Any) -> None:
    """Write the 64 bytes of FLOATS, WORDS or SHORTS."""
    memory(address, vector.dtype, len(vector))[:] = vector


@operation(void(int64, WORDS), lambda b, address, words: _store(b, address, b.trunc(words, _BYTES)))
def store_bytes(address: int, words: Any) -> None:
    """Write the lowest byte of each word, 16 bytes."""
    memory(address, np.uint8, LANES)[:] = words & 255


@operation(
    void(int64, WORDS),
    lambda b, address, words: _store(
        b, address, b.trunc(b.lshr(words, _constant(WORDS.vector, 16)), _HALVES)
    ),
)
def store_upper_halves(address: int, words: Any) -> None:
    """Write the upper 16 bits of each word, which for fp32 numbers are a bf16 number, 32 bytes."""
    memory(address, np.uint16, LANES)[:] = words.view(np.uint32) >> 16


# Constants and conversions.


@operation(FLOATS(float32), _spread)
def floats(value: float) -> Any:
    """A number in every lane."""
    return np.full(LANES, value, np.float32)


@operation(WORDS(int32), _spread)
def words(value: int) -> Any:
    """An integer in each of the 16 words."""
    return np.full(LANES, value, np.int32)


@operation(SHORTS(types.int16), lambda b, value: _spread(b, value, 2 * LANES))
def shorts(value: int) -> Any:
    """An integer in each of the 32 shorts."""
    return np.full(2 * LANES, value, np.int16)


@operation(FLOATS(WORDS), lambda b, words: b.sitofp(words, FLOATS.vector))
def to_floats(words: Any) -> Any:
    """16 integers as fp32 numbers."""
    return words.astype(np.float32)


@operation(WORDS(FLOATS), lambda b, x: b.fptosi(x, WORDS.vector))
def to_words(x: Any) -> Any:
    """Numbers without a fraction as integers."""
    return x.astype(np.int32)


@operation(WORDS(FLOATS), lambda b, x: b.bitcast(x, WORDS.vector))
def bits_of(x: Any) -> Any:
    """The bits of 16 fp32 numbers, as words."""
    return x.view(np.int32)


@operation(FLOATS(WORDS), lambda b, words: b.bitcast(words, FLOATS.vector))
def from_bits(words: Any) -> Any:
    """The inverse of ``bits_of``."""
    return words.view(np.float32)


# Arithmetic.


def _function_of_floats(name: str) -> Callable[..., Any]:
    return lambda builder, *x: call_intrinsic(builder, f"llvm.{name}.v{LANES}f32", FLOATS.vector, *x)


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _function_of_floats("fma")(builder, a, b, c) if FUSED else builder.fadd(builder.fmul(a, b), c)


@operation(FLOATS(FLOATS, FLOATS, FLOATS), _multiply_add)
def multiply_add(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once if the processor has fused multiply-add."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


@operation(FLOATS(FLOATS), _function_of_floats("fabs"))
def absolute(x: Any) -> Any:
    """The absolute values of 16 numbers."""
    return np.abs(x)


@operation(FLOATS(FLOATS), _function_of_floats("floor"))
def floor(x: Any) -> Any:
    """16 numbers rounded down to integers."""
    return np.floor(x)


@operation(FLOATS(FLOATS), _function_of_floats("rint"))
def rounded(x: Any) -> Any:
    """The nearest integers; ties go to the even one."""
    return np.rint(x)


def _largest(builder: Any, x: Any) -> Any:
    return call_intrinsic(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, x, flags=("nnan",))


@operation(float32(FLOATS), _largest)
def largest(x: Any) -> Any:
    """The largest number. There must be no NaN."""
    return x.max()


def _sum_of(builder: Any, x: Any) -> Any:
    if x.type == WORDS.vector:
        return call_intrinsic(builder, f"llvm.vector.reduce.add.v{LANES}i32", I32, x)
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    zero = ir.Constant(F32, 0.0)
    return call_intrinsic(builder, name, F32, zero, x, flags=("reassoc",))


@operation(float32(FLOATS), _sum_of, int32(WORDS))
def sum_of(x: Any) -> Any:
    """The sum of all lanes; for floats, in an order that depends only on the processor."""
    return x.sum(dtype=x.dtype)


def _dot(builder: Any, total: Any, weights: Any, numbers: Any) -> Any:
    if VNNI:
        name = f"llvm.x86.avx512.vpdpbusd.{32 * WIDTH}"
        return _in_registers(builder, name, WORDS.vector, total, weights, numbers)
    if PAIRED_BYTES:
        name = "llvm.x86.avx512.pmaddubs.w.512" if WIDTH == LANES else "llvm.x86.avx2.pmadd.ub.sw"
        factors = [builder.bitcast(words, ir.VectorType(I8, 4 * LANES)) for words in (weights, numbers)]
        return builder.add(total, _in_registers(builder, name, SHORTS.vector, *factors))
    if SIGNED_DOT:
        bytes_of = ir.VectorType(I8, 4 * LANES)
        factors = [builder.bitcast(words, bytes_of) for words in (weights, numbers)]
        return _in_registers(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", WORDS.vector, total, *factors)
    for n in range(4):  # any other processor: one byte of each word at a time
        weight = builder.lshr(weights, _constant(WORDS.vector, 8 * n))
        weight = builder.and_(weight, _constant(WORDS.vector, 255))
        number = builder.shl(numbers, _constant(WORDS.vector, 24 - 8 * n))
        number = builder.ashr(number, _constant(WORDS.vector, 24))
        total = builder.add(total, builder.mul(weight, number))
    return total


#: The type of sums of byte products; (0) -> a vector of that type, all zero; (address) -> one from memory.
TOTALS, totals, load_totals = (SHORTS, shorts, load_shorts) if PAIRED_BYTES else (WORDS, words, load_words)


@operation(TOTALS(TOTALS, WORDS, WORDS), _dot)
def dot_u8_i8(total: Any, weights: Any, numbers: Any) -> Any:
    """total + the products of the unsigned bytes of ``weights`` and the signed bytes of ``numbers``.

    Each word of the total gets the sum of four products. With AVX2 and no VNNI, each short gets the sum of two, and
    must not overflow: the largest is 2 * 15 * 127 * 8 = 30,480 for eight vectors of 4-bit weights, 2 * 31 * 127 * 4
    for four of 5 bits, and 2 * 63 * 127 * 2 for two of 6 bits. With ARM's dot products, weights must be below 128.
    """
    products = weights.view(np.uint8).astype(np.int32) * numbers.view(np.int8)
    return total + products.reshape(len(total), -1).sum(1, dtype=total.dtype)


def _whole(builder: Any, total: Any) -> Any:
    if total.type == WORDS.vector:
        return total
    name = "llvm.x86.avx512.pmaddw.d.512" if WIDTH == LANES else "llvm.x86.avx2.pmadd.wd"
    return _in_registers(builder, name, WORDS.vector, total, _constant(SHORTS.vector, 1))


@operation(WORDS(WORDS), _whole, WORDS(SHORTS))
def whole(total: Any) -> Any:
    """Sums of products as words: the sum of the two shorts of each word."""
    return total if total.dtype == np.int32 else total.astype(np.int32).reshape(-1, 2).sum(1, dtype=np.int32)


def _in_registers(builder: Any, name: str, result: Any, *vectors: Any) -> Any:
    """Call an LLVM intrinsic on register-sized vectors: once, or for each part of the vectors."""
    parts = LANES // WIDTH

    def part_of(vector: Any, n: int) -> Any:
        size = vector.type.count // parts
        lanes = ir.Constant(ir.VectorType(I32, size), list(range(n * size, n * size + size)))
        return builder.shuffle_vector(vector, vector, lanes)

    if parts == 1:
        return call_intrinsic(builder, name, result, *vectors)
    type_ = ir.VectorType(result.element, result.count // parts)
    found = [
        call_intrinsic(builder, name, type_, *(part_of(each, n) for each in vectors)) for n in range(parts)
    ]
    return _joined(builder, found)


# Blocks of vectors: tuples of rows times columns, whose vectors all stay in registers.


def _block(count: int) -> Any:
    return types.UniTuple(FLOATS, count)


def _tuple_of(builder: Any, vectors: Sequence[Any]) -> Any:
    value = ir.Constant(ir.ArrayType(vectors[0].type, len(vectors)), ir.Undefined)
    for n, vector in enumerate(vectors):
        value = builder.insert_value(value, vector, n)
    return value


def _parts_of(builder: Any, value: Any) -> list[Any]:
    return [builder.extract_value(value, n) for n in range(value.type.count)]


def _nth(builder: Any, address: Any, stride: Any, n: int, more: int = 0) -> Any:
    """address + n * stride + more."""
    address = builder.add(address, builder.mul(stride, ir.Constant(I64, n)))
    return builder.add(address, ir.Constant(I64, more)) if more else address


def _several(load: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def emit(builder: Any, address: Any, stride: Any, count: int) -> Any:
        return _tuple_of(builder, [load(builder, _nth(builder, address, stride, n)) for n in range(count)])

    return emit


def _columns_of(vector: Vector) -> tuple[Any, ...]:
    return lambda address, stride, count: types.UniTuple(vector, count.literal_value), int64, int64, CONSTANT


@operation(_columns_of(FLOATS), _several(lambda b, address: _load(b, address, FLOATS.vector)))
def load_columns(address: int, stride: int, count: int) -> Any:
    """``count`` vectors of fp32 numbers, ``stride`` bytes apart."""
    return tuple(load_floats(address + stride * n) for n in range(count))


@operation(_columns_of(FLOATS), _several(_load_bf16))
def load_columns_bf16(address: int, stride: int, count: int) -> Any:
    """``count`` vectors of bf16 numbers, widened, ``stride`` bytes apart."""
    return tuple(load_bf16(address + stride * n) for n in range(count))


@operation(_columns_of(FLOATS), _several(_load_fp16))
def load_columns_fp16(address: int, stride: int, count: int) -> Any:
    """``count`` vectors of fp16 numbers, widened, ``stride`` bytes apart."""
    return tuple(load_fp16(address + stride * n) for n in range(count))


@operation(_columns_of(WORDS), _several(lambda b, address: _load(b, address, WORDS.vector)))
def load_column_pairs(address: int, stride: int, count: int) -> Any:
    """``count`` vectors of pairs of bf16 numbers, a pair in each word, ``stride`` bytes apart."""
    return tuple(load_words(address + stride * n) for n in range(count))


@operation(
    (lambda rows, columns: _block(rows.literal_value * columns.literal_value), CONSTANT, CONSTANT),
    lambda b, rows, columns: _tuple_of(b, [ir.Constant(FLOATS.vector, None)] * (rows * columns)),
)
def zero_block(rows: int, columns: int) -> Any:
    """A block of rows * columns vectors, all zero."""
    return tuple(np.zeros(LANES, np.float32) for _ in range(rows * columns))


def _load_block(builder: Any, address: Any, stride: Any, rows: int, columns: int) -> Any:
    places = [_nth(builder, address, stride, r, 4 * LANES * c) for r in range(rows) for c in range(columns)]
    return _tuple_of(builder, [_load(builder, place, FLOATS.vector) for place in places])


@operation(
    (
        lambda *given: _block(given[2].literal_value * given[3].literal_value),
        int64,
        int64,
        CONSTANT,
        CONSTANT,
    ),
    _load_block,
)
def load_block(address: int, stride: int, rows: int, columns: int) -> Any:
    """A block from memory: each row is ``columns`` adjacent vectors, ``stride`` bytes after the row before it."""
    return tuple(
        load_floats(address + stride * r + 4 * LANES * c) for r in range(rows) for c in range(columns)
    )


def _store_block(builder: Any, address: Any, stride: Any, block: Any, columns: int) -> None:
    for n, vector in enumerate(_parts_of(builder, block)):
        _store(builder, _nth(builder, address, stride, n // columns, 4 * LANES * (n % columns)), vector)


@operation((void, int64, int64, types.UniTuple, CONSTANT), _store_block)
def store_block(address: int, stride: int, block: Any, columns: int) -> None:
    """Write a block, in the layout of ``load_block``."""
    for n, vector in enumerate(block):
        store(address + stride * (n // columns) + 4 * LANES * (n % columns), vector)


def _add_outer(builder: Any, block: Any, columns: Any, factors: Any, stride: Any) -> Any:
    sums, columns = _parts_of(builder, block), _parts_of(builder, columns)
    pairs = columns[0].type == WORDS.vector
    multiply = _dot_bf16 if pairs else _multiply_add
    for r in range(len(sums) // len(columns)):
        address = _nth(builder, factors, stride, r)
        factor = _spread(builder, _load(builder, address, I32 if pairs else F32))
        for c, column in enumerate(columns, r * len(columns)):
            sums[c] = multiply(builder, column, factor, sums[c])
    return _tuple_of(builder, sums)


def _dot_bf16(builder: Any, a: Any, b: Any, total: Any) -> Any:
    """The AVX512-BF16 instruction as assembly, because LLVM's intrinsic takes bfloat, which llvmlite lacks."""
    binding.initialize_native_asmparser()
    type_ = ir.FunctionType(FLOATS.vector, [FLOATS.vector, WORDS.vector, WORDS.vector])
    return builder.call(ir.InlineAsm(type_, "vdpbf16ps $3, $2, $0", "=v,0,v,v"), [total, a, b])


@operation(
    (lambda block, *others: block, types.UniTuple, types.UniTuple, int64, int64),
    _add_outer,
)
def add_outer(block: Any, columns: Any, factors: int, stride: int) -> Any:
    """block[row, column] + factor of the row * column, for all rows and columns.

    Args:
        block: sums, a tuple of rows * columns.
        columns: vectors of numbers, or of pairs of bf16 numbers, whose products with the factors' are summed.
        factors: address of the first row's factor, an fp32 number or a pair in bf16.
        stride: bytes from factor to factor.
    """
    sums, count = list(block), len(columns)
    for n in range(len(sums)):
        column = columns[n % count]
        address = factors + stride * (n // count)
        if column.dtype == np.float32:
            sums[n] = multiply_add(column, broadcast_float(address), sums[n])
        else:
            a, b = (
                (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
                for x in (column, broadcast_word(address))
            )
            sums[n] = sums[n] + (a * b).reshape(-1, 2).sum(1)
    return tuple(sums)


# Masks.


@operation(MASK(FLOATS), lambda b, x: b.fcmp_unordered("uno", x, x))
def is_nan(x: Any) -> Any:
    """The mask of 16 numbers that is true where they are NaN."""
    return np.isnan(x)


@operation(FLOATS(MASK, FLOATS, FLOATS), IRBuilder.select, WORDS(MASK, WORDS, WORDS))
def select(mask: Any, a: Any, b: Any) -> Any:
    """a where the mask is true, else b."""
    return np.where(mask, a, b)


def _any_of(builder: Any, mask: Any) -> Any:
    bits = builder.bitcast(mask, ir.IntType(LANES))
    return builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))


@operation(types.boolean(MASK), _any_of)
def any_of(mask: Any) -> bool:
    """Whether any of a mask's 16 values is true."""
    return bool(mask.any())


# Operators.


def _operator(symbol: Any, type_: Vector, result: Vector, emit: Callable[..., Any]) -> None:
    """Define a Python operator for two vectors of a type, or for one and a number."""

    def typed(a: Any, b: Any) -> Any:
        others = [other for other in (a, b) if other != type_]
        fits = len(others) < 2 and all(isinstance(other, types.Number) for other in others)
        return result(a, b) if fits else None

    def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        element = float32 if type_ == FLOATS else int32
        vectors = []
        for value, given in zip(values, signature.args, strict=True):
            spread = given != type_
            vectors.append(
                _spread(builder, context.cast(builder, value, given, element)) if spread else value
            )
        return emit(builder, *vectors)

    type_callable(symbol)(lambda context: typed)
    for operands in ((type_, type_), (type_, types.Number), (types.Number, type_)):
        lower_builtin(symbol, *operands)(lower)


for _symbol, _emit in {
    operator.add: IRBuilder.fadd,
    operator.sub: IRBuilder.fsub,
    operator.mul: IRBuilder.fmul,
    operator.truediv: IRBuilder.fdiv,
}.items():
    _operator(_symbol, FLOATS, FLOATS, _emit)
for _symbol, _emit in {
    operator.add: IRBuilder.add,
    operator.and_: IRBuilder.and_,
    operator.or_: IRBuilder.or_,
    operator.lshift: IRBuilder.shl,
    operator.rshift: IRBuilder.ashr,
}.items():
    _operator(_symbol, WORDS, WORDS, _emit)
_operator(operator.add, SHORTS, SHORTS, IRBuilder.add)
_operator(operator.or_, MASK, MASK, IRBuilder.or_)
_operator(operator.lt, FLOATS, MASK, lambda b, x, y: b.fcmp_ordered("<", x, y))
_operator(operator.gt, FLOATS, MASK, lambda b, x, y: b.fcmp_ordered(">", x, y))
type_callable(operator.neg)(lambda context: lambda x: FLOATS(x) if x == FLOATS else None)
lower_builtin(operator.neg, FLOATS)(lambda context, builder, signature, values: builder.fneg(values[0]))
