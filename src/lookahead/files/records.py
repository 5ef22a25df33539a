"""Records of a run as JSON lines: a run appends them, and the next run continues after them.

A record is one line. It is written by one unbuffered call and synchronised to disk, so that a process which is
killed leaves whole lines and at most one torn line at the end. Readers pass over a torn line, and the next
writer removes it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import AbstractContextManager
from math import isfinite
from pathlib import Path
from typing import Any

from ..core.errors import SettingsError


def finite(value: Any) -> Any:
    """The same value with None for NaN and the infinities, which JSON has not."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def as_line(record: Mapping[str, Any]) -> bytes:
    """One line of JSON in UTF-8, with its line break."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except ValueError:  # NaN, an infinity, or half a surrogate pair, which only escapes can say
        return json.dumps(finite(record)).encode() + b"\n"


class RecordWriter(AbstractContextManager["RecordWriter"]):
    """Appends records to a file, each for good; a context that closes it.

    Args:
        path: a file, made if need be; its folder must be there.
        append: keep what the file holds, without a torn last line; False begins anew.
        durable: synchronise every record to disk, so that it outlives a power failure too.

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
            raise SettingsError(f"{path} must be a file that can be written ({error.strerror})") from None
        self._durable = durable and stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record.

        Raises:
            SettingsError: the disk is full, or the file cannot be written any more.
        """
        remaining = memoryview(as_line(record))
        try:
            while remaining:  # a pipe may take a part only
                remaining = remaining[self._file.write(remaining) :]
            if self._durable:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise SettingsError(
                f"{self.path} must be a file that can be written ({error.strerror}); "
                "the records before this one are whole"
            ) from None

    def __exit__(self, *error: object) -> None:
        self._file.close()


def read_records(path: str | Path, field: str, origin: str) -> list[dict[str, Any]]:
    """The finished records of a file, in order; none where there is no file. The file is not changed.

    Args:
        field: what every record has.
        origin: what writes such records, for the error.

    Raises:
        SettingsError: a line that is not a record, by file and line.
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
                raise _no_record(path, number, origin, f"no object with {field!r}")
            records.append(record)
    if torn.strip() and not torn.startswith(b"{"):
        raise _no_record(path, len(lines) + 1, origin, "not JSON")
    return records


def _no_record(path: str | Path, line: int, origin: str, why: str) -> SettingsError:
    return SettingsError(
        f"line {line} of {path} is not a record of {origin} ({why}); remove the line, or give another file"
    )


def drop_torn_line(path: str | Path) -> None:
    """Cut off a last line that has no line break, which a killed process leaves."""
    if Path(path).is_file():
        os.truncate(path, Path(path).read_bytes().rfind(b"\n") + 1)
