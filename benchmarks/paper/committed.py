"""Committed records: one gzip file of JSON lines for each page, from which the page is computed.

The first line is the head: the command, the size of the model, and measurements made once for the whole page. Every
other line is one record of ``lookahead.bench.run`` without its text (benchmarks.rows: one prompt by all methods). The
text is left out because data sets have their own licences, and because a page needs only counts, times and equality.
All records of a file come from the same machine, commit, dtype and versions of torch and transformers. SHA256SUMS in
the same folder has a checksum of each file, so that edited records are rejected. docs/results/records/README.md
describes the fields.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lookahead.bench.record import Record
from lookahead.core import SettingsError
from lookahead.records import finite

from ..origin import require_one_origin

Head = dict[str, Any]
#: File with the checksums of a folder, in the format of the program sha256sum.
SUMS = "SHA256SUMS"
#: Fields of a record that pages are computed from.
FIELDS = (
    *(
        "workload",
        "category",
        "prompt",
        "turn",
        "repeat",
        "method",
        "state",
        "prompt_tokens",
        "skipped",
        "failed",
    ),
    *("new_tokens", "prefill_tokens", "steps", "rows", "prefill_seconds", "decode_seconds", "load"),
    *("equal", "first_divergence", "logit_gap", "loop_free", "drafter", "rouge", "temperature", "seconds"),
    *(
        "options",
        "model",
        "dtype",
        "path",
        "machine",
        "threads",
        "torch",
        "transformers",
        "lookahead",
        "commit",
    ),
)


def compact(record: Record) -> Record:
    """The fields that pages need. The token ids are replaced by a hash, so that equality can still be checked."""
    kept = {name: record[name] for name in FIELDS if name in record}
    for name in ("prefill_seconds", "decode_seconds"):
        if name in kept:
            kept[name] = round(kept[name], 5)
    if "tokens" in record:
        kept["tokens_hash"] = hashlib.sha256(json.dumps(record["tokens"]).encode()).hexdigest()[:12]
    return kept


def write(path: Path, head: Head, records: Iterable[Record]) -> None:
    """Write the head and the compacted records, and update the checksums. Equal records produce identical bytes.

    Raises:
        SettingsError: the records have different origins, the disk is full, or the folder is not writable. The old
            file is left unchanged.
    """
    kept = list(map(compact, records))
    require_one_origin(kept)
    lines = [head, *kept]
    text = "".join(json.dumps(finite(line), ensure_ascii=False) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = gzip.compress(text.encode(), 9, mtime=0)
    sums = _sums(path.parent) | {path.name: hashlib.sha256(packed).hexdigest()}
    replace(path, packed)
    listed = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    replace(path.with_name(SUMS), listed.encode())


def replace(path: Path, content: bytes) -> None:
    """Replace a file atomically.

    Raises:
        SettingsError: the disk is full, or the folder is not writable. The old file is left unchanged.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SettingsError(
            f"{path} must be a file that can be written ({error.strerror}); it is as it was, and the same command "
            "continues"
        ) from None


def read(path: Path) -> tuple[Head, list[Record]]:
    """(head, records) of a file written by ``write``.

    Raises:
        SettingsError: the file does not exist, its checksum is wrong, or its records come from different machines,
            commits, dtypes or versions.
    """
    if not path.is_file():
        raise SettingsError(f"{path} must be a file of records; measure first, without --page")
    packed = path.read_bytes()
    if hashlib.sha256(packed).hexdigest() != _sums(path.parent).get(path.name):
        raise SettingsError(
            f"{path} is not the file that was measured: its checksum is not the one in {SUMS}; restore it with git, "
            "or measure again"
        )
    head, *records = map(json.loads, gzip.decompress(packed).decode().splitlines())
    try:
        require_one_origin(records)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None
    return head, records


def _sums(folder: Path) -> dict[str, str]:
    """Checksum by file name."""
    path = folder / SUMS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
