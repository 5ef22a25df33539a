"""Compiles the functions of this package with numba. They are plain Python, and can be read and debugged as such.

``NUMBA_DISABLE_JIT=1`` in the environment leaves them uncompiled, with the same results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core.caching import FunctionCache
from numba.extending import register_jitable

Function = TypeVar("Function", bound=Callable[..., Any])
#: The newest version of numba whose private attributes (``_cache`` of a dispatcher, ``entry_point`` of an overload)
#: are known to work as used here. With a newer version, each process compiles the functions and calls them through
#: the public interface, which takes longer and gives the same results.
CHECKED = (0, 68)
#: An integer as in compiled code. In uncompiled code it widens fields of records, so that sums do not overflow.
int64 = cast(Callable[[Any], int], np.int64)
#: Numba's type annotations lack some of the settings. No function here makes or returns an array, so none needs
#: numba's reference counting, which would take ten times as long as the computation for a node.
_njit, _register = (
    partial(cast(Callable[..., Any], decorator), error_model="numpy", _nrt=False)
    for decorator in (numba.njit, register_jitable)
)


def numba_version() -> tuple[int, ...]:
    """Numba's major and minor version."""
    return tuple(int(part) for part in numba.__version__.split(".")[:2])


def compiled(function: Function) -> Function:
    """A function that other compiled functions call. It must not create arrays or return views.

    It is returned as it is: Python runs it uncompiled, and numba emits no code with which Python could call it.
    """
    result: Function = _register(no_cfunc_wrapper=True)(function)
    return result


def entry(function: Function) -> Function:
    """A function that Python calls, always with arguments of the same types: dtypes, dimensions and layouts.

    Its machine code is cached on disk if there is a writable folder.
    """
    result = _njit()(function)
    if result is not function and numba_version() <= CHECKED:  # if the JIT is off, ``result`` is ``function``
        # Without a writable folder, it is compiled in each process.
        with suppress(RuntimeError):
            result._cache = _Cache(function)
        result = _Entry(result)
    typed: Function = result
    return typed


class _Entry:
    """Calls the machine code directly: numba's dispatcher infers the types of all arguments, which takes longer."""

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
    """Whether the code of an entry is on disk; also true if it is never cached there."""
    cache = getattr(getattr(function, "_dispatcher", None), "_cache", None)
    if not isinstance(cache, _Cache):
        return True
    return any(key[-1] == _text_of_package() for key in cache._cache_file._load_index())


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's cache checks the file of the entry only; this one checks all files of the package."""

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        key = super()._index_key(signature, codegen)
        return (*key, _text_of_package())


@cache
def _text_of_package() -> str:
    """A digest of the text of all files of this package."""
    digest = hashlib.sha256()
    here = Path(__file__)
    for path in (here, *sorted((here.parent / "drafters" / "adaptive").rglob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()
