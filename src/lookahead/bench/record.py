"""Records: one JSON line per prompt, method and repeat, with the machine, the versions and the settings.

The key of a record is a hash of all settings under which it was measured; a run that finds the key in the file does
not measure again. Each record in the file has a checksum, so that a record edited by hand is detected.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..core import SettingsError
from ..hf.device import gpus
from ..records import RecordWriter, finite, read_records
from ..threads import thread_count

Record = dict[str, Any]
_INSTRUCTIONS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8"),
    *("asimd", "sve", "bf16"),
)


@lru_cache
def machine() -> dict[str, Any]:
    """Processor, instruction sets that limit the speed, cores, memory, GPU."""
    name = platform.processor() or platform.machine()
    flags = ""
    if Path("/proc/cpuinfo").is_file():
        fields = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        known = {key.strip(): value.strip() for key, _, value in fields}
        name = known.get("model name", name)
        flags = known.get("flags", known.get("Features", ""))
    pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()) else None
    named = gpus()
    gpu = {"gpu": named[0].rpartition(" (")[0]} if named else {}
    return gpu | {
        "processor": name,
        "instructions": [flag for flag in _INSTRUCTIONS if flag in flags.split()],
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "memory_gib": pages and round(pages * os.sysconf("SC_PAGE_SIZE") / 2**30),
    }


def was_busy(records: Iterable[Record]) -> str:
    """A warning if other work ran during a quarter of the measurements or more, else ""."""
    loads = [(r["load"], r["machine"]["cores"]) for r in records if r.get("load") is not None]
    busy = [load for load, cores in loads if load > cores + 1]
    if len(busy) * 4 < len(loads) or not busy:
        return ""
    return (
        f"Other work ran on the machine (load up to {max(busy):.1f} on {loads[0][1]} cores): "
        "the times are unreliable; S and equality do not depend on them."
    )


@lru_cache
def commit() -> str:
    """The library's git commit, with a plus sign if its sources have changed; without git, the package's version."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[1]), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        # This fails if the repository is another one that contains site-packages.
        git("ls-files", "--error-unmatch", "core/tree.py")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return f"version {__version__}"


def version_of(package: str) -> str:
    """The installed version of a package; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def environment() -> Record:
    """Where and with which versions a record is made; part of every record."""
    return {
        "machine": machine(),
        "threads": thread_count(),
        "torch": version_of("torch"),
        "transformers": version_of("transformers"),
        "lookahead": __version__,
        "commit": commit(),
    }


def key_of(*fields: Any) -> str:
    """A short hash of the settings under which a record was measured."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:20]


def checksum_of(record: Mapping[str, Any]) -> str:
    """A checksum of a record as written in its JSON line, independent of field order."""
    as_written = json.loads(json.dumps(finite(record)))
    return hashlib.sha256(json.dumps(as_written, sort_keys=True).encode()).hexdigest()[:12]


class Records:
    """The records of a folder, in ``records.jsonl``."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "records.jsonl"

    def read(self) -> list[Record]:
        """All finished records; of several with one key, the last.

        Raises:
            SettingsError: a line is not a record, or was changed by hand; the message names the file and the line.
        """
        records = read_records(self.path, "key", "`lookahead bench`")
        for record in records:
            checksum = record.pop("checksum", None)  # records of earlier versions have none
            if checksum not in (None, checksum_of(record)):
                raise SettingsError(
                    f"the record with the key {record['key']} in {self.path} was changed after it was measured: its "
                    "checksum differs; remove its line, and the same command measures it again"
                )
        return list({record["key"]: record for record in records}.values())

    def append(self, record: Record) -> None:
        """Write one record to disk, creating the folder if necessary."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with RecordWriter(self.path, append=True) as writer:
            writer.write(record | {"checksum": checksum_of(record)})


def describe_machine(host: Mapping[str, Any]) -> str:
    """Processor or GPU, cores and instruction sets, with which the line of ``describe`` begins.

    Args:
        host: the result of ``machine``.
    """
    name = host.get("gpu") or f"{host['processor']}, {host['cores']} cores"
    return ", ".join(filter(None, [name, " ".join(host["instructions"])]))


def describe(record: Mapping[str, Any], *others: Mapping[str, Any]) -> str:
    """One line about where and with which versions a record was made. ``others`` differ only in dtype and path."""
    threads = record["threads"]
    forms = (
        one["dtype"] + (f" on the {one['path']} path" if one.get("path") else "") for one in (record, *others)
    )
    parts = [
        describe_machine(record["machine"]),
        f"{threads} thread{'s' if threads > 1 else ''}",
        *(f"{name} {record[name]}" for name in ("torch", "transformers") if record[name]),
        record["commit"] if record["commit"].startswith("version") else f"commit {record['commit']}",
        f"{record['model']} in {' and '.join(dict.fromkeys(forms))}",
    ]
    return ", ".join(parts)
