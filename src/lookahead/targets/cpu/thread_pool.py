"""Threads that do one job together: the caller and helpers that sleep between requests.

A helper looks for the next job for a millisecond or two, because the next step of a text comes soon, and then sleeps
on a lock. One pool for each number of threads, for the whole process, that does one job at a time; a caller that
works alone needs no helpers and waits for nobody.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import numpy as np

from . import barrier
from .processor import STAMP


class ThreadPool:
    """``size`` threads, the caller among them. Its helpers are daemons and end with the process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = np.zeros(barrier.control_bytes(size) + 64, np.uint8)
        # A cache line of its own for each word that several threads look at.
        self._control = self._memory.ctypes.data + -self._memory.ctypes.data % 64
        begin = self._control - self._memory.ctypes.data + barrier.SIZE
        self._memory[begin : begin + 8].view(np.int64)[:] = size
        self._serve, self._post, self._lead = barrier.pool_code(STAMP)
        self._one_job = threading.Lock()
        self._owner: Any = None
        self._wake_locks = [threading.Lock() for _ in range(size)]
        for rank in range(1, size):
            name = f"lookahead-step-{rank}"
            threading.Thread(target=self._help, args=(rank,), name=name, daemon=True).start()

    def _help(self, rank: int) -> None:
        wake = self._wake_locks[rank]
        wake.acquire()
        while True:
            self._serve(self._control, rank)
            # Nobody wakes a helper whose leader was interrupted at the wrong moment: it looks for itself.
            wake.acquire(timeout=1.0)

    def run(self, job: int, argument: int, owner: object) -> None:
        """Let every thread do its part of a job; back when all have done it.

        Args:
            job: the address of compiled code (``barrier``).
            argument: an address that the job is given.
            owner: keeps alive what lies there. An interrupt may leave a job posted that the next call finishes.
        """
        with self._one_job:
            self._lead(self._control)  # what an interrupt left undone, if anything: the helpers wait for it
            self._owner = owner
            try:
                sleepers = self._post(self._control, job, argument)
                for rank in range(1, self.size) if sleepers else ():
                    if sleepers >> rank & 1:
                        with contextlib.suppress(RuntimeError):  # up already
                            self._wake_locks[rank].release()
            finally:
                self._lead(self._control)
            self._owner = None


_pools: dict[tuple[int, int], ThreadPool] = {}
_alone = threading.local()
_making = threading.Lock()


def thread_pool(size: int) -> ThreadPool:
    """The pool of this many threads, or of the calling thread alone; a forked process makes its own."""
    if size == 1:
        if not hasattr(_alone, "pool"):
            _alone.pool = ThreadPool(1)
        alone: ThreadPool = _alone.pool
        return alone
    key = (os.getpid(), size)
    found = _pools.get(key)
    if found is None:
        with _making:
            found = _pools.get(key) or _pools.setdefault(key, ThreadPool(size))
    return found
