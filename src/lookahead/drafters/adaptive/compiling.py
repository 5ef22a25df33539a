"""Compiles the functions of this package with numba. They are plain Python, to be read and debugged as such.

``NUMBA_DISABLE_JIT=1`` in the environment leaves them uncompiled, with the same results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core.caching import FunctionCache

Function = TypeVar("Function", bound=Callable[..., Any])
#: The newest version of numba whose private parts (``_cache`` of a dispatcher, ``entry_point`` of an overload) are
#: known to be as they are used here. With a newer one, functions are compiled in each process and called the public
#: way, which takes longer and gives the same results.
CHECKED = (0, 68)
#: A number as compiled code holds it; uncompiled, it makes sums of narrower fields of records as wide as there.
int64 = cast(Callable[[Any], int], np.int64)
#: Numba has types for part of its settings only.
_njit = cast(Callable[..., Any], numba.njit)


def numba_version() -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(int(part) for part in numba.__version__.split(".")[:2])


def _jit(function: Any) -> Any:
    # No function here makes or returns an array, so none needs numba's counts of references to them, which would
    # cost a node of the tree ten times what its computation does.
    return _njit(error_model="numpy", _nrt=False)(function)


def compiled(function: Function) -> Function:
    """A function that other compiled functions call. It must not make arrays, and views only for itself."""
    result: Function = _jit(function)
    return result


def entry(function: Function) -> Function:
    """A function that Python calls, always with arguments of the same types: dtypes, dimensions and layouts.

    Its machine code is kept on disk, where there is a folder to write to.
    """
    result = _jit(function)
    if result is not function and numba_version() <= CHECKED:  # the same function where the JIT is off
        # Without a folder that can be written to it is compiled in each process.
        with suppress(RuntimeError):
            result._cache = _Cache(function)
        result = _Entry(result)
    typed: Function = result
    return typed


class _Entry:
    """Numba finds out the types of all arguments at every call; with arrays by the dozen that takes most of it."""

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher
        self._machine_code: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if self._machine_code is not None:
            return self._machine_code(*arguments)
        result = self._dispatcher(*arguments)
        (overload,) = self._dispatcher.overloads.values()
        self._machine_code = overload.entry_point
        return result


def is_on_disk(function: Any) -> bool:
    """Whether the code of an entry is on disk; also true where it will never be."""
    cache = getattr(getattr(function, "_dispatcher", None), "_cache", None)
    if not isinstance(cache, _Cache):
        return True
    return any(key[-1] == _text_of_package() for key in cache._cache_file._load_index())


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's, which looks at the file of the entry alone, and not at what that calls."""

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        key = super()._index_key(signature, codegen)
        return (*key, _text_of_package())


@cache
def _text_of_package() -> str:
    """Changes with the text of any file here."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
