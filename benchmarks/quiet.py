"""Checks whether other programs use the CPU, which makes times unreliable. Linux only."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from lookahead.core import SettingsError

#: Number of cores that other programs may use.
SHARE = 0.1
#: Why a load average above zero does not mean that other work ran.
WHOSE_LOAD = (
    "the benchmark's own threads included; `make results` starts a page only while other programs use less than a "
    "tenth of a core"
)
STAT = Path("/proc/stat")


def processor() -> str:
    """The processor's family, model and stepping, which its name may hide."""
    file = Path("/proc/cpuinfo")
    lines = dict.fromkeys(file.read_text().splitlines()) if file.is_file() else {}
    parts = (line.replace("\t", "") for line in lines if re.match(r"(cpu family|model|stepping)\s*:", line))
    return ", ".join(parts) or "unknown"


def load_text(loads: Iterable[float | None]) -> str:
    """The load averages of measurements as a sentence; empty if unknown."""
    known = [load for load in loads if load is not None]
    if not known:
        return ""
    return f"Load average: {min(known):.1f} to {max(known):.1f}, {WHOSE_LOAD}."


def machine_text(processor: str, loads: Iterable[float | None]) -> str:
    """The processor and the load averages of measurements as sentences; empty if both are unknown.

    Args:
        processor: the result of ``processor`` where they were made, or "".
        loads: load averages; None where it is unknown.
    """
    return " ".join(filter(None, [f"Processor: {processor}." if processor else "", load_text(loads)]))


def used_by_others(seconds: float = 2.0) -> float:
    """Average number of cores used by other programs; 0 if unknown."""
    if not STAT.is_file():
        return 0.0

    def busy() -> tuple[float, float]:
        # user, nice, system, idle, iowait, irq, softirq, steal; in ticks
        words = STAT.read_text().splitlines()[0].split()[1:9]
        ticks = sum(int(word) for place, word in enumerate(words) if place not in (3, 4))
        own = sum(os.times()[:4])
        return ticks / os.sysconf("SC_CLK_TCK"), own

    all_before, own_before = busy()
    begin = time.perf_counter()
    time.sleep(seconds)
    all_after, own_after = busy()
    return max(0.0, all_after - all_before - (own_after - own_before)) / (time.perf_counter() - begin)


def require_quiet(patience: float = 60.0) -> None:
    """Wait until other programs use less than a tenth of a core.

    Raises:
        SettingsError: they still use more after ``patience`` seconds. With ``LOOKAHEAD_BUSY=1`` in the environment
            this is not checked; pages then report that other work ran.
    """
    end = time.monotonic() + patience
    while (used := used_by_others()) > SHARE and os.environ.get("LOOKAHEAD_BUSY") != "1":
        if time.monotonic() > end:
            raise SettingsError(
                f"a measurement needs a quiet machine, but other programs use {used:.1f} cores; end them, or set "
                "LOOKAHEAD_BUSY=1 to measure all the same"
            )
