"""Threads that do one job together, the caller and helpers, and how they wait for one another.

A helper looks for the next job for 20 ms, because the next step of a text comes soon, and then sleeps
on a lock; it looks in compiled code and sleeps in Python. One pool for each number of threads, for the whole process,
does one job at a time; a caller that works alone needs no helpers and waits for nobody. A job is the address of a
compiled function of (argument, control, rank, size, arrived).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import register_jitable

from .llvm import ARM, I32, I64, STAMP, VOID, X86, at, call, emitted, load

# The control block, bytes from its beginning: the number of the job, the arrivals counted, what a job is, and for
# each rank whether it sleeps, the last job that it has seen, and how many items of its share are taken (``take``).
# Words that many threads look at have a cache line.
JOB_NUMBER, ARRIVED, JOB, ARGUMENT, SIZE, ARRIVED_BEFORE = 0, 64, 128, 136, 144, 152
RANKS, RANK_BYTES, SEEN, TAKEN, CLOCK, STAGES = 192, 128, 8, 16, 64, 5
#: Turns of a waiting loop before a thread offers its core, and the time in ms before a helper sleeps: being woken
#: costs a pass 1 to 5 ms. Turns do not measure time: 100,000 take 20 ms on one processor and 85 ms on another.
SPINS, AWAKE = 2000, 20


#: The system's function that gives up the core to another thread: no arguments, an int for an answer.
YIELD = "sched_yield"
if sys.platform == "win32":
    YIELD = "SwitchToThread"
    # kernel32's, under names that compiled code finds also where it comes from the cache on disk.
    for name in (YIELD, "GetTickCount64"):
        binding.add_symbol(name, ctypes.cast(getattr(ctypes.windll.kernel32, name), ctypes.c_void_p).value)
#: The number of ``clock_gettime``'s monotonic clock; 64-bit systems give seconds and nanoseconds in 8 bytes each.
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
    seconds, nanoseconds = (
        load(builder, memory, I64, 8),
        load(builder, builder.add(memory, ir.Constant(I64, 8)), I64, 8),
    )
    million = ir.Constant(I64, 1_000_000)
    return builder.add(builder.mul(seconds, ir.Constant(I64, 1000)), builder.sdiv(nanoseconds, million))


def _jump(builder: Any, address: Any, *arguments: Any) -> None:
    kind = ir.FunctionType(VOID, [I64] * len(arguments))
    builder.call(builder.inttoptr(address, kind.as_pointer()), list(arguments))


# Words that several threads share, sequentially consistent; ``fetch_add`` and ``exchange`` give the old value.
atomic_load = emitted(lambda b, word: b.load_atomic(at(b, word, I64), "seq_cst", 8), 1, types.int64)
fetch_add = emitted(lambda b, word, n: b.atomic_rmw("add", at(b, word, I64), n, "seq_cst"), 2, types.int64)
exchange = emitted(lambda b, word, n: b.atomic_rmw("xchg", at(b, word, I64), n, "seq_cst"), 2, types.int64)
#: Tell the core that this is a waiting loop; offer it to other threads.
pause, yield_core = emitted(_pause, 0), emitted(_yield_core, 0)
#: The time in milliseconds since some moment; 16 bytes at the address are written.
milliseconds = emitted(_milliseconds, 1, types.int64)
#: Call the compiled function at an address with five 64-bit integers.
jump = emitted(_jump, 6)


@register_jitable
def barrier(control: int, arrived: int, size: int) -> int:
    """Wait until all threads are here; returns the arrivals counted by then."""
    arrived += size
    fetch_add(control + ARRIVED, 1)
    spins = 0
    while atomic_load(control + ARRIVED) < arrived:
        pause()
        spins += 1
        if spins > SPINS:
            yield_core()
    return arrived


@register_jitable
def share(count: int, rank: int, size: int) -> tuple[int, int]:
    """The part of ``range(count)`` that is this thread's."""
    return count * rank // size, count * (rank + 1) // size


@register_jitable
def take(control: int, stage: int, owner: int, count: int) -> int:
    """The next item of the ``count`` of a rank's share, for the rank itself or one that is done with its own.

    Args:
        stage: one of ``STAGES`` counters; ``restart`` sets them to zero while no rank is at such a stage.
    """
    word = control + RANKS + RANK_BYTES * owner + TAKEN + 8 * stage
    return fetch_add(word, 1) if atomic_load(word) < count else count


@register_jitable
def restart(control: int, begin: int, end: int, rank: int) -> None:
    """Nothing of a rank's share is taken in these stages."""
    for stage in range(begin, end):
        exchange(control + RANKS + RANK_BYTES * rank + TAKEN + 8 * stage, 0)


@register_jitable
def _next_job(control: int, rank: int) -> bool:
    """Do a job that was posted and that this rank has not seen, if there is one."""
    number, seen = atomic_load(control + JOB_NUMBER), control + RANKS + RANK_BYTES * rank + SEEN
    if number == atomic_load(seen):
        return False
    exchange(seen, number)
    size, before = atomic_load(control + SIZE), atomic_load(control + ARRIVED_BEFORE)
    jump(atomic_load(control + JOB), atomic_load(control + ARGUMENT), control, rank, size, before)
    return True


def _pool_code(stamp: int) -> tuple[Any, Any, Any]:
    """serve(control, rank): do the pool's jobs until none has come for a while.
    post(control, job, argument) -> bits of the sleepers to wake.
    lead(control): do the leader's part of a job that was posted and not led.

    Where ``control`` is compared with the stamp, which it never is, that names the code on disk.
    """

    def serve(control: int, rank: int) -> None:
        asleep = control + RANKS + RANK_BYTES * rank
        exchange(asleep, 0)
        spins, idle_since = 0, 0
        while control != stamp:
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
                # A job may have come by now; whose flag is gone has been sent for.
                if (
                    atomic_load(control + JOB_NUMBER) == atomic_load(asleep + SEEN)
                    or exchange(asleep, 0) == 0
                ):
                    return
                spins = 0

    def post(control: int, job: int, argument: int) -> int:
        exchange(control + JOB, job)
        exchange(control + ARGUMENT, argument)
        exchange(control + ARRIVED_BEFORE, atomic_load(control + ARRIVED))
        sleepers = 0
        if control != stamp:
            fetch_add(control + JOB_NUMBER, 1)
            for rank in range(1, atomic_load(control + SIZE)):
                sleepers |= exchange(control + RANKS + RANK_BYTES * rank, 0) << rank
        return sleepers

    def lead(control: int) -> None:
        if control != stamp:
            _next_job(control, 0)

    word, on_disk = types.int64, partial(njit, nogil=True, cache=True)
    return (
        on_disk(types.void(word, word))(serve),
        on_disk(word(word, word, word))(post),
        on_disk(types.void(word))(lead),
    )


class ThreadPool:
    """``size`` threads, the caller among them. Its helpers are daemons and end with the process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = np.zeros(RANKS + RANK_BYTES * size + 64, np.uint8)
        # A cache line of its own for each word that several threads look at.
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

    def _word(self, place: int) -> int:
        """A word of the control block."""
        return int(self._words[place // 8])

    def _help(self, rank: int) -> None:
        wake = self._wake_locks[rank]
        wake.acquire()
        while True:
            self._serve(self._control, rank)
            # Nobody wakes a helper whose leader was interrupted at the wrong moment: it looks for itself, once a
            # second and at two words only, because ``_serve`` would wait for the next job for 20 ms.
            while not wake.acquire(timeout=1.0) and self._word(JOB_NUMBER) == self._word(
                RANKS + RANK_BYTES * rank + SEEN
            ):
                pass

    def run(self, job: int, argument: int, owner: object) -> None:
        """Let every thread do its part of a job; back when all have done it.

        Args:
            job: the address of compiled code (above).
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


_alone = threading.local()
#: Pools of a process, which a fork does not take along: (process id, threads) -> pool.
_shared = cache(lambda process, size: ThreadPool(size))


def thread_pool(size: int) -> ThreadPool:
    """The pool of this many threads, or of the calling thread alone; a forked process makes its own."""
    if size == 1 and not hasattr(_alone, "pool"):
        _alone.pool = ThreadPool(1)
    pool: ThreadPool = _alone.pool if size == 1 else _shared(os.getpid(), size)
    return pool
