"""Pools of threads that share a job: the caller (rank 0) and its helpers.

A job is the address of a compiled function of (argument, control, rank, size, arrived), which every thread calls. The
process has one pool for each number of threads, and a pool does one job at a time. A pool of one thread has no
helpers and never waits. ``kernels.workers`` explains how threads wait, and the order of their accesses to the words
that they share.
"""

from __future__ import annotations

import contextlib
import os
import threading
from functools import cache
from typing import Any

import numpy as np

from ..machine_code import kernel

#: Stages of a pass with work stealing.
STAGES = 5


def _fields(*fields: tuple[str, int]) -> np.dtype[Any]:
    """A record of 64-bit words, given as (name, offset in bytes). Words that many threads poll have their own cache
    lines."""
    names, offsets = zip(*fields, strict=True)
    return np.dtype({"names": names, "formats": ["i8"] * len(names), "offsets": offsets, "itemsize": 192})


#: A pool's words: the number of jobs posted so far; the arrivals counted at barriers; the job, its argument, the
#: number of threads, and the arrivals counted before the job.
CONTROL = _fields(
    ("posted", 0), ("arrived", 64), ("job", 128), ("argument", 136), ("size", 144), ("arrived_before", 152)
)
#: A thread's words: whether it sleeps, and whether ``post`` found it asleep; the last job that it has seen; 16 bytes
#: for the clock; and how many items of its share of each stage are taken.
RANK = _fields(("asleep", 0), ("woken", 8), ("seen", 16), ("scratch", 24), ("taken", 64))
#: Compiled: run a helper's jobs until none comes; post a job; run rank 0's part of it.
serve, post, lead = (kernel(name) for name in ("serve", "post", "lead"))


class ThreadPool:
    """``size`` threads, including the caller. The helpers are daemons and end with the process.

    Attributes:
        control: the pool's words, a record of ``CONTROL``.
        ranks: the words of its threads, (size,) of ``RANK``.
        address: the address of the control block, for compiled code.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.control, self.ranks, self.address = control_block(size)
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
            serve(self.address, rank)
            # If the caller is interrupted between posting and waking, nothing wakes this helper. So it checks for a
            # job once a second; ``serve`` would poll for ``AWAKE`` us each time.
            while not wake.acquire(timeout=1.0) and self.control["posted"] == self.ranks["seen"][rank]:
                pass

    def run(self, job: int, argument: int, owner: object) -> None:
        """Run a job on all threads. Returns when all have finished.

        Args:
            job: the address of a compiled function (see the module).
            argument: the address that is passed to it.
            owner: the object that owns the memory there. The pool keeps it alive, because an interrupt may leave a
                posted job that the next call finishes.
        """
        with self._one_job:
            lead(self.address)  # finish a job left by an interrupt; the helpers are waiting for it
            self._owner = owner
            try:
                self.post(job, argument)
            finally:
                lead(self.address)
            self._owner = None

    def post(self, job: int, argument: int) -> None:
        """Post a job, and wake the helpers that sleep."""
        if not post(self.address, job, argument):
            return
        for rank in range(1, self.size):
            if self.ranks["woken"][rank]:
                self.ranks["woken"][rank] = 0
                with contextlib.suppress(RuntimeError):  # already awake
                    self._wake_locks[rank].release()


def control_block(size: int) -> tuple[Any, Any, int]:
    """The control block of a pool: a record of ``CONTROL``, (size,) of ``RANK``, and the address of both."""
    memory = np.zeros(CONTROL.itemsize + RANK.itemsize * size + 64, np.uint8)
    first = -memory.ctypes.data % 64  # a block begins on a cache line
    memory = memory[first : first + CONTROL.itemsize + RANK.itemsize * size]
    control = memory[: CONTROL.itemsize].view(CONTROL)[0]
    ranks = memory[CONTROL.itemsize :].view(RANK)
    control["size"] = size
    return control, ranks, memory.ctypes.data


_alone = threading.local()
#: (process id, threads) -> pool; a forked process has no threads of its parent's pools.
_shared = cache(lambda process, size: ThreadPool(size))


def thread_pool(size: int) -> ThreadPool:
    """The pool of this many threads; for a single thread, the calling thread's own pool."""
    if size == 1 and not hasattr(_alone, "pool"):
        _alone.pool = ThreadPool(1)
    pool: ThreadPool = _alone.pool if size == 1 else _shared(os.getpid(), size)
    return pool
