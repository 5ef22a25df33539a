"""Compiles functions with numba and caches the machine code on disk. No other module does this.

    @compiled               a function that other compiled functions call
    @entry                  a function that Python calls; numba infers the types from the arguments of a call
    MachineCode(f, n)       a function of n 64-bit integers, called by its address
    pack, unpack_as(T)      pass a named tuple of many arrays as one array of their addresses
    compile_ahead(f)        calls f in another process, to cache the machine code on disk

The functions are plain Python, and can be read and debugged as such: with ``NUMBA_DISABLE_JIT=1`` in the environment
they run uncompiled, with the same results.

Only this module uses numba's internals; .github/workflows/numba.yml tests them with the oldest and the newest version
that pyproject.toml allows:

- ``FunctionCache._index_key``, and the attribute ``_cache`` of a dispatcher and of a ``CFunc``, because the key that
  ``cache=True`` uses cannot include other files; ``FunctionCache.save_overload``, because an error ends the program
- the class ``CFunc``, because ``numba.cfunc`` compiles immediately, without that cache
- the option ``_nrt``
- ``JITCodeLibrary``, the code of one function: numba optimizes a function alone and again in each caller, here once
- ``CompilerBase`` and ``DefaultPassBuilder``, to give a function that library; ``AttributeTemplate``, for the type of
  packed fields

Numba's disk cache treats code as current while the function's own file is unchanged. Ours call functions in other
files, directly and through closures, so the key includes a digest of every file of the function's package.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import event
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_getattr_generic,
    models,
    register_jitable,
    register_model,
)
from numba.np.arrayobj import populate_array

Function = TypeVar("Function", bound=Callable[..., Any])
#: A 64-bit integer, as in compiled code. In uncompiled code it widens fields of records, so sums do not overflow.
int64 = cast(Callable[[Any], int], np.int64)
#: Division as in numpy. No compiled function creates an array, so none needs numba's reference counting, which would
#: take ten times as long as the work on one node of a tree. These functions are never called from C; skipping the
#: wrapper saves 10 % of compile time.
_OPTIONS = {"error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}
#: Message printed when a process compiles for longer than ``PATIENCE``.
MESSAGE = (
    "lookahead: compiling for this processor takes about 15 seconds; later starts load the code from disk"
)
#: Seconds of compilation, or of waiting for it, after which the message is printed.
PATIENCE = 1.0
#: The longest wait for another process, in seconds. Compilation takes less even on a slow machine.
LONGEST = 120.0


class _Part(JITCodeLibrary):  # type: ignore[misc]  # numba has no types
    """The code of a function that only compiled functions call.

    It is linked into its callers and optimized there. Numba would also optimize and emit it here, unused; skipping
    that saves a quarter of compile time.
    """

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing: no machine code here refers to the environment."""


class _PartCompiler(CompilerBase):  # type: ignore[misc]
    """Numba's compiler, which puts the code into a ``_Part``."""

    def define_pipelines(self) -> Any:
        state = self.state
        state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        return [DefaultPassBuilder.define_nopython_pipeline(state)]


def compiled(
    function: Function, variant: str = "", *, inline: bool = False, fastmath: bool | set[str] = False
) -> Function:
    """Compile a function that other compiled functions call. It must not create arrays or return views.

    Returns the function unchanged: Python runs it uncompiled, and numba emits no wrapper for calls from Python.

    Args:
        variant: distinguishes functions that differ only in their closures. The linker identifies functions by
            their name and the types of their arguments.
        inline: whether the function is inlined into every caller, so that its vectors stay in registers.
        fastmath: LLVM's flags for floating-point operations.
    """
    function.__qualname__ += variant
    result: Function = register_jitable(
        **_OPTIONS, forceinline=inline, fastmath=fastmath, pipeline_class=_PartCompiler
    )(function)
    return result


def entry(function: Function, variant: str = "", *, nogil: bool = False) -> Function:
    """Compile a function that Python calls. Its machine code is cached on disk if there is a writable folder.

    Args:
        variant: see ``compiled``.
        nogil: whether a call releases the GIL.
    """
    function.__qualname__ += variant
    result = numba.njit(**_OPTIONS, nogil=nogil)(function)
    if result is not function:  # with the JIT off, numba returns the function itself
        _keep_on_disk(result, function)
    return cast(Function, result)


class MachineCode:
    """A function of 64-bit integers that returns nothing, compiled or loaded from disk, with its address.

    The address is valid while this object exists.

    Args:
        arguments: the number of arguments.
        variant: see ``compiled``.
    """

    def __init__(self, function: Callable[..., Any], arguments: int, variant: str) -> None:
        function.__qualname__ += variant
        signature = (types.int64,) * arguments, types.void
        self._code = CFunc(function, signature, {}, {"error_model": "numpy", "_nrt": False})
        _keep_on_disk(self._code, function)
        self._code.compile()
        address: Any = self._code.address
        self.address: int = address


#: Cached, because numba would build the type of a record again in each call, in 20 us.
_type_of = cache(numba.from_dtype)


def pack(arrays: Any) -> Any:
    """The addresses, shapes and strides of all arrays of a named tuple, and its integers, for ``unpack_as``.

    Passing 50 arrays separately costs 7 us, or 50 us with cold caches; passing one costs a tenth. The caller must
    keep the arrays alive. With the JIT off, this returns the named tuple.

    Raises:
        TypeError: an array does not have the dtype, dimensions or layout that its field declares.
    """
    if numba.config.DISABLE_JIT:
        return arrays
    words = list[int]()

    def add(value: Any, kind: Any) -> None:
        if isinstance(kind, _Fields | types.BaseTuple):
            parts = kind if isinstance(kind, types.BaseTuple) else [of for of, _ in kind.fields.values()]
            for each, of in zip(value, parts, strict=True):
                add(each, of)
        elif isinstance(kind, types.Array):
            fits = value.ndim == kind.ndim and _type_of(value.dtype) == kind.dtype
            if not fits or (kind.layout == "C" and not value.flags.c_contiguous):
                raise TypeError(f"an array must be {kind}, got {value.dtype} of shape {value.shape}")
            words.extend((value.ctypes.data, *value.shape, *value.strides))
        else:
            words.append(int(value))

    kind: Any = type(arrays)
    add(arrays, _kind_of(kind))
    return np.array(words, np.int64)


def unpack_as(kind: type) -> Any:
    """Make the function that compiled code calls to view the result of ``pack`` as the named tuple again.

    Functions pass the address on, and each field access loads from it. By value, 50 arrays would be 400 arguments per
    function.
    """
    if numba.config.DISABLE_JIT:
        return lambda packed: packed

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    @intrinsic  # type: ignore[untyped-decorator]
    def unpack(_: Any, packed: Any) -> Any:
        return _kind_of(kind)(packed), emit

    return unpack


class _Fields(types.Type):  # type: ignore[misc]  # numba has no types
    """The type of a packed named tuple in compiled code; its value is the address of the words.

    Attributes:
        fields: field -> (its type, the number of words before it).
        size: the number of words.
    """

    def __init__(self, kind: type) -> None:
        super().__init__(f"{kind.__module__}.{kind.__qualname__}")
        self.fields: dict[str, tuple[Any, int]] = {}
        self.size = 0
        for name, hint in get_type_hints(kind, include_extras=True).items():
            self.fields[name] = _kind_of(hint), self.size
            self.size += _size_of(_kind_of(hint))


@register_model(_Fields)
class _FieldsModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.IntType(64).as_pointer())


@infer_getattr
class _FieldsTyping(AttributeTemplate):  # type: ignore[misc]
    key = _Fields

    def generic_resolve(self, fields: Any, name: str) -> Any:
        return fields.fields[name][0] if name in fields.fields else None


@lower_getattr_generic(_Fields)  # type: ignore[untyped-decorator]
def _emit_field(context: Any, builder: Any, fields: Any, address: Any, name: str) -> Any:
    kind, before = fields.fields[name]
    return _emit_read(
        context, builder, kind, builder.gep(address, [context.get_constant(types.intp, before)])
    )


def _emit_read(context: Any, builder: Any, kind: Any, address: Any) -> Any:
    """Emit the instructions that load a value from its words."""
    numbers = count()

    def word() -> Any:
        place = builder.gep(address, [context.get_constant(types.intp, next(numbers))])
        loaded = builder.load(place)
        # No compiled code writes the words, so LLVM may reuse one load for all uses of the value.
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return loaded

    if isinstance(kind, _Fields):
        return address
    if isinstance(kind, types.BaseTuple):
        parts = []
        for each in kind:
            parts.append(_emit_read(context, builder, each, address))
            address = builder.gep(address, [context.get_constant(types.intp, _size_of(each))])
        return context.make_tuple(builder, kind, parts)
    if not isinstance(kind, types.Array):
        return word()
    array = context.make_array(kind)(context, builder)
    data = builder.inttoptr(word(), array.data.type)
    shape = [word() for _ in range(kind.ndim)]
    strides = [word() for _ in range(kind.ndim)]
    size = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None)
    return array._getvalue()


@cache
def _kind_of(kind: Any) -> Any:
    """Numba's type for an annotation: a named tuple, a tuple, ``int``, or an array.

    An array is ``Annotated[Any, dtype, dimensions]``, followed by "strided" if it may be a view with gaps.
    """
    if get_origin(kind) is tuple:
        return types.Tuple([_kind_of(each) for each in get_args(kind)])
    if kind is int:
        return types.int64
    if get_origin(kind) is Annotated:
        _, dtype, dimensions, *strided = get_args(kind)
        return types.Array(numba.from_dtype(np.dtype(dtype)), dimensions, "A" if strided else "C")
    return _Fields(kind)


def _size_of(kind: Any) -> int:
    """The number of words of a value."""
    if isinstance(kind, _Fields):
        return kind.size
    if isinstance(kind, types.BaseTuple):
        return sum(map(_size_of, kind))
    return 1 + 2 * kind.ndim if isinstance(kind, types.Array) else 1


class _Cache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """Numba's disk cache, whose key also covers other source files."""

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        return signature, codegen.magic_tuple(), _digest_for(self._py_func.__code__.co_filename)

    def save_overload(self, signature: Any, code: Any) -> None:
        with suppress(OSError):  # on a full disk, the next process compiles the function again
            super().save_overload(signature, code)


def _keep_on_disk(code: Any, function: Callable[..., Any]) -> None:
    with suppress(RuntimeError):  # without a writable folder, each process compiles the function
        code._cache = _Cache(function)


@cache
def _digest_for(file: str) -> str:
    """A digest of the sources that a function in this file may call.

    They are ``jit``, what is compiled in sampling/, and the function's package: cpu/ or drafters/adaptive/.
    """
    library = Path(__file__).parent
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for name in ("draws.py", "top.py"):
        digest.update((library / "sampling" / name).read_bytes())
    path = Path(file)
    if library in path.parents:
        parts = path.relative_to(library).parts
        path = library.joinpath(*parts[: 1 if parts[0] == "cpu" else 2])
    for each in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        digest.update(each.read_bytes())
    return digest.hexdigest()


class _Compilation(event.Listener):  # type: ignore[misc]
    """Adds up the seconds of compilation in this process, and prints one line if it takes long."""

    def __init__(self) -> None:
        self._depth = 0
        self._begin = 0.0
        self._seconds = 0.0
        self._said = False

    def on_start(self, _: Any) -> None:
        if self._depth == 0:
            self._begin = perf_counter()
        self._depth += 1

    def on_end(self, ended: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and (ended.data["dispatcher"].py_func.__module__ or "").startswith(__package__):
            self._seconds += perf_counter() - self._begin
            if self._seconds > PATIENCE:
                self.say()

    def say(self) -> None:
        """Print the line once per process, and on rank 0 only."""
        if not self._said and sys.stderr is not None and os.environ.get("RANK", "0") == "0":
            print(MESSAGE, file=sys.stderr, flush=True)
        self._said = True


_compilation = _Compilation()
# Loading from disk does not trigger this event.
event.register("numba:compile", _compilation)

_ahead: dict[Callable[[], None], subprocess.Popen[bytes]] = {}


def compile_ahead(function: Callable[[], None]) -> None:
    """Call a function in another process, to cache the code that it compiles on disk. Does not wait for it.

    Nothing happens if such a process has already run with these files on this processor, or if there is only one
    core. An error there costs only time: functions that are not on disk are compiled when they are called.

    Args:
        function: calls every entry to be compiled. Its module must be importable.
    """
    mark = _mark_of(function)
    if function in _ahead or mark is None or mark.exists() or (os.cpu_count() or 1) < 2 or not sys.executable:
        return
    program = (
        # Garbage collection would take a tenth of the time.
        "import gc; gc.disable(); "
        f"from {function.__module__} import {function.__name__}; {function.__name__}(); "
        f"from pathlib import Path; Path({str(mark)!r}).touch()"
    )
    quiet = subprocess.DEVNULL
    with suppress(OSError):
        _ahead[function] = subprocess.Popen(
            [sys.executable, "-c", program], stdin=quiet, stdout=quiet, stderr=quiet
        )


def wait_for_compilation() -> None:
    """Wait until the processes that ``compile_ahead`` started have finished."""
    while _ahead:
        _, process = _ahead.popitem()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            _compilation.say()
            with suppress(subprocess.TimeoutExpired):
                process.wait(LONGEST)


def _mark_of(function: Callable[[], None]) -> Path | None:
    """Marker file: ``compile_ahead`` has run this function. None if there is no folder for compiled code."""
    try:
        folder = _Cache(function).cache_path
    except RuntimeError:
        return None
    processor = numba.config.CPU_NAME, numba.config.CPU_FEATURES, llvmlite.binding.get_host_cpu_name()
    parts = (
        numba.__version__,
        platform.python_version(),
        _digest_for(function.__code__.co_filename),
        processor,
    )
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return Path(folder) / f"{function.__module__}.{function.__name__}.{digest}.compiled"
