"""Files that later runs read: records as JSON lines, to which they append, and files that are replaced as a whole.

A record is one line, written by one unbuffered call and synchronized to disk. A killed process therefore leaves
complete lines and at most one incomplete line at the end, which readers skip and the next writer removes.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from .core.errors import SettingsError

#: The remedy in errors about files of a long command, which can continue where it ended.
CONTINUES = "what was saved before is kept, and the same command continues"
#: Largest size of a JSON file in the cache folder, in bytes.
LARGEST_JSON = 1 << 20


def cache_folder() -> Path:
    """The folder for learned and measured data of this machine, in XDG_CACHE_HOME or the system's cache folder."""
    usual = {"win32": os.environ.get("LOCALAPPDATA", "~/AppData/Local"), "darwin": "~/Library/Caches"}
    base = os.environ.get("XDG_CACHE_HOME") or usual.get(sys.platform, "~/.cache")
    return Path(base).expanduser() / "lookahead-decoding"


def check_writable(folder: Path, name: str, instead: str) -> None:
    """Raise SettingsError unless files can be written to a folder, which is created; called before long work.

    Args:
        folder: the folder.
        name: the folder's name in the message.
        instead: the remedy, as in "give another folder".
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise not_writable(name, error, instead) from None


def not_writable(name: object, error: OSError, instead: str = "", kind: str = "folder") -> SettingsError:
    """The error of a folder or file that cannot be written or whose disk is full.

    Args:
        name: the name of the folder or file in the message.
        error: the cause.
        instead: the remedy, or what has been saved.
        kind: "folder" or "file".
    """
    reason = error.strerror or error
    return SettingsError(
        f"{name} must be a writable {kind} with free disk space ({reason}){instead and '; '}{instead}"
    )


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file atomically: readers see either the older file or the complete new one.

    The block writes to the temporary file that it is given. If it raises, the older file is kept.

    Args:
        path: the file, in an existing folder.

    Raises:
        OSError: the file cannot be replaced.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def open_regular(path: Path, follow: bool = True) -> int:
    """Open a file for reading. Returns its descriptor.

    Args:
        path: the file.
        follow: whether it may be a link.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a regular file.
    """
    # A FIFO without a writer would block an ordinary open.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags if follow else flags | getattr(os, "O_NOFOLLOW", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is not a regular file")
    return descriptor


def read_bytes(path: Path, largest: int) -> bytes:
    """The content of a file that others may change at any time.

    Such a file is not mapped into memory: shortening a mapped file kills the process, and what is written into it
    (by ``cp`` or ``rsync --inplace``) appears in arrays that have been checked.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a regular file, or larger than ``largest`` bytes.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        require(size <= largest, f"it has {size} bytes, but may have at most {largest}")
        return file.read(largest)


def read_json(path: Path) -> Any:
    """The content of a JSON file in the cache folder; None if it cannot be opened.

    Raises:
        ValueError: it is not a regular file, larger than ``LARGEST_JSON``, nested too deeply, or not JSON; NaN and
            infinities are not JSON either.
    """

    def refuse(number: str) -> None:
        raise ValueError(f"{number} is not a number in JSON")

    try:
        content = read_bytes(path, LARGEST_JSON)
    except OSError:
        return None
    try:
        return json.loads(content, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_arrays(path: Path, largest: int) -> tuple[dict[str, str], dict[str, Any]]:
    """(metadata, arrays) of a safetensors file, in memory.

    Raises:
        OSError: it cannot be read.
        ValueError: as in ``read_bytes``, or it is not a safetensors file of numpy's types.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    content = read_bytes(path, largest)
    try:
        arrays = load(content)
    except (SafetensorError, KeyError) as error:
        raise ValueError(str(error)) from None
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header.get("__metadata__", {}), arrays


def require(condition: Any, message: str) -> None:
    """Raise ValueError with this message unless a condition on a file's contents holds."""
    if not condition:
        raise ValueError(message)


def finite(value: Any) -> Any:
    """The value with NaN and infinities, which JSON lacks, replaced by None."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def as_line(record: Mapping[str, Any]) -> bytes:
    """One line of JSON in UTF-8, including the line break."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except ValueError:  # NaN, an infinity, or half of a surrogate pair, which must be escaped
        return json.dumps(finite(record)).encode() + b"\n"


class RecordWriter(AbstractContextManager["RecordWriter"]):
    """Appends records to a file. A context manager that closes the file.

    Args:
        path: the file, in an existing folder.
        append: whether to keep the file's records, except an incomplete last line; False replaces the file.
        durable: whether to synchronize every record to disk, so that it survives a power failure.

    Raises:
        SettingsError: the file cannot be written.
    """

    def __init__(self, path: str | Path, append: bool = False, durable: bool = True) -> None:
        self.path = Path(path)
        try:
            if append:
                drop_torn_line(self.path)
            self._file = open(self.path, "ab" if append else "wb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise SettingsError(f"{path} must be a writable file ({error.strerror})") from None
        self._durable = durable and stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record.

        Raises:
            SettingsError: the disk is full, or the file can no longer be written.
        """
        remaining = memoryview(as_line(record))
        try:
            while remaining:  # a pipe may accept only part of it
                remaining = remaining[self._file.write(remaining) :]
            if self._durable:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise SettingsError(
                f"{self.path} must be a writable file ({error.strerror}); the records before this one are complete"
            ) from None

    def __exit__(self, *error: object) -> None:
        self._file.close()


def read_records(path: str | Path, field: str, origin: str) -> list[dict[str, Any]]:
    """The complete records of a file, in order; none if the file does not exist. The file is not changed.

    Args:
        path: the file.
        field: a key that every record has.
        origin: the program that writes such records, for error messages.

    Raises:
        SettingsError: a line is not a record; the message names the file and the line.
    """
    if not Path(path).is_file():
        return []
    *lines, torn = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _no_record(path, number, origin, f"not JSON: {error}") from None
            if not isinstance(record, dict) or field not in record:
                raise _no_record(path, number, origin, f"not an object with {field!r}")
            records.append(record)
    if torn.strip() and not torn.startswith(b"{"):
        raise _no_record(path, len(lines) + 1, origin, "not JSON")
    return records


def _no_record(path: str | Path, line: int, origin: str, why: str) -> SettingsError:
    return SettingsError(
        f"line {line} of {path} is not a record of {origin} ({why}); remove the line or give another file"
    )


def drop_torn_line(path: str | Path) -> None:
    """Remove a last line without a line break, left by a killed process."""
    if Path(path).is_file():
        content = Path(path).read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):  # otherwise another process may have added a record since it was read
            os.truncate(path, whole)
