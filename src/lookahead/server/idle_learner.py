"""``--learn-when-idle``: another process learns from the model's own text, and is stopped while there are requests.

The process has the lowest priority and a process group of its own: the system ends a stopped process whose server was
killed. SIGSTOP takes effect within milliseconds, whatever the process is computing.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from subprocess import DEVNULL, Popen
from time import monotonic

from ..core import SettingsError
from ..options import LoadOptions

log = logging.getLogger("lookahead.server")

#: Seconds without requests after which the process runs.
IDLE_SECONDS = 3.0
PROGRAM = "import os, sys; os.nice(19); from lookahead.learning.idle import main; main(sys.argv[1])"


class IdleLearner:
    """The process and when it may run. ``pause`` may be called from any thread.

    Args:
        loading: how the model is loaded.
        device: where it runs.

    Raises:
        SettingsError: the model is not on a CPU, or the system cannot stop processes.
    """

    def __init__(self, loading: LoadOptions, device: str) -> None:
        if device != "cpu" or not hasattr(signal, "SIGSTOP"):
            raise SettingsError(
                f"learn_when_idle needs a model on the CPU of Linux or macOS, got {device} on {sys.platform}; "
                "leave it out, and run lookahead learn"
            )
        self._options = json.dumps(
            {k: v for k, v in loading.keywords().items() if k != "drafter"}, default=str
        )
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None
        self._last_request = monotonic()
        self._runs = self._ended = False

    def pause(self) -> None:
        """Stop the process, because a request has arrived."""
        with self._lock:
            self._last_request = monotonic()
            if self._runs:
                self._signal("SIGSTOP")
                self._runs = False

    def resume(self) -> None:
        """Start the process or let it continue, unless a request arrived in the last ``IDLE_SECONDS``."""
        with self._lock:
            if self._ended or monotonic() - self._last_request < IDLE_SECONDS:
                return
            if self._process is None:
                command = [sys.executable, "-c", PROGRAM, self._options]
                self._process = Popen(command, stdin=DEVNULL, stdout=DEVNULL, process_group=0)
            elif self._process.poll() is not None:
                self._ended = True
                log.info("learning while idle has ended with status %s", self._process.returncode)
            elif not self._runs:
                self._signal("SIGCONT")
            self._runs = not self._ended

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._signal("SIGKILL")
                self._process.wait()

    def _signal(self, name: str) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            os.killpg(self._process.pid, getattr(signal, name))
