"""The batch form of ``lookahead generate``: JSON lines in, JSON lines out, and an output that can be gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..core import LookaheadError, SettingsError
from ..core.records import RecordWriter, drop_torn_line, read_records
from .console import Interrupted, as_record, diverged, note, progress_bar
from .options import Task, dismiss, read_bytes, warm_pool

if TYPE_CHECKING:
    from ..engine.llm import LLM

KINDS = {"prompt": str, "input_ids": list, "messages": list}


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the input."""

    line: int  # its number, from 1
    id: Any  # as given; the line's number where none is; None where the line is no JSON object
    prompt: Any  # text, token ids or chat messages
    error: str | None = None  # why the line cannot be used

    @property
    def key(self) -> tuple[int, str]:
        """Line, and id as text: 1, 1.0 and "1" are three."""
        return self.line, _text(self.id)

    def failed(self, error: str) -> dict[str, Any]:
        """The record of a line that could not be used."""
        return {"id": self.id, "error": error, "line": self.line}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def read_jobs(data: bytes) -> list[Job]:
    """Every line that is not blank."""
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [_job(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _job(number: int, line: bytes) -> Job:
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return Job(number, None, None, f"line {number} must be JSON in UTF-8 and is not: {error}")
    if not isinstance(value, dict):
        return Job(number, None, None, f"line {number} must be a JSON object, got {type(value).__name__}")
    name, given = value.get("id", number), [key for key in KINDS if key in value]
    if len(given) != 1:
        got = " and ".join(given) or f"only {sorted(value)}"
        wanted = " or ".join(f'"{key}"' for key in KINDS)
        return Job(number, name, None, f"line {number} must have {wanted}, got {got}")
    prompt, kind = value[given[0]], KINDS[given[0]]
    wrong = f'line {number}: "{given[0]}" must be a {kind.__name__}, got {type(prompt).__name__}'
    return Job(number, name, prompt, None if isinstance(prompt, kind) else wrong)


def still_to_do(jobs: Sequence[Job], records: Sequence[dict[str, Any]], output: Path) -> list[Job]:
    """Jobs without a record. A record belongs to the job of its line and id.

    Where the input has changed since, the id alone decides.

    Raises:
        SettingsError: the input has changed, and not every prompt has an id of its own.
    """
    done = {(record.get("line"), _text(record["id"])) for record in records}
    if done <= {job.key for job in jobs}:
        return [job for job in jobs if job.key not in done]
    named: dict[str, list[int]] = {}
    for line, name in (job.key for job in jobs):
        named.setdefault(name, []).append(line)
    for name, lines in named.items():
        if len(lines) > 1 or name == "null":
            raise SettingsError(
                f"--resume cannot tell which of the prompts with id {name} (lines {', '.join(map(str, lines))}) "
                f"have their results in {output}, whose records are of other lines; "
                "give every prompt an id of its own, or use --overwrite"
            )
    return [job for job in jobs if job.key[1] not in {name for _, name in done}]


class _Stdout(nullcontext[Any]):
    """Records to stdout, where no --output is given."""

    def write(self, record: dict[str, Any]) -> None:
        typer.echo(json.dumps(record, ensure_ascii=False))


def run_batch(task: Task, load: Callable[[], LLM], options: dict[str, Any], warm: Path | None) -> int:
    """Run every prompt of the input that has no result yet; the exit status."""
    source, output = task.input or Path("-"), task.output
    jobs = read_jobs(read_bytes(source, "--input"))
    earlier = [] if output is None else _earlier(source, output, task)
    todo = jobs if output is None else still_to_do(jobs, earlier, output)
    done = len(jobs) - len(todo)
    if earlier:
        note(f"{done} of {len(jobs)} prompts have results; going on with {len(todo)}")
    if not todo:
        dismiss()
        if output is not None:
            output.touch()
    errors, status = sum("error" in record for record in earlier), 0
    if todo:
        llm, equal = load(), []
        sink = _Stdout() if output is None else RecordWriter(output, append=True)
        try:
            with sink, warm_pool(llm, warm) as kept, progress_bar() as bar:
                shown = bar.add_task("", total=len(jobs), completed=done)
                for record in _records(llm, todo, task, options | kept):
                    sink.write(record)
                    errors += "error" in record
                    equal += [record["equal"]] if "equal" in record else []
                    bar.advance(shown)
                    done += output is None
        except KeyboardInterrupt:
            where = ""
            if output is not None:  # the file knows of a record whose writing was interrupted at its end
                done += len(read_records(output, "id", "this run")) - len(earlier)
                where = f" in {output}; the same command with --resume goes on"
            raise Interrupted(f"interrupted: {done} of {len(jobs)} prompts have results{where}") from None
        if equal:
            note(f"{sum(equal)} of {len(equal)} equal to plain decoding", "green")
        status = diverged(llm, equal)
    note(f"{len(jobs)} prompts, {errors} with an error" if jobs else f"{source} has no prompts")
    return int(status or errors > 0)


def _earlier(source: Path, output: Path, task: Task) -> list[dict[str, Any]]:
    """The records that are there already, the output being made ready to append to."""
    if not output.parent.is_dir():
        raise SettingsError(f"--output must lie in a folder that exists, got {output}")
    if output.is_dir():
        raise SettingsError(f"--output must be a file, got the folder {output}")
    if output.exists() and source.exists() and output.samefile(source):
        raise SettingsError(f"--input and --output must be two files, got {output} for both")
    if task.resume:
        records = read_records(output, "id", "an earlier run, which --resume needs")
        drop_torn_line(output)
        return records
    if output.is_file() and output.stat().st_size:
        if not task.overwrite:
            raise SettingsError(
                f"{output} already holds results; give --resume to go on with it or --overwrite to begin anew"
            )
        output.write_bytes(b"")
    return []


def _records(llm: LLM, jobs: list[Job], task: Task, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A record per job as soon as it is done, that of a bad line in its place."""
    from ..engine import compare as comparing

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
    if "seed" in options:  # the line decides, so that a resumed run draws the same
        seeds = [options["seed"] + job.line - 1 for job, _ in good]
    for update in llm.run([ids for _, ids in good], batch_size=task.batch_size, seeds=seeds, **options):
        (job, ids), result = good[update.index], update.result
        if result is None:
            continue
        while bad and bad[0][0] < job.line:
            yield bad.pop(0)[1]
        if result.error is not None:
            yield job.failed(str(result.error))
            continue
        record = {"id": job.id, "line": job.line} | as_record(result)
        if task.compare:
            plain = comparing.decode_plainly(llm, ids, result.seed, options)
            record |= comparing.compare(llm, result, plain).as_dict()
        yield record
    yield from (record for _, record in bad)
