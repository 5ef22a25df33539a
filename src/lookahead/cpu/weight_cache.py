"""The packed weights of GGUF files on disk: the first start packs them, and later starts map them.

A mapped file costs a start nothing but the pages that it reads, and processes share them. A file holds

    header     HEADER bytes: MAGIC and a digest of the file's name, length, and SAMPLE bytes of each SPACING; zeros
    panels     in the order in which ``gguf_blueprint`` takes them; see ``packed``
    zeros      because kernels read a little past the last weight

Its name is a digest of the identity of the GGUF file (``GGUFFile.digest``) and of ``LAYOUT``. Panels are the same on
every processor.

A file is complete before it gets its name, and its bytes never change afterwards: it is read-only, and removed or
replaced as a whole, so those who have mapped it keep what they mapped. Memory errors (SIGBUS) therefore need somebody
who overrides the file's permissions. Only files and folders of the user or of root that nobody else can write are
used.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import numpy as np

from ..core import SettingsError
from ..core.errors import shown
from ..gguf.file import GGUFFile
from ..records import cache_folder, open_regular
from .formats import round_up

#: Incremented when ``packed`` or ``gguf_blueprint`` puts other bytes into the panels of a file.
LAYOUT = 1
#: The environment variable that turns the cache off, and its values, which are those of the server's settings.
VARIABLE = "LOOKAHEAD_WEIGHT_CACHE"
OFF, ON = ("0", "off", "f", "false", "n", "no"), ("1", "on", "t", "true", "y", "yes")
#: The largest size of the folder, in bytes.
LIMIT = 32 * 10**9
#: Files with less packed weights are not kept, because packing them takes a few milliseconds.
LEAST = 16 << 20
#: Seconds to wait for another process that packs weights.
PATIENCE = 120
HEADER = 4096
MAGIC = b"lookahead panels\n"
#: Bytes after the last weight.
AFTER = 4096
#: A sample of this many bytes is checked for each ``SPACING`` bytes when a file is opened.
SAMPLE, SPACING = 4096, 1 << 20

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def folder() -> Path:
    """Where the files are."""
    return cache_folder() / "weights"


def is_on() -> bool:
    """Whether the cache is used, by the environment variable and the system.

    Raises:
        SettingsError: the environment variable is neither on nor off.
    """
    value = os.environ.get(VARIABLE, "1").lower()
    if value not in ON + OFF:
        raise SettingsError(
            f"{VARIABLE} must be 1 or 0, got {shown(value)}; unset it to use the weight cache"
        )
    return value in ON and sys.platform != "win32"  # where a mapped file cannot be renamed


class Kept(NamedTuple):
    """A file of the cache: its path, its bytes, and when it was last used, in seconds since 1970."""

    path: Path
    size: int
    used: float


def kept() -> list[Kept]:
    """The files of the cache, the least recently used one first."""
    found = []
    for path in folder().glob("*.panels"):
        with suppress(OSError):  # another process has removed it
            status = path.lstat()
            found.append(Kept(path, status.st_size, status.st_mtime))
    return sorted(found, key=lambda each: each.used)


class MappedPanels:
    """The memory of a model's packed weights, mapped from a file. Has the methods of ``ArrayMemory``.

    Args:
        descriptor: the file, with a length of ``file_size``.
        size: bytes of all weights.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._map = mmap.mmap(descriptor, file_size(size), access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # as for ``ArrayMemory``, if the file system has huge pages
            with suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._used = HEADER

    @property
    def used(self) -> Bytes:
        """All bytes taken so far, uint8 (bytes,)."""
        return self._bytes[HEADER : self._used]

    def take(self, size: int) -> Bytes:
        """The next ``size`` bytes, uint8 (size,), read-only."""
        begin = self._used
        self._used += round_up(size, 64)
        return self._bytes[begin : begin + size]

    def header(self, name: str) -> bytes:
        """What the header of a file with this name and these contents must be."""
        found = hashlib.sha256(f"{name} {len(self._bytes)}".encode())
        for begin in range(HEADER, len(self._bytes), SPACING):
            found.update(self._bytes[begin : begin + SAMPLE])  # type: ignore[arg-type]
        return MAGIC + found.digest()

    def check(self, name: str) -> None:
        """Raise ValueError unless the header is that of this name and these contents."""
        header = self.header(name)
        if self._bytes[: len(header)].tobytes() != header:
            raise ValueError("it is damaged")


def file_size(size: int) -> int:
    """Bytes of a file with this many bytes of weights."""
    return HEADER + round_up(size, 64) + AFTER


def open_panels(file: GGUFFile, size: int) -> MappedPanels | None:
    """The packed weights of a file, mapped; None if they are not in the cache.

    Args:
        file: the GGUF file.
        size: bytes of its packed weights.
    """
    path = path_of(file)
    if not is_safe(path.parent):
        return None
    try:
        descriptor = open_regular(path, follow=False)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(descriptor)
        if not is_own(status) or status.st_size != file_size(size):
            return None
        panels = MappedPanels(descriptor, size)
        panels.check(path.stem)
        with suppress(OSError):  # for the order of use; the disk may be read-only
            os.utime(descriptor)
        return panels
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


@contextmanager
def panels_of(file: GGUFFile, size: int) -> Iterator[MappedPanels]:
    """The packed weights of a file, mapped from the cache, to which the block adds them if they are missing.

    Args:
        file: the GGUF file.
        size: bytes of its packed weights.

    Raises:
        OSError: the weights cannot be kept; the block may have run in part.
    """
    found = open_panels(file, size)
    if found is not None:
        yield found
        return
    from filelock import FileLock

    path = path_of(file)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_safe(path.parent):
        raise OSError(errno.EPERM, "others can change it")
    # One process packs at a time, so that several starts at once do the work once.
    with FileLock(path.parent / "lock", timeout=PATIENCE):
        found = open_panels(file, size)
        if found is not None:
            yield found
            return
        for left in path.parent.glob("*.new"):  # by processes that were killed
            left.unlink(missing_ok=True)
        make_room(file_size(size))
        new = path.with_suffix(".new")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(new, flags, 0o600)
        try:
            panels = NewPanels(descriptor, size)
            with panels.flushing():
                yield panels
            panels.complete(path.stem)
            os.replace(new, path)
        finally:
            os.close(descriptor)
            new.unlink(missing_ok=True)


class NewPanels(MappedPanels):
    """A file of packed weights that is being written. It is written by calls, so that a full disk is an error.

    Args:
        descriptor: the file, empty and writable. The caller closes it after ``complete``.
        size: bytes of all weights.

    Raises:
        OSError: it cannot have this length.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._file = descriptor
        os.ftruncate(descriptor, file_size(size))
        super().__init__(descriptor, size)

    @contextmanager
    def flushing(self) -> Iterator[None]:
        """Bring what the block writes to the disk while it still packs, so that ``complete`` waits less."""
        done = Event()

        def flush() -> None:
            while not done.wait(0.1):
                with suppress(OSError):  # ``complete`` meets the same error
                    os.fsync(self._file)

        thread = Thread(target=flush, name="lookahead-flush")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def write(self, part: Bytes, content: Bytes) -> None:
        """Write the contents of a part of this memory.

        Raises:
            OSError: the disk is full.
        """
        self._write(part.ctypes.data - self._bytes.ctypes.data, content)

    def _write(self, at: int, content: Any) -> None:
        left = memoryview(content).cast("B")
        while left:
            written = os.pwrite(self._file, left, at)
            at += written
            left = left[written:]

    def complete(self, name: str) -> None:
        """Write the header of a file with this name, and make the file read-only.

        Raises:
            OSError: the disk is full.
        """
        self._write(0, self.header(name))
        os.fsync(self._file)
        os.fchmod(self._file, 0o400)
        if hasattr(os, "posix_fadvise") and hasattr(mmap, "MADV_DONTNEED"):
            # Pages that are read through the map are huge where the file system has huge pages. Those that were
            # written in pieces are not, and decoding from them is 6 to 9 % slower, so they are read again.
            self._map.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)


def make_room(size: int) -> None:
    """Remove files, the least recently used ones first, until one of this size fits in the limit.

    Raises:
        OSError: it is larger than the limit, or than half of the free disk space.
    """
    left = LIMIT - size
    if left < 0:
        raise OSError(errno.EFBIG, f"{size / 1e9:.0f} GB are more than the limit of {LIMIT / 1e9:.0f} GB")
    for each in reversed(kept()):
        left -= each.size
        if left < 0:
            each.path.unlink(missing_ok=True)
    if shutil.disk_usage(folder()).free < 2 * size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def path_of(file: GGUFFile) -> Path:
    """The file of the cache for a GGUF file."""
    name = hashlib.sha256(f"{LAYOUT} {file.digest()}".encode()).hexdigest()[:32]
    return folder() / f"{name}.panels"


def is_safe(path: Path) -> bool:
    """Whether a path is a folder, and not a link to one, that only this user and root can change."""
    with suppress(OSError):
        status = path.lstat()
        return stat.S_ISDIR(status.st_mode) and is_own(status)
    return False


def is_own(status: os.stat_result) -> bool:
    """Whether only this user and root can change a file or folder."""
    return status.st_uid in trusted() and not status.st_mode & 0o022


def trusted() -> tuple[int, ...]:
    """The users whose files are used."""
    return 0, os.geteuid()
