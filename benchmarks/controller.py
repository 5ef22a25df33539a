"""The controller of adaptive against plain decoding and against fixed numbers of rows, text by text.

    python benchmarks/controller.py MODEL --data DIR --times 1:18,4:21,8:26 --out controller.jsonl
    python benchmarks/controller.py MODEL --data DIR --wall     wall times, methods in turn, plain decoding twice

Without ``--wall`` the clock is a model of a quiet machine: a forward pass of k rows takes t(k), given in milliseconds
or measured first (the quickest of ``--repeats``), and all else its own CPU time. So texts, rows and drafts are real,
and what else the machine does shows in no figure. Prompts that the priors were fitted to are left out. A text's time
is that of all steps after the prefill.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import lookahead
from lookahead.bench.record import describe, environment
from lookahead.bench.workloads import load_workload
from lookahead.core import Decoder, Request
from lookahead.drafters import make_drafter
from lookahead.drafters.adaptive import AdaptiveState, StepTimes, drafter, measure_times, times_for
from lookahead.drafters.adaptive.step_times import MENU, from_points, place_of
from lookahead.sampling import SeededNoise, make_choose

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import fit_priors

WORKLOADS = ("humaneval", "gsm8k", "mbpp", "classeval", "mt-bench", "spec-bench")
FIXED = (2, 4, 6, 8)
#: What names a text's line in a file.
KEYS = ("commit", "dtype", "clock", "workload", "prompt", "temperature")


class QuietClock:
    """Seconds: of each forward pass what a table says, of all else CPU time."""

    def __init__(self, table: list[float]) -> None:
        self.table, self.passes, self.real = table, 0.0, 0.0

    def __call__(self) -> float:
        return self.passes + thread_time() - self.real

    def target(self, target: Any) -> Any:
        """The target with this clock."""
        forward = target.forward

        def timed(trees: Any) -> Any:
            start = thread_time()
            scores = forward(trees)
            self.real += thread_time() - start
            self.passes += self.table[place_of(max(len(tree) for _, tree in trees))]
            return scores

        target.forward = timed
        return target


class Bench:
    """One model, and a clock; None is the wall's."""

    def __init__(self, llm: Any, given: str, repeats: int, wall: bool, new_tokens: int) -> None:
        self.llm, self.new_tokens, self.clock = llm, new_tokens, None
        times_for(llm.model, llm.path, llm.target)  # compiles
        if given:
            points = (part.split(":") for part in given.split(","))
            self.table = from_points({int(rows): float(ms) / 1e3 for rows, ms in points})
        else:
            times = measure_times(llm.target(), llm.vocabulary, MENU[:12], (256,), (1,), repeats, None, 1e9)
            (self.table,) = times.bins.values()
        if not wall:
            self.clock = QuietClock(self.table)
            drafter.perf_counter = self.clock  # type: ignore[attr-defined]
        print(
            "t(k) in ms:", {k: round(1e3 * t, 2) for k, t in zip(MENU, self.table, strict=True)}, flush=True
        )

    def decode(self, prompt: list[int], method: str, temperature: float, seed: int) -> tuple[float, Any]:
        """Seconds after the prefill, and the generation."""
        llm, name, config = self.llm, method.split()[0], None
        if name == "fixed":
            name, config = "adaptive", {"budget": False, "max_rows": int(method.split()[1])}
        state = AdaptiveState(config, False, StepTimes({(0, 1): list(self.table)}))
        made = make_drafter(name, config, llm.vocabulary, state if name == "adaptive" else None)
        noise, process = None, None
        if temperature:
            noise = SeededNoise(seed, len(prompt), llm.vocabulary, temperature)

            def process(ids: Any, scores: Any) -> Any:
                return scores / temperature

        made.use_noise(noise)
        target = llm.target() if self.clock is None else self.clock.target(llm.target())
        decoder, now = Decoder(target), self.clock or perf_counter
        chooser = make_choose(prompt, process, noise)
        generation = decoder.add(Request(prompt, made, self.new_tokens, chooser, llm.eos))
        decoder.step()
        start = now()
        while decoder.busy:
            decoder.step()
        return now() - start, generation


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    llm = lookahead.load(args.model, dtype=args.dtype)
    bench = Bench(llm, args.times, args.repeats, args.wall, args.new_tokens)
    methods = ["plain", "adaptive", *(f"fixed {k}" for k in args.fixed), *["again"] * args.wall]
    about = {**environment(), "dtype": llm.dtype, "clock": "wall" if args.wall else "quiet"}
    about["t"] = {str(k): round(1e3 * t, 3) for k, t in zip(MENU, bench.table, strict=True) if k <= 64}
    fitted, lines = set(fit_priors.prompts(args.data, 60)), []
    before = read(args.out) if args.out else []
    done = {tuple(line[key] for key in KEYS): line for line in before}
    for workload in args.workloads:
        found = [
            p for p in load_workload(workload, 3 * args.prompts, data=args.data) if p.turns[0] not in fitted
        ]
        for number, prompt in enumerate(found[: args.prompts]):
            ids = prompt.tokens(llm.tokenizer)[-args.longest :]
            for temperature in args.temperatures:
                text = {**about, "workload": workload, "prompt": number, "temperature": temperature}
                known = done.get(tuple(text[key] for key in KEYS))
                if known is not None:
                    lines.append(known)
                    continue
                seconds: dict[str, list[float]] = defaultdict(list)
                made: dict[str, Any] = {}
                for turn in range(args.rounds if args.wall else 1):
                    for method in methods[:: -1 if turn % 2 else 1]:
                        name = "autoregressive" if method in ("plain", "again") else method
                        spent, made[method] = bench.decode(ids, name, temperature, number)
                        seconds[method].append(spent)
                line = {
                    **text,
                    "tokens": len(made["plain"].tokens),
                    "equal": all(one.tokens == made["plain"].tokens for one in made.values()),
                    "seconds": {method: min(some) for method, some in seconds.items()},
                    "steps": {method: made[method].stats.steps for method in methods},
                    "rows": {method: made[method].stats.rows for method in methods},
                }  # fmt: skip
                lines.append(line)
                ratios = {m: round(s / line["seconds"]["plain"], 3) for m, s in line["seconds"].items()}
                print(
                    workload, number, f"T={temperature:g}", line["tokens"], line["equal"], ratios, flush=True
                )
                if args.out:
                    with open(args.out, "a") as file:
                        file.write(json.dumps(line) + "\n")
    return lines


def read(path: str) -> list[dict[str, Any]]:
    """The lines of a file, none where there is none."""
    file = Path(path)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def tables(lines: list[dict[str, Any]]) -> str:
    """The figures as Markdown: totals by dtype, temperature and workload."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        for workload in (line["workload"], "all"):
            groups[line["clock"], line["dtype"], line["temperature"], workload].append(line)
    columns = ("clock", "dtype", "T", "workload", "texts", "equal", "adaptive", "best fixed", "its rate")
    columns += ("adaptive's of it", "median text", "slowest text", "over 1.02", "plain again")
    columns += ("plain again over 1.02",)
    text = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for group, some in sorted(groups.items(), key=lambda group: str(group[0])):
        total = {m: sum(line["seconds"][m] for line in some) for m in some[0]["seconds"]}
        best = min((m for m in total if m.startswith("fixed")), key=lambda m: total[m], default="plain")
        ratios, again = (
            [line["seconds"].get(m, 0) / line["seconds"]["plain"] for line in some]
            for m in ("adaptive", "again")
        )
        speedup = f"{total['plain'] / total['adaptive']:.2f}"
        cells = [*group, len(some), sum(line["equal"] for line in some), speedup]
        cells += [best, f"{total['plain'] / total[best]:.2f}", f"{total[best] / total['adaptive']:.2f}"]
        cells += [f"{median(ratios):.3f}", f"{max(ratios):.3f}", sum(ratio > 1.02 for ratio in ratios)]
        cells += [f"{min(again):.3f} to {max(again):.3f}" if max(again) else ""]
        cells += [sum(ratio > 1.02 for ratio in again)]
        text.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("model", nargs="?")
    add("--data", type=Path)
    add("--dtype", default="float32")
    add("--fixed", type=lambda text: [int(k) for k in text.split(",")], default=list(FIXED))
    add("--prompts", type=int, default=20, help="of each workload")
    add("--workloads", type=lambda text: text.split(","), default=list(WORKLOADS))
    add("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 0.7, 1.0])
    add("--new-tokens", type=int, default=128)
    add("--longest", type=int, default=1024, help="tokens of a prompt at most; its end counts")
    add("--times", default="", help="t(k) in milliseconds, as 1:18,4:21,8:26; measured where left out")
    add("--repeats", type=int, default=40)
    add("--wall", action="store_true")
    add("--rounds", type=int, default=3)
    add("--out", help="JSON lines; appended to, and texts that it has at this commit are not measured again")
    add("--page", action="store_true", help="print tables of the lines of --out, and measure nothing")
    args = parser.parse_args()
    if args.page:
        lines = read(args.out)
        print(describe(lines[-1]) + "\n\n" + tables(lines))
    else:
        print(tables(measure(args)))


if __name__ == "__main__":
    main()
