"""Pools of threads that work on a job together: the caller (rank 0) and its helpers.

A job is the address of a compiled function of (argument, control, rank, size, arrived), which every thread calls. The
process has one pool for each number of threads, and a pool does one job at a time. A pool of one thread has no
helpers and never waits.

After a job, a helper polls for the next one for 20 ms in compiled code, because the next step of a text comes soon;
then it sleeps on a lock in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import register_jitable

from .llvm import ARM, I32, I64, STAMP, VOID, X86, at, call, call_address, emitted, load

# The control block is memory that all threads of a pool share. These are the offsets of its 64-bit words: the number
# of jobs posted, the arrivals counted at barriers, the job with its argument and the pool's size, and the arrivals
# counted before the job. Then a part for each rank: whether it sleeps, the last job that it has seen, how many items
# of its share of each stage are taken (``take``), and whether ``post`` found it asleep. Words that many threads poll
# have separate cache lines.
JOB_NUMBER, ARRIVED, JOB, ARGUMENT, SIZE, ARRIVED_BEFORE = 0, 64, 128, 136, 144, 152
RANKS, RANK_BYTES, SEEN, TAKEN, WAKE, CLOCK, STAGES = 192, 128, 8, 16, 56, 64, 5
#: Iterations of a polling loop before a thread offers its core to others, and milliseconds before a helper sleeps;
#: waking it delays a pass by 1 to 5 ms. Iterations do not measure time: 100,000 take 20 ms on one processor and 85 ms
#: on another.
SPINS, AWAKE = 2000, 20


class Worker(NamedTuple):
    """One thread in a job: the address of the pool's control block, its rank, and the number of threads."""

    control: int
    rank: int
    size: int


#: The system's function that offers the core to another thread; it takes no arguments and returns an int.
YIELD = "sched_yield"
if sys.platform == "win32":
    YIELD = "SwitchToThread"
    # Functions of kernel32, under names that code loaded from disk also finds.
    for name in (YIELD, "GetTickCount64"):
        binding.add_symbol(name, ctypes.cast(getattr(ctypes.windll.kernel32, name), ctypes.c_void_p).value)
#: The id of ``clock_gettime``'s monotonic clock. 64-bit systems return seconds and nanoseconds in 8 bytes each.
MONOTONIC = getattr(time, "CLOCK_MONOTONIC", 0)


def _pause(builder: Any) -> None:
    if X86:
        call(builder, "llvm.x86.sse2.pause", VOID, [])
    elif ARM:
        call(builder, "llvm.aarch64.hint", VOID, [ir.Constant(I32, 1)])


def _yield_core(builder: Any) -> None:
    call(builder, YIELD, I32, [])


def _milliseconds(builder: Any, memory: Any) -> Any:
    if sys.platform == "win32":
        return call(builder, "GetTickCount64", I64, [])
    call(builder, "clock_gettime", I32, [ir.Constant(I32, MONOTONIC), at(builder, memory, I64)])
    seconds = load(builder, memory, I64, 8)
    nanoseconds = load(builder, builder.add(memory, ir.Constant(I64, 8)), I64, 8)
    million = ir.Constant(I64, 1_000_000)
    return builder.add(builder.mul(seconds, ir.Constant(I64, 1000)), builder.sdiv(nanoseconds, million))


# Sequentially consistent access to shared words; ``fetch_add`` and ``exchange`` return the old value.
atomic_load = emitted(lambda b, word: b.load_atomic(at(b, word, I64), "seq_cst", 8), 1, types.int64)
fetch_add = emitted(lambda b, word, n: b.atomic_rmw("add", at(b, word, I64), n, "seq_cst"), 2, types.int64)
exchange = emitted(lambda b, word, n: b.atomic_rmw("xchg", at(b, word, I64), n, "seq_cst"), 2, types.int64)
#: ``pause`` tells the core that this is a polling loop; ``yield_core`` offers the core to other threads.
pause, yield_core = emitted(_pause, 0), emitted(_yield_core, 0)
#: (memory) -> milliseconds of a monotonic clock; 16 bytes at ``memory`` are scratch space.
milliseconds = emitted(_milliseconds, 1, types.int64)
#: Call the compiled function at an address with five 64-bit integers.
call_job = emitted(call_address, 6)


@register_jitable
def barrier(worker: Any, arrived: int) -> int:
    """Wait until all threads are here. ``arrived`` counts arrivals at earlier barriers; returns the new count."""
    arrived += worker.size
    fetch_add(worker.control + ARRIVED, 1)
    spins = 0
    while atomic_load(worker.control + ARRIVED) < arrived:
        pause()
        spins += 1
        if spins > SPINS:
            yield_core()
    return arrived


@register_jitable
def share(count: int, rank: int, size: int) -> tuple[int, int]:
    """The bounds of a rank's part of ``range(count)``."""
    return count * rank // size, count * (rank + 1) // size


@register_jitable
def take(control: int, stage: int, owner: int, count: int) -> int:
    """Take the next of the ``count`` items in the share of the rank ``owner``; ``count`` if none is left.

    A rank takes from its own share first, then from the shares of other ranks (work stealing).

    Args:
        stage: which of the ``STAGES`` counters; ``restart`` sets them to zero while no rank is in that stage.
    """
    word = control + RANKS + RANK_BYTES * owner + TAKEN + 8 * stage
    return fetch_add(word, 1) if atomic_load(word) < count else count


@register_jitable
def restart(worker: Any, begin: int, end: int) -> None:
    """Mark this rank's share of stages begin..end as not taken."""
    for stage in range(begin, end):
        exchange(worker.control + RANKS + RANK_BYTES * worker.rank + TAKEN + 8 * stage, 0)


@register_jitable
def _next_job(control: int, rank: int) -> bool:
    """Do the posted job if this rank has not seen it. Returns whether there was one."""
    number, seen = atomic_load(control + JOB_NUMBER), control + RANKS + RANK_BYTES * rank + SEEN
    if number == atomic_load(seen):
        return False
    exchange(seen, number)
    size, before = atomic_load(control + SIZE), atomic_load(control + ARRIVED_BEFORE)
    call_job(atomic_load(control + JOB), atomic_load(control + ARGUMENT), control, rank, size, before)
    return True


def _pool_code(stamp: int) -> tuple[Any, Any, Any]:
    """Three functions, compiled once and cached on disk. Naming ``stamp`` in them makes it part of their names there.

    serve(control, rank): do the pool's jobs until none has come for ``AWAKE`` milliseconds.
    post(control, job, argument) -> the number of sleeping ranks, which the caller must wake: ``WAKE`` is 1 for them.
    lead(control): do rank 0's part of the posted job, unless it is done.
    """

    def serve(control: int, rank: int) -> None:
        _ = stamp
        asleep = control + RANKS + RANK_BYTES * rank
        exchange(asleep, 0)
        spins, idle_since = 0, 0
        while True:
            if _next_job(control, rank):
                spins = 0
                continue
            pause()
            spins += 1
            if spins == SPINS:
                idle_since = milliseconds(asleep + CLOCK)
            if spins > SPINS:
                yield_core()
            if spins > SPINS and spins % 16 == 0 and milliseconds(asleep + CLOCK) > idle_since + AWAKE:
                exchange(asleep, 1)
                # A job may have been posted in the meantime. If ``post`` has cleared the flag, a wake-up follows.
                if (
                    atomic_load(control + JOB_NUMBER) == atomic_load(asleep + SEEN)
                    or exchange(asleep, 0) == 0
                ):
                    return
                spins = 0

    def post(control: int, job: int, argument: int) -> int:
        _ = stamp
        exchange(control + JOB, job)
        exchange(control + ARGUMENT, argument)
        exchange(control + ARRIVED_BEFORE, atomic_load(control + ARRIVED))
        fetch_add(control + JOB_NUMBER, 1)
        sleepers = 0
        for rank in range(1, atomic_load(control + SIZE)):
            asleep = control + RANKS + RANK_BYTES * rank
            if exchange(asleep, 0) == 1:
                exchange(asleep + WAKE, 1)
                sleepers += 1
        return sleepers

    def lead(control: int) -> None:
        _ = stamp
        _next_job(control, 0)

    word, on_disk = types.int64, partial(njit, nogil=True, cache=True)
    return (
        on_disk(types.void(word, word))(serve),
        on_disk(word(word, word, word))(post),
        on_disk(types.void(word))(lead),
    )


class ThreadPool:
    """``size`` threads, including the caller. The helpers are daemons and end with the process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = np.zeros(RANKS + RANK_BYTES * size + 64, np.uint8)
        # The control block begins on a cache line.
        self._control = self._memory.ctypes.data + -self._memory.ctypes.data % 64
        first = self._control - self._memory.ctypes.data
        self._words = self._memory[first : first + (len(self._memory) - first) // 8 * 8].view(np.int64)
        self._words[SIZE // 8] = size
        self._serve, self._post, self._lead = _pool_code(STAMP)
        self._one_job = threading.Lock()
        self._owner: Any = None
        self._wake_locks = [threading.Lock() for _ in range(size)]
        for rank in range(1, size):
            name = f"lookahead-step-{rank}"
            threading.Thread(target=self._help, args=(rank,), name=name, daemon=True).start()

    def _word(self, offset: int) -> int:
        """A word of the control block."""
        return int(self._words[offset // 8])

    def _help(self, rank: int) -> None:
        wake = self._wake_locks[rank]
        wake.acquire()
        while True:
            self._serve(self._control, rank)
            # If the caller is interrupted between posting and waking, nothing wakes this helper. So it compares two
            # words once a second; ``_serve`` would poll for 20 ms each time.
            while not wake.acquire(timeout=1.0) and self._word(JOB_NUMBER) == self._word(
                RANKS + RANK_BYTES * rank + SEEN
            ):
                pass

    def run(self, job: int, argument: int, owner: object) -> None:
        """Let every thread do its part of a job. Returns when all have finished.

        Args:
            job: the address of a compiled function (see the module).
            argument: the address that is passed to it.
            owner: the object that owns the memory there. The pool keeps it alive, because an interrupt may leave a
                posted job, which the next call finishes.
        """
        with self._one_job:
            self._lead(
                self._control
            )  # finish a job that an interrupt has left; the helpers are waiting for it
            self._owner = owner
            try:
                sleepers = self._post(self._control, job, argument)
                for rank in range(1, self.size) if sleepers else ():
                    wake = (RANKS + RANK_BYTES * rank + WAKE) // 8
                    if self._words[wake]:
                        self._words[wake] = 0
                        with contextlib.suppress(RuntimeError):  # it is awake already
                            self._wake_locks[rank].release()
            finally:
                self._lead(self._control)
            self._owner = None


_alone = threading.local()
#: (process id, threads) -> pool; a forked process has no threads of its parent's pools.
_shared = cache(lambda process, size: ThreadPool(size))


def thread_pool(size: int) -> ThreadPool:
    """The pool of this many threads; for a single thread, the calling thread's own pool."""
    if size == 1 and not hasattr(_alone, "pool"):
        _alone.pool = ThreadPool(1)
    pool: ThreadPool = _alone.pool if size == 1 else _shared(os.getpid(), size)
    return pool
