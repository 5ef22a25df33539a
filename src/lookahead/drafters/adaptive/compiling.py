"""How the functions of this package are compiled: by numba, as they stand; read or debug them as plain Python.

``NUMBA_DISABLE_JIT=1`` in the environment leaves them uncompiled, with the same results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.core.caching import FunctionCache

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """A function that other compiled functions call."""
    result: Function = njit(error_model="numpy")(function)
    return result


def entry(function: Function) -> Function:
    """A function that Python calls; its machine code is kept on disk, where there is a folder to write to."""
    result: Any = njit(error_model="numpy")(function)
    if hasattr(result, "_cache"):  # not so where the JIT is off
        try:
            result._cache = _Cache(function)
        except RuntimeError:  # no folder that can be written to: compiled in each process
            pass
    typed: Function = result
    return typed


class _Cache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """Numba's, which looks at the file of the entry alone, and not at what that calls."""

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        return (*super()._index_key(signature, codegen), _text_of_package())


@cache
def _text_of_package() -> str:
    """Changes with the text of any file here."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
