"""The answers that models wrote for one user, if the user wants them to be kept, and the base table with them.

Each owner (the user of this account, or the clients of a server) has two files for each tokenizer: the answers as
token ids, to which every process appends, and a base table in which they are counted beside the tokenizer's own
table. Another process builds it between requests (``lookahead.learning.remembered``). A request uses the table that
is there when it starts. Only the owner of the account can read the files, and no owner's text enters the table of
another.

The answers are lines of numbers: at most three tokens of the prompt, which the first tokens of the answer followed,
and the answer. Half of the room is kept in a second file, which the first replaces when it is full, so the oldest
answers go, and appending never waits.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from subprocess import Popen
from time import monotonic
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from ...core import Drafter, SettingsError, Target
from ...model import Model
from ...records import cache_folder, read_bytes
from .base_files import key_of, run_in_background, warn_once
from .calibration import ORDERS
from .drafter import Adaptive
from .sources.base_table import LARGEST_FILE, BaseTable, read_table

#: The most bytes of answers, of which a token takes 4 to 7: about 50,000 tokens.
MOST_BYTES = 300_000
#: Larger tokens are damage: three of them as one number must fit in 64 bits.
MOST_TOKEN = 1 << 21
#: No table, and its version.
NOTHING = None, 0
#: Least number of seconds between the starts of two processes that build a table.
PAUSE = 10.0


def folder() -> Path:
    """The folder of all remembered answers and their tables."""
    return cache_folder() / "remembered"


def owner_of(api_key: str | None) -> str:
    """The owner of a server's answers: the holders of its API key."""
    return "server" if api_key is None else f"key-{hashlib.sha256(api_key.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Remembering(Adaptive):
    """``Adaptive`` with the answers of one owner, to which those of its sequences are added."""

    remembered: Remembered | None = field(default=None, compare=False, repr=False)

    def prepare(self, model: Any, target: Target) -> Adaptive:
        prepared = super().prepare(model, target)
        assert self.remembered is not None
        assert prepared.for_model is not None
        table, version = self.remembered.table(model.shape.vocabulary)
        if table is None:
            return prepared
        given = prepared.for_model._replace(base_table=table, remembered=version)
        return replace(prepared, for_model=given)

    def keep(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        assert self.remembered is not None
        self.remembered.add(prompt, tokens)


def remembering(drafter: Drafter, model: Model, owner: str = "user") -> Remembering:
    """The drafter, with the answers of this owner and this model's tokenizer.

    Raises:
        SettingsError: the drafter does not use the tokenizer's table, or the tokenizer is unknown.
    """
    if not isinstance(drafter, Adaptive) or "base" not in drafter.sources or drafter.table is not None:
        raise SettingsError(
            f"remember needs the drafter adaptive with the source base and without a table, got {drafter}; "
            "leave one of them out"
        )
    if not (key := key_of(model)):
        raise SettingsError("remember needs a model with a tokenizer; leave it out")
    settings = {each.name: getattr(drafter, each.name) for each in fields(drafter)}
    return Remembering(**settings, remembered=Remembered(owner, key))


class Remembered:
    """The answers of one owner in the tokens of one tokenizer.

    Args:
        owner: whose answers they are; a part of the names of the files.
        key: the key of the tokenizer.
    """

    def __init__(self, owner: str, key: str) -> None:
        self.owner, self.key = owner, key
        self.answers = folder() / f"{owner}-{key}.txt"
        self.older = self.answers.with_suffix(".old.txt")
        self.file = self.answers.with_suffix(".safetensors")
        self._process: Popen[bytes] | None = None
        self._started = -PAUSE
        #: The state of the table's file when it was read last, and what was read.
        self._read: tuple[Any, tuple[BaseTable | None, int]] = None, NOTHING

    def table(self, vocabulary: int) -> tuple[BaseTable | None, int]:
        """The table as it is now, and its version: a checksum of its file. ``NOTHING`` if there is none.

        Args:
            vocabulary: V of the model.
        """
        try:
            status = self.file.stat()
        except OSError:
            self._read = None, NOTHING
            return NOTHING
        state = status.st_mtime_ns, status.st_size, status.st_ino
        if self._read[0] != state:
            self._read = state, NOTHING
            try:
                table = read_table(self.file)  # open_table would keep the tables before this one
                table.check(vocabulary, self.key)
                self._read = state, (table, zlib.crc32(read_bytes(self.file, LARGEST_FILE)))
            except (SettingsError, OSError, ValueError) as error:
                warn_once(str(error))
        return self._read[1]

    def add(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Append an answer, and start a process that counts it, unless the last one is recent.

        Args:
            prompt: token ids of the prompt.
            tokens: the emitted tokens.
        """
        try:
            self._append(" ".join(map(str, [*prompt[-ORDERS:], *tokens])).encode() + b"\n")
            running = self._process is not None and self._process.poll() is None
            if not running and monotonic() - self._started >= PAUSE:
                self._started = monotonic()
                main = f"from lookahead.learning.remembered import main; main({self.owner!r}, {self.key!r})"
                self._process = run_in_background(f"os.umask(0o077); {main}")
        except OSError as error:
            warn_once(f"{folder()} must be a writable folder to remember answers ({error.strerror})")

    def _append(self, line: bytes) -> None:
        make_folder()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(self.answers, flags, 0o600)
        try:
            os.write(descriptor, line)
            full = os.fstat(descriptor).st_size > MOST_BYTES // 2
        finally:
            os.close(descriptor)
        if full:
            self._rotate()

    def _rotate(self) -> None:
        """Let the newer half of the answers replace the older one. If another process holds the lock, do it later."""
        try:
            with locked(timeout=0):
                if self.answers.stat().st_size > MOST_BYTES // 2:
                    os.replace(self.answers, self.older)
        except (Timeout, FileNotFoundError):
            pass

    def texts(self) -> Iterator[np.ndarray[Any, Any]]:
        """The answers, oldest first. Damaged lines are left out.

        Raises:
            ValueError: a file is not a regular file, or too large.
        """
        for file in (self.older, self.answers):
            try:
                content = read_bytes(file, 10 * MOST_BYTES)
            except OSError:
                continue
            for line in content.split(b"\n"):
                if line.translate(None, b" 0123456789"):
                    continue
                tokens = [int(word) for word in line.split()]
                if tokens and max(tokens) < MOST_TOKEN:
                    yield np.array(tokens, np.int64)


def make_folder() -> None:
    """Create the folder, for the owner of the account alone."""
    folder().parent.mkdir(parents=True, exist_ok=True)
    folder().mkdir(mode=0o700, exist_ok=True)


def locked(timeout: float = -1) -> FileLock:
    """The lock of the folder, held while answers are moved or removed and while a table is built.

    Args:
        timeout: seconds to wait for it; -1 for no limit.
    """
    return FileLock(folder() / "lock", timeout=timeout, mode=0o600)


def kept() -> list[Path]:
    """The files of all owners."""
    try:
        return sorted(file for file in folder().iterdir() if file.name != "lock")
    except OSError:
        return []


def forget() -> list[Path]:
    """Remove the answers and tables of all owners, once no process builds a table. Returns the files.

    Raises:
        SettingsError: a file cannot be removed.
    """
    files = kept()
    try:
        if files:
            with locked():
                files = kept()
                for file in files:
                    file.unlink(missing_ok=True)
    except OSError as error:
        raise SettingsError(f"{folder()} must be a writable folder ({error.strerror})") from None
    return files
