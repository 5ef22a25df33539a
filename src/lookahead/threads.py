"""Small torch work between steps runs on one thread.

A parallel region of torch's OpenMP threads would first have to wait for a core that the threads of a compiled step
(``targets.cpu``) hold on to for the next step, or leave its own threads spinning when that begins: on two cores
either costs several steps. Between steps there are rows of one vocabulary, which one thread does as quickly.

The number of OpenMP threads belongs to the calling thread. ``torch.set_num_threads`` changes it, and beside it the
number that threads yet to come begin with, which must stay as the user has set it; so OpenMP is asked itself.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch


def _setter() -> Callable[[int], object]:
    """Sets the calling thread's number of OpenMP threads."""
    try:
        found = ctypes.CDLL(None).omp_set_num_threads  # torch has loaded it for all
    except (OSError, AttributeError, TypeError):
        return torch.set_num_threads
    found.argtypes, found.restype = [ctypes.c_int], None
    before = torch.get_num_threads()
    try:  # there may be two such libraries, of which torch uses the other
        found(before + 1)
        mine = torch.get_num_threads() == before + 1
    finally:
        found(before)
    return found if mine else torch.set_num_threads


class _Local(threading.local):
    depth = 0
    before: int | None = None  # what an outermost block found, where it is not to stay at one


_local, _set = _Local(), _setter()


class OneThread:
    """A context in which torch's operations on the CPU run on the calling thread; nested and shared as one likes."""

    def __enter__(self) -> None:
        if _local.depth == 0:
            before = thread_count()
            if before > 1:
                _local.before = before
                _set(1)
        _local.depth += 1

    def __exit__(self, *error: object) -> None:
        if _local.depth <= 1:
            thread_count()
        else:
            _local.depth -= 1


def thread_count() -> int:
    """Torch's threads for the calling thread, which is in no block: what one left undone at an interrupt is done."""
    if _local.before is not None:
        _set(_local.before)
        _local.before = None
    _local.depth = 0
    return torch.get_num_threads()


one_thread = OneThread()
