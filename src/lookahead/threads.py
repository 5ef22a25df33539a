"""``one_thread``: small torch operations between steps run on one thread.

The threads of a compiled step (``targets.cpu``) keep their cores for a while to wait for the next step. A parallel
region of torch's OpenMP threads would wait for a free core, or leave its own threads spinning when the next step
begins; on two cores either costs several steps. Operations between steps are on rows of one vocabulary, which one
thread does as fast.

The number of OpenMP threads is a property of the calling thread. ``torch.set_num_threads`` also changes the number
for threads that start later, which must remain the user's; so this module calls OpenMP directly.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch


def _setter() -> Callable[[int], object]:
    """The function that sets the calling thread's number of OpenMP threads."""
    try:
        set_threads = ctypes.CDLL(None).omp_set_num_threads  # of the library that torch has loaded
    except (OSError, AttributeError, TypeError):
        return torch.set_num_threads
    set_threads.argtypes, set_threads.restype = [ctypes.c_int], None
    before = torch.get_num_threads()
    try:  # two OpenMP libraries may be loaded, and torch may use the other
        set_threads(before + 1)
        works = torch.get_num_threads() == before + 1
    finally:
        set_threads(before)
    return set_threads if works else torch.set_num_threads


class _Local(threading.local):
    depth = 0
    before: int | None = None  # the number before the outermost block, if that was not one


_local, _set = _Local(), _setter()


class OneThread:
    """A context in which torch's CPU operations run on the calling thread only. Blocks may be nested, and the object
    may be shared between threads."""

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
    """Torch's number of threads for the calling thread, which must be in no block. If an interrupt left a block
    without restoring the number, it is restored now."""
    if _local.before is not None:
        _set(_local.before)
        _local.before = None
    _local.depth = 0
    return torch.get_num_threads()


one_thread = OneThread()
