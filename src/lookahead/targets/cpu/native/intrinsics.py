"""Words of compiled code that numba lacks: typed memory, atomics, waiting, e^x, and vectors in LLVM's language.

A tag argument (an unsigned 16-bit zero for bf16's bits, a float zero for fp32) tells what an address points to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from .machine import ARM, FUSED, LANES, X86

TAGS = {torch.bfloat16: np.uint16(0), torch.float32: np.float32(0)}
#: How products are computed, as the type of a tag argument too.
KINDS = {"tiles": np.int8(0), "bytes": np.uint8(0), "pairs": np.int16(0), "vectors": np.int32(0)}
#: Sums in lanes and fused multiply-adds; NaN and infinity keep their meaning.
MATHS = {"reassoc", "contract", "nsz"}

#: Kinds that compute on tiles; "bytes" holds weights as bytes and widens them.
ON_TILES = (types.int8, types.uint8)

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
VOID = ir.VoidType()
BYTES = I8.as_pointer()
VECTOR = ir.VectorType(F32, LANES)


def const(value: int) -> ir.Constant:
    """A 64-bit constant."""
    return ir.Constant(I64, value)


def call(builder: Any, name: str, result: Any, arguments: list[Any], flags: tuple[str, ...] = ()) -> Any:
    """Call one of LLVM's intrinsics."""
    kinds = [argument.type for argument in arguments]
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, kinds), name)
    return builder.call(function, arguments, fastmath=flags)


def at(builder: Any, address: Any, kind: Any = I8) -> Any:
    """An address as a pointer."""
    return builder.inttoptr(address, kind.as_pointer())


def load_vector(builder: Any, address: Any, narrow: bool) -> Any:
    """LANES numbers as fp32; ``narrow`` where memory holds bf16."""
    if not narrow:
        value = builder.load(at(builder, address, VECTOR))
        value.align = 4
        return value
    bits = builder.load(at(builder, address, ir.VectorType(I16, LANES)))
    bits.align = 2
    wide = ir.VectorType(I32, LANES)
    shifts = ir.Constant(wide, [ir.Constant(I32, 16)] * LANES)
    return builder.bitcast(builder.shl(builder.zext(bits, wide), shifts), VECTOR)


def load_single(builder: Any, address: Any, narrow: bool) -> Any:
    """One number as fp32."""
    if not narrow:
        value = builder.load(at(builder, address, F32))
        value.align = 4
        return value
    bits = builder.load(at(builder, address, I16))
    bits.align = 2
    return builder.bitcast(builder.shl(builder.zext(bits, I32), ir.Constant(I32, 16)), F32)


def store_vector(builder: Any, value: Any, address: Any) -> None:
    """LANES fp32 numbers to memory."""
    builder.store(value, at(builder, address, value.type)).align = 4


def spread(builder: Any, value: Any) -> Any:
    """One number in every lane."""
    kind = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(
        one, one, ir.Constant(ir.VectorType(I32, LANES), [ir.Constant(I32, 0)] * LANES)
    )


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once where the processor can."""
    if FUSED:
        return call(builder, f"llvm.fma.v{LANES}f32", VECTOR, [a, b, c])
    return builder.fadd(builder.fmul(a, b), c)


def zeros(kind: Any = VECTOR) -> ir.Constant:
    """A vector of zeros."""
    return ir.Constant(kind, None)


def emitted(emit: Callable[..., Any], arguments: int, result: Any = types.void) -> Any:
    """A function of compiled code from ``emit(builder, *values)``; all arguments are 64-bit integers."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        value = emit(builder, *values)
        return context.get_dummy_value() if value is None else value

    typed = result(*[types.int64] * arguments), generate
    # numba wants as many named arguments as there are values.
    shapes: dict[int, Callable[..., Any]] = {
        0: lambda context: typed,
        1: lambda context, a: typed,
        2: lambda context, a, b: typed,
        4: lambda context, a, b, c, d: typed,
        5: lambda context, a, b, c, d, e: typed,
        6: lambda context, a, b, c, d, e, f: typed,
    }
    return intrinsic(shapes[arguments])


@intrinsic
def pointer(context: Any, address: Any, tag: Any) -> Any:
    """The address as a pointer to values of the tag's type."""
    result = types.CPointer(tag)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], target.get_value_type(result))

    return result(types.int64, tag), generate


def _fetch_add(builder: Any, address: Any, value: Any) -> Any:
    return builder.atomic_rmw("add", at(builder, address, I64), value, "seq_cst")


def _exchange(builder: Any, address: Any, value: Any) -> Any:
    return builder.atomic_rmw("xchg", at(builder, address, I64), value, "seq_cst")


def _look(builder: Any, address: Any) -> Any:
    return builder.load_atomic(at(builder, address, I64), "seq_cst", 8)


def _pause(builder: Any) -> None:
    if X86:
        call(builder, "llvm.x86.sse2.pause", VOID, [])
    elif ARM:
        call(builder, "llvm.aarch64.hint", VOID, [ir.Constant(I32, 1)])


def _ticks(builder: Any) -> Any:
    return call(builder, "llvm.readcyclecounter", I64, []) if X86 else const(0)


def _jump(builder: Any, address: Any, *arguments: Any) -> None:
    kind = ir.FunctionType(VOID, [I64] * len(arguments))
    builder.call(builder.inttoptr(address, kind.as_pointer()), list(arguments))


#: Atomic words at an address, sequentially consistent; ``fetch_add`` and ``exchange`` give the old value.
fetch_add = emitted(_fetch_add, 2, types.int64)
exchange = emitted(_exchange, 2, types.int64)
look = emitted(_look, 1, types.int64)
#: Tell the core that this is a waiting loop.
pause = emitted(_pause, 0)
#: A counter of time, 0 where there is none.
ticks = emitted(_ticks, 0, types.int64)
#: Call the compiled function at an address with five 64-bit integers.
jump = emitted(_jump, 6)


def widen(value: Any) -> Any:
    raise NotImplementedError("compiled code only")


@overload(widen)
def _widen_code(value):  # type: ignore[no-untyped-def]  # numba compares the two signatures
    """To fp32."""
    if value == types.uint16:
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: value


def narrow(value: Any, tag: Any) -> Any:
    raise NotImplementedError("compiled code only")


@overload(narrow)
def _narrow_code(value, tag):  # type: ignore[no-untyped-def]
    """From fp32 to the tag's type, to the nearest, ties to even; NaN stays NaN."""
    if tag == types.uint16:

        def to_bits(value, tag):  # type: ignore[no-untyped-def]
            bits = np.float32(value).view(np.uint32)
            odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
            rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16)
            return np.uint16(rounded) if value == value else np.uint16(0x7FC0)

        return to_bits
    return lambda value, tag: np.float32(value)


def bytes_of(tag: Any) -> Any:
    raise NotImplementedError("compiled code only")


@overload(bytes_of)
def _bytes_code(tag):  # type: ignore[no-untyped-def]
    """Of one number."""
    size = 2 if tag == types.uint16 else 4
    return lambda tag: size


def input_tag(kind: Any) -> Any:
    raise NotImplementedError("compiled code only")


@overload(input_tag)
def _input_tag_code(kind):  # type: ignore[no-untyped-def]
    """The tag of what a product reads: bf16 for tiles and pairs, fp32 for vectors."""
    if kind == types.int32:
        return lambda kind: np.float32(0)
    return lambda kind: np.uint16(0)


def query_tag(kind: Any) -> Any:
    raise NotImplementedError("compiled code only")


@overload(query_tag)
def _query_tag_code(kind):  # type: ignore[no-untyped-def]
    """The tag of queries: bf16 for tiles, else fp32."""
    if kind in ON_TILES:
        return lambda kind: np.uint16(0)
    return lambda kind: np.float32(0)


def paired_keys(kind: Any) -> Any:
    raise NotImplementedError("compiled code only")


@overload(paired_keys)
def _paired_code(kind):  # type: ignore[no-untyped-def]
    """How many neighbours of a key lie together."""
    pairs = 2 if kind in ON_TILES else 1
    return lambda kind: pairs
