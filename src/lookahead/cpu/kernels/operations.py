"""Operations: extensions of numba for compiled functions, each declared once.

    @operation(types.float32(types.int64), emit)
    def name(address):
        body

The body defines the operation and runs when a function is called uncompiled. In compiled code it is replaced with the
instructions that ``emit(builder, *values)`` writes with LLVM's builder. The prototype gives the types: the result
type, called with the argument types.

This module has the operations on memory and addresses, which are 64-bit integers; ``vectors`` has those on vectors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.extending import lower_builtin, type_callable

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, NOTHING = ir.FloatType(), ir.VoidType()
int32, int64, float32, void = types.int32, types.int64, types.float32, types.void
#: The type of an argument that must be constant; ``emit`` gets its value, a Python int.
CONSTANT = types.IntegerLiteral


def operation(prototype: Any, emit: Callable[..., Any], *others: Any) -> Callable[[Any], Any]:
    """Make a function an operation.

    Args:
        prototype: result(arguments), numba types; or a tuple of result and arguments, in which the result may be a
            function of the arguments' types, and an argument may be a class of types, such as ``CONSTANT``.
        emit: (builder, *values) -> the value of the result, or None.
        others: prototypes of the same operation on other types.
    """
    prototypes = [
        each if isinstance(each, tuple) else (each.return_type, *each.args) for each in (prototype, *others)
    ]

    def decorate(function: Any) -> Any:
        @wraps(function)  # numba reads the names of the arguments
        def typed(*given: Any) -> Any:
            for result, *wanted in prototypes:
                if len(given) == len(wanted) and all(map(_fits, given, wanted)):
                    arguments = [g if isinstance(w, type) else w for g, w in zip(given, wanted, strict=True)]
                    type_ = result if isinstance(result, types.Type) else result(*given)
                    return type_(*arguments)
            return None

        def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            pairs = zip(signature.args, values, strict=True)
            values = [type_.literal_value if isinstance(type_, CONSTANT) else value for type_, value in pairs]
            value = emit(builder, *values)
            return context.get_dummy_value() if value is None else value

        type_callable(function)(lambda context: typed)
        for _, *wanted in prototypes:
            lower_builtin(function, *wanted)(lower)
        return function

    return decorate


def _fits(given: Any, wanted: Any) -> bool:
    """Whether an argument may be passed; numba converts numbers."""
    if isinstance(wanted, type):
        return isinstance(given, wanted)
    if isinstance(wanted, types.Number):
        return isinstance(given, types.Number)
    return bool(given == wanted)


def call_intrinsic(builder: Any, name: str, result: Any, *arguments: Any, flags: Sequence[str] = ()) -> Any:
    """Call one of LLVM's intrinsics, or a C function."""
    type_ = ir.FunctionType(result, [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, type_, name)
    return builder.call(function, list(arguments), fastmath=flags)


def pointer_to(builder: Any, address: Any, type_: Any = I8) -> Any:
    """An address as LLVM's pointer to a type."""
    return builder.inttoptr(address, type_.as_pointer())


def memory(address: int, dtype: Any, count: int) -> np.ndarray[Any, Any]:
    """The numbers at an address, as an array that shares the memory."""
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype)


def offsets_of(dtype: np.dtype[Any]) -> dict[str, int]:
    """The offsets of a record's fields, in bytes."""
    return {name: field[1] for name, field in (dtype.fields or {}).items()}


class _Numbers:
    """A pointer for functions run by Python: ``numbers[i]``."""

    def __init__(self, address: int, dtype: Any) -> None:
        self._address = address
        self._dtype = np.dtype(dtype)

    def _at(self, index: int) -> np.ndarray[Any, Any]:
        return memory(self._address + int(index) * self._dtype.itemsize, self._dtype, 1)

    def __getitem__(self, index: int) -> Any:
        return self._at(index)[0]

    def __setitem__(self, index: int, value: Any) -> None:
        self._at(index)[0] = value


def numbers_at(dtype: Any) -> Any:
    """Make the operation (address) -> numbers of a dtype, read and written by index."""
    kind, size = np.dtype(dtype).kind, np.dtype(dtype).itemsize
    element = F32 if kind == "f" else ir.IntType(8 * size)
    numbers = types.CPointer(from_dtype(np.dtype(dtype)))

    @operation(numbers(int64), lambda builder, address: pointer_to(builder, address, element))
    def pointer(address: int) -> Any:
        return _Numbers(address, dtype)

    return pointer


def record_at(dtype: np.dtype[Any]) -> Any:
    """Make the operation (address) -> the record there, with the fields of a structured dtype."""
    type_ = from_dtype(dtype)

    @operation(type_(int64), lambda b, address: pointer_to(b, address, ir.ArrayType(I8, dtype.itemsize)))
    def record(address: int) -> Any:
        return memory(address, dtype, 1).view(np.recarray)[0]

    return record


floats_at, integers_at, words_at = (numbers_at(each) for each in ("f4", "i8", "i4"))
shorts_at, bytes_at = numbers_at("u2"), numbers_at("u1")


def _prefetch(builder: Any, address: Any, size: int) -> None:
    hints = [ir.Constant(I32, number) for number in (0, 2, 1)]  # a read, into L2, of data
    for line in range(0, size, 64):
        pointer = pointer_to(builder, builder.add(address, ir.Constant(I64, line)))
        call_intrinsic(builder, "llvm.prefetch.p0", NOTHING, pointer, *hints)


@operation((void, int64, CONSTANT), _prefetch)
def prefetch(address: int, size: int) -> None:
    """Prefetch the cache lines of ``size`` bytes into the L2 cache."""


def _call(builder: Any, address: Any, *arguments: Any) -> None:
    type_ = ir.FunctionType(NOTHING, [I64] * len(arguments))
    builder.call(builder.inttoptr(address, type_.as_pointer()), arguments)


@operation(void(*[int64] * 5), _call, void(*[int64] * 6), void(*[int64] * 7))
def call(address: int, a: int, b: int, c: int, d: int, e: int | None = None, f: int | None = None) -> None:
    """Call the compiled function of four to six integers at an address."""
    arguments = [n for n in (a, b, c, d, e, f) if n is not None]
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(address)(*arguments)


def _stack_memory(builder: Any, size: int) -> Any:
    with builder.goto_entry_block():
        block = builder.alloca(ir.ArrayType(I8, size))
    block.align = 64
    return builder.ptrtoint(block, I64)


@operation((int64, CONSTANT), _stack_memory)
def stack_memory(size: int) -> int:
    """The address of ``size`` bytes on the stack of the calling function."""
    _uncompiled_memory.append(np.zeros(size, np.uint8))
    return int(_uncompiled_memory[-1].ctypes.data)


#: Keeps the memory of ``stack_memory`` alive in functions run by Python.
_uncompiled_memory: list[np.ndarray[Any, Any]] = []
