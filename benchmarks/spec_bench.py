"""Answer files in Spec-Bench's format, so that its own evaluation can read ours.

One file per method, one row per question: ``choices`` with ``turns``, ``decoding_steps``, ``new_tokens``,
``wall_time`` (one entry per turn) and ``accept_lengths`` (one entry per step, over all turns). As in their counter,
steps and times include the prefill, which accepts one token.

    python -m benchmarks.spec_bench DIR     a folder written by `benchmarks.side_by_side --workload spec-bench`
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lookahead.bench.record import Record, Records
from lookahead.records import RecordWriter

#: Fields that must be equal for records to be summed together.
SETUP = ("model", "dtype", "path", "machine", "threads", "torch", "transformers", "commit", "options")


def rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Rows of one method. Every repeat is a choice."""
    questions: dict[str, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if "skipped" not in record:
            questions[record["prompt"]][record["repeat"]].append(record)
    return [_row(question, list(repeats.values())) for question, repeats in questions.items()]


def _row(question: str, repeats: list[list[Record]]) -> dict[str, Any]:
    first = repeats[0][0]
    return {
        "question_id": int(question) if question.isdigit() else question,
        "category": first["category"],
        "answer_id": first["key"],
        "model_id": "-".join(filter(None, (first["model"], first["method"], first["state"]))),
        "choices": [
            _choice(index, sorted(turns, key=lambda r: r["turn"])) for index, turns in enumerate(repeats)
        ],
        "tstamp": datetime.fromisoformat(first["time"]).timestamp(),
    }


def _choice(index: int, turns: list[Record]) -> dict[str, Any]:
    return {
        "index": index,
        "turns": [record["text"] for record in turns],
        "decoding_steps": [record["steps"] + 1 for record in turns],
        "new_tokens": [record["new_tokens"] for record in turns],
        "wall_time": [record["prefill_seconds"] + record["decode_seconds"] for record in turns],
        "accept_lengths": [size for r in turns for size in (r["prefill_tokens"], *r["step_tokens"])],
    }


def write_answers(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write ``spec-bench-METHOD.jsonl`` for every method. Returns the files."""
    written = []
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda r: r["repeat"]):
        groups[f"{record['method']}-{record['state']}"].append(record)
    for name, group in groups.items():
        written.append(folder / f"spec-bench-{re.sub('[^A-Za-z0-9.-]+', '-', name).strip('-')}.jsonl")
        with RecordWriter(written[-1]) as writer:
            for row in rows(group):
                writer.write(row)
    return written


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    every = Records(folder).read()
    newest = [r for r in every if all(r.get(name) == every[-1].get(name) for name in SETUP)]
    for answers in write_answers(newest, folder):
        print(answers)
