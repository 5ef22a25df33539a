"""Start-up time, memory and first use of the command line, compared with llama.cpp's.

    python -m benchmarks.startup
    python -m benchmarks.startup --bin llama.cpp/build/bin --larger qwen-0.5b.gguf qwen-1.5b.gguf

Start: wall-clock time of a whole process that emits one token. Memory: the largest resident set of a process that
emits 64 tokens, and the largest without the mapped weights, which the system can drop and processes share. First use:
with empty caches, until the text is written; the weights are packed before, and the cost curve is measured after it.
Eight at once: wall-clock time until eight processes that start together have each emitted one token.
Programs alternate; the medians of ``--rounds`` runs count, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

from lookahead import default_model
from lookahead.bench.record import environment
from lookahead.core import SettingsError

from .llamacpp_build import build_of
from .page import write_report
from .quiet import require_quiet
from .report import markdown_table

PROMPT = "Name the months of the year."
#: Tokens emitted for the largest resident set.
TOKENS = 64
#: Processes that start at once.
TOGETHER = 8
#: Measurement -> heading and unit of its column.
COLUMNS = {
    "start": ("start", "s"),
    "memory": ("memory", "MB"),
    "unmapped": ("without mapped weights", "MB"),
    "first use": ("first use", "s"),
    "eight at once": ("eight at once", "s"),
}
#: llama.cpp's context, which it allocates at the start; ours grows with the sequence.
CONTEXT = 512


def ours(model: Path, tokens: int) -> list[str]:
    """The command line of this library."""
    command = [sys.executable, "-m", "lookahead", "generate", str(model)]
    return [*command, "--prompt", PROMPT, "--max-new-tokens", str(tokens)]


def theirs(folder: Path, model: Path, tokens: int) -> list[str]:
    """llama.cpp's command line."""
    completion = folder / "llama-completion"
    own = [str(completion), "-no-cnv", "--no-warmup"]
    command = own if completion.exists() else [str(folder / "llama-cli"), "--single-turn"]
    command += ["-m", str(model), "-t", str(os.cpu_count())]
    return [*command, "--temp", "0", "-p", PROMPT, "-n", str(tokens), "-c", str(CONTEXT)]


#: Run in a small process: starts a command, and prints its status, its seconds, the seconds until it wrote something,
#: its largest resident set in KiB, and the largest without mapped files of weights, from samples if it is asked for
#: them, because they take time.
#: A process inherits the largest resident set of the one that starts it, and this program has loaded torch.
LAUNCHER = """
import json, os, signal, subprocess, sys, threading, time
begin = time.perf_counter()
sampled, *command = sys.argv[1:]
process = subprocess.Popen(command, stdin=-3, stdout=-1, stderr=-3, start_new_session=True)
written = []
def drain():
    while process.stdout.read1(1 << 16):
        written.append(time.perf_counter() - begin)
threading.Thread(target=drain).start()
largest = 0
while sampled == "1" and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
    own, weights = 0, False
    try:
        for line in open(f"/proc/{process.pid}/smaps"):
            if "-" in line.split(" ", 1)[0]:
                weights = line.rstrip().endswith((".panels", ".gguf"))
            elif line.startswith("Rss:") and not weights:
                own += int(line.split()[1])
    except OSError:
        pass
    largest = max(largest, own)
    time.sleep(0.02)
_, status, used = os.wait4(process.pid, 0)
seconds = time.perf_counter() - begin
try:
    os.killpg(process.pid, signal.SIGKILL)  # a table that is still being counted would disturb the next measurement
except ProcessLookupError:
    pass
print(json.dumps([os.waitstatus_to_exitcode(status), seconds, (written or [seconds])[0], used.ru_maxrss, largest]))
"""


class Spent(NamedTuple):
    """Seconds of a process, and until it wrote; MB of its largest resident set, and without mapped weights."""

    seconds: float
    first: float
    memory: float
    unmapped: float


def spent(
    command: Sequence[str], environment: Mapping[str, str] | None = None, sampled: bool = False
) -> Spent:
    """What a process takes. Its memory without mapped weights is only measured if it is ``sampled``.

    Raises:
        SettingsError: the process fails.
    """
    launched = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LAUNCHER, str(int(sampled)), *command],
        stdout=subprocess.PIPE,
        check=True,
        env=None if environment is None else {**os.environ, **environment},
    )
    status, seconds, first, *kibibytes = json.loads(launched.stdout)
    if status:
        raise SettingsError(f"{' '.join(command[:3])} ended with status {status}")
    return Spent(seconds, first, *(1024 * size / 1e6 for size in kibibytes))


def together(command: Sequence[str]) -> float:
    """Seconds until ``TOGETHER`` processes that start at once have ended."""
    begin = perf_counter()
    quiet = subprocess.DEVNULL
    processes = [subprocess.Popen(command, stdout=quiet, stderr=quiet) for _ in range(TOGETHER)]
    if any([process.wait() for process in processes]):
        raise SettingsError(f"{' '.join(command[:3])} must run {TOGETHER} times at once, and did not")
    return perf_counter() - begin


def measure(files: Sequence[Path], folder: Path | None, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Measure each file. Returns program and file -> name of the measurement -> value of each round."""
    found: dict[str, dict[str, list[float]]] = {}
    for number, file in enumerate(files):
        label = f", {file.stem}" if number else ""  # the first is the default model
        mine = found[f"ours{label}"] = {name: [] for name in COLUMNS}
        others = found[f"llama.cpp{label}"] = {"start": [], "memory": [], "unmapped": []} if folder else {}
        if folder is None:
            del found[f"llama.cpp{label}"]
        for _ in range(2):  # packs the weights, and measures the cost curve
            spent(ours(file, TOKENS))
        for _ in range(rounds):
            commands = [(mine, partial(ours, file))]
            if folder is not None:
                commands.append((others, partial(theirs, folder, file)))
            for figures, command in commands:
                figures["start"].append(spent(command(1)).seconds)
                used = spent(command(TOKENS), sampled=True)
                figures["memory"].append(used.memory)
                figures["unmapped"].append(used.unmapped)
            mine["eight at once"].append(together(ours(file, 1)))
            with TemporaryDirectory(ignore_cleanup_errors=True) as empty:
                mine["first use"].append(spent(ours(file, 1), {"XDG_CACHE_HOME": empty}).first)
    return found


def cell(figures: Sequence[float], unit: str) -> str:
    """A median with its range."""
    digits = 0 if unit == "MB" or median(figures) >= 10 else 1
    low, middle, high = (f"{x:.{digits}f}" for x in (min(figures), median(figures), max(figures)))
    return f"{middle} {unit} ({low}–{high})"


def cells(found: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, str]]:
    """Program -> name of the measurement -> cell of the table."""
    return {
        name: {what: cell(each, COLUMNS[what][1]) for what, each in figures.items()}
        for name, figures in found.items()
    }


def table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[list[str]]:
    """The headings and the rows of the page's table."""
    measured = [what for what in COLUMNS if any(what in own for own in found.values())]
    rows = [[name, *(own.get(what, "–") for what in measured)] for name, own in cells(found).items()]
    return [["", *(COLUMNS[what][0] for what in measured)], *rows]


def main() -> None:
    folder, file = default_model()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bin", type=Path, help="folder of llama.cpp's programs (default: measure ours only)"
    )
    parser.add_argument("--larger", type=Path, nargs="*", default=[], help="further GGUF files to measure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, default=Path("docs/results/startup"), help="figures, without suffix"
    )
    args = parser.parse_args()
    model = Path(folder) / file
    require_quiet()
    record: dict[str, Any] = {**environment(), "model": model.name, "dtype": "its own weights", "path": "cpu"}
    loads = [os.getloadavg()[0]]
    found = measure([model, *args.larger], args.bin, args.rounds)
    headings, *rows = table(found)
    body = [
        f"Start: a whole process that emits one token. Memory: the largest resident set while it emits {TOKENS} "
        "tokens, and the largest without the mapped weights, which the system can drop and processes share. First "
        "use: with empty caches, until the text is written; the weights are packed and kept before, and the cost of "
        "steps is measured after it. Eight at once: until eight processes that start together have each emitted one "
        f"token. Medians of {args.rounds} runs, with the smallest and the largest; the programs alternate.",
        "",
        markdown_table(headings, rows),
    ]
    if args.bin is not None:
        (program, *_) = theirs(args.bin, model, 1)
        body += [
            "",
            f"llama.cpp: {Path(program).name} with a context of {CONTEXT} tokens. {build_of(Path(program))}.",
        ]
    if args.larger:
        sizes = (f"{file.name} ({file.stat().st_size / 1e6:,.0f} MB)" for file in args.larger)
        body += ["", f"Larger files: {', '.join(sizes)}."]
    write_report(args.out, "Start-up, memory and first use", record, found, body, loads)


if __name__ == "__main__":
    main()
