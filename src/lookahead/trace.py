"""Traces: every step of one completion as JSON lines, written during decoding and read by ``lookahead show``.

    with TraceWriter("steps.jsonl", llm) as trace:
        for update in llm.run([prompt], drafter="5,4,5"):
            trace.write(update)

docs/trace.md specifies the format. A trace contains the text of each token, so reading it needs no tokenizer. The
file is complete if it has a line with ``end``; readers show the contents of a shorter file and report that it is
truncated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .core import Sequence, SettingsError, Update
from .records import RecordWriter

if TYPE_CHECKING:
    from .llm import LLM

#: The version of the format. Readers reject other versions.
VERSION = 1


class TraceWriter(AbstractContextManager["TraceWriter"]):
    """Writes the trace of one completion.

    Args:
        path: a file that does not exist yet or may be replaced.
        llm: the model, for the header and the text of tokens.

    Raises:
        SettingsError: the file cannot be written.
    """

    def __init__(self, path: str | Path, llm: LLM) -> None:
        self._file = RecordWriter(path, durable=False)
        self._llm = llm
        self._steps = 0
        self._sequence: Sequence | None = None
        self._known: set[int] = set()

    def write(self, update: Update) -> None:
        """Append one step.

        Raises:
            SettingsError: the update belongs to another sequence, or the file can no longer be written.
        """
        sequence = update.sequence
        tree = update.tree
        if self._sequence is None:
            self._sequence = sequence
            self._write_header(sequence)
        if sequence is not self._sequence:
            raise SettingsError(
                f"a trace has one sequence, got steps of another; {self._file.path} has the first"
            )
        # The step, if it emitted tokens.
        if update.tokens:
            record: dict[str, Any] = {"tokens": update.tokens}
            shown = set(update.tokens)
            if tree is not None:
                self._steps += 1
                record |= {"path": update.path, "tree": tree.tokens, "parents": tree.parents}
                shown.update(tree.tokens)
            # Without a drafter, the completion ended with its first token. After an error, the drafter may not have
            # observed the step.
            drafting = sequence.drafting if sequence.error is None else None
            details = drafting.trace(tree) if drafting is not None else {}
            for name in ("ngrams", "ngrams_of_text"):
                shown.update(token for ngram in details.get(name, ()) for token in ngram)
            texts = self._texts(shown)
            self._file.write(
                {"step": self._steps} | record | {name: v for name, v in details.items() if v} | texts
            )
        # The last line.
        if update.result is not None:
            error = update.result.error
            self._file.write(
                {
                    "end": update.result.finish_reason,
                    "steps": self._steps,
                    "new_tokens": len(sequence.tokens),
                }
                | ({} if error is None else {"error": str(error)})
            )

    def _write_header(self, sequence: Sequence) -> None:
        request = sequence.request
        llm = self._llm
        self._file.write(
            {
                "trace": "lookahead",
                "version": VERSION,
                "model": llm.name,
                "dtype": llm.dtype,
                "path": sequence.stats.path,
                "drafter": str(request.drafter),
                "settings": _settings(request.drafter),
                "seed": request.seed,
                "max_new_tokens": request.max_new_tokens,
                "prompt": list(request.prompt),
            }
            | self._texts(request.prompt)
        )

    def _texts(self, tokens: Iterable[int]) -> dict[str, Any]:
        """The text of each token that is not in an earlier line, by token id."""
        new = sorted(set(tokens) - self._known)
        self._known.update(new)
        tokenizer = self._llm.tokenizer
        if not new or tokenizer is None:
            return {}
        return {"texts": {str(token): str(tokenizer.decode([token])) for token in new}}

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)


def _settings(drafter: Any) -> dict[str, Any]:
    """The drafter's settings with JSON values."""
    values = {name: getattr(drafter, name) for name in getattr(drafter, "__dataclass_fields__", ())}
    return {name: v for name, v in values.items() if v is None or isinstance(v, (bool, int, float, str))}


@dataclass(frozen=True, slots=True)
class Trace:
    """The contents of a trace file.

    Attributes:
        header: its first line.
        lines: the readable lines of the file, unchanged, header included.
        steps: the number of steps in them.
        problem: why the trace is incomplete; "" if it is complete.
    """

    header: dict[str, Any]
    lines: list[str]
    steps: int
    problem: str


def read_trace(path: str | Path) -> Trace:
    """Read a trace, which may be truncated. The file is not changed.

    Raises:
        SettingsError: the file is missing, or it is not a trace of this version.
    """
    try:
        lines = Path(path).read_bytes().decode("utf-8", errors="replace").split("\n")
    except OSError as error:
        raise SettingsError(f"a trace must be a readable file, got {path} ({error.strerror})") from None
    # The header.
    header = _object(lines[0])
    if header is None or header.get("trace") != "lookahead":
        raise SettingsError(
            f"{path} is not a trace: its first line must be the header written by lookahead generate --trace"
        )
    if header.get("version") != VERSION:
        raise SettingsError(
            f"{path} is a trace of version {header.get('version')!r}, and this release reads version {VERSION}; "
            "show it with the release that wrote it, or record it again"
        )
    # The steps, up to the end or the first unreadable line.
    kept = [lines[0]]
    steps = 0
    problem = ""
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        record = _object(line)
        if record is None or ("step" not in record and "end" not in record):
            last = number == len(lines)
            problem = f"line {number} is {'cut off' if last else 'not a step of a trace'}"
            break
        kept.append(line)
        if "end" in record:
            return Trace(header, kept, steps, "")
        steps = record["step"]
    return Trace(header, kept, steps, problem or "the line with its end is missing")


def _object(line: str) -> dict[str, Any] | None:
    """A line as a JSON object; None if it is not one."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
