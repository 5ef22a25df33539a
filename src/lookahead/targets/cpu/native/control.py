"""How the threads of a team meet and wait: the control block, the barrier, and the loops of leader and helpers.

A helper looks for the next job for a while and then sleeps; looking is done here, without Python, and sleeping in
``team.py``. A job is the address of a compiled function of (argument, control, rank, team, arrivals before it).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import register_jitable

from .intrinsics import I32, call, emitted, exchange, fetch_add, jump, look, pause, pointer
from .machine import STAMP

# The control block of a team, in 64-bit words with a cache line for each that many threads look at.
GO, ARRIVED, JOB, ARGUMENT, TEAM, BASE, ASLEEP = 0, 8, 16, 17, 18, 19, 24
#: Turns of a waiting loop before a thread offers its core to others, and before it goes to sleep.
PATIENCE, WAKEFUL = 2000, 6000


def _yield(builder: Any) -> None:
    if sys.platform != "win32":
        call(builder, "sched_yield", I32, [])


yield_core = emitted(_yield, 0)


@register_jitable
def meet(control: int, target: int) -> None:
    """Wait until ``target`` arrivals have been counted, this one included."""
    fetch_add(control + 8 * ARRIVED, 1)
    turns = 0
    while look(control + 8 * ARRIVED) < target:
        pause()
        turns += 1
        if turns > PATIENCE:
            yield_core()


def serve_code() -> Any:
    """serve(control, rank): do the team's jobs until none has come for a while."""
    return _serve(STAMP)


def lead_code() -> tuple[Any, Any]:
    """post(control, job, argument) -> bits of the sleepers to wake; lead(control) does the leader's part of a
    job that was posted and not led."""
    return _post(STAMP), _lead(STAMP)


def _serve(stamp: int) -> Any:
    @njit(types.void(types.int64, types.int64), nogil=True, cache=True, error_model="numpy")
    def serve(control, rank):  # type: ignore[no-untyped-def]
        if control == stamp:
            return
        asleep, seen = control + 8 * (ASLEEP + 8 * rank), control + 8 * (ASLEEP + 8 * rank + 1)
        words = carray(pointer(control, np.int64(0)), (ASLEEP,))
        exchange(asleep, 0)
        turns = 0
        while True:
            number = look(control + 8 * GO)
            if number != look(seen):
                exchange(seen, number)
                jump(words[JOB], words[ARGUMENT], control, rank, words[TEAM], words[BASE])
                turns = 0
            else:
                pause()
                turns += 1
                if turns > PATIENCE:
                    yield_core()
                if turns > WAKEFUL:
                    exchange(asleep, 1)
                    # A job may have come meanwhile; whose flag is gone has been sent for.
                    if look(control + 8 * GO) == number or exchange(asleep, 0) == 0:
                        return
                    turns = 0

    return serve


def _post(stamp: int) -> Any:
    @njit(types.int64(types.int64, types.int64, types.int64), nogil=True, cache=True, error_model="numpy")
    def post(control, job, argument):  # type: ignore[no-untyped-def]
        words = carray(pointer(control, np.int64(0)), (ASLEEP,))
        words[JOB], words[ARGUMENT] = job, argument
        words[BASE] = look(control + 8 * ARRIVED)
        sleepers = 0
        if control != stamp:
            fetch_add(control + 8 * GO, 1)
            for rank in range(1, words[TEAM]):
                sleepers |= exchange(control + 8 * (ASLEEP + 8 * rank), 0) << rank
        return sleepers

    return post


def _lead(stamp: int) -> Any:
    @njit(types.void(types.int64), nogil=True, cache=True, error_model="numpy")
    def lead(control):  # type: ignore[no-untyped-def]
        words = carray(pointer(control, np.int64(0)), (ASLEEP,))
        number, seen = look(control + 8 * GO), control + 8 * (ASLEEP + 1)
        if control != stamp and number != look(seen):
            exchange(seen, number)
            jump(words[JOB], words[ARGUMENT], control, 0, words[TEAM], words[BASE])

    return lead
