"""Every check that needs an NVIDIA GPU, in one table: `make gpu-check` runs the first three, in five minutes at most.

    certificate  whether captured passes and exact mode are available, for a random Llama and other families, and why
    step         t(k) of a random 7B Llama in bf16: transformers eager, tree steps, captured passes, lower bound
    text         the path that make_target chooses, and exact mode, against plain decoding, token for token
    kernel       the attention kernel, compiled, against the definition in float64
    attention    120 rows over 8192 tokens, 32 and 8 key heads, beside its lower bound; which backend, which tiles
    ranks        lookahead parallelism over nccl, on machines with two GPUs

No model is downloaded: weights are random. Each check runs in a process of its own with a time limit, so one that
crashes the GPU or hangs does not stop the others, and the page is written line by line as they come. Without a
GPU, `--tiny` runs everything but the capture, small and on the CPU; its times have no meaning.

    python scripts/gpu_check.py [--tiny] [--out docs/results/gpu-check.md] [--only kernel,attention,...]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

#: Check -> seconds that it may take.
CHECKS = {"certificate": 70, "step": 140, "text": 80, "attention": 110, "ranks": 40, "kernel": 150}
FIRST = ("certificate", "step", "text")
ROOT = Path(__file__).resolve().parent.parent
HEAD = "| check | what | value | bound | verdict |\n| --- | --- | ---: | ---: | --- |\n"


class Page:
    """The table, printed as it comes and written to a file after every line."""

    def __init__(self, path: Path | None, command: str) -> None:
        self.path = path
        self.command = command
        self.where = ""
        self.lines: list[list[str]] = []

    @property
    def missed(self) -> int:
        return sum(line[4] == "MISSED" for line in self.lines)

    def add(self, check: str, what: str, value: str, bound: str = "", verdict: str = "") -> None:
        self.lines.append([check, what, value, bound, verdict])
        print(f"{check:10} {what:66} {value:>34} {bound:>14} {verdict}", flush=True)
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        rows = "".join(f"| {' | '.join(line)} |\n" for line in self.lines)
        text = f"# GPU check\n\n`{self.command}`\n\n{self.where}\n\n{HEAD}{rows}"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text, encoding="utf-8")


def run_check(name: str, page: Page, tiny: bool) -> None:
    """Run one check in a process of its own, which prints lines that begin with TABLE and WHERE."""
    command = [sys.executable, str(ROOT / "scripts" / "gpu_checks.py"), name, *(["--tiny"] if tiny else [])]
    start, limit = time.monotonic(), CHECKS[name] * (4 if tiny else 1)  # a dry run may be on a busy machine
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    late: list[bool] = []

    def end() -> None:
        late.append(True)
        os.killpg(child.pid, signal.SIGKILL)  # the group is the child's own

    timer = Timer(limit, end)
    timer.start()
    other: list[str] = []
    assert child.stdout is not None
    for line in child.stdout:
        word, _, rest = line.rstrip("\n").partition("\t")
        if word == "TABLE":
            page.add(name, *rest.split("\t"))
        elif word == "WHERE":
            page.where = page.where or rest
            page.write()
        else:
            other.append(line)
    child.wait()
    timer.cancel()
    spent = f"{time.monotonic() - start:.0f} s"
    if late:
        page.add(name, f"did not finish within {limit} s", spent, "", "MISSED")
    elif child.returncode:
        last = next((line.strip() for line in reversed(other) if line.strip()), "")
        page.add(
            name, f"ended with status {child.returncode}: {last[:120]}".replace("|", "/"), spent, "", "MISSED"
        )
    else:
        page.add(name, "all of it", spent)
    if late or child.returncode:
        print("".join(other[-60:]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a dry run on the CPU")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    parser.add_argument("--only", help="checks by name, with commas between, or all")
    given = parser.parse_args()
    names = list(CHECKS) if given.only == "all" else given.only.split(",") if given.only else list(FIRST)
    if unknown := [name for name in names if name not in CHECKS]:
        print(f"unknown check {unknown[0]!r}; known are {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    import torch

    if not given.tiny and not torch.cuda.is_available():
        built = "" if torch.version.cuda else f"; torch {torch.__version__} is a build without CUDA"
        print(
            f"gpu-check needs an NVIDIA GPU and finds none{built}; --tiny is a dry run on the CPU",
            file=sys.stderr,
        )
        return 2
    page = Page(given.out, "python scripts/gpu_check.py " + " ".join(sys.argv[1:]))
    for name in names:
        run_check(name, page, given.tiny)
    print(f"{page.where}\n{len(page.lines)} lines, {page.missed} missed")
    return 1 if page.missed else 0


if __name__ == "__main__":
    sys.exit(main())
