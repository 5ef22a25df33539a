"""Start-up time, memory and first use of the command line, compared with llama.cpp's.

    python -m benchmarks.startup
    python -m benchmarks.startup --bin llama.cpp/build/bin --model model.Q4_0.gguf

Start: wall-clock time of a whole process that emits one token. Memory: the largest resident set of a process that
emits 64 tokens. First use: the start with empty caches, when kernels are compiled, once per machine and version, and
the cost curve is measured, once per model.
Programs alternate; the medians of ``--rounds`` runs count, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from lookahead import default_model
from lookahead.bench.record import environment
from lookahead.core import SettingsError

from .llamacpp_build import build_of
from .page import write_page
from .quiet import require_quiet
from .report import markdown_table

PROMPT = "Name the months of the year."
#: Tokens emitted for the largest resident set.
TOKENS = 64
#: llama.cpp's context, which it allocates at the start; ours grows with the sequence.
CONTEXT = 512


def ours(model: Path, tokens: int) -> list[str]:
    """The command line of this library."""
    command = [sys.executable, "-m", "lookahead", "generate", str(model)]
    return [*command, "--prompt", PROMPT, "--max-new-tokens", str(tokens)]


def theirs(folder: Path, model: Path, tokens: int) -> list[str]:
    """llama.cpp's command line."""
    command = [str(folder / "llama-cli"), "-m", str(model), "-t", str(os.cpu_count())]
    return [*command, "--temp", "0", "-p", PROMPT, "-n", str(tokens), "--single-turn", "-c", str(CONTEXT)]


#: Run in a small process: starts a command, and prints its status, its seconds and its largest resident set in KiB.
#: A process inherits the largest resident set of the one that starts it, and this program has loaded torch.
LAUNCHER = """
import json, os, subprocess, sys, time
begin = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdin=-3, stdout=-3, stderr=-3)
_, status, used = os.wait4(process.pid, 0)
seconds = time.perf_counter() - begin
print(json.dumps([os.waitstatus_to_exitcode(status), seconds, used.ru_maxrss]))
"""


def spent(command: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[float, float]:
    """(seconds, MB of the largest resident set) of a process.

    Raises:
        SettingsError: the process fails.
    """
    launched = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LAUNCHER, *command],
        stdout=subprocess.PIPE,
        check=True,
        env=None if environment is None else {**os.environ, **environment},
    )
    status, seconds, kibibytes = json.loads(launched.stdout)
    if status:
        raise SettingsError(f"{' '.join(command[:3])} ended with status {status}")
    return seconds, kibibytes * 1024 / 1e6


def measure(
    model: Path, folder: Path | None, their_model: Path, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Measure. Returns program -> name of the measurement -> value of each round."""
    found: dict[str, dict[str, list[float]]] = {"ours": {"start": [], "memory": [], "first use": []}}
    if folder is not None:
        found["llama.cpp"] = {"start": [], "memory": []}
    spent(ours(model, TOKENS))  # compiles, and measures the cost curve
    for _ in range(rounds):
        for name, figures in found.items():

            def command(tokens: int, name: str = name) -> list[str]:
                if name == "ours" or folder is None:
                    return ours(model, tokens)
                return theirs(folder, their_model, tokens)

            figures["start"].append(spent(command(1))[0])
            figures["memory"].append(spent(command(TOKENS))[1])
    for _ in range(rounds):
        with TemporaryDirectory() as empty:
            caches = {"NUMBA_CACHE_DIR": empty, "XDG_CACHE_HOME": empty}
            found["ours"]["first use"].append(spent(ours(model, 1), caches)[0])
    return found


def cell(figures: Sequence[float], unit: str) -> str:
    """A median with its range."""
    digits = 0 if unit == "MB" or median(figures) >= 10 else 1
    low, middle, high = (f"{x:.{digits}f}" for x in (min(figures), median(figures), max(figures)))
    return f"{middle} {unit} ({low}–{high})"


def cells(found: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, str]]:
    """Program -> name of the measurement -> cell of the table."""
    units = {"start": "s", "memory": "MB", "first use": "s"}
    return {
        name: {what: cell(each, units[what]) for what, each in figures.items()}
        for name, figures in found.items()
    }


def main() -> None:
    folder, file = default_model()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bin", type=Path, help="folder of llama.cpp's programs (default: measure ours only)"
    )
    parser.add_argument("--model", type=Path, help="a GGUF file for llama.cpp (default: the default model)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("docs/results/startup"), help="page and JSON")
    args = parser.parse_args()
    model = Path(folder) / file
    require_quiet()
    record: dict[str, Any] = {**environment(), "model": model.name, "dtype": "its own weights", "path": "cpu"}
    loads = [os.getloadavg()[0]]
    found = measure(model, args.bin, args.model or model, args.rounds)
    shown = cells(found)
    rows = [
        [name, *(own.get(what, "–") for what in ("start", "memory", "first use"))]
        for name, own in shown.items()
    ]
    body = [
        f"Start: a whole process that emits one token. Memory: the largest resident set while it emits {TOKENS} "
        "tokens. First use: the start with empty caches. It compiles the kernels, once per machine and version, and "
        "measures the cost of steps, once per model. llama.cpp has no such step, because it is compiled in advance. "
        f"Medians of {args.rounds} runs, with the smallest and the largest; the programs alternate.",
        "",
        markdown_table(["", "start", "memory", "first use"], rows),
    ]
    if args.bin is not None:
        body += [
            "",
            f"llama.cpp: llama-cli with a context of {CONTEXT} tokens. {build_of(args.bin / 'llama-cli')}.",
        ]
    if args.model is not None:
        body += ["", f"llama.cpp's file is {args.model.name}."]
    print(write_page(args.out, "Start-up, memory and first use", record, found, body, loads))


if __name__ == "__main__":
    main()
