"""Machine code: what is compiled, and how Python calls it.

    @compiled               a function that other compiled functions call
    @entry                  a function that Python calls, with integers, floats and arrays
    kernel(name)            an entry whose source is imported only to compile it, by its name
    pack(arrays)            a named tuple of many arrays, for an entry's argument with that type

The functions are plain Python. ``builder`` compiles them with numba when the library is installed, into one shared
library for each level of processors (``processor.LEVELS``). This module loads the library; it imports neither numba
nor LLVM. An entry has a C interface: integers are 64 bits wide, floats are doubles, and an array is its address,
shape and strides.

A checkout whose kernels were not built, or whose sources have changed since, builds them once. If no library fits the
processor, numba compiles each entry when it is first called. With ``NUMBA_DISABLE_JIT=1`` in the environment the
functions run uncompiled, with the same results.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from threading import RLock
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np

from .core.errors import SettingsError, Unsupported
from .processor import LEVELS, Level, level

Function = TypeVar("Function", bound=Callable[..., Any])
#: A 64-bit integer, as in compiled code. In uncompiled code it widens fields of records, so sums do not overflow.
int64 = cast(Callable[[Any], int], np.int64)
#: Whether functions run uncompiled.
UNCOMPILED = os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")
PACKAGE = Path(__file__).parent
#: The folder of the built libraries, and the symbol with the digest and names of the sources of one.
BUILT, SOURCES_SYMBOL = PACKAGE / "built", "lookahead_sources"
SUFFIXES = {"linux": ".so", "darwin": ".dylib", "win32": ".dll"}

#: The functions to compile with their options, and all entries by name.
marked: list[tuple[Callable[..., Any], dict[str, Any]]] = []
entries: dict[str, Entry] = {}
_one = RLock()


def compiled(
    function: Function, variant: str = "", *, inline: bool = False, fastmath: bool | set[str] = False
) -> Function:
    """Mark a function that other compiled functions call. It must not create arrays or return views.

    Returns the function unchanged, and Python runs it uncompiled.

    Args:
        variant: distinguishes functions that differ only in their closures. The linker identifies functions by
            their name and the types of their arguments.
        inline: whether the function is inlined into every caller, so that its vectors stay in registers.
        fastmath: LLVM's flags for floating-point operations.
    """
    function.__qualname__ += variant
    marked.append((function, {"forceinline": inline, "fastmath": fastmath}))
    return function


def entry(function: Function, name: str = "", *, nogil: bool = False, **types: Any) -> Function:
    """Make a function an entry. Its annotations give the types of its arguments; see ``value_type_of``.

    Args:
        name: the entry's name, if not the function's.
        nogil: whether a call from Python releases the GIL.
        types: annotations of arguments that only a closure knows.
    """
    function.__annotations__.update(types)
    made = Entry(function, name or function.__name__.strip("_"), nogil)
    function.__qualname__ += made.name
    if made.name in entries:
        raise ValueError(f"two entries are called {made.name}")
    entries[made.name] = made
    return cast(Function, made)


class Entry:
    """A function that Python calls, or compiled code by its address."""

    def __init__(self, function: Callable[..., Any], name: str, nogil: bool) -> None:
        self.function = function
        self.name = name
        self._nogil = nogil

    def __call__(self, *values: Any) -> Any:
        return self._run(*values)

    @cached_property
    def value_types(self) -> list[Any]:
        """The types of the arguments, and of the result: int or None."""
        hints = get_type_hints(self.function, include_extras=True)
        names = self.function.__code__.co_varnames[: self.function.__code__.co_argcount]
        return [
            *(value_type_of(hints[name]) for name in names),
            None if hints["return"] is type(None) else int,
        ]

    @cached_property
    def _run(self) -> Callable[..., Any]:
        if UNCOMPILED:
            return self.function
        *value_types, _ = self.value_types
        c_types = [each for value_type in value_types for each in _c_types(value_type)]
        prototype = ctypes.CFUNCTYPE if self._nogil else ctypes.PYFUNCTYPE
        code = prototype(ctypes.c_int64, *c_types)(address(self.name))
        if len(c_types) == len(value_types) and not any(
            isinstance(value_type, Fields) for value_type in value_types
        ):
            return code

        def run(*values: Any) -> Any:
            words = list[Any]()
            for value, value_type in zip(values, value_types, strict=True):
                if isinstance(value_type, Array):
                    value_type.add(words, value)
                else:
                    words.append(value.address if isinstance(value_type, Fields) else value)
            return code(*words)

        return run


@cache
def kernel(name: str) -> Callable[..., int]:
    """The entry of this name, whose arguments are integers. A call releases the GIL."""
    code: Any = None

    def call(*values: int) -> int:
        nonlocal code
        if code is None:
            if UNCOMPILED:
                code = _builder().all_entries()[name].function
            else:
                c_types = [ctypes.c_int64] * len(values)
                code = ctypes.CFUNCTYPE(ctypes.c_int64, *c_types)(address(name))
        return cast(int, code(*values))

    return call


# The types of values.


@dataclass(frozen=True)
class Array:
    """An array of this dtype and number of dimensions; ``strided`` if it may be a view with gaps."""

    dtype: np.dtype[Any]
    dimensions: int
    strided: bool

    def add(self, words: list[Any], value: Any) -> None:
        """Append an array's address, shape and strides."""
        if (
            value.ndim != self.dimensions
            or value.dtype != self.dtype
            or not (self.strided or value.flags.c_contiguous)
        ):
            gaps = "" if self.strided else " without gaps"
            raise TypeError(
                f"an array must be {self.dtype} of {self.dimensions} dimensions{gaps}, got {value.dtype} of "
                f"shape {value.shape} and strides {value.strides}"
            )
        words.append(value.__array_interface__["data"][0])
        words += value.shape
        words += value.strides


@dataclass(frozen=True)
class Fields:
    """A named tuple. In compiled code its value is the address of its words.

    Attributes:
        fields: field -> (its type, the number of words before it).
        size: the number of words.
    """

    record: type

    @cached_property
    def fields(self) -> dict[str, tuple[Any, int]]:
        fields = {}
        before = 0
        for name, hint in get_type_hints(self.record, include_extras=True).items():
            fields[name] = value_type_of(hint), before
            before += words_of(value_type_of(hint))
        return fields

    @property
    def size(self) -> int:
        return sum(words_of(value_type) for value_type, _ in self.fields.values())


@cache
def value_type_of(hint: Any) -> Any:
    """The type of values of an annotation: int, float, ``Array``, a tuple of them, or ``Fields``, a named tuple.

    An array is ``Annotated[Any, dtype, dimensions]``, followed by "strided" if it may be a view with gaps.
    """
    if hint in (int, float):
        return hint
    if hint is bool:
        return int
    if get_origin(hint) is tuple:
        return tuple(value_type_of(each) for each in get_args(hint))
    if get_origin(hint) is Annotated:
        _, dtype, dimensions, *strided = get_args(hint)
        return Array(np.dtype(dtype), dimensions, bool(strided))
    return Fields(hint)


def words_of(value_type: Any) -> int:
    """The number of words of a value."""
    if isinstance(value_type, Fields):
        return value_type.size
    if isinstance(value_type, tuple):
        return sum(map(words_of, value_type))
    return 1 + 2 * value_type.dimensions if isinstance(value_type, Array) else 1


def _c_types(value_type: Any) -> list[Any]:
    """The C types of an argument."""
    if value_type is float:
        return [ctypes.c_double]
    return [ctypes.c_int64] * (words_of(value_type) if isinstance(value_type, Array) else 1)


class Packed:
    """The words of a named tuple of arrays, and their address. The caller must keep the arrays alive."""

    def __init__(self, words: Sequence[int]) -> None:
        self._words = np.array(words, np.int64)
        self.address: int = self._words.ctypes.data


def pack(arrays: Any) -> Any:
    """The addresses, shapes and strides of all arrays of a named tuple, and its integers, for an entry.

    Passing 50 arrays separately costs 50 us; passing one costs a hundredth. Uncompiled, this returns the named tuple.

    Raises:
        TypeError: an array does not have the dtype, dimensions or layout that its field declares.
    """
    if UNCOMPILED:
        return arrays
    words = list[int]()

    def add(value: Any, value_type: Any) -> None:
        if isinstance(value_type, Array):
            value_type.add(words, value)
        elif value_type is int:
            words.append(int(value))
        else:
            parts = (
                value_type
                if isinstance(value_type, tuple)
                else [each for each, _ in value_type.fields.values()]
            )
            for each, part in zip(value, parts, strict=True):
                add(each, part)

    record: Any = type(arrays)
    add(arrays, value_type_of(record))
    return Packed(words)


# Finding the code.


@cache
def address(name: str) -> int:
    """The address of an entry's machine code.

    Raises:
        Unsupported: functions run uncompiled.
        SettingsError: no library fits this processor, and numba is not installed.
    """
    if UNCOMPILED:
        raise Unsupported("NUMBA_DISABLE_JIT is set; unset it for compiled passes")
    with _one:
        library = load()
        try:
            code = None if library is None else library[name]
        except AttributeError:  # not an entry of this package
            code = None
        return (
            int(_builder().address(name)) if code is None else ctypes.cast(code, ctypes.c_void_p).value or 0
        )


@cache
def load() -> ctypes.CDLL | None:
    """The library for this processor; None if there is none that fits."""
    if level() not in LEVELS or sys.platform not in SUFFIXES:
        return None
    path = path_of(BUILT, level(), sys.platform)
    if (PACKAGE.parents[1] / "hatch_build.py").exists():  # a checkout
        _keep_up_to_date(path)
    if not path.exists():
        return None
    return _open(path)


def path_of(folder: Path, level: Level, system: str) -> Path:
    """The library for a level of processors and a system (``sys.platform``)."""
    return folder / f"{level.name}{SUFFIXES[system]}"


def _open(path: Path) -> ctypes.CDLL:
    with_mathematics()
    return ctypes.CDLL(str(path))


def with_mathematics() -> None:
    """Make the C library's logarithms and exponentials known to all libraries."""
    if sys.platform == "linux":
        with suppress(OSError):  # musl has them in its one library
            ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)


def _keep_up_to_date(path: Path) -> None:
    """Build a checkout's library if it is missing or its sources have changed."""
    if is_current(path):
        return
    from filelock import FileLock

    BUILT.mkdir(exist_ok=True)
    with FileLock(BUILT / "lock"):
        if is_current(path):
            return
        print("lookahead: building the kernels, which have changed; this takes a minute", file=sys.stderr)
        command = [sys.executable, "-m", f"{__package__}.builder", str(BUILT), level().name]
        environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            path.unlink(missing_ok=True)
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            print(f"lookahead: not built ({reason}); each process compiles them", file=sys.stderr)


def is_current(path: Path) -> bool:
    """Whether a library is there and its sources are those of this package.

    It is not loaded: a process that has loaded a library gets it again, even after another one has taken its place.
    """
    found = (
        re.search(rb"([0-9a-f]{64})((?:\n[\w./\\]+\.py)+)\0", path.read_bytes()) if path.exists() else None
    )
    return found is not None and found[1].decode() == digest_of(found[2].decode().split())


def digest_of(names: Sequence[str]) -> str:
    """A digest of source files of this package; empty if one is missing."""
    digest = hashlib.sha256()
    for name in names:
        try:
            digest.update((PACKAGE / name).read_bytes())
        except OSError:
            return ""
    return digest.hexdigest()


def _builder() -> Any:
    """The module ``builder``, which imports numba and the sources of the kernels."""
    try:
        return import_module(f"{__package__}.builder")
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "llvmlite"):
            raise
        raise SettingsError(
            f"the kernels must be compiled for this processor ({level().name}): no built library fits it, and numba "
            "is not installed; pip install 'lookahead-decoding[jit]'"
        ) from None
