"""What this processor offers to compiled code, and what numba lacks: typed memory at an address, and vectors.

``emitted`` turns a function that writes LLVM instructions into a function for compiled code. In both, addresses and
counts are 64-bit integers. A function whose first parameter is ``builder`` writes instructions. bf16 numbers are
represented as unsigned 16-bit integers.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import sys
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.extending import intrinsic, register_jitable


def _features() -> dict[str, bool]:
    """Features of the processor that numba compiles for: this one, unless numba's settings name another."""
    if config.CPU_FEATURES is not None:
        return {name[1:]: name.startswith("+") for name in config.CPU_FEATURES.split(",") if name}
    return {} if config.CPU_NAME == "generic" else dict(binding.get_host_cpu_features())


_FEATURES = _features()
X86 = platform.machine().lower() in ("x86_64", "amd64")
ARM = platform.machine().lower() in ("aarch64", "arm64")
#: fp32 numbers in a vector, vectors in the register file, and whether a * b + c is one instruction.
LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx2") else 4
REGISTERS = 32 if LANES == 16 or ARM else 16
FUSED = ARM or bool(_FEATURES.get("fma")) or LANES == 16


def _tiles_permitted() -> bool:
    """Ask Linux for tile registers (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA). Returns whether it grants them."""
    wanted = ("amx-tile", "amx-bf16")
    if not (X86 and sys.platform == "linux" and all(_FEATURES.get(name) for name in wanted)):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).syscall(158, 0x1023, 18) == 0)


#: bf16 products on matrix tiles (AMX).
TILES = LANES == 16 and _tiles_permitted()
#: bf16 products of pairs in vectors (AVX512-BF16).
PAIRS = LANES == 16 and X86 and bool(_FEATURES.get("avx512bf16"))
#: Instructions that sum four products of bytes (AVX512-VNNI, AVX-VNNI), and two (AVX2).
VNNI = X86 and (
    (LANES == 16 and bool(_FEATURES.get("avx512vnni"))) or (LANES == 8 and bool(_FEATURES.get("avxvnni")))
)
PAIRED_BYTES = X86 and LANES >= 8
#: An instruction that widens fp16 numbers (F16C).
HALVES = LANES == 16 or ARM or bool(_FEATURES.get("f16c"))


def _stamp() -> int:
    digest = hashlib.sha256(
        repr((LANES, REGISTERS, FUSED, TILES, PAIRS, VNNI, PAIRED_BYTES, HALVES)).encode()
    )
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7], "little")


#: Part of the name of compiled code on disk. It changes with the values above and with the text of any file in this
#: package.
STAMP = _stamp()
#: Lets LLVM sum in lanes and fuse multiply-adds; NaN and infinity keep their meaning.
REASSOCIATE = {"reassoc", "contract", "nsz"}

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, VOID = ir.FloatType(), ir.VoidType()
VECTOR, INTEGERS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
ZEROS = ir.Constant(VECTOR, None)


def jit(function: Any, variant: str = "", **options: Any) -> Any:
    """A function that compiled functions call, with numpy's rules for division.

    It is returned unchanged, so Python runs it uncompiled, and numba emits no machine code for it outside its
    callers. The code with which Python would call each function would take a fifth of the compilation time.

    Functions that differ only in what they close over need different ``variant`` texts: the linker identifies code
    from disk by its name and argument types.
    """
    function.__qualname__ += variant
    return register_jitable(error_model="numpy", no_cfunc_wrapper=True, **options)(function)


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's cache on disk, for functions that close over other functions: the name of the code has ``STAMP``."""

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        return signature, codegen.magic_tuple(), STAMP


def machine_code(function: Any, arguments: int, variant: str) -> Any:
    """Compile a function of 64-bit integers that returns nothing, or load its code from disk.

    The ``address`` of the result is valid as long as the result exists.

    Args:
        variant: tells functions that differ only in what they close over apart; see ``jit``.

    Raises:
        RuntimeError: numba has no folder for compiled code.
    """
    function.__qualname__ += variant
    signature = (types.int64,) * arguments, types.void
    code: Any = CFunc(function, signature, {}, {"error_model": "numpy"})
    code._cache = _Cache(function)
    code.compile()
    return code


def const(value: int) -> ir.Constant:
    """A 64-bit constant."""
    return ir.Constant(I64, value)


def offset(builder: Any, base: Any, *terms: Any) -> Any:
    """base + the sum of the terms. A term is a value, an int, or a pair whose product is added."""
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


def call_address(builder: Any, address: Any, *arguments: Any) -> None:
    """Call the compiled function at an address; arguments are 64-bit integers."""
    kind = ir.FunctionType(VOID, [I64] * len(arguments))
    builder.call(builder.inttoptr(address, kind.as_pointer()), list(arguments))


def load_numbers(builder: Any, address: Any, is_bf16: bool = False) -> Any:
    """A vector of fp32; if ``is_bf16``, it is widened from bf16 in memory."""
    if not is_bf16:
        return load(builder, address, VECTOR, 4)
    bits = builder.zext(load(builder, address, ir.VectorType(I16, LANES), 2), INTEGERS)
    return builder.bitcast(builder.shl(bits, integers(16)), VECTOR)


def widen_halves(builder: Any, bits: Any) -> Any:
    """fp16 to fp32; ``bits`` is a 16-bit integer or a vector of them.

    Without an instruction for this, exponent and fraction are shifted to their positions in fp32, and multiplying by
    2^112 corrects the exponent's bias (127 instead of 15), also for subnormal numbers. Infinity and NaN become large
    numbers, but scales of weights are neither.
    """
    wide = ir.VectorType(I32, bits.type.count) if isinstance(bits.type, ir.VectorType) else I32
    floats = ir.VectorType(F32, wide.count) if wide is not I32 else F32
    if HALVES:
        half = ir.VectorType(ir.HalfType(), wide.count) if wide is not I32 else ir.HalfType()
        return builder.fpext(builder.bitcast(bits, half), floats)

    def constant(kind: Any, value: Any) -> Any:
        if not isinstance(kind, ir.VectorType):
            return ir.Constant(kind, value)
        return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)

    bits = builder.zext(bits, wide)
    number = builder.shl(builder.and_(bits, constant(wide, 0x7FFF)), constant(wide, 13))
    number = builder.fmul(builder.bitcast(number, floats), constant(floats, 2.0**112))
    sign = builder.shl(builder.and_(bits, constant(wide, 0x8000)), constant(wide, 16))
    return builder.bitcast(builder.or_(builder.bitcast(number, wide), sign), floats)


def prefetch(builder: Any, address: Any, distance: int = 0, lines: int = 1) -> None:
    """Prefetch cache lines into the second-level cache, from ``distance`` bytes after an address."""
    hints = [ir.Constant(I32, number) for number in (0, 2, 1)]
    for line in range(lines):
        call(
            builder,
            "llvm.prefetch.p0",
            VOID,
            [at(builder, offset(builder, address, distance + 64 * line)), *hints],
        )


def store_vector(builder: Any, value: Any, address: Any) -> None:
    """Store LANES fp32 numbers."""
    builder.store(value, at(builder, address, value.type)).align = 4


def broadcast(builder: Any, value: Any, width: int = LANES) -> Any:
    """A vector with one value in every lane."""
    kind = ir.VectorType(value.type, width)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, first, integers(0, width))


def load_broadcast(builder: Any, address: Any, kind: Any = F32, width: int = LANES) -> Any:
    """The number at an address in every lane."""
    return broadcast(builder, load(builder, address, kind, 4), width)


def floats(value: float) -> ir.Constant:
    """An fp32 constant in every lane."""
    return ir.Constant(VECTOR, [ir.Constant(F32, value)] * LANES)


def integers(value: int, width: int = LANES) -> ir.Constant:
    """A 32-bit integer constant in every lane."""
    return ir.Constant(ir.VectorType(I32, width), [ir.Constant(I32, value)] * width)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c on vectors of fp32, rounded once if the processor can."""
    if FUSED:
        return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])
    return builder.fadd(builder.fmul(a, b), c)


def accumulate(
    builder: Any,
    rows: int,
    columns: int,
    steps: Any,
    load_columns: Callable[[Any], Sequence[Any]],
    factors: tuple[Any, Any],
    out: tuple[Any, Any],
    add: bool = False,
    multiply: Any = multiply_add,
) -> None:
    """A product in registers: out[row, column] = sum over the steps of factors[row, step] * columns[step, column].

    A column is a vector. The rows * columns sums stay in registers throughout all steps.

    Args:
        load_columns: (step) -> the vectors of the step, one for each column.
        factors, out: address of the first row, and bytes from row to row.
        add: whether the sums start from the values in ``out`` instead of zero.
        multiply: (builder, column, factor, sum) -> new sum.
    """

    def address_of(r: int, v: int) -> Any:
        return offset(builder, out[0], (out[1], r), 4 * LANES * v)

    sums = {(r, v): cgutils.alloca_once(builder, VECTOR) for r in range(rows) for v in range(columns)}
    for index, total in sums.items():
        builder.store(load_numbers(builder, address_of(*index)) if add else ZEROS, total)
    with cgutils.for_range(builder, steps) as loop:
        loaded = load_columns(loop.index)
        for r in range(rows):
            factor = load_broadcast(builder, offset(builder, factors[0], (factors[1], r), (loop.index, 4)))
            for v, column in enumerate(loaded):
                builder.store(multiply(builder, column, factor, builder.load(sums[r, v])), sums[r, v])
    for index, total in sums.items():
        store_vector(builder, builder.load(total), address_of(*index))


def in_blocks(builder: Any, count: Any, sizes: Sequence[int], emit: Callable[[int, Any], None]) -> None:
    """Divide ``count`` rows into blocks and call ``emit(rows of the block, first row)`` for each.

    Blocks are as large as possible. ``sizes`` are the allowed ones, largest first; the last is 1.
    """
    first: Any = const(0)
    for size in sizes:
        blocks = builder.udiv(builder.sub(count, first), const(size))
        with cgutils.for_range(builder, blocks) as loop:
            emit(size, offset(builder, first, (loop.index, size)))
        first = offset(builder, first, (blocks, size))


def emitted(emit: Callable[..., Any], arguments: int, result: Any = types.void) -> Any:
    """Make a function for compiled code from ``emit(builder, *values)``, which writes LLVM instructions.

    Args:
        arguments: the number of arguments; all are 64-bit integers.
        result: numba's type of the value that ``emit`` returns; void if it returns None.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        value = emit(builder, *values)
        return context.get_dummy_value() if value is None else value

    def typed(context: Any, *values: Any) -> Any:
        return result(*[types.int64] * arguments), generate

    # numba requires as many named arguments as there are values.
    names = ["context", *(f"value{n}" for n in range(arguments))]
    kind = Parameter.POSITIONAL_OR_KEYWORD
    typed.__signature__ = Signature([Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return intrinsic(typed)


def address_as(kind: Any) -> Any:
    """Make a function (address) -> value of a numba type: a pointer for ``carray``, or a record with named fields."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(kind))

    return intrinsic(lambda context, address: (kind(types.int64), generate))


floats_at, integers_at = (address_as(types.CPointer(kind)) for kind in (types.float32, types.int64))
