"""Packed files alongside llama.cpp on the same file: start-up, memory, t(k), a prompt of 512 tokens, 16 sequences.

    python -m benchmarks.packed_step                                    the default model's own file
    python -m benchmarks.packed_step --types own Q4_0 Q4_K_M            conversions of it
    python -m benchmarks.packed_step --larger qwen-1.5B.gguf            larger files, with their sizes in their names

t(k) is the time of one step of k rows, all with logits, after 128 tokens. llama.cpp evaluates the same trees, through
this library's engine for it. The two alternate; medians of the rounds are printed. The floor is the bytes of the
weights over the read bandwidth of a buffer of that size, measured in the same run. A start is a command from the
shell to its end: eight tokens, with compiled code on disk; llama.cpp's is a Python process that loads the file and
generates as many.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch

import lookahead
from lookahead.bench.record import environment
from lookahead.core import TokenTree
from lookahead.loading import default_model

from .convert_gguf import convert
from .measured import size_of
from .page import write_report
from .report import markdown_table
from .step import read_bandwidth, sample_tree

OWN = "own"
#: Rounds of the steps of larger files, which take long.
FEW_ROUNDS = 5
ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
CONTEXT, PROMPT, SEQUENCES = 128, 512, 16
OURS, THEIRS = "ours", "llama.cpp"
STARTS = {
    OURS: "import sys; from lookahead.cli import main; sys.argv = ['lookahead', 'generate', {file!r}, '--prompt', "
    "'The capital of France is', '--max-new-tokens', '8']; main()",
    THEIRS: "import llama_cpp; model = llama_cpp.Llama({file!r}, n_threads={threads}, verbose=False); "
    "model('The capital of France is', max_tokens=8, temperature=0)",
}
#: Prints the resident set and its peak in MB at the end of the code before it. Linux gives them in KiB.
MEMORY = (
    "; lines = dict(line.split(':', 1) for line in open('/proc/self/status')); "
    "print([int(lines[name].split()[0]) * 1024 / 1e6 for name in ('VmRSS', 'VmHWM')])"
)
LOADED = {
    OURS: "import lookahead; llm = lookahead.load({file!r}); "
    "llm.generate('The capital of France is', max_new_tokens=8)" + MEMORY,
    THEIRS: STARTS[THEIRS] + MEMORY,
}

ABOUT = (
    "A start is a command from the shell to its end with eight tokens; that of llama.cpp is a Python process. "
    "llama.cpp evaluates the same trees as ours, through this library's engine for it, so t(1) includes some Python "
    "that its own programs do not have. The two alternate: after 50 ms, in which the threads of the other come to "
    "rest, one step is not counted and the next is, which may take longer than within a text. The floor of a step is "
    "an estimate: the bytes of the weights over the read bandwidth, the median of a measurement after each number of "
    "rows. It has the noise of that measurement, so a step may even be below it."
)


def file_of(kind: str, source: Path, folder: Path) -> Path:
    """The file of a type, created if missing."""
    if kind == OWN:
        return source
    out = folder / f"{source.stem}.{kind}.gguf"
    if not out.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        half = out.with_suffix(".part")
        convert(source, half, kind)
        half.rename(out)
    return out


def run(code: str, file: Path, threads: int) -> tuple[float, str]:
    """(seconds, output) of a Python process."""
    start = perf_counter()
    words = [sys.executable, "-c", code.format(file=str(file), threads=threads)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return perf_counter() - start, done.stdout


def timed(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each call. They alternate, and each turn begins with an uncounted call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            sleep(0.05)  # threads of the other may still wait actively
            call()
            start = perf_counter()
            call()
            times[name].append((perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(kind: str, file: Path, rounds: int, starts: int) -> dict[str, Any]:
    """The figures of one file; times in milliseconds, starts in seconds, memory in MB."""
    threads = torch.get_num_threads()
    line: dict[str, Any] = {"type": kind, "file_mb": file.stat().st_size / 1e6}
    for name in (OURS, THEIRS):
        run(STARTS[name], file, threads)  # compiles, and fills the system's cache of files
    both: dict[str, list[float]] = {OURS: [], THEIRS: []}
    for _ in range(starts):
        for name, mine in both.items():
            mine.append(run(STARTS[name], file, threads)[0])
    line["start"] = {name: statistics.median(mine) for name, mine in both.items()}
    line["memory"] = memory(file)
    ours = lookahead.load(file)
    theirs = lookahead.load(file, engine="llama.cpp")
    line["weights"] = ours.dtype
    targets = {OURS: ours.target(), THEIRS: theirs.target()}
    vocabulary = ours.vocabulary
    text = [(101 * i + 7) % min(vocabulary, 49152) for i in range(PROMPT)]

    def prompt(target: Any) -> None:
        target.prefill([(0, text)])
        target.release(0)

    line["prompt"] = timed({name: partial(prompt, target) for name, target in targets.items()}, rounds)
    for target in targets.values():
        target.prefill([(slot, text[slot : slot + CONTEXT]) for slot in range(SEQUENCES)])
    singles = [(slot, TokenTree(1)) for slot in range(SEQUENCES)]
    line["batch"] = timed({name: partial(step, target, singles) for name, target in targets.items()}, rounds)
    for target in targets.values():  # other sequences in its memory make llama.cpp's attention slower
        for slot in range(1, SEQUENCES):
            target.release(slot)
    line["t"] = {}
    size = int(line["file_mb"] * 1e6)
    bandwidths = list[float]()  # on a shared machine, a single measurement may be off by half
    for rows in ROWS:
        steps = {
            name: partial(step, target, [(0, sample_tree(rows, vocabulary))])
            for name, target in targets.items()
        }
        line["t"][rows] = timed(steps, rounds)
        bandwidths.append(read_bandwidth(size, torch.float32))
    line["floor"] = size / statistics.median(bandwidths) * 1e3
    return line


def memory(file: Path) -> dict[str, list[float]]:
    """(resident set, its peak) in MB of a process that has loaded the file and generated eight tokens."""
    threads = torch.get_num_threads()
    return {name: eval_numbers(run(LOADED[name], file, threads)[1]) for name in (OURS, THEIRS)}


def step(target: Any, trees: Sequence[tuple[int, TokenTree]]) -> None:
    """One forward pass, including reading its first token."""
    target.forward(trees)[0].best(0)


def eval_numbers(text: str) -> list[float]:
    """The numbers of the last line, as a list."""
    return [float(number) for number in text.strip().splitlines()[-1].strip("[]").split(",")]


def page(lines: list[dict[str, Any]]) -> list[str]:
    """Tables of all files."""
    both = [
        ("start, s", "start", 2),
        (f"prompt of {PROMPT}, ms", "prompt", 0),
        (f"{SEQUENCES} sequences, ms", "batch", 1),
    ]
    body = [f"Medians, {OURS} / {THEIRS}. {ABOUT}", ""]
    heads = ["file", "MB", *(title for title, _, _ in both), "resident MB", "largest MB"]
    body.append(
        markdown_table(
            heads,
            [
                [
                    f"{line['type']} ({line['weights']})",
                    f"{line['file_mb']:.0f}",
                    *(f"{line[key][OURS]:.{n}f} / {line[key][THEIRS]:.{n}f}" for _, key, n in both),
                    *(f"{line['memory'][OURS][i]:.0f} / {line['memory'][THEIRS][i]:.0f}" for i in range(2)),
                ]
                for line in lines
            ],
            texts=1,
        )
    )
    body += ["", "t(k) in ms, and over t(1). At t(1) / floor = 1, memory bandwidth limits the step.", ""]
    rows = []
    for line in lines:
        for name in (OURS, THEIRS):
            times = [line["t"][k][name] for k in ROWS]
            floor = f"{times[0] / line['floor']:.2f}"
            rows.append(
                [
                    line["type"],
                    name,
                    *(f"{t:.1f}" for t in times),
                    f"{line['t'][16][name] / times[0]:.2f}",
                    floor,
                ]
            )
    heads = ["file", "by", *(f"t({k})" for k in ROWS), "t(16) / t(1)", "t(1) / floor"]
    return [*body, markdown_table(heads, rows, texts=2)]


def peer() -> str:
    """The version of llama.cpp's package and the instructions that it was compiled for."""
    import llama_cpp

    compiled = llama_cpp.llama_print_system_info().decode().strip()
    return f"llama-cpp-python {version('llama-cpp-python')}: {compiled}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--types", nargs="+", default=[OWN], choices=[OWN, "Q4_0", "IQ4_NL", "Q8_0", "Q4_K_M"])
    add("--larger", type=Path, nargs="*", default=[], help="larger GGUF files")
    add("--rounds", type=int, default=15)
    add("--starts", type=int, default=5)
    add("--folder", type=Path, default=Path("build/results"), help="where conversions are kept")
    add("--out", type=Path, default=Path("docs/results/packed-step"), help="figures, without suffix")
    given = parser.parse_args()
    where, folder = environment(), default_model()
    source, load, lines = folder.folder / folder.file, os.getloadavg()[0], []
    for kind in given.types:
        lines.append(measure(kind, file_of(kind, source, given.folder), given.rounds, given.starts))
        print(lines[-1], flush=True)
    for file in given.larger:
        lines.append(measure(size_of(file), file, min(given.rounds, FEW_ROUNDS), given.starts))
        print(lines[-1], flush=True)
    names = " and ".join(["SmolLM2-135M-Instruct", *(file.stem for file in given.larger)])
    record = {**where, "model": names, "dtype": "packed weights", "load": load}
    write_report(
        given.out,
        "Packed files compared with llama.cpp: start, memory and steps",
        record,
        lines,
        [*page(lines), "", peer()],
    )


if __name__ == "__main__":
    main()
