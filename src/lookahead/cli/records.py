"""Prompts and results as JSON lines: whole lines only, and an output that can be gone on with."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
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


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _job(number: int, line: bytes) -> Job:
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
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


def still_to_do(jobs: Sequence[Job], records: Sequence[dict[str, Any]], output: Path) -> list[Job]:
    """Jobs without a record. A record belongs to the job of its line and id.

    Where the input has changed since, or the record names no line, it belongs to the job of its id, if only one
    has it; but a record without an id belongs to its line alone.

    Raises:
        SettingsError: the ids alone do not tell which jobs have records.
    """
    lines = Counter((record.get("line"), _key(record["id"])) for record in records)
    left = [job for job in jobs if not lines.pop((job.line, _key(job.id)), 0)]
    by_id: Counter[str] = Counter()
    for (line, key), count in lines.items():
        by_id[key] += count if line is None or key != "null" else 0
    same = {key: [job.line for job in left if _key(job.id) == key] for key in by_id if by_id[key]}
    for key, numbers in same.items():
        if len(numbers) > max(1, by_id[key]):
            raise SettingsError(
                f"--resume cannot tell which of the prompts with id {key} (lines {', '.join(map(str, numbers))}) "
                f"have their results in {output}, whose records are of other lines or name none; "
                "give every prompt an id of its own, or use --overwrite"
            )
    return [job for job in left if not same.get(_key(job.id))]


def _key(value: Any) -> str:
    """An id as text: 1, 1.0 and "1" are three."""
    return json.dumps(value, sort_keys=True)


def trace_line(name: Any, step: Step, piece: str) -> dict[str, Any]:
    """One step: the tree as drafted, the path that was accepted, the tokens that were emitted."""
    tree = step.tree
    return {
        "id": name,
        "step": step.generation.stats.steps if tree is not None else 0,
        "rows": step.rows,
        "tree": None
        if tree is None
        else {"tokens": tree.tokens, "parents": tree.parents, "needs_logits": tree.needs_logits},
        "path": step.path,
        "tokens": step.tokens,
        "text": piece,
    }
