"""The data sets of the paper and of Spec-Bench as prompts. The project includes no data.

A data set is read from ``name=PATH``, or from a folder of data sets (``--data``) that contains a file of its name, or
a folder of its name with such a file. docs/benchmarks.md lists the names and where each file comes from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from lookahead.bench import workloads
from lookahead.bench.workloads import Prompt
from lookahead.core import SettingsError


@dataclass(frozen=True, slots=True)
class Source:
    """The fields of a row that make the prompt. A row with ``turns`` is a conversation and needs no template."""

    origin: str  # where the file comes from, for people
    turn: str = "{turns}"  # template of the user's turn
    plain: str = ""  # template for a model without a chat template; ``turn`` if empty
    id: str = "id"  # field with the id; the row's number if the field is absent
    reference: str = ""  # field with the reference; none if empty
    licence: str = "not stated"  # as its publisher says

    @property
    def fields(self) -> str:
        """What a row must have."""
        named = [field for _, field, _, _ in Formatter().parse(self.turn) if field]
        return ", ".join([*named, self.reference] if self.reference else named)

    def prompt(self, workload: str, row: Mapping[str, Any], number: int) -> Prompt:
        """The prompt of a row."""
        name = str(row.get(self.id, number))
        category = str(row.get("category", ""))
        if "turns" in row:
            return workloads.conversation(workload, name, category, row["turns"], row.get("reference"))
        if "prompt" in row:
            workloads.text_of(row["prompt"])
        texts = {
            key: "\n".join(map(str, value)) if isinstance(value, list) else value
            for key, value in row.items()
        }
        turn = self.turn.format_map(texts)
        plain = self.plain.format_map(texts).rstrip()
        reference = row[self.reference] if self.reference else None
        return Prompt(name, workload, (turn,), plain or None, category, reference)


_GITHUB = "https://github.com/"
_HUB = "https://huggingface.co/datasets/"
_COMPLETE = "Complete this Python {}. Answer with the code only.\n\n"
#: The data sets of the project's pages.
SETS = ("humaneval", "gsm8k", "mbpp", "mt-bench", "classeval", "spec-bench")
SOURCES: dict[str, Source] = {
    "humaneval": Source(
        f"{_GITHUB}openai/human-eval",
        licence="MIT",
        turn=_COMPLETE.format("function") + "{prompt}",
        plain="{prompt}",
        id="task_id",
        reference="canonical_solution",
    ),
    "gsm8k": Source(
        f"{_GITHUB}openai/grade-school-math (test.jsonl)",
        licence="MIT",
        turn="{question}",
        plain="Question: {question}\nAnswer:",
        reference="answer",
    ),
    "mbpp": Source(
        f"{_GITHUB}google-research/google-research (mbpp/mbpp.jsonl)",
        licence="CC-BY-4.0",
        turn="{text} Answer with Python code only. It must pass these tests:\n\n{test_list}",
        plain='"""\n{text}\n{test_list}\n"""',
        id="task_id",
        reference="code",
    ),
    "mt-bench": Source(
        f"{_GITHUB}lm-sys/FastChat (llm_judge/data/mt_bench/question.jsonl)",
        id="question_id",
        licence="Apache-2.0",
    ),
    "classeval": Source(
        f"{_GITHUB}FudanSELab/ClassEval",
        licence="MIT",
        turn=_COMPLETE.format("class") + "{skeleton}",
        plain="{skeleton}",
        id="task_id",
        reference="solution_code",
    ),
    "spec-bench": Source(
        f"{_GITHUB}hemingkx/Spec-Bench (data/spec_bench/question.jsonl)",
        id="question_id",
        licence="Apache-2.0",
    ),
    "xsum": Source(
        f"{_HUB}EdinburghNLP/xsum, as JSON lines",
        turn="Summarize:\n{document}",
        plain="{document}\n\nSummary:",
        reference="summary",
    ),
    "cnn-dailymail": Source(
        f"{_HUB}abisee/cnn_dailymail, as JSON lines",
        licence="Apache-2.0",
        turn="Summarize:\n{article}",
        plain="{article}\n\nSummary:",
        reference="highlights",
    ),
}


def load_workload(
    name: str, limit: int | None = None, seed: int = 0, data: str | Path | None = None
) -> list[Prompt]:
    """The prompts of a workload.

    Args:
        name: a data set; ``NAME=PATH`` to give its file; or what ``lookahead.bench.load_workload`` takes.
        limit: at most this many prompts, taken from each category in turn; so Spec-Bench's own categories come
            before the MT-Bench within it.
        seed: selects the functions of the standard library.
        data: a folder of data sets.

    Raises:
        SettingsError: an unknown name, a missing file, or a line that cannot be read.
    """
    name, _, given = name.partition("=")
    if name not in SOURCES:
        if name != workloads.STDLIB and not Path(name).is_file():
            raise SettingsError(
                f"unknown workload {name!r}; known are {', '.join([*SOURCES, workloads.STDLIB])}, "
                "and the path of a JSON-lines file"
            )
        return workloads.load_workload(name, limit, seed)
    source = SOURCES[name]
    path = Path(given) if given else find_file(name, data)
    if path is None:
        missing = f"there is nothing for {name} in {data}; " if data is not None else ""
        raise SettingsError(
            f"{missing}put the file of {name} under --data as {name}/FILE.jsonl, or give {name}=PATH; "
            f"it comes from {source.origin}"
        )
    return workloads.in_turn(workloads.read_prompts(path, name, source.prompt, source.fields), limit)


def find_file(name: str, data: str | Path | None) -> Path | None:
    """The file of a data set under ``data``: a file of its name, or inside a folder of its name. None if absent."""
    if data is None:
        return None
    root = Path(data)
    if not root.is_dir():
        raise SettingsError(f"the data folder {root} does not exist")

    def letters(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    matching = [
        path
        for path in (*root.glob("*.json*"), *root.glob("*/*.json*"))
        if letters(name) in (letters(path.parent.name), letters(path.stem))
    ]
    # A test split comes first, a training split last.
    return min(matching, key=lambda p: ("test" not in p.name, "train" in p.name, p.name), default=None)
