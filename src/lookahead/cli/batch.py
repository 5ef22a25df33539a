"""A file of prompts for ``lookahead generate --input``: one JSON line each, one record for each completion.

An interrupted run continues with ``--resume``: records belong to jobs by line, id and prompt, and the settings of the
run are kept in a file next to the output.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from ..core import LookaheadError, SettingsError
from ..option import OptionSet, flag_of
from ..records import RecordWriter, as_line, drop_torn_line, read_records, replacing
from .console import Interrupted, as_record, diverged, note, progress_bar
from .shared import read_bytes
from .task import Task

if TYPE_CHECKING:
    from ..llm import LLM

#: Keys of a prompt in a line of the input, and the types of their values.
KINDS = {"prompt": str, "input_ids": list, "messages": list}
#: The types of JSON values in messages.
TYPES: dict[type, str] = {
    **{str: "a string", list: "a list", dict: "an object", type(None): "null"},
    **{bool: "true or false", int: "a number", float: "a number"},
}


#: Options that do not affect results, except that another number of threads may round differently. A GGUF file is
#: decoded with other weights on a GPU than on a CPU, so the device is not one of them.
WITHOUT_EFFECT = (
    "--threads",
    "--prefix-cache",
    "--local-files-only",
    "--parallel-timeout",
)


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the input."""

    line: int  # its number, from 1
    id: Any  # as given, or else the line's number; None if the line is not a JSON object
    prompt: Any  # a string, token ids or chat messages
    error: str | None = None  # why the line cannot be used

    @property
    def key(self) -> tuple[int, str]:
        """Line, and id as JSON, so that 1, 1.0 and "1" are three ids."""
        return self.line, _text(self.id)

    @property
    def prompt_hash(self) -> str:
        """A short hash of the prompt, which is in the record too."""
        return hashlib.sha256(_text(self.prompt).encode()).hexdigest()[:12]

    def failed(self, error: str) -> dict[str, Any]:
        """The record of a line that could not be used."""
        return {"id": self.id, "error": error, "line": self.line}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def as_message(text: str) -> list[dict[str, str]]:
    """A conversation that consists of one message of the user."""
    return [{"role": "user", "content": text}]


def read_jobs(data: bytes, chat: bool = False) -> list[Job]:
    """The jobs of all non-blank lines.

    Args:
        chat: whether a text is a message of the user.
    """
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [_job(number, line, chat) for number, line in enumerate(lines, 1) if line.strip()]


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _job(number: int, line: bytes, chat: bool) -> Job:
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return Job(number, None, None, f"line {number} must be JSON in UTF-8, and is not: {error}")
    if not isinstance(value, dict):
        return Job(number, None, None, f"line {number} must be a JSON object, got {TYPES[type(value)]}")
    name = value.get("id", number)
    given = [key for key in KINDS if key in value]
    if len(given) != 1:
        got = " and ".join(given) or f"only {sorted(value)}"
        wanted = " or ".join(f'"{key}"' for key in KINDS)
        return Job(number, name, None, f"line {number} must have {wanted}, got {got}")
    prompt = value[given[0]]
    kind = KINDS[given[0]]
    wrong = f'line {number}: "{given[0]}" must be {TYPES[kind]}, got {TYPES[type(prompt)]}'
    if not isinstance(prompt, kind):
        return Job(number, name, prompt, wrong)
    if chat and kind is str and prompt:  # an empty prompt is refused later
        prompt = as_message(prompt)
    return Job(number, name, prompt, None)


def still_to_do(jobs: Sequence[Job], records: Sequence[dict[str, Any]], output: Path) -> list[Job]:
    """The jobs without a record. A record belongs to the job with the same line, id and prompt.

    If the input has changed, only ids and prompts are compared. Records of earlier versions have no hash of the
    prompt.

    Raises:
        SettingsError: the input has changed, and ids are missing or not unique, or a prompt is not the one of the
            record with its id.
    """
    done = {(record.get("line"), _text(record["id"])) for record in records}
    hashes = {
        (record["line"], _text(record["id"])): record["prompt_hash"]
        for record in records
        if "prompt_hash" in record
    }
    same = all(hashes.get(job.key, job.prompt_hash) == job.prompt_hash for job in jobs)
    if same and done <= {job.key for job in jobs}:
        return [job for job in jobs if job.key not in done]
    named: dict[str, list[int]] = {}
    for line, name in (job.key for job in jobs):
        named.setdefault(name, []).append(line)
    for name, lines in named.items():
        if len(lines) > 1 or name == "null":
            raise SettingsError(
                f"--resume cannot tell which of the prompts with id {name} (lines {', '.join(map(str, lines))}) "
                f"have results in {output}, whose records belong to other lines; "
                "give every prompt a unique id, or use --overwrite"
            )
    # A line without an id has its number as the id, so a moved prompt is rejected here.
    hashed = {(name, prompt_hash) for (_, name), prompt_hash in hashes.items()}
    known = {name for name, _ in hashed}
    for job in jobs:
        if job.key[1] in known and (job.key[1], job.prompt_hash) not in hashed:
            raise SettingsError(
                f"--resume found another prompt with id {job.key[1]} (line {job.line}) than the one with a result in "
                f"{output}; give every prompt a unique id, or use --overwrite"
            )
    finished = {name for _, name in done}
    return [job for job in jobs if job.key[1] not in finished]


class _Stdout(nullcontext[Any]):
    """Writes records to stdout if there is no --output."""

    def write(self, record: dict[str, Any]) -> None:
        typer.echo(as_line(record), nl=False)


def settings_of(*groups: OptionSet) -> dict[str, Any]:
    """The options that affect results, by flag and as JSON, without those at their defaults."""
    given = {name: value for group in groups for name, value in group.keywords().items()}
    own = {"model" if name == "path_or_id" else flag_of(name): value for name, value in given.items()}
    kept = {name: value for name, value in own.items() if name not in WITHOUT_EFFECT}
    return cast("dict[str, Any]", json.loads(json.dumps(kept, default=str)))


def settings_file(output: Path) -> Path:
    """The file with the settings of a run, next to its output."""
    return output.with_name(output.name + ".settings.json")


def check_settings(output: Path, settings: dict[str, Any]) -> None:
    """Raise SettingsError if the settings differ from those of the run to be continued, or cannot be read."""
    path = settings_file(output)
    if path.is_file():
        try:
            before = dict(json.loads(path.read_text(encoding="utf-8")).items())
        except (OSError, ValueError, AttributeError) as error:
            raise SettingsError(
                f"{path} must have the settings of the earlier run, but cannot be read ({error}); --mix-settings "
                "replaces it, --overwrite replaces the results too"
            ) from None
        changed = [
            f"{name} was {before.get(name, 'not given')} and is {settings.get(name, 'not given')}"
            for name in sorted(before.keys() | settings.keys())
            if before.get(name) != settings.get(name)
        ]
        if changed:
            raise SettingsError(
                f"--resume needs the settings of the earlier run: {', '.join(changed)}; use the same, or "
                "--mix-settings to continue with others, or --overwrite to replace the results"
            )


def begin_output(output: Path, settings: dict[str, Any], resume: bool) -> None:
    """Write the settings, and prepare the output: without ``resume``, it is emptied; otherwise, records of errors are
    removed, because their prompts are tried again.

    Called once the model has been loaded, so that earlier results are kept if that fails.

    Raises:
        SettingsError: a file cannot be written.
    """
    path = settings_file(output)
    try:
        path.write_text(json.dumps(settings, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"the settings of {output} cannot be written to {path} ({error})") from None
    if not output.is_file():  # none yet, or a pipe
        return
    try:
        if not resume:
            output.write_bytes(b"")
            return
        drop_torn_line(output)
        lines = output.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if not line.strip() or "error" not in json.loads(line)]
        if len(kept) < len(lines):
            with replacing(output.resolve()) as temporary:
                temporary.write_bytes(b"".join(kept))
                shutil.copymode(output, temporary)
    except OSError as error:
        raise SettingsError(f"{output} must be a writable file ({error.strerror})") from None


def run_batch(
    task: Task,
    load: Callable[[], LLM],
    leave: Callable[[], None],
    options: dict[str, Any],
    settings: dict[str, Any],
) -> int:
    """Complete every prompt of the input that has no result yet.

    Args:
        task: input and output.
        load: loads the model; called only if a prompt remains.
        leave: ends the other ranks; called if no prompt remains.
        options: the options of each completion.
        settings: the settings that the results depend on, written next to the output.

    Returns:
        The exit status: 1 after an error of any prompt.

    Raises:
        SettingsError: the output or the input cannot be used, or the settings of the earlier run differ.
        Interrupted: after Ctrl-C; results so far are kept.
    """
    source = task.input or Path("-")
    jobs = read_jobs(read_bytes(source, "--input"), task.chat)
    earlier = [] if task.output is None else _earlier(source, task.output, task)
    todo = _without_result(jobs, earlier, task, settings)
    if todo:
        llm = load()
        if task.output is not None:
            begin_output(task.output, settings, task.resume)
        errors, status = _complete(llm, jobs, todo, len(earlier), task, options)
    else:  # the output and its settings are still written
        errors = status = 0
        leave()
        if task.output is not None:
            begin_output(task.output, settings, task.resume)
            task.output.touch()
    note(f"{len(jobs)} prompts, {errors} with an error" if jobs else f"{source} has no prompts")
    return int(status or errors > 0)


def _without_result(
    jobs: Sequence[Job], earlier: Sequence[dict[str, Any]], task: Task, settings: dict[str, Any]
) -> Sequence[Job]:
    """The jobs without a result in the output, found before the model is loaded."""
    if task.output is None or not earlier:
        return jobs
    if not task.mix_settings:
        check_settings(task.output, settings)
    todo = still_to_do(jobs, earlier, task.output)
    note(f"{len(jobs) - len(todo)} of {len(jobs)} prompts have results; continuing with {len(todo)}")
    return todo


def _complete(
    llm: LLM, jobs: Sequence[Job], todo: Sequence[Job], earlier: int, task: Task, options: dict[str, Any]
) -> tuple[int, int]:
    """Complete the jobs that remain. Returns (number of errors, exit status of the comparisons).

    A record is written as soon as its prompt is done, so an interrupt loses only unfinished prompts.
    """
    errors = 0
    done = len(jobs) - len(todo)
    equal: list[bool] = []
    sink = _Stdout() if task.output is None else RecordWriter(task.output, append=True)
    try:
        with sink, progress_bar() as bar:
            shown = bar.add_task("", total=len(jobs), completed=done)
            for record in _records(llm, todo, task, options):
                sink.write(record)
                errors += "error" in record
                equal += [record["equal"]] if "equal" in record else []
                bar.advance(shown)
                done += task.output is None
    except KeyboardInterrupt:
        where = ""
        if task.output is not None:  # count the records in the file, because the last one may be incomplete
            records = read_records(task.output, "id", "this run")
            done += sum("error" not in record for record in records) - earlier
            where = f" in {task.output}; the same command with --resume continues"
        raise Interrupted(f"interrupted: {done} of {len(jobs)} prompts have results{where}") from None
    if equal:
        colour = "green" if all(equal) else "red"
        note(f"{sum(equal)} of {len(equal)} equal to plain decoding", colour)
    return errors, diverged(llm, equal)


def _earlier(source: Path, output: Path, task: Task) -> list[dict[str, Any]]:
    """Check the output. Returns the records of earlier results, without those of errors, if the run is continued."""
    if not output.parent.is_dir():
        raise SettingsError(f"--output must be in a folder that exists, got {output}")
    if output.is_dir():
        raise SettingsError(f"--output must be a file, got the folder {output}")
    if output.exists() and source.exists() and output.samefile(source):
        raise SettingsError(f"--input and --output must be two files, got {output} for both")
    for path in (output, settings_file(output)):  # before the model is loaded; nothing is changed yet
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise SettingsError(f"{path} must be a writable file")
    if task.resume:
        records = read_records(output, "id", "an earlier run, which --resume needs")
        return [record for record in records if "error" not in record]
    if output.is_file() and output.stat().st_size and not task.overwrite:
        raise SettingsError(
            f"{output} already has results; give --resume to continue, or --overwrite to replace them"
        )
    return []


def _records(llm: LLM, jobs: Sequence[Job], task: Task, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the record of each job as soon as it is done; for an unusable line, a record with the error."""
    from . import compare as comparing

    bad: list[tuple[int, dict[str, Any]]] = []
    good: list[tuple[Job, list[int]]] = []
    for job in jobs:
        try:
            if job.error is not None:
                raise SettingsError(job.error)
            good.append((job, llm.encode(job.prompt)))
        except LookaheadError as error:
            bad.append((job.line, job.failed(str(error))))
    seeds = None
    if "seed" in options:  # the line determines the seed, so that a resumed run draws the same tokens
        seeds = [options["seed"] + job.line - 1 for job, _ in good]
    for update in llm.run([ids for _, ids in good], batch_size=task.batch_size, seeds=seeds, **options):
        job, ids = good[update.index]
        result = update.result
        if result is None:
            continue
        while bad and bad[0][0] < job.line:
            yield bad.pop(0)[1]
        if result.error is not None:
            yield job.failed(str(result.error))
            continue
        record = {"id": job.id, "line": job.line, "prompt_hash": job.prompt_hash} | as_record(result)
        if task.compare:
            plain = llm.generate(ids, **comparing.plainly(result.seed, options))
            record |= comparing.compare(llm, result, plain).as_dict()
        yield record
    yield from (record for _, record in bad)
