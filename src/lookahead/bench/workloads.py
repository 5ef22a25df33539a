"""Prompts to measure with: the paper's data sets, any JSON-lines file, and the running Python's own library.

No data comes with the package: a data set is read from a file that the user names, or from a folder of data sets.
Code ends without its last line break for a model without a chat template: many tokenizers join a line break
and the indent after it into one token, and a prompt must not cut that token in two.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from ..core import SettingsError
from .stdlib import stdlib_prompts

Row = Mapping[str, Any]
#: (row, its number) -> fields of a ``Prompt``
Reader = Callable[[Row, int], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, or a conversation of several turns."""

    id: str  # unique within the workload
    workload: str
    turns: tuple[str, ...]  # what the user says, turn by turn; the answers in between are the target's own
    plain: str | None = None  # the first turn for a model without a chat template; ``turns[0]`` where None
    category: str = ""  # for workloads made of several kinds
    reference: str | None = None  # a text to compare the last answer with, where there is one
    history: tuple[Mapping[str, str], ...] = ()  # messages before the first turn (a system message, say)
    ids: tuple[int, ...] | None = None  # the only turn as token ids, where there is no text

    def tokens(self, tokenizer: Any, answers: Sequence[str] = ()) -> list[int]:
        """Token ids of the turn that follows ``answers``, by the chat template where there is one.

        Args:
            tokenizer: a transformers tokenizer; any where the prompt is token ids.
            answers: the target's answers to the earlier turns.

        Raises:
            SettingsError: a text, and no tokenizer.
        """
        if self.ids is not None:
            return list(self.ids)
        if tokenizer is None:
            raise SettingsError("texts need a tokenizer, and the model has none; pass token ids")
        earlier, turn = list(zip(self.turns, answers, strict=False)), self.turns[len(answers)]
        if getattr(tokenizer, "chat_template", None):
            messages = [dict(message) for message in self.history]
            for question, answer in earlier:
                messages += [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            messages.append({"role": "user", "content": turn})
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        first = self.turns[0] if self.plain is None else self.plain
        text = "".join(message["content"] + "\n\n" for message in self.history) + first
        for answer, following in zip(answers, self.turns[1:], strict=False):
            text += f"{answer}\n\n{following}\n"
        return list(tokenizer(text)["input_ids"])


@dataclass(frozen=True, slots=True)
class Source:
    """A data set: how a row becomes a prompt, what a row must have, and where the file comes from (for people)."""

    read: Reader
    fields: tuple[str, ...]
    origin: str


def _code(name: str, code: str, solution: str) -> Reader:
    return lambda row, number: {
        "id": row["task_id"],
        "turns": (f"Complete this Python {name}. Answer with the code only.\n\n{row[code]}",),
        "plain": row[code].rstrip(),
        "reference": row.get(solution),
    }


def _summary(text: str, reference: str) -> Reader:
    return lambda row, number: {
        "id": str(row.get("id", number)),
        "turns": (f"Summarize:\n{row[text]}",),
        "plain": f"{row[text]}\n\nSummary:",
        "reference": row[reference],
    }


def _gsm8k(row: Row, number: int) -> dict[str, Any]:
    question = row["question"].strip()
    plain = f"Question: {question}\nAnswer:"
    return {"id": f"gsm8k/{number}", "turns": (question,), "plain": plain, "reference": row["answer"]}


def _mbpp(row: Row, number: int) -> dict[str, Any]:
    task, tests = row["text"], "\n".join(row["test_list"])
    return {
        "id": f"mbpp/{row['task_id']}",
        "turns": (f"{task} Answer with Python code only. It must pass these tests:\n\n{tests}",),
        "plain": f'"""\n{task}\n{tests}\n"""',
        "reference": row.get("code"),
    }


def _turns(row: Row, number: int) -> dict[str, Any]:
    turns, references = row["turns"], row.get("reference")
    if isinstance(turns, str) or not turns:
        raise TypeError(f"turns must be a list of at least one text, got {turns!r:.60}")
    return {
        "id": str(row.get("question_id", number)),
        "turns": tuple(str(turn) for turn in turns),
        "plain": f"{turns[0]}\n",
        "category": row.get("category", ""),
        "reference": str(references[-1]) if references else None,
    }


def _own(row: Row, number: int) -> dict[str, Any]:
    """A row of the user's own file: prompt, text, turns or messages."""
    name = {"id": str(row.get("id", number))}
    if "turns" in row:
        return _turns(row, number) | name
    fields = name | {"category": str(row.get("category", "")), "reference": row.get("reference")}
    if "messages" in row:
        *history, last = row["messages"]
        if last["role"] != "user":
            raise ValueError(f"the last message must be the user's, got role {last['role']!r}")
        return fields | {"turns": (last["content"],), "history": tuple(history)}
    text = row.get("prompt", row.get("text"))
    if not isinstance(text, str) or not text:
        raise TypeError(f"prompt must be a text that is not empty, got {text!r:.60}")
    return fields | {"turns": (text,)}


_QUESTION = ("question_id", "category", "turns")
_CODE = "https://github.com/"
SOURCES: dict[str, Source] = {
    "humaneval": Source(
        _code("function", "prompt", "canonical_solution"), ("task_id", "prompt"), f"{_CODE}openai/human-eval"
    ),
    "gsm8k": Source(_gsm8k, ("question", "answer"), f"{_CODE}openai/grade-school-math (test.jsonl)"),
    "mbpp": Source(
        _mbpp, ("task_id", "text", "test_list"), f"{_CODE}google-research/google-research (mbpp/mbpp.jsonl)"
    ),
    "mt-bench": Source(
        _turns, _QUESTION, f"{_CODE}lm-sys/FastChat (llm_judge/data/mt_bench/question.jsonl)"
    ),
    "classeval": Source(
        _code("class", "skeleton", "solution_code"), ("task_id", "skeleton"), f"{_CODE}FudanSELab/ClassEval"
    ),
    "spec-bench": Source(
        _turns, _QUESTION, f"{_CODE}hemingkx/Spec-Bench (data/spec_bench/question.jsonl)"
    ),
    "xsum": Source(
        _summary("document", "summary"), ("document", "summary"),
        "https://huggingface.co/datasets/EdinburghNLP/xsum, as JSON lines",
    ),
    "cnn-dailymail": Source(
        _summary("article", "highlights"), ("article", "highlights"),
        "https://huggingface.co/datasets/abisee/cnn_dailymail, as JSON lines",
    ),
}  # fmt: skip
_OWN = Source(_own, ("prompt, text, turns or messages",), "a file of the user's own")
KNOWN = (*SOURCES, "stdlib")


def load_workload(
    name: str, limit: int | None = None, seed: int = 0, data: str | Path | None = None
) -> list[Prompt]:
    """The prompts of a workload.

    Args:
        name: a known name; ``name=PATH`` to say where its file lies; or the path of a JSON-lines file
            whose rows have ``prompt``, ``text``, ``turns`` or ``messages``.
        limit: at most so many, taken in turn from each category.
        seed: chooses among the standard library's functions.
        data: a folder with data sets, each in a folder or a file of its name.

    Raises:
        SettingsError: an unknown name, a file that is not there, or a line that cannot be read.
    """
    name, _, given = name.partition("=")
    if name == "stdlib":
        return [Prompt(workload="stdlib", **fields) for fields in stdlib_prompts(limit or 64, seed)]
    if name in SOURCES:
        path = Path(given) if given else find_file(name, data)
        if path is None:
            missing = f"nothing for {name} lies in {data}; " if data is not None else ""
            raise SettingsError(
                f"{missing}put the file of {name} under --data as {name}/FILE.jsonl, or give --workload {name}=PATH; "
                f"it comes from {SOURCES[name].origin}"
            )
        prompts = _prompts(name, SOURCES[name], path)
    elif Path(name).is_file():
        prompts = _prompts(Path(name).stem, _OWN, Path(name))
    else:
        raise SettingsError(
            f"unknown workload {name!r}; known are {', '.join(KNOWN)}, or give the path of a JSON-lines file"
        )
    if limit is None:
        return prompts
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.category, []).append(prompt)
    in_turn = chain.from_iterable(zip_longest(*kinds.values()))
    return [prompt for prompt in in_turn if prompt is not None][:limit]


def _prompts(name: str, source: Source, path: Path) -> list[Prompt]:
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    fields = ", ".join(source.fields)
    for place, number, row in _rows(path):
        if not isinstance(row, Mapping):
            raise SettingsError(f"{place}: an object with {fields} is needed, got {row!r:.60}")
        try:
            prompt = Prompt(workload=name, **source.read(row, number))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise SettingsError(
                f"{place}: a row of {name} must have {fields} ({type(error).__name__}: {error}); "
                f"this one has {', '.join(row)}"
            ) from error
        if prompt.id in places:
            raise SettingsError(f"{place}: the id {prompt.id!r} is also that of {places[prompt.id]}")
        places[prompt.id] = place
        prompts.append(prompt)
    if not prompts:
        raise SettingsError(f"{name}: the file holds no rows")
    return prompts


def _rows(path: Path) -> Iterator[tuple[str, int, Any]]:
    """(place for errors, number, row) of a JSON array or of JSON lines, packed with gzip or not."""
    if not path.is_file():
        raise SettingsError(f"there is no file {path}")
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read as UTF-8 text: {error}") from error
    array = text.lstrip().startswith("[")
    for number, part in enumerate([text] if array else text.split("\n")):
        if not part.strip():
            continue
        try:
            value = json.loads(part)
        except json.JSONDecodeError as error:
            place = f"{path}, line {number + error.lineno}"
            raise SettingsError(f"{place}: not JSON ({error.msg} at column {error.colno})") from error
        if array:
            yield from ((f"{path}, entry {entry + 1}", entry, row) for entry, row in enumerate(value))
        else:
            yield f"{path}, line {number + 1}", number, value


def find_file(name: str, data: str | Path | None) -> Path | None:
    """The data set's file under ``data``: in a folder of its name, or itself of that name."""
    if data is None:
        return None
    root = Path(data)
    if not root.is_dir():
        raise SettingsError(f"the data folder {root} does not exist")

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    found = [
        path
        for path in (*root.glob("*"), *root.glob("*/*"))
        if re.search(r"\.jsonl?(\.gz)?$", path.name)
        and plain(name) in (plain(path.parent.name), plain(path.name.split(".")[0]))
    ]
    # A test split comes before everything else, a training split after it.
    return min(found, key=lambda p: ("test" not in p.name, "train" in p.name, p.name), default=None)
