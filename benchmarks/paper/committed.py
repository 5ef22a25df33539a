"""Records by text that are committed: one gzip file of JSON lines for each page, from which the page is computed.

The first line is the head: the command, the size of the model, and what was measured once for the whole page. Every
further line is one record of ``lookahead.bench.run`` without the text itself: prompts come from data sets with
licences of their own, and a page needs counts, times and equality only.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lookahead.bench.record import Record
from lookahead.files.records import finite

Head = dict[str, Any]
#: Fields of a record that pages are computed from.
FIELDS = (
    *("workload", "category", "prompt", "turn", "repeat", "method", "state", "prompt_tokens", "skipped"),
    *("new_tokens", "prefill_tokens", "steps", "rows", "prefill_seconds", "decode_seconds", "load"),
    *("equal", "first_divergence", "logit_gap", "loop_free", "drafter", "rouge"),
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
    """The fields that pages need; the text is replaced by a hash, so that equality can be checked again."""
    kept = {name: record[name] for name in FIELDS if name in record}
    for name in ("prefill_seconds", "decode_seconds"):
        if name in kept:
            kept[name] = round(kept[name], 5)
    if "tokens" in record:
        kept["tokens_hash"] = hashlib.sha256(json.dumps(record["tokens"]).encode()).hexdigest()[:12]
    return kept


def write(path: Path, head: Head, records: Iterable[Record]) -> None:
    """Write head and compacted records; the same records give the same bytes."""
    lines = [head, *map(compact, records)]
    text = "".join(json.dumps(finite(line), ensure_ascii=False) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def read(path: Path) -> tuple[Head, list[Record]]:
    """(head, records) of a file that ``write`` wrote."""
    head, *records = map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines())
    return head, records
