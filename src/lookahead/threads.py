"""``one_thread``: runs small torch operations between steps on a single thread.

After a compiled step (``cpu``), its threads keep polling for the next step for a while. A parallel region of
torch's OpenMP threads would have to wait for a free core, or its threads would still be spinning when the next step
begins; on two cores, either takes as long as several steps. Operations between steps work on single rows of logits,
for which one thread is as fast.

The thread count is a property of the calling thread, but ``torch.set_num_threads`` also changes it for threads that
start later, and so overwrites the user's setting. A thread that started while another was in a block gets the user's
count when it first calls this module.

This module does not import torch, because packed weights are decoded without it, which saves a second at every start.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any


def _torch() -> Any:
    """The module torch if it has been imported, else None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "set_num_threads") else None


#: The count of ``set_thread_count``, until torch knows it.
_chosen: int | None = None


def set_thread_count(count: int) -> None:
    """Set the number of threads of compiled passes and of torch, for the whole process."""
    global _chosen
    _chosen = count
    thread_count()


@cache
def _default_count() -> int:
    """torch's default thread count: OMP_NUM_THREADS, or the number of cores that this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    try:
        processors = os.sched_getaffinity(0)
    except AttributeError:  # not on this system
        return os.cpu_count() or 1
    cores = set()
    for processor in processors:
        core = str(processor)
        with suppress(OSError):  # threads of one core list the same siblings
            core = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list").read_text()
        cores.add(core)
    return len(cores)


class _Local(threading.local):
    depth = 0
    before: int | None = None  # the count before the outermost block, unless it was 1
    known = False  # whether this thread has called ``thread_count``


_local = _Local()
#: The earlier counts of the threads inside a block, by thread.
_inside: dict[int, int] = {}


class OneThread:
    """A context manager in which torch's CPU operations run on the calling thread only. Blocks may be nested, and
    threads may share the object."""

    def __enter__(self) -> None:
        if _local.depth == 0 and _torch() is not None:
            before = thread_count()
            if before > 1:
                _local.before = before
                _inside[threading.get_ident()] = before
                _torch().set_num_threads(1)
        _local.depth += 1

    def __exit__(self, *error: object) -> None:
        if _local.depth <= 1:
            thread_count()
        else:
            _local.depth -= 1


def thread_count() -> int:
    """The number of threads that torch and compiled passes use in the calling thread. Do not call it in a block.

    If an interrupt left a block without restoring the count, it is restored here.
    """
    global _chosen
    torch = _torch()
    if _local.before is not None:
        torch.set_num_threads(_local.before)
        _inside.pop(threading.get_ident(), None)
        _local.before = None
    _local.depth = 0
    if torch is None:
        return _default_count() if _chosen is None else _chosen
    if _chosen is not None:
        torch.set_num_threads(_chosen)
        _chosen = None
    if not _local.known:
        others = list(_inside.values())
        if others and torch.get_num_threads() == 1:
            torch.set_num_threads(max(others))
        _local.known = True
    return int(torch.get_num_threads())


one_thread = OneThread()
