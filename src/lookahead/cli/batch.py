"""The batch form of ``lookahead generate``: JSON lines in, JSON lines out, resumable."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..core import LookaheadError, SettingsError
from ..core.records import RecordWriter, drop_torn_line, read_records
from .console import Interrupted, note, stderr
from .options import dismiss, read_bytes, warm_pool
from .output import as_record, diverged, tracing
from .records import Job, read_jobs, still_to_do, trace_line

if TYPE_CHECKING:
    from ..engine.llm import LLM
    from ..engine.results import Update


class _Stdout(nullcontext[Any]):
    """Records to stdout, where no --output is given."""

    def write(self, record: dict[str, Any]) -> None:
        typer.echo(json.dumps(record, ensure_ascii=False))


def run_batch(
    load: Callable[[], LLM],
    source: Path,
    output: Path | None,
    resume: bool,
    overwrite: bool,
    batch_size: int,
    compare: bool,
    trace: Path | None,
    options: dict[str, Any],
    warm: Path | None = None,
) -> int:
    """Run every prompt of ``source`` that has no result yet; the exit status."""
    if batch_size < 1:
        raise SettingsError(f"--batch-size must be at least 1, got {batch_size}")
    jobs = read_jobs(read_bytes(source, "--input"))
    earlier = _prepare(source, output, resume, overwrite)
    todo = still_to_do(jobs, earlier, output) if output is not None else jobs
    if earlier:
        note(f"{len(jobs) - len(todo)} of {len(jobs)} prompts have results; going on with {len(todo)}")
    batch = _Batch(jobs, todo, compare)
    batch.errors = sum("error" in record for record in earlier)
    if todo:
        llm = load()
        sink = RecordWriter(output, append=True) if output is not None else _Stdout()
        try:
            with sink, tracing(trace, append=resume) as writer, warm_pool(llm, warm) as kept:
                batch.run(llm, sink, writer, batch_size, options | kept)
        except KeyboardInterrupt:
            written, where = batch.written, ""
            if output is not None:  # the file knows of a record whose writing was interrupted at its end
                written = len(read_records(output, "id", "this run")) - len(earlier)
                where = f" in {output}; the same command with --resume goes on"
            done = len(jobs) - len(todo) + written
            raise Interrupted(f"interrupted: {done} of {len(jobs)} prompts have results{where}") from None
        if batch.comparisons:
            equal = sum(c.equal for c in batch.comparisons)
            note(f"{equal} of {len(batch.comparisons)} equal to plain decoding", "green")
        if diverged(llm, batch.comparisons):
            return 1
    else:
        dismiss()
        if output is not None:
            output.touch()
    note(f"{len(jobs)} prompts, {batch.errors} with an error" if jobs else f"{source} has no prompts")
    return int(batch.errors > 0)


def _prepare(source: Path, output: Path | None, resume: bool, overwrite: bool) -> list[dict[str, Any]]:
    """Make the output ready to append to; the records that are there already."""
    if output is None:
        return []
    if not output.parent.is_dir():
        raise SettingsError(f"--output must lie in a folder that exists, got {output}")
    if output.is_dir():
        raise SettingsError(f"--output must be a file, got the folder {output}")
    if output.exists() and source.exists() and output.samefile(source):
        raise SettingsError(f"--input and --output must be two files, got {output} for both")
    if resume:
        records = read_records(output, "id", "an earlier run, which --resume needs")
        drop_torn_line(output)
        return records
    if output.exists() and output.stat().st_size and output.is_file():
        if not overwrite:
            raise SettingsError(
                f"{output} already holds results; give --resume to go on with it or --overwrite to begin anew"
            )
        output.write_bytes(b"")
    return []


class _Batch:
    """The jobs of one run, in input order.

    Attributes:
        written: records written by this run.
        errors: records with an error.
        comparisons: with plain decoding, where asked.
    """

    def __init__(self, jobs: list[Job], todo: list[Job], compare: bool) -> None:
        self._all = len(jobs)
        self._todo = todo
        self._compare = compare
        self.written = 0
        self.errors = 0
        self.comparisons: list[Any] = []

    def run(
        self, llm: LLM, sink: Any, trace: RecordWriter | None, batch_size: int, options: dict[str, Any]
    ) -> None:
        bad: list[tuple[int, dict[str, Any]]] = []
        good: list[tuple[int, Job, list[int]]] = []
        for place, job in enumerate(self._todo):
            try:
                if job.error is not None:
                    raise SettingsError(job.error)
                good.append((place, job, llm.encode(job.prompt)))
            except LookaheadError as error:
                bad.append((place, job.failed(str(error))))
        seeds = None
        if "seed" in options:  # the line decides, so that a resumed run draws the same
            seeds = [options["seed"] + job.line - 1 for _, job, _ in good]
        updates = llm.run([ids for _, _, ids in good], batch_size=batch_size, seeds=seeds, **options)
        with _progress() as progress:
            task = progress.add_task("", total=self._all, completed=self._all - len(self._todo))
            for update in updates:
                place, job, ids = good[update.index]
                if trace is not None and update.step is not None:
                    trace.write(trace_line(job.id, update.step, update.piece))
                if update.result is None:
                    continue
                while bad and bad[0][0] < place:
                    self._write(sink, bad.pop(0)[1])
                self._write(sink, self._record(llm, job, ids, update, options))
                progress.update(task, completed=self._all - len(self._todo) + self.written)
            for _, record in bad:
                self._write(sink, record)
            progress.update(task, completed=self._all)

    def _write(self, sink: Any, record: dict[str, Any]) -> None:
        sink.write(record)
        self.written += 1
        self.errors += "error" in record

    def _record(
        self, llm: LLM, job: Job, ids: list[int], update: Update, options: dict[str, Any]
    ) -> dict[str, Any]:
        from ..engine.compare import compare

        result = update.result
        assert result is not None
        if result.error is not None:
            return job.failed(str(result.error))
        record = {"id": job.id, "line": job.line} | as_record(result)
        if self._compare:
            comparison = compare(llm, result, ids, **options)
            self.comparisons.append(comparison)
            own = comparison.as_dict()
            record |= {
                key: own[key] for key in ("equal", "first_divergence", "gap", "plain_steps", "plain_seconds")
            }
        return record


def _progress() -> Any:
    """A bar with the time left, where stderr is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    console = stderr()
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        "left",
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
