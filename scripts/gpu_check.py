"""The GPU check: one command that needs no network and writes one page with tables and figures (`make gpu-check`).

    certificate  whether captured passes and exact mode are available, for a random Llama and other families, and why
    rows         the bits of steps of 2 to 64 rows against single rows, on every path of the default model in bf16
    text         the path chosen by make_target, and exact mode, against plain decoding, token for token
    step         t(k) of a random 7B Llama in bf16 for 1 to 256 rows, with its lower bound: captured passes, tree
                 steps with masks, transformers
    speed        the default model in bf16: plain, prompt lookup, (15,5,15), (7,7,7), adaptive, with the attention
                 kernel and with sdpa, alongside transformers' generate and its prompt lookup
    speed-own    the same with --model, in bf16
    speed-fp16   the default model in fp16
    scaling      S and speed by W, as in figure 8 of the paper
    memory       the cache, captured passes and the peak, by sequences and context
    ranks        lookahead parallelism over nccl, on machines with two GPUs

With --only, two more (--only all runs everything):

    attention    120 rows over 8192 tokens, 32 and 8 key heads, with the lower bound; best backend and tiles
    kernel       the attention kernel, compiled, against the definition in float64

All parts together take at most --budget seconds (600). Time that a part leaves is divided among later ones, and parts
that repeat measurements repeat fewer. Each part runs in a separate process, so one that crashes the GPU or hangs does
not stop the others. The page is written after every line, so an interrupt (Ctrl-C) loses nothing. `--tiny` is a dry
run of the same parts on the CPU, with a tiny model; its times are meaningless.

    python scripts/gpu_check.py [--model PATH] [--tiny] [--out build/gpu-check.md] [--only step,speed,...]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Timer
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
#: Part -> its share of the time. A part is (name of the check, further arguments).
SHARES = {
    "certificate": 60,
    "rows": 40,
    "text": 60,
    "step": 110,
    "speed": 120,
    "speed-own": 120,
    "speed-fp16": 70,
    "scaling": 70,
    "memory": 50,
    "ranks": 40,
    "attention": 110,
    "kernel": 150,
}
EXTRA = ("attention", "kernel")
#: Seconds after which the remaining time is printed.
MINUTE = 60.0
#: Minimum seconds of a part.
SHORTEST = 10.0
#: A part is terminated after its time plus this share of it.
GRACE = 0.25
HEAD = "| part | what | value | bound | verdict |\n| --- | --- | ---: | ---: | --- |\n"


class Page:
    """The page. Lines are printed as they arrive, and the file is rewritten after each.

    Attributes:
        lines: the table of verdicts.
        tables: part -> title -> key -> cells, in order of arrival.
        notes: lines below the description of the machine.
        drawn: parts with a figure.
    """

    def __init__(self, path: Path | None, command: str) -> None:
        self.path = path
        self.command = command
        self.where = ""
        self.lines: list[list[str]] = []
        self.tables: dict[str, dict[str, dict[str, dict[str, str]]]] = {}
        self.notes: list[str] = []
        self.drawn: set[str] = set()

    @property
    def missed(self) -> int:
        return sum(line[4] == "MISSED" for line in self.lines)

    def add(self, part: str, what: str, value: str, bound: str = "", verdict: str = "") -> None:
        self.lines.append([part, what, value, bound, verdict])
        print(f"{part:11} {what:66} {value:>34} {bound:>14} {verdict}", flush=True)
        self.write()

    def add_row(self, part: str, title: str, key: str, cells: dict[str, str]) -> None:
        self.tables.setdefault(part, {}).setdefault(title, {})[key] = cells
        self.write()

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        text = "\n\n".join(filter(None, ["# GPU check", f"`{self.command}`", self.where, *self.notes]))
        for part, tables in self.tables.items():
            text += self.section(part)
            if part in self.drawn:
                text += f"\n\n![{', '.join(tables)}]({self.figure(part).name})"
        text += "\n\n## Verdicts\n\n" + HEAD + "".join(f"| {' | '.join(line)} |\n" for line in self.lines)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text, encoding="utf-8")

    def section(self, part: str) -> str:
        """The tables of a part in Markdown; "" if it has none."""
        found = ""
        for title, rows in self.tables.get(part, {}).items():
            heads = list(next(iter(rows.values())))
            lines = markdown([heads, *(list(cells.values()) for cells in rows.values())])
            found += f"\n\n## {part}: {title}\n\n{lines}"
        return found

    def figure(self, part: str) -> Path:
        """The path of a part's figure."""
        assert self.path is not None
        return self.path.with_name(f"{self.path.stem}-{part}.svg")

    def draw(self, part: str) -> None:
        """Draw the figure of a part, if it has one and matplotlib is installed."""
        from benchmarks.plots import can_draw, save

        tables = self.tables.get(part)
        if self.path is None or not tables or part not in FIGURES or not can_draw():
            return
        for title, rows in tables.items():
            if figure := FIGURES[part](title, list(rows.values())):
                save(figure, self.figure(part).with_suffix(""), self.where)
                self.drawn.add(part)
                self.write()
                return


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its header."""
    heads, *body = rows
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw_steps(title: str, rows: Sequence[dict[str, str]]) -> Any:
    """t(k) and its lower bound, by context."""
    from benchmarks.plots import colour, label, new_figure, powers_of_two

    if "floor" not in rows[0]:
        return None
    figure, axes = new_figure()
    for index, tokens in enumerate(dict.fromkeys(row["tokens"] for row in rows)):
        points = [row for row in rows if row["tokens"] == tokens]
        k = [int(row["rows"]) for row in points]
        style = colour(index)
        axes.plot(k, [float(row["ms"]) for row in points], label=f"{tokens} tokens", **style)
        axes.plot(k, [float(row["floor"]) for row in points], color=style["color"], linestyle=":")
    powers_of_two(axes, sorted({int(row["rows"]) for row in rows}))
    label(axes, title, "rows of the step, k", "time of the step, t(k) (ms); dotted: lower bound")
    return figure


def draw_windows(title: str, rows: Sequence[dict[str, str]]) -> Any:
    """S and the speed-up, by W."""
    from benchmarks.plots import colour, label, new_figure, powers_of_two

    figure, axes = new_figure()
    w = [int(row["W"]) for row in rows]
    axes.plot(w, [float(row["S"]) for row in rows], label="S", **colour(0))
    speed = [float(row["over plain"].replace("–", "nan")) for row in rows]
    axes.plot(w, speed, label="speed over plain decoding", **colour(1))
    powers_of_two(axes, w)
    label(axes, title, "W = G", "")
    return figure


def draw_speeds(title: str, rows: Sequence[dict[str, str]]) -> Any:
    """Tokens per second, by method."""
    from benchmarks.plots import COLOURS, label, new_figure

    figure, axes = new_figure(7.2, 4.6)
    names = [f"{row['method']}, {row['attention']}" for row in rows]
    axes.barh(names, [float(row["tokens/s"]) for row in rows], color=COLOURS[0])
    axes.invert_yaxis()
    label(axes, title, "tokens per second", legend=False)
    return figure


FIGURES = {
    "step": draw_steps,
    "scaling": draw_windows,
    **dict.fromkeys(("speed", "speed-fp16", "speed-own"), draw_speeds),
}


def command_of(part: str, tiny: bool, model: str | None, seconds: float) -> list[str]:
    """The command line of a part."""
    check, _, which = part.partition("-")
    words = [sys.executable, str(ROOT / "scripts" / "gpu_checks.py"), check, "--seconds", f"{seconds:.0f}"]
    if which == "fp16":
        words += ["--dtype", "float16"]
    if model is not None and (which == "own" or check == "scaling"):
        words += ["--model", model]
    return words + ["--tiny"] * tiny


def run_part(part: str, page: Page, tiny: bool, model: str | None, seconds: float) -> None:
    """Run a part in a separate process for about ``seconds``, and add its output to the page."""
    # Start it, with a timer that ends it.
    begin = time.monotonic()
    limit = seconds * (1 + GRACE)
    child = subprocess.Popen(
        command_of(part, tiny, model, seconds),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    late: list[bool] = []

    def end() -> None:
        late.append(True)
        os.killpg(child.pid, signal.SIGKILL)  # the child has its own group

    timer = Timer(limit, end)
    timer.start()

    # Add its lines to the page; keep all others, such as a traceback.
    other: list[str] = []
    assert child.stdout is not None
    try:
        for line in child.stdout:
            word, _, rest = line.rstrip("\n").partition("\t")
            if word == "TABLE":
                page.add(part, *rest.split("\t"))
            elif word == "ROW":
                title, key, cells = rest.split("\t")
                page.add_row(part, title, key, json.loads(cells))
            elif word == "WHERE":
                page.where = page.where or rest
                page.write()
            else:
                other.append(line)
        child.wait()
    finally:
        timer.cancel()
        if child.poll() is None:  # an interrupt
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        child.stdout.close()

    # Report how it ended.
    spent = f"{time.monotonic() - begin:.0f} s"
    if late:
        page.add(part, f"did not finish within {limit:.0f} s", spent, "", "MISSED")
    elif child.returncode:
        last = next((line.strip() for line in reversed(other) if line.strip()), "")
        page.add(
            part, f"ended with status {child.returncode}: {last[:150]}".replace("|", "/"), spent, "", "MISSED"
        )
    else:
        page.add(part, "all of it", spent)
    if late or child.returncode:
        print("".join(other[-60:]), flush=True)


def run_all(parts: Sequence[str], page: Page, tiny: bool, model: str | None, budget: float) -> None:
    """Run the parts within a budget of seconds. After a minute, print how long the rest takes."""
    begin = time.monotonic()
    left = list(parts)

    def announce() -> None:
        spent = time.monotonic() - begin
        page.note(
            f"After {spent:.0f} s: {', '.join(left)} take at most {max(0.0, budget - spent):.0f} s more."
        )

    timer = Timer(MINUTE, announce)
    timer.daemon = True
    timer.start()
    try:
        while left:
            # Divide the remaining time by the shares, and leave room for the grace period.
            share = SHARES[left[0]] / sum(SHARES[part] for part in left)
            seconds = (budget - (time.monotonic() - begin)) * share / (1 + GRACE)
            run_part(left[0], page, tiny, model, max(SHORTEST, seconds))
            print(page.section(left[0]), flush=True)
            page.draw(left.pop(0))
    except KeyboardInterrupt:
        page.note(f"Interrupted in {left[0]}; not measured: {', '.join(left)}.")
        raise
    finally:
        timer.cancel()


def chosen_parts(only: str | None, model: str | None) -> list[str]:
    """The parts of ``--only``, or the default ones.

    Raises:
        ValueError: a part is unknown, or lacks its model.
    """
    known = [part for part in SHARES if part != "speed-own" or model is not None]
    if only is None:
        return [part for part in known if part not in EXTRA]
    parts = known if only == "all" else only.split(",")
    if unknown := [part for part in parts if part not in SHARES]:
        raise ValueError(f"unknown part {unknown[0]!r}; known are {', '.join(SHARES)}")
    if "speed-own" in parts and model is None:
        raise ValueError("speed-own needs --model, a directory or a GGUF file")
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="your own model, a directory or GGUF file, for speed-own and scaling")
    parser.add_argument("--tiny", action="store_true", help="a dry run on the CPU")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check.md", help="the page")
    parser.add_argument("--only", help="names of parts separated by commas, or all")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for all parts together")
    given = parser.parse_args()
    try:
        parts = chosen_parts(given.only, given.model)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if given.model is not None and not Path(given.model).exists():
        print(f"--model must be a directory or a GGUF file that exists, got {given.model}", file=sys.stderr)
        return 2
    if given.model is not None:  # the parts run in the repository's folder
        given.model = str(Path(given.model).resolve())
    if not given.budget >= 60:
        print(f"--budget must be at least 60 seconds, got {given.budget:g}", file=sys.stderr)
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_all(parts, page, given.tiny, given.model, given.budget)
    except KeyboardInterrupt:
        print(f"what was measured is in {given.out}")
        return 130
    print(f"{page.where}\n{len(page.lines)} lines, {page.missed} missed; the page is {given.out}")
    return 1 if page.missed else 0


if __name__ == "__main__":
    sys.exit(main())
