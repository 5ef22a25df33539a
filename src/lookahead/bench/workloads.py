"""Prompts to measure with: the paper's data sets, any JSON-lines file, and the running Python's own library.

Knows files and rows; nothing of models, except that a chat template is applied where a tokenizer has one.
Code ends without its last line break for a model without a chat template: many tokenizers join a line break
and the indent after it into one token, and a prompt must not cut that token in two.
No data comes with the package: a data set is read from a file that the user names, from a folder given
as ``data``, or from the Hugging Face hub where ``datasets`` is installed and the network allows it.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import SettingsError
from .data_sets import SOURCES, Reader, Row, Source, turns_of
from .stdlib import stdlib_prompts

KNOWN = (*SOURCES, "stdlib")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, or a conversation of several turns.

    Attributes:
        id: unique within the workload.
        workload: its name.
        turns: what the user says, turn by turn; the answers in between are the target's own.
        plain: the first turn for a model without a chat template; ``turns[0]`` where None.
        category: for workloads made of several kinds.
        reference: a text to compare the last answer with, where there is one.
        history: messages before the first turn (a system message, say).
        ids: the only turn as token ids, where there is no text.
    """

    id: str
    workload: str
    turns: tuple[str, ...]
    plain: str | None = None
    category: str = ""
    reference: str | None = None
    history: tuple[Mapping[str, str], ...] = ()
    ids: tuple[int, ...] | None = None

    def tokens(self, tokenizer: Any, answers: Sequence[str] = ()) -> list[int]:
        """Token ids of the turn that follows ``answers``, by the chat template where there is one.

        Args:
            tokenizer: a transformers tokenizer; any where the prompt is token ids.
            answers: the target's answers to the earlier turns.
        """
        if self.ids is not None:
            return list(self.ids)
        turns = self.turns[: len(answers) + 1]
        if getattr(tokenizer, "chat_template", None):
            messages = [dict(message) for message in self.history]
            for turn, answer in zip(turns, [*answers, None], strict=True):
                messages.append({"role": "user", "content": turn})
                if answer is not None:
                    messages.append({"role": "assistant", "content": answer})
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        first = self.turns[0] if self.plain is None else self.plain
        parts = [message["content"] + "\n\n" for message in self.history] + [first]
        for turn, answer in zip(turns[1:], answers, strict=True):
            parts += [answer, "\n\n", turn, "\n"]
        return list(tokenizer("".join(parts))["input_ids"])


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
        source = SOURCES[name]
        path = Path(given) if given else find_file(name, data)
        rows = _read(path) if path is not None else _from_hub(name, source, data)
        prompts = _prompts(name, source.read, source.fields, rows)
    elif Path(name).is_file():
        prompts = _prompts(Path(name).stem, _own, ("prompt, text, turns or messages",), _read(Path(name)))
    else:
        raise SettingsError(
            f"unknown workload {name!r}; known are {', '.join(KNOWN)}, or give the path of a JSON-lines file"
        )
    return prompts if limit is None else _in_turn(prompts, limit)


def _own(row: Row, number: int) -> dict[str, Any]:
    """A row of the user's own file: prompt, text, turns or messages."""
    more = {
        "id": str(row.get("id", number)),
        "category": str(row.get("category", "")),
        "reference": row.get("reference"),
    }
    if "messages" in row:
        *history, last = row["messages"]
        if last["role"] != "user":
            raise ValueError(f"the last message must be the user's, got role {last['role']!r}")
        return {**more, "turns": (last["content"],), "history": tuple(history)}
    if "turns" in row:
        return {**turns_of(row, number), "id": more["id"]}
    text = row["prompt"] if "prompt" in row else row["text"]
    if not isinstance(text, str) or not text:
        raise TypeError(f"prompt must be a text that is not empty, got {text!r:.60}")
    return {**more, "turns": (text,)}


def _prompts(
    name: str,
    read: Reader,
    fields: Sequence[str],
    rows: Iterator[tuple[str, int, Any]],
) -> list[Prompt]:
    prompts: list[Prompt] = []
    ids: dict[str, str] = {}
    for place, number, row in rows:
        if not isinstance(row, Mapping):
            raise SettingsError(f"{place}: an object with {', '.join(fields)} is needed, got {row!r:.60}")
        try:
            prompt = Prompt(workload=name, **read(row, number))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise SettingsError(
                f"{place}: a row of {name} must have {', '.join(fields)} ({type(error).__name__}: {error}); "
                f"this one has {', '.join(row)}"
            ) from error
        if prompt.id in ids:
            raise SettingsError(f"{place}: the id {prompt.id!r} is also that of {ids[prompt.id]}")
        ids[prompt.id] = place
        prompts.append(prompt)
    if not prompts:
        raise SettingsError(f"{name}: the file holds no rows")
    return prompts


def _read(path: Path) -> Iterator[tuple[str, int, Any]]:
    """(place for errors, number, row) of a JSON array or of JSON lines, packed with gzip or not."""
    if not path.is_file():
        raise SettingsError(f"there is no file {path}")
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read as UTF-8 text: {error}") from error
    if text.lstrip().startswith("["):
        for number, row in enumerate(_parse(text, path)):
            yield f"{path}, entry {number + 1}", number, row
        return
    for number, line in enumerate(text.split("\n")):
        if line.strip():
            yield f"{path}, line {number + 1}", number, _parse(line, path, number)


def _parse(text: str, path: Path, line: int = 0) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{path}, line {line + error.lineno}"
        raise SettingsError(f"{place}: not JSON ({error.msg} at column {error.colno})") from error


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_file(name: str, data: str | Path | None) -> Path | None:
    """The data set's file under ``data``: in a folder of its name, or itself of that name."""
    if data is None:
        return None
    root = Path(data)
    if not root.is_dir():
        raise SettingsError(f"the data folder {root} does not exist")
    wanted = _plain(name)
    found = [
        path
        for pattern in ("*", "*/*")
        for path in root.glob(pattern)
        if re.search(r"\.jsonl?(\.gz)?$", path.name)
        and (_plain(path.parent.name) == wanted or _plain(path.name.split(".")[0]) == wanted)
    ]
    # A test split comes before everything else, a training split after it.
    return min(found, key=lambda p: ("test" not in p.name, "train" in p.name, p.name), default=None)


def _from_hub(name: str, source: Source, data: str | Path | None) -> Iterator[tuple[str, int, Any]]:
    where = (
        f"put the file of {name} under --data as {name}/FILE.jsonl, or give --workload {name}=PATH; "
        f"it comes from {source.origin}"
    )
    if data is not None:
        where = f"nothing for {name} lies in {data}; {where}"
    if source.hub is None:
        raise SettingsError(f"{name} has no copy on the Hugging Face hub; {where}")
    repository, configuration, split = source.hub
    try:
        from datasets import load_dataset
    except ImportError:
        raise SettingsError(f"{where}; or install `datasets` to fetch {repository} from the hub") from None
    try:
        rows = load_dataset(repository, configuration, split=split)
    except Exception as error:  # no network, a hub error, a changed repository: the cure is the same
        raise SettingsError(
            f"{repository} cannot be fetched from the Hugging Face hub ({type(error).__name__}); {where}"
        ) from error
    for number, row in enumerate(rows):
        yield f"{repository} ({split}), row {number}", number, row


def _in_turn(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """At most ``limit``, one of each category in turn, so that few prompts still cover all kinds."""
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.category, []).append(prompt)
    deepest = max(map(len, kinds.values()))
    rounds = [kind[i] for i in range(deepest) for kind in kinds.values() if i < len(kind)]
    return rounds[:limit]
