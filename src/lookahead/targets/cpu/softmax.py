"""Softmax of a row of scores, in two halves: exponentials and their sum here, the division with the weighted sum."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import llvm
from .epilogue import exponential, store_rounded
from .llvm import F32, VECTOR, call, load_numbers, numbers, offset
from .processor import LANES

ZEROS = ir.Constant(VECTOR, None)


def _softmax(builder: Any, scores: Any, vectors: Any) -> Any:
    largest = cgutils.alloca_once_value(builder, numbers(float("-inf")))
    with cgutils.for_range(builder, vectors) as loop:
        value = load_numbers(builder, offset(builder, scores, (loop.index, 4 * LANES)), False)
        before = builder.load(largest)
        builder.store(builder.select(builder.fcmp_ordered(">", value, before), value, before), largest)
    top = call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [builder.load(largest)], ("nnan",))
    top = llvm.broadcast(builder, top)
    total = cgutils.alloca_once_value(builder, ZEROS)
    with cgutils.for_range(builder, vectors) as loop:
        place = offset(builder, scores, (loop.index, 4 * LANES))
        value = builder.fsub(load_numbers(builder, place, False), top)
        power = exponential(builder, value)
        # What is too small to count is nothing at all, so that lanes behind the end are.
        power = builder.select(builder.fcmp_ordered("<", value, numbers(-87.0)), ZEROS, power)
        llvm.store_vector(builder, power, place)
        builder.store(builder.fadd(builder.load(total), power), total)
    arguments = [ir.Constant(F32, 0.0), builder.load(total)]
    summed = call(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", F32, arguments, ("reassoc",))
    return builder.fdiv(ir.Constant(F32, 1.0), summed)


def _clear(builder: Any, out: Any, vectors: Any) -> None:
    with cgutils.for_range(builder, vectors) as loop:
        llvm.store_vector(builder, ZEROS, offset(builder, out, (loop.index, 4 * LANES)))


def scaled_output(narrow: bool) -> Any:
    """(sums, factor, out, vectors): sums times the fp32 number at an address, as bf16 where ``narrow``."""

    def emit(builder: Any, sums: Any, factor: Any, out: Any, vectors: Any) -> None:
        scale = llvm.broadcast(builder, load_numbers(builder, factor, False, 1))
        with cgutils.for_range(builder, vectors) as loop:
            value = load_numbers(builder, offset(builder, sums, (loop.index, 4 * LANES)), False)
            line = offset(builder, out, (loop.index, (2 if narrow else 4) * LANES))
            store_rounded(builder, builder.fmul(value, scale), line, 0, narrow)

    return llvm.emitted(emit, 4)


#: (scores, vectors) -> one over the sum: exponentials of scores against their largest, in place.
softmax = llvm.emitted(_softmax, 2, types.float32)
#: (address, vectors)
clear = llvm.emitted(_clear, 2)
