"""Prompts and results as JSON lines: whole lines only, and an output that can be gone on with."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import SettingsError, Step

KEYS = ("prompt", "input_ids", "messages")


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the input.

    Attributes:
        line: its number, from 1.
        id: as given; the line's number where none is; None where the line is no JSON object.
        prompt: text, token ids or chat messages.
        error: why the line cannot be used, or None.
    """

    line: int
    id: Any
    prompt: Any
    error: str | None = None

    def failed(self, error: str) -> dict[str, Any]:
        """The record of a line that could not be used."""
        return {"id": self.id, "error": error, "line": self.line}


def read_jobs(data: bytes) -> list[Job]:
    """Every line that is not blank."""
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [_job(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _job(number: int, line: bytes) -> Job:
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return Job(number, None, None, f"line {number} must be JSON in UTF-8 and is not: {error}")
    if not isinstance(value, dict):
        return Job(number, None, None, f"line {number} must be a JSON object, got {type(value).__name__}")
    name = value.get("id", number)
    given = [key for key in KEYS if key in value]
    if len(given) != 1:
        return Job(
            number,
            name,
            None,
            f'line {number} must have "prompt" or "input_ids" or "messages", '
            + (f"got {' and '.join(given)}" if given else f"got only {sorted(value)}"),
        )
    prompt = value[given[0]]
    wanted = str if given[0] == "prompt" else list
    if not isinstance(prompt, wanted):
        return Job(
            number, name, None, f'line {number}: "{given[0]}" must be a {wanted.__name__}, '
            f"got {type(prompt).__name__}",
        )  # fmt: skip
    return Job(number, name, prompt)


class Writer:
    """Appends JSON lines, one unbuffered write each, so that an interrupt leaves whole lines."""

    def __init__(self, path: Path, append: bool = False) -> None:
        try:
            self._file = open(path, "ab" if append else "wb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise SettingsError(f"{path} must be a file that can be written ({error.strerror})") from None

    def write(self, record: dict[str, Any]) -> None:
        try:
            line = json.dumps(record, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:  # half a surrogate pair, which only escapes can say
            line = json.dumps(record).encode("ascii")
        rest = memoryview(line + b"\n")
        while rest:  # a full disk or a pipe may take a part only
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()


def finished_records(path: Path) -> list[dict[str, Any]]:
    """The records of an earlier run; a torn last line is cut off the file.

    Raises:
        SettingsError: the file holds something else.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    records = []
    for number, line in enumerate(whole.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            _ = record["id"]
        except (ValueError, KeyError, TypeError):
            raise SettingsError(
                f"--resume needs the output of an earlier run; line {number} of {path} is not a record of one"
            ) from None
        records.append(record)
    if len(whole) < len(data):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    return records


def still_to_do(jobs: Iterable[Job], records: Iterable[dict[str, Any]]) -> list[Job]:
    """Jobs without a record; of several with one id as many as have none."""
    done = Counter(json.dumps(record["id"]) for record in records)
    rest = []
    for job in jobs:
        key = json.dumps(job.id)
        if done[key]:
            done[key] -= 1
        else:
            rest.append(job)
    return rest


def trace_line(name: Any, step: Step, piece: str) -> dict[str, Any]:
    """One step: the tree as drafted, the path that was accepted, the tokens that were emitted."""
    tree = step.tree
    return {
        "id": name,
        "step": step.generation.stats.steps if tree is not None else 0,
        "rows": step.rows,
        "tree": None
        if tree is None
        else {"tokens": tree.tokens, "parents": tree.parents, "read": tree.needs_logits},
        "path": step.path,
        "tokens": step.tokens,
        "text": piece,
    }
