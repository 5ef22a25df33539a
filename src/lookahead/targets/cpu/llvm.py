"""Words of compiled code that numba lacks: typed memory at an address, atomics, and vectors in LLVM's language.

``emitted`` makes a function of compiled code from one that writes LLVM instructions; addresses and counts are
64-bit integers. bf16 numbers are held as unsigned 16-bit integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from .processor import ARM, FUSED, LANES, X86

#: Sums in lanes and fused multiply-adds; NaN and infinity keep their meaning.
REASSOCIATE = {"reassoc", "contract", "nsz"}

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, VOID = ir.FloatType(), ir.VoidType()
VECTOR, INTEGERS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
ZEROS = ir.Constant(VECTOR, None)

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(function: Function, variant: str = "", **options: Any) -> Function:
    """Compile without Python's lock and with numpy's rules for division; typed, where numba's own is not.

    Functions that differ only in what they close over need a ``variant`` each: the linker knows them by name and
    types of arguments, and takes one for the other where both come from the disk.
    """
    function.__qualname__ += variant
    compiled: Function = numba.njit(function, nogil=True, error_model="numpy", **options)
    return compiled


def on_disk(function: Function, signature: Any = None) -> Function:
    """Keep the code on disk, compiled now for a signature or when called; it may close over plain values only."""
    compiled: Function = numba.njit(signature, nogil=True, cache=True, error_model="numpy")(function)
    return compiled


def inlined(function: Function) -> Function:
    """A function that compiled code may call, and Python too."""
    known: Function = register_jitable(function)
    return known


def const(value: int) -> ir.Constant:
    """A 64-bit constant."""
    return ir.Constant(I64, value)


def offset(builder: Any, base: Any, *terms: Any) -> Any:
    """base + sum of terms; a term is a value, a constant, or a pair of factors."""
    for term in terms:
        a, b = term if isinstance(term, tuple) else (term, None)
        a, b = (const(x) if isinstance(x, int) else x for x in (a, b))
        base = builder.add(base, a if b is None else builder.mul(a, b))
    return base


def call(builder: Any, name: str, result: Any, arguments: Sequence[Any], flags: Sequence[str] = ()) -> Any:
    """Call one of LLVM's intrinsics."""
    kinds = [argument.type for argument in arguments]
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, kinds), name)
    return builder.call(function, list(arguments), fastmath=flags)


def at(builder: Any, address: Any, kind: Any = I8) -> Any:
    """An address as a pointer."""
    return builder.inttoptr(address, kind.as_pointer())


def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    """A value from memory."""
    value = builder.load(at(builder, address, kind))
    value.align = align
    return value


def load_numbers(builder: Any, address: Any, narrow: bool, lanes: int = LANES) -> Any:
    """One number (lanes = 1) or a vector, as fp32; ``narrow`` where memory holds bf16."""
    single = lanes == 1
    if not narrow:
        return load(builder, address, F32 if single else VECTOR, 4)
    bits = load(builder, address, I16 if single else ir.VectorType(I16, lanes), 2)
    wide = I32 if single else INTEGERS
    shift = ir.Constant(I32, 16) if single else integers(16)
    return builder.bitcast(builder.shl(builder.zext(bits, wide), shift), F32 if single else VECTOR)


def store_vector(builder: Any, value: Any, address: Any) -> None:
    """LANES fp32 numbers to memory."""
    builder.store(value, at(builder, address, value.type)).align = 4


def broadcast(builder: Any, value: Any) -> Any:
    """One number in every lane."""
    kind = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, one, integers(0))


def numbers(value: float) -> ir.Constant:
    """A constant in every lane."""
    return ir.Constant(VECTOR, [ir.Constant(F32, value)] * LANES)


def integers(value: int) -> ir.Constant:
    """An integer constant in every lane."""
    return ir.Constant(INTEGERS, [ir.Constant(I32, value)] * LANES)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once where the processor can."""
    if FUSED:
        return call(builder, f"llvm.fma.v{LANES}f32", VECTOR, [a, b, c])
    return builder.fadd(builder.fmul(a, b), c)


def accumulate(
    builder: Any, rows: int, columns: int, steps: Any, parts: Callable[[Any], Sequence[Any]],
    factor: Callable[[Any, int], Any], out: Callable[[int, int], Any], add: bool = False,
    multiply: Any = multiply_add,
) -> None:  # fmt: skip
    """Sums (rows, columns) of vectors, held in registers: each step adds its parts times each row's factor.

    Args:
        parts: (step) -> vectors, one for each column.
        factor: (step, row) -> a number, which goes to every lane.
        out: (row, column) -> the address of a sum.
        add: sums begin with what lies there.
    """
    sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(columns)] for _ in range(rows)]
    places = [(r, v) for r in range(rows) for v in range(columns)]
    for r, v in places:
        builder.store(load_numbers(builder, out(r, v), False) if add else ZEROS, sums[r][v])
    with cgutils.for_range(builder, steps) as loop:
        loaded = parts(loop.index)
        for r in range(rows):
            lanes = broadcast(builder, factor(loop.index, r))
            for v, part in enumerate(loaded):
                builder.store(multiply(builder, part, lanes, builder.load(sums[r][v])), sums[r][v])
    for r, v in places:
        store_vector(builder, builder.load(sums[r][v]), out(r, v))


def in_blocks(builder: Any, count: Any, sizes: Sequence[int], emit: Callable[[int, Any], None]) -> None:
    """``emit(size, first)`` for ``count`` rows, as many at once as ``sizes`` (largest first, 1 last) allow."""
    first: Any = const(0)
    for size in sizes:
        blocks = builder.udiv(builder.sub(count, first), const(size))
        with cgutils.for_range(builder, blocks) as loop:
            emit(size, offset(builder, first, (loop.index, size)))
        first = offset(builder, first, (blocks, size))


def emitted(emit: Callable[..., Any], arguments: int, result: Any = types.void) -> Any:
    """A function of compiled code from ``emit(builder, *values)``; all arguments are 64-bit integers."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        value = emit(builder, *values)
        return context.get_dummy_value() if value is None else value

    def typed(context: Any, *values: Any) -> Any:
        return result(*[types.int64] * arguments), generate

    # numba wants as many named arguments as there are values.
    names = ["context", *(f"value{n}" for n in range(arguments))]
    kind = Parameter.POSITIONAL_OR_KEYWORD
    typed.__signature__ = Signature([Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return intrinsic(typed)


def pointer_to(kind: Any) -> Any:
    """(address) -> a pointer to numbers of a numba type, for ``carray``."""
    return _typed_address(types.CPointer(kind))


def record_at(dtype: np.dtype[Any]) -> Any:
    """(address) -> the record of a structured dtype that lies there; its fields are read and written by name."""
    return _typed_address(numba.from_dtype(dtype))


def _typed_address(result: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(result))

    return intrinsic(lambda context, address: (result(types.int64), generate))


floats_at, integers_at = pointer_to(types.float32), pointer_to(types.int64)


def _atomic(operation: str) -> Callable[..., Any]:
    return lambda builder, address, value: builder.atomic_rmw(
        operation, at(builder, address, I64), value, "seq_cst"
    )


def _pause(builder: Any) -> None:
    if X86:
        call(builder, "llvm.x86.sse2.pause", VOID, [])
    elif ARM:
        call(builder, "llvm.aarch64.hint", VOID, [ir.Constant(I32, 1)])


def _jump(builder: Any, address: Any, *arguments: Any) -> None:
    kind = ir.FunctionType(VOID, [I64] * len(arguments))
    builder.call(builder.inttoptr(address, kind.as_pointer()), list(arguments))


#: Words that several threads share, sequentially consistent; ``fetch_add`` and ``exchange`` give the old value.
fetch_add, exchange = (emitted(_atomic(name), 2, types.int64) for name in ("add", "xchg"))
atomic_load = emitted(lambda b, address: b.load_atomic(at(b, address, I64), "seq_cst", 8), 1, types.int64)
#: Tell the core that this is a waiting loop.
pause = emitted(_pause, 0)
#: A counter of time, 0 where there is none.
ticks = emitted(lambda b: call(b, "llvm.readcyclecounter", I64, []) if X86 else const(0), 0, types.int64)
#: Call the compiled function at an address with five 64-bit integers.
jump = emitted(_jump, 6)
