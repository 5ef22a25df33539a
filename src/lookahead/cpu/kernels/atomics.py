"""Atomic access to 64-bit words shared by threads, and ways to wait, as operations.

Each operation is named for its memory order. ``thread_pool`` explains the order of each of its accesses.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from llvmlite import ir

from ...processor import target_system
from .operations import I32, I64, NOTHING, call_intrinsic, int64, memory, operation, pointer_to, void
from .processor import ARM, X86

WINDOWS = target_system() == "win32"
#: The id of ``clock_gettime``'s monotonic clock.
MONOTONIC = 6 if target_system() == "darwin" else 1


def _word(address: int) -> np.ndarray[Any, Any]:
    return memory(address, np.int64, 1)


@operation(int64(int64), lambda b, address: b.load_atomic(pointer_to(b, address, I64), "acquire", 8))
def load_acquire(address: int) -> Any:
    """Read a word. What another thread wrote before its release of this value is visible afterwards."""
    return _word(address)[0]


@operation(int64(int64), lambda b, address: b.load_atomic(pointer_to(b, address, I64), "seq_cst", 8))
def load_in_order(address: int) -> Any:
    """Read a word; sequentially consistent with all such operations of all threads."""
    return _word(address)[0]


@operation(
    void(int64, int64),
    lambda b, address, value: b.store_atomic(value, pointer_to(b, address, I64), "release", 8) and None,
)
def store_release(address: int, value: int) -> None:
    """Write a word. What this thread wrote before is visible to any thread that acquires this value."""
    _word(address)[0] = value


@operation(
    int64(int64, int64), lambda b, address, n: b.atomic_rmw("add", pointer_to(b, address, I64), n, "acq_rel")
)
def fetch_add(address: int, n: int) -> Any:
    """Add to a word, with acquire and release. Returns the old value."""
    word = _word(address)
    word[0] += n
    return word[0] - n


@operation(
    int64(int64, int64), lambda b, address, n: b.atomic_rmw("add", pointer_to(b, address, I64), n, "seq_cst")
)
def fetch_add_in_order(address: int, n: int) -> Any:
    """``fetch_add``, sequentially consistent with all such operations of all threads."""
    word = _word(address)
    word[0] += n
    return word[0] - n


@operation(
    int64(int64, int64),
    lambda b, address, value: b.atomic_rmw("xchg", pointer_to(b, address, I64), value, "seq_cst"),
)
def exchange_in_order(address: int, value: int) -> Any:
    """Replace a word; sequentially consistent with all such operations of all threads. Returns the old value."""
    word = _word(address)
    old = word[0]
    word[0] = value
    return old


def _pause(builder: Any) -> None:
    if X86:
        call_intrinsic(builder, "llvm.x86.sse2.pause", NOTHING)
    elif ARM:
        call_intrinsic(builder, "llvm.aarch64.hint", NOTHING, ir.Constant(I32, 1))


@operation((void,), _pause)
def pause() -> None:
    """Tell the core that this is a polling loop."""


def _yield_core(builder: Any) -> None:
    call_intrinsic(builder, "SwitchToThread" if WINDOWS else "sched_yield", I32)


@operation((void,), _yield_core)
def yield_core() -> None:
    """Offer the core to another thread that is ready to run."""
    os.sched_yield()


def _sleep(builder: Any, scratch: Any, microseconds: Any) -> None:
    if WINDOWS:  # one millisecond, the shortest possible sleep
        call_intrinsic(builder, "Sleep", NOTHING, ir.Constant(I32, 1))
        return
    seconds = pointer_to(builder, scratch, I64)
    rest = builder.add(scratch, ir.Constant(I64, 8))
    builder.store(ir.Constant(I64, 0), seconds)
    builder.store(builder.mul(microseconds, ir.Constant(I64, 1000)), pointer_to(builder, rest, I64))
    call_intrinsic(builder, "nanosleep", I32, seconds, ir.Constant(I64.as_pointer(), None))


@operation(void(int64, int64), _sleep)
def sleep(scratch: int, microseconds: int) -> None:
    """Sleep for at least this long, less than a second. Overwrites 16 bytes at ``scratch``."""
    time.sleep(microseconds / 1e6)


def _clock(builder: Any, scratch: Any) -> Any:
    first = pointer_to(builder, scratch, I64)
    if WINDOWS:  # in units of 100 ns
        call_intrinsic(builder, "GetSystemTimePreciseAsFileTime", NOTHING, first)
        return builder.udiv(builder.load(first), ir.Constant(I64, 10))
    call_intrinsic(builder, "clock_gettime", I32, ir.Constant(I32, MONOTONIC), first)
    seconds = builder.load(first)
    nanoseconds = builder.load(pointer_to(builder, builder.add(scratch, ir.Constant(I64, 8)), I64))
    microseconds = builder.mul(seconds, ir.Constant(I64, 1_000_000))
    return builder.add(microseconds, builder.sdiv(nanoseconds, ir.Constant(I64, 1000)))


@operation(int64(int64), _clock)
def clock(scratch: int) -> int:
    """Microseconds since an arbitrary moment. Overwrites 16 bytes at ``scratch``."""
    return time.monotonic_ns() // 1000
