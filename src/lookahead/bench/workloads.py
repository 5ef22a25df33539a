"""Prompts to measure with: the paper's data sets, any JSON-lines file, and the running Python's own library.

No data comes with the package: a data set is read from a file that the user names, or from a folder of data sets.
Code ends without its last line break for a model without a chat template: many tokenizers join a line break
and the indent after it into one token, and a prompt must not cut that token in two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from string import Formatter
from typing import Any

from ..core import SettingsError
from .stdlib import stdlib_prompts


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, or a conversation of several turns."""

    id: str  # unique within the workload
    workload: str
    turns: tuple[str, ...]  # what the user says, turn by turn; the answers in between are the target's own
    plain: str | None = None  # the first turn for a model without a chat template; ``turns[0]`` where None
    category: str = ""  # for workloads made of several kinds
    reference: str | None = None  # a text to compare the last answer with, where there is one
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
        chat = getattr(tokenizer, "chat_template", None)
        first = self.turns[0] if self.plain is None or chat else self.plain
        texts = [first, *(text for pair in zip(answers, self.turns[1:], strict=False) for text in pair)]
        if not chat:
            text = first + "".join(
                f"{a}\n\n{turn}\n" for a, turn in zip(texts[1::2], texts[2::2], strict=True)
            )
            return list(tokenizer(text)["input_ids"])
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True, slots=True)
class Source:
    """A data set: what of a row becomes a prompt. A row with ``turns`` is a conversation as it stands."""

    origin: str  # where the file comes from, for people
    turn: str = "{turns}"  # the user's turn, with fields of the row in braces
    plain: str = ""  # likewise, for a model without a chat template; ``turn`` where empty
    id: str = "id"  # field; the row's number where it is not there
    reference: str = ""  # field; none where empty

    @property
    def fields(self) -> str:
        """What a row must have."""
        named = [field for _, field, _, _ in Formatter().parse(self.turn) if field]
        return ", ".join([*named, self.reference] if self.reference else named)

    def prompt(self, workload: str, row: Mapping[str, Any], number: int) -> Prompt:
        """The prompt of a row."""
        name, category = str(row.get(self.id, number)), str(row.get("category", ""))
        if "turns" in row:
            turns, references = row["turns"], row.get("reference")
            if isinstance(turns, str) or not turns:
                raise TypeError(f"turns must be a list of at least one text, got {turns!r:.60}")
            turns = tuple(str(turn) for turn in turns)
            reference = str(references[-1]) if references else None
            return Prompt(name, workload, turns, f"{turns[0]}\n", category, reference)
        given = row.get("prompt", "-")
        if not isinstance(given, str) or not given:
            raise TypeError(f"prompt must be a text that is not empty, got {given!r:.60}")
        texts = {
            key: "\n".join(map(str, value)) if isinstance(value, list) else value
            for key, value in row.items()
        }
        turn, plain = self.turn.format_map(texts), self.plain.format_map(texts).rstrip()
        reference = row[self.reference] if self.reference else None
        return Prompt(name, workload, (turn,), plain or None, category, reference)


CODE = "Complete this Python {}. Answer with the code only.\n\n"
_GITHUB, _HUB = "https://github.com/", "https://huggingface.co/datasets/"
SOURCES: dict[str, Source] = {
    "humaneval": Source(
        f"{_GITHUB}openai/human-eval",
        CODE.format("function") + "{prompt}", "{prompt}", "task_id", "canonical_solution",
    ),
    "gsm8k": Source(
        f"{_GITHUB}openai/grade-school-math (test.jsonl)",
        "{question}", "Question: {question}\nAnswer:", reference="answer",
    ),
    "mbpp": Source(
        f"{_GITHUB}google-research/google-research (mbpp/mbpp.jsonl)",
        "{text} Answer with Python code only. It must pass these tests:\n\n{test_list}",
        '"""\n{text}\n{test_list}\n"""', "task_id", "code",
    ),
    "mt-bench": Source(f"{_GITHUB}lm-sys/FastChat (llm_judge/data/mt_bench/question.jsonl)", id="question_id"),
    "classeval": Source(
        f"{_GITHUB}FudanSELab/ClassEval",
        CODE.format("class") + "{skeleton}", "{skeleton}", "task_id", "solution_code",
    ),
    "spec-bench": Source(f"{_GITHUB}hemingkx/Spec-Bench (data/spec_bench/question.jsonl)", id="question_id"),
    "xsum": Source(
        f"{_HUB}EdinburghNLP/xsum, as JSON lines",
        "Summarize:\n{document}", "{document}\n\nSummary:", reference="summary",
    ),
    "cnn-dailymail": Source(
        f"{_HUB}abisee/cnn_dailymail, as JSON lines",
        "Summarize:\n{article}", "{article}\n\nSummary:", reference="highlights",
    ),
}  # fmt: skip
KNOWN = (*SOURCES, "stdlib")


def load_workload(
    name: str, limit: int | None = None, seed: int = 0, data: str | Path | None = None
) -> list[Prompt]:
    """The prompts of a workload.

    Args:
        name: a known name; ``name=PATH`` to say where its file lies; or the path of a JSON-lines file
            whose rows have ``prompt`` or ``turns``.
        limit: at most so many, taken in turn from each category, the largest first: those of Spec-Bench before
            the MT-Bench within it.
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
        prompts = _prompts(Path(name).stem, Source("", "{prompt}"), Path(name))
    else:
        raise SettingsError(
            f"unknown workload {name!r}; known are {', '.join(KNOWN)}, or give the path of a JSON-lines file"
        )
    if limit is None:
        return prompts
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.category, []).append(prompt)
    in_turn = chain.from_iterable(zip_longest(*sorted(kinds.values(), key=len, reverse=True)))
    return [prompt for prompt in in_turn if prompt is not None][:limit]


def _prompts(name: str, source: Source, path: Path) -> list[Prompt]:
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    fields = source.fields if source.origin else "prompt or turns"
    for number, (place, row) in enumerate(_rows(path)):
        if not isinstance(row, Mapping):
            raise SettingsError(f"{place}: an object with {fields} is needed, got {row!r:.60}")
        try:
            prompt = source.prompt(name, row, number)
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


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place for errors, row) of JSON lines, or of a JSON array, as ClassEval comes."""
    if not path.is_file():
        raise SettingsError(f"there is no file {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read as UTF-8 text: {error}") from error
    array = text.lstrip().startswith("[")
    for number, part in enumerate([text] if array else text.split("\n"), 1):
        if not part.strip():
            continue
        try:
            value = json.loads(part)
        except json.JSONDecodeError as error:
            place = f"{path}, line {number + error.lineno - 1}"
            raise SettingsError(f"{place}: not JSON ({error.msg} at column {error.colno})") from error
        if array:
            yield from ((f"{path}, entry {entry}", row) for entry, row in enumerate(value, 1))
        else:
            yield f"{path}, line {number}", value


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
        for path in (*root.glob("*.json*"), *root.glob("*/*.json*"))
        if plain(name) in (plain(path.parent.name), plain(path.stem))
    ]
    # A test split comes before everything else, a training split after it.
    return min(found, key=lambda p: ("test" not in p.name, "train" in p.name, p.name), default=None)
