"""How the threads of a pool wait for one another: control block, barrier, and the loops of leader and helpers.

A helper looks for the next job for a while and then sleeps; looking is done here, without Python, and sleeping in
``thread_pool.py``. A job is the address of a compiled function of (argument, control, rank, size, arrived).
"""

from __future__ import annotations

import sys
from typing import Any

from numba import types

from .llvm import I32, atomic_load, call, emitted, exchange, fetch_add, inlined, jump, on_disk, pause

# The control block, bytes from its beginning: the number of the job, the arrivals counted, what a job is, and for
# each rank whether it sleeps and the last job that it has seen. Words that many threads look at have a cache line.
JOB_NUMBER, ARRIVED, JOB, ARGUMENT, SIZE, ARRIVED_BEFORE = 0, 64, 128, 136, 144, 152
RANKS, RANK_BYTES, SEEN = 192, 64, 8
#: Turns of a waiting loop before a thread offers its core to others, and before it goes to sleep.
SPINS, SPINS_AWAKE = 2000, 6000


def _yield(builder: Any) -> None:
    if sys.platform != "win32":
        call(builder, "sched_yield", I32, [])


yield_core = emitted(_yield, 0)


def control_bytes(size: int) -> int:
    """Of the control block of so many threads."""
    return RANKS + RANK_BYTES * size


@inlined
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


@inlined
def share(count: int, rank: int, size: int) -> tuple[int, int]:
    """The part of ``range(count)`` that is this thread's."""
    return count * rank // size, count * (rank + 1) // size


@inlined
def _do_job(control: int, rank: int) -> None:
    size, before = atomic_load(control + SIZE), atomic_load(control + ARRIVED_BEFORE)
    jump(atomic_load(control + JOB), atomic_load(control + ARGUMENT), control, rank, size, before)


def pool_code(stamp: int) -> tuple[Any, Any, Any]:
    """serve(control, rank): do the pool's jobs until none has come for a while.
    post(control, job, argument) -> bits of the sleepers to wake.
    lead(control): do the leader's part of a job that was posted and not led.

    Where ``control`` is compared with the stamp, which it never is, that names the code on disk.
    """

    def serve(control: int, rank: int) -> None:
        asleep = control + RANKS + RANK_BYTES * rank
        exchange(asleep, 0)
        spins = 0
        while control != stamp:
            number = atomic_load(control + JOB_NUMBER)
            if number != atomic_load(asleep + SEEN):
                exchange(asleep + SEEN, number)
                _do_job(control, rank)
                spins = 0
                continue
            pause()
            spins += 1
            if spins > SPINS:
                yield_core()
            if spins > SPINS_AWAKE:
                exchange(asleep, 1)
                # A job may have come by now; whose flag is gone has been sent for.
                if atomic_load(control + JOB_NUMBER) == number or exchange(asleep, 0) == 0:
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
        number, seen = atomic_load(control + JOB_NUMBER), control + RANKS + SEEN
        if control != stamp and number != atomic_load(seen):
            exchange(seen, number)
            _do_job(control, 0)

    word = types.int64
    return (
        on_disk(serve, types.void(word, word)),
        on_disk(post, word(word, word, word)),
        on_disk(lead, types.void(word)),
    )
