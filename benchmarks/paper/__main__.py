"""The command line of the reproductions; see the package docstring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from lookahead.bench import RunOptions, load_model
from lookahead.core import LookaheadError, SettingsError

from ..report import command_line
from ..servers import exit_on_signals
from . import __doc__ as about
from . import committed, settings
from .study import Study, page_facts, page_text

STUDIES = ("scaling-law", "ablation", "sampling-quality", "end-to-end", "parallel", "attention")
PAGES = Path("docs/results")
INTERRUPTED = "\ninterrupted: finished records are kept, and the same command continues"


def module_of(name: str) -> ModuleType:
    """The module of a study, which defines ``measure`` and ``page``."""
    return import_module(f"{__package__}.{name.replace('-', '_')}")


def parser() -> argparse.ArgumentParser:
    """The options, which all studies share."""
    made = argparse.ArgumentParser(
        "python -m benchmarks.paper", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("name", choices=[*STUDIES, "settings"])
    add = made.add_argument
    add("--page", action="store_true", help="print the report of the committed records; measure nothing")
    add("--model", help="a directory, a GGUF file or a hub id (default: the library's default)")
    add(
        "--workload",
        action="append",
        default=[],
        help="a data set instead of the study's own; can be repeated",
    )
    add("--data", type=Path, help="folder of data sets")
    add("--limit", type=int, help="prompts per workload (default: the study's own number; 0 for all)")
    add("--out", type=Path, default=PAGES, help="folder for the figures and the records")
    add("--records", type=Path, help="folder for the complete records (default: bench/NAME)")
    add("--max-new-tokens", type=int, default=128, help="maximum number of new tokens per prompt")
    add("--repeats", type=int, default=1, help="number of times each prompt is decoded")
    add("--temperature", type=float, default=0.0, help="temperature, for `settings` only; 0 is greedy")
    add("--seed", type=int, default=0, help="seed of sampling, and of the choice of standard-library code")
    add("--dtype", default="auto")
    add("--device")
    add("--threads", type=int)
    add("--path", default="auto", help="forward-pass implementation: auto, cpu or transformers")
    return made


def progress(done: int, total: int, what: str) -> None:
    """Overwrite one line on stderr."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{done}/{total} {what}", end="" if what else "\n", file=sys.stderr, flush=True)


def write_figures(name: str, out: Path) -> str:
    """Compute a study's figures, as JSON, from the records in ``out``. Returns its report in Markdown."""
    head, records = committed.read(out / "records" / f"{name}.jsonl.gz")
    page = module_of(name).page(head, records)
    committed.replace(out / f"{name}.json", page_facts(head, records, page).encode())
    return page_text(name, head, records, page)


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    exit_on_signals()
    given = parser().parse_args(words)
    try:
        if given.limit is not None and given.limit < 0:
            raise SettingsError(f"--limit must be at least 0, got {given.limit}")
        if not given.page:
            study = _study(given)
            if given.name == "settings":
                settings.settings(study)
                return 0
            records, measured = module_of(given.name).measure(study)
            head = study.head(command_line(list(words), "python -m benchmarks.paper"), **measured)
            committed.write(given.out / "records" / f"{given.name}.jsonl.gz", head, records)
        print(write_figures(given.name, given.out))
    except LookaheadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return 130
    return 0


def _study(given: argparse.Namespace) -> Study:
    options = RunOptions(
        given.max_new_tokens,
        given.temperature if given.name == "settings" else 0.0,
        seed=given.seed,
        repeats=given.repeats,
    )
    model = load_model(
        given.model, path=given.path, dtype=given.dtype, threads=given.threads, device=given.device
    )
    records = given.records or Path("bench") / given.name
    return Study(
        model, tuple(given.workload), given.data, given.limit, options, records, progress, given.model
    )


if __name__ == "__main__":
    sys.exit(main())
