"""Prompts for measurements: any JSON-lines file, or functions of the running Python's standard library.

For a model without a chat template, code prompts end without their last newline, because many tokenizers merge a
newline and the following indentation into one token, and a prompt must not split that token.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from ..core import SettingsError

STDLIB = "stdlib"
#: Number of its prompts without a limit.
STDLIB_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, or a conversation of several turns."""

    id: str  # unique within the workload
    workload: str
    turns: tuple[str, ...]  # the user's turns; the target's own answers come between them
    plain: str | None = None  # the first turn for a model without a chat template; ``turns[0]`` if None
    category: str = ""  # for workloads that mix several kinds of prompts
    reference: str | None = None  # the reference for the last answer, if any
    ids: tuple[int, ...] | None = None  # the only turn as token ids, instead of text

    def tokens(self, tokenizer: Any, answers: Sequence[str] = ()) -> list[int]:
        """Token ids of the turn after ``answers``, with the chat template if the tokenizer has one.

        Args:
            tokenizer: a transformers tokenizer; ignored if the prompt is token ids.
            answers: the target's answers to the earlier turns.

        Raises:
            SettingsError: the prompt is text and there is no tokenizer.
        """
        if self.ids is not None:
            return list(self.ids)
        if tokenizer is None:
            raise SettingsError("a text prompt needs a tokenizer, and this model has none; pass token ids")
        chat = getattr(tokenizer, "chat_template", None)
        first = self.turns[0] if self.plain is None or chat else self.plain
        texts = [first, *(text for pair in zip(answers, self.turns[1:], strict=False) for text in pair)]
        if not chat:
            text = first + "".join(
                f"{answer}\n\n{turn}\n" for answer, turn in zip(texts[1::2], texts[2::2], strict=True)
            )
            return list(tokenizer(text)["input_ids"])
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def load_workload(name: str, limit: int | None = None, seed: int = 0) -> list[Prompt]:
    """The prompts of a workload.

    Args:
        name: "stdlib", or the path of a JSON-lines file whose rows have ``prompt`` or ``turns``; ``id``,
            ``category`` and ``reference`` are optional.
        limit: at most this many prompts, taken from each category in turn (see ``in_turn``); None for all, which are
            ``STDLIB_PROMPTS`` of the standard library.
        seed: selects the functions of the standard library.

    Raises:
        SettingsError: the file is missing, or a line cannot be read.
    """
    if name == STDLIB:
        return [Prompt(workload=STDLIB, **fields) for fields in stdlib_prompts(limit or STDLIB_PROMPTS, seed)]
    if not Path(name).is_file():
        raise SettingsError(
            f"a workload must be {STDLIB} or the path of a JSON-lines file whose rows have prompt or turns, "
            f"got {name!r}"
        )
    return in_turn(read_prompts(Path(name), Path(name).stem, prompt_of_row, "prompt or turns"), limit)


def in_turn(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """At most ``limit`` prompts, taken from each category in turn, the largest category first; None for all."""
    if limit is None:
        return list(prompts)
    categories: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        categories.setdefault(prompt.category, []).append(prompt)
    largest_first = sorted(categories.values(), key=len, reverse=True)
    mixed = (prompt for prompt in chain.from_iterable(zip_longest(*largest_first)) if prompt is not None)
    return list(islice(mixed, limit))


def prompt_of_row(workload: str, row: Mapping[str, Any], number: int) -> Prompt:
    """The prompt of a row with ``prompt`` or ``turns``.

    Raises:
        KeyError, TypeError: the row has neither, or they are not text.
    """
    name = str(row.get("id", number))
    category = str(row.get("category", ""))
    if "turns" in row:
        return conversation(workload, name, category, row["turns"], row.get("reference"))
    return Prompt(
        name, workload, (text_of(row["prompt"]),), category=category, reference=row.get("reference")
    )


def conversation(workload: str, name: str, category: str, turns: Any, references: Any) -> Prompt:
    """A prompt of several turns. The reference is a string, or a list of one per turn, of which the last is kept.

    Raises:
        TypeError: ``turns`` is not a list of strings, or is empty.
    """
    if isinstance(turns, str) or not turns:
        raise TypeError(f"turns must be a list of at least one string, got {turns!r:.60}")
    texts = tuple(text_of(turn) for turn in turns)
    last = references if isinstance(references, str) or not references else references[-1]
    reference = str(last) if last else None
    return Prompt(name, workload, texts, f"{texts[0]}\n", category, reference)


def text_of(value: Any) -> str:
    """The prompt or a turn of a row, validated.

    Raises:
        TypeError: it is not a string, or is empty.
        ValueError: it has half of a surrogate pair.
    """
    if not isinstance(value, str) or not value:
        raise TypeError(f"a prompt or turn must be a non-empty string, got {value!r:.60}")
    value.encode()  # raises ValueError for half of a surrogate pair
    return value


def read_prompts(
    path: Path,
    workload: str,
    prompt_of: Callable[[str, Mapping[str, Any], int], Prompt],
    fields: str,
) -> list[Prompt]:
    """The prompts of a file of JSON lines, or of one JSON array.

    Args:
        prompt_of: called with (workload, row, row number from 0).
        fields: the required fields of a row, for error messages.

    Raises:
        SettingsError: a row cannot be read; the message has its file and line.
    """
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for number, (where, row) in enumerate(_rows(path)):
        if not isinstance(row, Mapping):
            raise SettingsError(f"{where}: a row must be an object with {fields}, got {row!r:.60}")
        try:
            prompt = prompt_of(workload, row, number)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise SettingsError(
                f"{where}: a row of {workload} must have {fields} ({type(error).__name__}: {error}); "
                f"this row has {', '.join(row)}"
            ) from error
        if prompt.id in seen:
            raise SettingsError(f"{where}: the id {prompt.id!r} is already used at {seen[prompt.id]}")
        seen[prompt.id] = where
        prompts.append(prompt)
    if not prompts:
        raise SettingsError(f"{path} must have at least one prompt, and has no rows")
    return prompts


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(file and line for errors, row)."""
    if not path.is_file():
        raise SettingsError(f"there is no file {path}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read as UTF-8 text: {error}") from error
    is_array = text.lstrip().startswith("[")
    for number, part in enumerate([text] if is_array else text.split("\n"), 1):
        if not part.strip():
            continue
        try:
            value = json.loads(part)
        except json.JSONDecodeError as error:
            where = f"{path}, line {number + error.lineno - 1}"
            raise SettingsError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
        except (ValueError, RecursionError) as error:  # too many digits, or nested too deeply
            raise SettingsError(f"{path}, line {number}: not readable JSON ({error})") from error
        if is_array:
            yield from ((f"{path}, entry {entry}", row) for entry, row in enumerate(value, 1))
        else:
            yield f"{path}, line {number}", value


# -------------------------------------------------------------------------------- the standard library

#: Folders of tests, tables, or third-party packages.
EXCLUDED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "encodings",
    "pydoc_data",
    "ensurepip",
    "__pycache__",
    "__phello__",
}


def stdlib_prompts(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Fields of at most ``count`` prompts: the signature and docstring of a function; the reference is its body.

    At most one function per file is used. The same Python and seed give the same prompts.

    Raises:
        SettingsError: the sources of the standard library are not on this machine.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(root.rglob("*.py")) if not EXCLUDED_FOLDERS & set(p.relative_to(root).parts)]
    if not files:
        raise SettingsError(f"this Python has no library sources in {root}; use another workload")
    generator = random.Random(seed)
    generator.shuffle(files)
    functions_by_file = ((path.relative_to(root).as_posix(), _functions(path)) for path in files)
    for file, functions in islice(filter(lambda pair: pair[1], functions_by_file), count):
        name, head, body = generator.choice(functions)
        yield {
            "id": f"{file}:{name}",
            "turns": (f"Complete this Python function. Answer with the code only.\n\n{head}",),
            "plain": head.rstrip(),
            "reference": body,
        }


def _functions(path: Path) -> list[tuple[str, str, str]]:
    """(name, signature and docstring, body) of the functions of a file that are worth completing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # outdated escapes in the library's strings
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    functions = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 3 or not ast.get_docstring(node):
            continue
        first, docstring_end, end = node.lineno, node.body[0].end_lineno or 0, node.end_lineno or 0
        if 4 <= end - docstring_end <= 60 and docstring_end - first <= 30:
            # Dedent a method, and its body by the same number of columns.
            indent = len(lines[first - 1]) - len(lines[first - 1].lstrip())
            head = textwrap.dedent("".join(lines[first - 1 : docstring_end]))
            body = "".join(line[indent:] if line.strip() else line for line in lines[docstring_end:end])
            functions.append((f"{node.name}:{first}", head, body))
    return functions
