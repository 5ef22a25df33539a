"""The command line of the paper's laboratory; see the package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lookahead.bench import RunOptions, load_model
from lookahead.cli.bench import command_line
from lookahead.core import LookaheadError, SettingsError

from . import __doc__ as about
from . import ablation, end_to_end, parallel, sampling_quality, scaling_law, settings
from .study import Study

STUDIES: dict[str, Callable[[Study], Path]] = {
    "scaling-law": scaling_law.scaling_law,
    "ablation": ablation.ablation,
    "sampling-quality": sampling_quality.sampling_quality,
    "end-to-end": end_to_end.end_to_end,
    "parallel": parallel.parallel,
}


def parser() -> argparse.ArgumentParser:
    """The options, the same for every result."""
    made = argparse.ArgumentParser(
        "python -m benchmarks.paper", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("name", choices=[*STUDIES, "settings"])
    add = made.add_argument
    add("--model", help="a directory or a hub id; the bundled model if not given")
    add(
        "--workload",
        action="append",
        default=[],
        help="in place of the result's own choice; several times for several",
    )
    add("--data", type=Path, help="folder that holds data sets by name")
    add("--limit", type=int, help="prompts per workload; 0 for all")
    add("--out", type=Path, default=Path("docs/results"), help="folder for the page and its picture")
    add("--records", type=Path, help="folder for the records; bench/NAME if not given")
    add("--max-new-tokens", type=int, default=128, help="most tokens per text")
    add("--repeats", type=int, default=1, help="every prompt so many times")
    add("--temperature", type=float, default=0.0, help="of `settings`; 0 is greedy")
    add("--seed", type=int, default=0, help="of the draws, and of the choice from the standard library")
    add("--dtype", default="float32")
    add("--device")
    add("--threads", type=int)
    add("--path", default="auto", help="what evaluates our steps: auto, cpu or transformers")
    return made


def progress(done: int, total: int, what: str) -> None:
    """One line on stderr that is written over."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{done}/{total} {what}", end="" if what else "\n", file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    given = parser().parse_args(words)
    try:
        if given.limit is not None and given.limit < 0:
            raise SettingsError(f"--limit must be at least 0, got {given.limit}")
        options = RunOptions(
            given.max_new_tokens,
            given.temperature if given.name == "settings" else 0.0,
            seed=given.seed,
            repeats=given.repeats,
        )
        model = load_model(
            given.model, path=given.path, dtype=given.dtype, threads=given.threads, device=given.device
        )
        study = Study(
            model,
            tuple(given.workload),
            given.data,
            given.limit,
            options,
            given.out,
            given.records or Path("bench") / given.name,
            command_line(list(words), "python -m benchmarks.paper"),
            progress,
            print,
        )
        if given.name == "settings":
            settings.settings(study)
        else:
            print(f"\n{STUDIES[given.name](study)}")
    except LookaheadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
