"""The paper's data sets and their peers: what a row looks like, where it comes from, which prompt it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
#: (row, its number) -> fields of a ``Prompt``
Reader = Callable[[Row, int], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a data set comes from and how a row becomes a prompt.

    Attributes:
        read: makes a prompt of a row.
        fields: what a row must have.
        origin: for people.
        hub: (repository, configuration, split) on the Hugging Face hub.
    """

    read: Reader
    fields: tuple[str, ...]
    origin: str
    hub: tuple[str, str | None, str] | None = None


def _code(name: str, code: str, solution: str) -> Reader:
    def read(row: Row, number: int) -> dict[str, Any]:
        return {
            "id": row["task_id"],
            "turns": (f"Complete this Python {name}. Answer with the code only.\n\n{row[code]}",),
            "plain": row[code].rstrip(),
            "reference": row.get(solution),
        }

    return read


def _summary(text: str, reference: str) -> Reader:
    def read(row: Row, number: int) -> dict[str, Any]:
        return {
            "id": str(row.get("id", number)),
            "turns": (f"Summarize:\n{row[text]}",),
            "plain": f"{row[text]}\n\nSummary:",
            "reference": row[reference],
        }

    return read


def _gsm8k(row: Row, number: int) -> dict[str, Any]:
    question = row["question"].strip()
    plain = f"Question: {question}\nAnswer:"
    return {"id": f"gsm8k/{number}", "turns": (question,), "plain": plain, "reference": row["answer"]}


def _mbpp(row: Row, number: int) -> dict[str, Any]:
    task, tests = row["text"] if "text" in row else row["prompt"], "\n".join(row["test_list"])
    return {
        "id": f"mbpp/{row['task_id']}",
        "turns": (f"{task} Answer with Python code only. It must pass these tests:\n\n{tests}",),
        "plain": f'"""\n{task}\n{tests}\n"""',
        "reference": row.get("code"),
    }


def turns_of(row: Row, number: int) -> dict[str, Any]:
    turns = row["turns"] if "turns" in row else row["prompt"]
    if isinstance(turns, str) or not turns:
        raise TypeError(f"turns must be a list of at least one text, got {turns!r:.60}")
    references = row.get("reference")
    return {
        "id": str(row.get("question_id", row.get("prompt_id", number))),
        "turns": tuple(str(turn) for turn in turns),
        "plain": f"{turns[0]}\n",
        "category": row.get("category", ""),
        "reference": str(references[-1]) if references else None,
    }


_QUESTION = ("question_id", "category", "turns")
SOURCES: dict[str, Source] = {
    "humaneval": Source(
        _code("function", "prompt", "canonical_solution"), ("task_id", "prompt"),
        "https://github.com/openai/human-eval (HumanEval.jsonl)", ("openai/openai_humaneval", None, "test"),
    ),
    "gsm8k": Source(
        _gsm8k, ("question", "answer"),
        "https://github.com/openai/grade-school-math (test.jsonl)", ("openai/gsm8k", "main", "test"),
    ),
    "mbpp": Source(
        _mbpp, ("task_id", "text", "test_list"),
        "https://github.com/google-research/google-research/tree/master/mbpp (mbpp.jsonl)",
        ("google-research-datasets/mbpp", "full", "test"),
    ),
    "mt-bench": Source(
        turns_of, _QUESTION, "https://github.com/lm-sys/FastChat (llm_judge/data/mt_bench/question.jsonl)",
        ("HuggingFaceH4/mt_bench_prompts", None, "train"),
    ),
    "classeval": Source(
        _code("class", "skeleton", "solution_code"), ("task_id", "skeleton"),
        "https://github.com/FudanSELab/ClassEval (ClassEval_data.json)", ("FudanSELab/ClassEval", None, "test"),
    ),
    "spec-bench": Source(
        turns_of, _QUESTION, "https://github.com/hemingkx/Spec-Bench (data/spec_bench/question.jsonl)"
    ),
    "xsum": Source(
        _summary("document", "summary"), ("document", "summary"),
        "https://huggingface.co/datasets/EdinburghNLP/xsum, as JSON lines", ("EdinburghNLP/xsum", None, "test"),
    ),
    "cnn-dailymail": Source(
        _summary("article", "highlights"), ("article", "highlights"),
        "https://huggingface.co/datasets/abisee/cnn_dailymail, as JSON lines",
        ("abisee/cnn_dailymail", "3.0.0", "test"),
    ),
}  # fmt: skip
