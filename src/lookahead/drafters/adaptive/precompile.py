"""Compiles the functions of this package in another process, while this one compiles the model's forward pass.

When a machine uses the library for the first time, each takes about ten seconds on one core. The other process writes
machine code to numba's cache on disk, from which this process loads it. An error there costs only time: a function
that is not on disk is compiled when it is called.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from ...jit import is_on_disk
from . import grow, learn

#: The longest wait, in seconds; the compilation takes less even on a slow machine.
LONGEST = 120.0
#: What the other process runs.
CODE = f"from {__package__}.measure import compile_all; compile_all()"
_running: list[subprocess.Popen[bytes]] = []


def start() -> None:
    """Start the other process, unless the code is on disk or there is only one core."""
    if _running or (os.cpu_count() or 1) < 2 or not sys.executable:
        return
    if is_on_disk(grow.grow) and is_on_disk(learn.learn):
        return
    quiet = subprocess.DEVNULL
    with suppress(OSError):
        _running.append(
            subprocess.Popen([sys.executable, "-c", CODE], stdin=quiet, stdout=quiet, stderr=quiet)
        )


def wait() -> None:
    """Wait until the other process has finished, if there is one."""
    while _running:
        process = _running.pop()
        with suppress(subprocess.TimeoutExpired):
            process.wait(LONGEST)
