"""Answer files as Spec-Bench writes them, so that its own evaluation reads ours.

One file per method, one row per question: ``choices`` with ``turns``, ``decoding_steps``, ``new_tokens``,
``wall_time`` (one entry per turn) and ``accept_lengths`` (one entry per step, over all turns). Their counter
is kept: steps and times include the prefill, whose token counts as accepted by it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from .summary import Record


def rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Rows of one method; every repeat is a choice."""
    questions: dict[str, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if "skipped" not in record:
            questions[record["prompt"]][record["repeat"]].append(record)
    return [_row(question, repeats) for question, repeats in questions.items()]


def _row(question: str, repeats: dict[int, list[Record]]) -> dict[str, Any]:
    first = next(iter(repeats.values()))[0]
    return {
        "question_id": int(question) if question.isdigit() else question,
        "category": first["category"],
        "answer_id": first["key"],
        "model_id": f"{first['model']}-{first['method']}{'-' + first['state'] if first['state'] else ''}",
        "choices": [_choice(number, turns) for number, turns in enumerate(repeats.values())],
        "tstamp": datetime.fromisoformat(first["time"]).timestamp(),
    }


def _choice(number: int, turns: list[Record]) -> dict[str, Any]:
    turns = sorted(turns, key=lambda record: record["turn"])
    return {
        "index": number,
        "turns": [record["text"] for record in turns],
        "decoding_steps": [record["steps"] + 1 for record in turns],
        "new_tokens": [record["new_tokens"] for record in turns],
        "wall_time": [record["prefill_seconds"] + record["decode_seconds"] for record in turns],
        "accept_lengths": [
            size for record in turns for size in (record["prefill_tokens"], *record["step_tokens"])
        ],
    }


def write_answers(records: Sequence[Record], folder: str | Path) -> list[Path]:
    """Write ``spec-bench-METHOD.jsonl`` for every method. Returns the files."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups["-".join(part for part in (record["method"], record["state"]) if part)].append(record)
    written = []
    for name, group in groups.items():
        path = Path(folder) / f"spec-bench-{re.sub('[^A-Za-z0-9.-]+', '-', name)}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows(group)), encoding="utf-8"
        )
        written.append(path)
    return written
