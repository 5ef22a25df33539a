"""Methods side by side on the paper's data sets, including other libraries' decoding, prompt by prompt.

    python -m benchmarks.side_by_side --data DIR --dtype bfloat16 --workload humaneval --limit 10
    python -m benchmarks.side_by_side --data DIR --dtype bfloat16 --method "hf-greedy hf-prompt-lookup adaptive"

The measurement is that of ``lookahead bench``; ``benchmarks.datasets`` adds the data sets and ``benchmarks.peers``
the other libraries. Records are written to --out as they are made; after an interrupt, the same command continues.
If another library is not installed or fails while decoding, the run continues, and its cells give the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lookahead.bench import ModelUnderTest, Records, RunOptions, load_model, run, split_methods
from lookahead.bench.methods import Method
from lookahead.bench.workloads import Prompt
from lookahead.core import LookaheadError, SettingsError

from .datasets import SOURCES, load_workload
from .outcomes import MissingPackage
from .peers import Absent, default_methods, guarded_methods
from .plots import NO_PLOTS, can_draw
from .quiet import require_quiet
from .report import command_line, write_report
from .servers import exit_on_signals


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        "python -m benchmarks.side_by_side",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("model", nargs="?", help="as for lookahead.load (default: the library's default model)")
    add(
        "--workload",
        action="append",
        help=f"{', '.join(SOURCES)}, stdlib, NAME=FILE, or a JSON-lines file; can be repeated",
    )
    add("--data", type=Path, help="folder of data sets")
    add("--limit", type=int, default=10, help="prompts per workload; 0 for all")
    add("--method", action="append", help="a list of methods, can be repeated; see benchmarks/peers.py")
    add("--repeats", type=int, default=1, help="number of times each prompt is decoded")
    add("--once", action="append", default=[], metavar="METHOD", help="decode only in the first repeat")
    add("--no-warm", action="store_true", help="only cold runs, even of methods that keep state")
    add("--max-new-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add(
        "--dtype",
        default="auto",
        help="methods of transformers on a quantized GGUF file need bfloat16 or float32",
    )
    add("--threads", type=int)
    add("--path", default="auto", help="forward-pass implementation: auto, cpu or transformers")
    add("--out", type=Path, default=Path("bench"), help="folder for records, tables and plots")
    return made


def prompts_of(names: Sequence[str], limit: int, seed: int, data: Path | None) -> list[Prompt]:
    """The prompts of all workloads, each prompt once: Spec-Bench has those of MT-Bench too.

    Args:
        limit: prompts of each workload; 0 for all.
    """
    prompts: dict[Any, Prompt] = {}
    for name in names:
        # As many more as may have occurred before.
        found = load_workload(name, limit + len(prompts) if limit else None, seed, data)
        new = {(prompt.turns, prompt.ids): prompt for prompt in found}
        new = {key: prompt for key, prompt in new.items() if key not in prompts}
        prompts |= dict(list(new.items())[: limit or None])
    return list(prompts.values())


def methods_or_absent(name: str, model: ModelUnderTest, warm: bool, folder: Path) -> list[Method]:
    """As ``guarded_methods``, but with ``Absent`` for a peer whose package is not installed."""
    try:
        return guarded_methods(name, model, warm, folder)
    except MissingPackage as error:
        return [Absent(name, model, error)]


def progress(done: int, total: int, what: str) -> None:
    """Overwrite one line on stderr."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{done}/{total} {what}", end="" if what else "\n", file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    exit_on_signals()
    given = parser().parse_args(words)
    draw = can_draw()
    if not draw:
        print(NO_PLOTS, file=sys.stderr)
    try:
        options = RunOptions(
            given.max_new_tokens,
            given.temperature,
            seed=given.seed,
            repeats=given.repeats,
            warm=not given.no_warm,
            once=tuple(given.once),
        )
        prompts = prompts_of(given.workload or ["stdlib"], given.limit, given.seed, given.data)
        model = load_model(given.model, path=given.path, dtype=given.dtype, threads=given.threads)
        names = split_methods(given.method) if given.method else default_methods(model)
        methods = [
            method for name in names for method in methods_or_absent(name, model, options.warm, given.out)
        ]
        unknown = sorted(set(options.once) - {method.label for method in methods})
        if unknown:
            raise SettingsError(f"--once must name methods of --method, got {', '.join(unknown)}")
        require_quiet()
        records = run(methods, prompts, model, options, Records(given.out), progress)
    except LookaheadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_report(records, given.out, command_line(list(words), "python -m benchmarks.side_by_side"), draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
