"""Checks that all records of a page come from one machine, commit, dtype, torch and transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lookahead.core import SettingsError


def origin_of(record: Mapping[str, Any]) -> dict[str, str]:
    """The properties that all records of one page must share, by name; "" where a record does not have one."""
    host = record.get("machine", {})
    processor = host.get("gpu") or host.get("processor", "")
    return {
        "machine": ", ".join(filter(None, [processor, " ".join(host.get("instructions", ()))])),
        "number of threads": str(record.get("threads", "")),
        "commit": str(record.get("commit", "")),
        "dtype": str(record.get("dtype", "")),
        "version of torch": str(record.get("torch", "")),
        "version of transformers": str(record.get("transformers", "")),
    }


def require_one_origin(records: Iterable[Mapping[str, Any]]) -> None:
    """Raise SettingsError unless all records come from one machine, commit, dtype, torch and transformers."""
    first: dict[str, str] | None = None
    for record in records:
        origin = origin_of(record)
        first = first or origin
        for what, value in origin.items():
            if value != first[what]:
                raise SettingsError(
                    f"the records of a page must come from one {what}, got {first[what]!r} and {value!r}; move the "
                    "records of one of them elsewhere, or measure all again"
                )
