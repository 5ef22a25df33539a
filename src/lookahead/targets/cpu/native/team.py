"""Threads that share one job: the caller and helpers that sleep between requests.

A helper looks for the next job for a millisecond or two, because the next step of a text comes soon, and then sleeps
on a lock. One team for each number of threads, for the whole process; one job at a time.
"""

from __future__ import annotations

import contextlib
import os
import threading

import numpy as np

from . import control


class Team:
    """``size`` threads, the caller among them. Its helpers are daemons and end with the process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._control = np.zeros(control.ASLEEP + 8 * (size + 1), np.int64)
        # A cache line of its own for each word that several threads look at.
        begin = -self._control.ctypes.data % 64 // 8
        self._address = self._control.ctypes.data + 8 * begin
        self._control[begin + control.TEAM] = size
        self._post, self._lead = control.lead_code()
        self._serve = control.serve_code()
        self._busy = threading.Lock()
        self._beds = [threading.Lock() for _ in range(size)]
        for rank in range(1, size):
            name = f"lookahead-step-{rank}"
            threading.Thread(target=self._help, args=(rank,), name=name, daemon=True).start()

    def _help(self, rank: int) -> None:
        bed = self._beds[rank]
        bed.acquire()
        while True:
            self._serve(self._address, rank)
            # Nobody wakes a helper whose leader was interrupted at the wrong moment: it looks for itself.
            bed.acquire(timeout=1.0)

    def run(self, job: int, argument: int) -> None:
        """Let every thread do its part of the job at an address; back when all have done it."""
        with self._busy:
            self._lead(self._address)  # what an interrupt left undone, if anything: the helpers wait for it
            try:
                sleepers = self._post(self._address, job, argument)
                for rank in range(1, self.size) if sleepers else ():
                    if sleepers >> rank & 1:
                        with contextlib.suppress(RuntimeError):  # up already
                            self._beds[rank].release()
            finally:
                self._lead(self._address)


_teams: dict[tuple[int, int], Team] = {}
_making = threading.Lock()


def team_of(size: int) -> Team:
    """The team of this many threads; a forked process makes its own."""
    key = (os.getpid(), size)
    found = _teams.get(key)
    if found is None:
        with _making:
            found = _teams.get(key) or _teams.setdefault(key, Team(size))
    return found
