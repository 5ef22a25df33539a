"""Servers that a program starts on this machine, and the signals that end them with it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from time import sleep

import httpx

from lookahead.core import SettingsError


def exit_on_signals() -> None:
    """Exit on SIGTERM and SIGHUP, so that blocks end: servers that were started, and marks that a peer decodes."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, frame: sys.exit(128 + number))


@contextmanager
def running(words: list[str], path: str) -> Iterator[str]:
    """Start a server on a free port, and yield its address once ``path`` answers; end it afterwards.

    Raises:
        SettingsError: it ended before.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with TemporaryFile("w+") as log:
        command = [*words, "--port", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True)
        try:
            while process.poll() is None:
                with suppress(httpx.TransportError):
                    if httpx.get(f"{address}{path}", timeout=60).status_code == 200:
                        break
                sleep(0.2)
            if process.poll() is not None:
                log.seek(0)
                last = (log.read().strip().splitlines() or ["it said nothing"])[-1]
                raise SettingsError(f"the server did not start: {last}")
            yield address
        finally:
            process.terminate()
            process.wait()


def started_llamacpp(
    program: Path | str,
    file: Path | str,
    threads: int,
    context: int,
    slots: int = 1,
    more: Sequence[str] = (),
) -> AbstractContextManager[str]:
    """As ``running``, llama.cpp's own server on a GGUF file, without a cache of prompts.

    Args:
        program: the path of llama-server.
        file: the file.
        threads: number of threads.
        context: number of tokens of a slot.
        slots: number of completions at the same time.
        more: further options.
    """
    words = [str(program), "--model", str(file), "--threads", str(threads), "--threads-batch", str(threads)]
    words += ["--parallel", str(slots), "--ctx-size", str(slots * context), "--no-webui", "--cache-ram", "0"]
    return running([*words, *more], "/health")
