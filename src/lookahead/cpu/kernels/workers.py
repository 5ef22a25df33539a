"""The compiled half of ``thread_pool``: threads that share a job, the caller (rank 0) and its helpers.

A job is the address of a compiled function of (argument, control, rank, size, arrived), which every thread calls. The
process has one pool for each number of threads, and a pool does one job at a time. A pool of one thread has no
helpers and never waits.

**Waiting.** A waiting thread polls: first without yielding its core for about 20 us, then yielding between polls, and
after ``PATIENCE`` us sleeping ``NAP`` us between polls. So if other programs preempt the thread that it waits for,
its own core becomes available to that thread, and the scheduler does not count the wait as work. A helper without a
job waits like this for ``AWAKE`` us, because the next step of a completion usually follows soon; then it sleeps on a
lock in Python.

After ``PATIENCE`` = 2 ms, a helper therefore sleeps almost all of the time, but it sleeps on the lock only after
``AWAKE`` = 20 ms. Drafting between two passes can take longer than a shorter limit, and waking a helper from the lock
delays a pass by 1 to 5 ms. With a limit of 0.5 ms, drafted steps of 8 rows of SmolLM2 took 31.1 ms in fp32 and 15.0
in bf16, with 20 ms 25.4 and 12.8; plain steps took 22.9 and 11.5, and 21.1 and 10.9 (Intel Xeon with AMX; dev/LOG.md,
2026-11-22).

**Memory order.** All shared words are in one block of memory, ``CONTROL`` and a ``RANK`` for each thread. Plain loads
and stores of different threads are not ordered. Three orders are required:

1. A job and its argument must be written before the job is seen. ``post`` writes them, then adds 1 to ``posted`` (a
   release), so a thread that reads the new number (an acquire) also reads the matching job. No thread still needs the
   words of the previous job, because a job ends with a barrier, so all threads have read them.
2. What a thread wrote before a barrier must be visible after it. Arriving adds to ``arrived`` (a release and an
   acquire), and each thread waits until it reads the count of all (an acquire). An addition continues the release of
   the additions before it, so the last count releases what all threads wrote, plain stores to the buffers of a pass
   included.
3. A helper that goes to sleep must not miss a job. A helper sets ``asleep``, then reads ``posted`` once more; the
   poster adds to ``posted``, then reads ``asleep``. If either pair could be reordered, the helper could miss the job
   and the poster the sleeper. So these four accesses are sequentially consistent: whichever pair comes later sees
   the other thread's word.

``take`` needs no order beyond its own word, because an item is a number, and what it refers to was written before the
last barrier. ``restart`` is ordered by the barriers before and after it, between which no thread is in that stage.

On x86 every load is an acquire and every store a release, and an addition is one locked instruction in any order, so
these orders cost nothing there. ARM needs them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...machine_code import compiled, entry, int64
from ..thread_pool import CONTROL, RANK
from .atomics import (
    clock,
    exchange_in_order,
    fetch_add,
    fetch_add_in_order,
    load_acquire,
    load_in_order,
    pause,
    sleep,
    store_release,
    yield_core,
)
from .operations import call, offsets_of

POSTED, ARRIVED, JOB, ARGUMENT, SIZE, ARRIVED_BEFORE = offsets_of(CONTROL).values()
ASLEEP, WOKEN, SEEN, SCRATCH, TAKEN = offsets_of(RANK).values()
CONTROL_BYTES, RANK_BYTES = CONTROL.itemsize, RANK.itemsize

#: Polls before a thread yields its core between polls.
SPINS = 2000
#: Microseconds of waiting before a thread sleeps between polls.
PATIENCE = 2000
#: The length of such a sleep in microseconds, to which Linux adds 50.
NAP = 50
#: Microseconds without a job before a helper sleeps on its lock until it is woken.
AWAKE = 20_000


class Worker(NamedTuple):
    """One thread in a job: the address of the pool's control block, its rank, and the number of threads."""

    control: int
    rank: int
    size: int


@compiled
def rank_at(control: int, rank: int) -> int:
    """The address of a thread's words."""
    return control + CONTROL_BYTES + RANK_BYTES * rank


@compiled
def _wait(spins: int, since: int, words: int) -> tuple[int, int]:
    """Wait between two polls. Returns the number of polls, and the time at which polling without yielding ended."""
    spins += 1
    if spins < SPINS:
        pause()
        return spins, since
    if spins == SPINS:
        since = clock(words + SCRATCH)
    if clock(words + SCRATCH) < since + PATIENCE:
        yield_core()
    else:
        sleep(words + SCRATCH, NAP)
    return spins, since


@compiled
def barrier(worker: Any, arrived: int) -> int:
    """Wait until all threads have arrived. ``arrived`` counts arrivals at earlier barriers; returns the new count."""
    arrived += worker.size
    words = rank_at(worker.control, worker.rank)
    # Release what this thread wrote; continue the others' releases (2).
    fetch_add(worker.control + ARRIVED, 1)
    spins, since = 0, 0
    while load_acquire(worker.control + ARRIVED) < arrived:  # acquire what all threads wrote (2)
        spins, since = _wait(spins, since, words)
    return arrived


@compiled
def share(count: int, rank: int, size: int) -> tuple[int, int]:
    """The bounds of a rank's part of ``range(count)``."""
    return count * rank // size, count * (rank + 1) // size


@compiled
def take(control: int, stage: int, owner: int, count: int) -> int:
    """Take the next of the ``count`` items in the share of the rank ``owner``; ``count`` if none is left.

    A rank takes from its own share first, then from the shares of other ranks (work stealing).

    Args:
        stage: which of the ``STAGES`` counters; ``restart`` sets them to zero while no rank is in that stage.
    """
    taken = rank_at(control, owner) + TAKEN + 8 * stage
    # This only saves the addition: a stale value is too small, and the addition below is exact.
    if load_acquire(taken) >= count:
        return count
    return int64(fetch_add(taken, 1))  # no two threads get the same number, in any order


@compiled
def restart(worker: Any, begin: int, end: int) -> None:
    """Mark this rank's share of stages begin..end as not taken."""
    for stage in range(begin, end):
        # The next barrier orders it.
        store_release(rank_at(worker.control, worker.rank) + TAKEN + 8 * stage, 0)


@compiled
def _next_job(control: int, rank: int) -> bool:
    """Run the posted job if this rank has not seen it. Returns whether there was one."""
    words = rank_at(control, rank)
    number = load_acquire(control + POSTED)  # acquire the job that belongs to this number (1)
    if number == load_acquire(words + SEEN):
        return False
    store_release(words + SEEN, number)  # read only by this thread, in Python while it sleeps
    size, before = load_acquire(control + SIZE), load_acquire(control + ARRIVED_BEFORE)
    job, argument = load_acquire(control + JOB), load_acquire(control + ARGUMENT)
    call(job, argument, control, rank, size, before)
    return True


@entry
def serve(control: int, rank: int) -> None:
    """Run the pool's jobs until none has arrived for ``AWAKE`` microseconds."""
    words = rank_at(control, rank)
    store_release(words + ASLEEP, 0)
    spins, since = 0, 0
    while True:
        if _next_job(control, rank):
            spins = 0
            continue
        spins, since = _wait(spins, since, words)
        if spins > SPINS and clock(words + SCRATCH) > since + AWAKE:
            exchange_in_order(words + ASLEEP, 1)  # before the next line for all threads (3)
            if load_in_order(control + POSTED) == load_acquire(words + SEEN):
                return
            # A job has been posted in the meantime. If ``post`` has cleared the flag, a wake-up follows.
            if exchange_in_order(words + ASLEEP, 0) == 0:
                return
            spins = 0


@entry
def post(control: int, job: int, argument: int) -> int:
    """Post a job. Returns the number of sleeping ranks, which the caller must wake: ``woken`` is 1 for them."""
    store_release(control + JOB, job)
    store_release(control + ARGUMENT, argument)
    store_release(control + ARRIVED_BEFORE, load_acquire(control + ARRIVED))  # no thread is in a barrier now
    # Release the job (1); for all threads, before the loop below (3).
    fetch_add_in_order(control + POSTED, 1)
    sleepers = 0
    for rank in range(1, load_acquire(control + SIZE)):
        words = rank_at(control, rank)
        if exchange_in_order(words + ASLEEP, 0) == 1:
            store_release(words + WOKEN, 1)  # only this thread reads it, in Python
            sleepers += 1
    return sleepers


@entry
def lead(control: int) -> None:
    """Run rank 0's part of the posted job, unless it is done."""
    _next_job(control, 0)
