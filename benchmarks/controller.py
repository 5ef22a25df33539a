"""The adaptive drafter's choice of rows against plain decoding and fixed numbers of rows, text by text.

    python -m benchmarks.controller MODEL --data DIR --texts float32:20 --times 1:18,4:21,8:26
    python -m benchmarks.controller MODEL --data DIR --wall     wall times, methods in turn, plain decoding twice

Without ``--wall`` the clock models a quiet machine: a forward pass of k rows takes t(k), given in milliseconds or
measured first (the fastest of ``--repeats``), and everything else takes its own CPU time. So texts, rows and drafts
are real, and other work on the machine does not affect the figures. Prompts that the priors were fitted to are left
out. Beside fixed numbers of rows stands the bare rule: the rows that maximise F(k) - lambda t(k), without regret
budget, cooldowns, correction of F and bonus for exploration. The time of a text is that of all steps after the
prefill. Texts that ``--records`` has at this commit are not measured again, so the same command continues after an
interrupt.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import lookahead
from lookahead.bench.record import environment
from lookahead.bench.report import markdown_table
from lookahead.core import Drafter, Engine, Request
from lookahead.drafters import Adaptive, as_drafter
from lookahead.drafters.adaptive import controller, sequence
from lookahead.drafters.adaptive.measure import measure_times, times_for
from lookahead.drafters.adaptive.step_times import MENU, StepTimes, from_points, menu_index
from lookahead.records import RecordWriter, finite, read_records
from lookahead.sampling import SeededNoise, make_choose

from .datasets import load_workload
from .page import write_page

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import fit_priors

WORKLOADS = ("humaneval", "gsm8k", "mbpp", "classeval", "mt-bench", "spec-bench")
FIXED = (4, 8, 16, 32)
EXPLORATION = controller.EXPLORATION
#: Fields that identify a text in the records.
KEYS = ("commit", "dtype", "clock", "workload", "prompt", "temperature")
#: A text is slow if it takes more than this share of plain decoding's time.
LIMIT = 1.02


class BareRule(controller.Controller):
    """The rows that maximise F(k) - lambda t(k), nothing else."""

    loss_budget = inf
    bias = 1.0

    def cooldown(self, rows: int) -> int:
        return 0


class QuietClock:
    """Seconds on a quiet machine: t(k) for each forward pass, CPU time for everything else."""

    def __init__(self, table: list[float]) -> None:
        self.table, self.passes, self.real = table, 0.0, 0.0

    def __call__(self) -> float:
        return self.passes + thread_time() - self.real

    def target(self, target: Any) -> Any:
        """Make the passes of a target advance this clock by t(k). Returns the target."""
        forward = target.forward

        def timed(trees: Any) -> Any:
            start = thread_time()
            scores = forward(trees)
            self.real += thread_time() - start
            self.passes += self.table[menu_index(max(len(tree) for _, tree in trees))]
            return scores

        target.forward = timed
        return target


class Bench:
    """A model and a clock.

    Args:
        times: t(k) as text, "1:18,4:21"; measured if empty.
        wall: use wall time in place of the quiet clock.
    """

    def __init__(self, llm: Any, times: str, repeats: int, wall: bool, new_tokens: int) -> None:
        self.llm, self.new_tokens, self.clock = llm, new_tokens, None
        times_for(llm.model, llm.path, llm.target)  # compiles
        if times:
            points = (part.split(":") for part in times.split(","))
            self.table = from_points({int(rows): float(ms) / 1e3 for rows, ms in points})
        else:
            measured = measure_times(
                llm.target(), llm.vocabulary, MENU[:12], (256,), (1,), repeats, None, 1e9
            )
            (self.table,) = measured.bins.values()
        if not wall:
            self.clock = QuietClock(self.table)
            sequence.perf_counter = self.clock  # type: ignore[attr-defined]
        print(
            "t(k) in ms:", {k: round(1e3 * t, 2) for k, t in zip(MENU, self.table, strict=True)}, flush=True
        )

    def decode(self, prompt: list[int], method: str, temperature: float, seed: int) -> tuple[float, Any]:
        """(seconds after the prefill, sequence) of one prompt."""
        llm, name = self.llm, method.split()[0]
        bare = name == "rule"
        sequence.Controller = BareRule if bare else controller.Controller  # type: ignore[misc]
        controller.EXPLORATION = 0.0 if bare else EXPLORATION
        if name == "fixed":
            made: Drafter = Adaptive(int(method.split()[1]), budget=False)
        else:
            made = as_drafter("adaptive" if bare else name)
        times = StepTimes({(0, 1): list(self.table)})
        noise, process = None, None
        if temperature:
            noise = SeededNoise(seed, len(prompt), llm.vocabulary, temperature)

            def process(ids: Any, scores: Any) -> Any:
                return scores / temperature

        target = llm.target() if self.clock is None else self.clock.target(llm.target())
        engine, now = Engine(lambda: target), self.clock or perf_counter
        chooser = make_choose(prompt, process, noise)
        text = engine.add(
            Request(prompt, made, self.new_tokens, chooser, llm.eos, noise=noise, step_times=times)
        )
        engine.step()
        start = now()
        while engine.busy:
            engine.step()
        return now() - start, text


def measure(args: argparse.Namespace, dtype: str, prompts: int) -> list[dict[str, Any]]:
    """One record for each text of one dtype."""
    llm = lookahead.load(args.model, dtype=dtype)
    bench = Bench(llm, args.times, args.repeats, args.wall, args.new_tokens)
    methods = ["plain", "adaptive", "rule", *(f"fixed {k}" for k in args.fixed), *["again"] * args.wall]
    clock = "wall" if args.wall else "quiet"
    about = {**environment(), "model": llm.name, "path": llm.path, "dtype": llm.dtype, "clock": clock}
    about["t"] = {str(k): round(1e3 * t, 3) for k, t in zip(MENU, bench.table, strict=True) if k <= 64}
    fitted, lines = set(fit_priors.prompts(args.data, 60)), []
    done = {
        tuple(line[key] for key in KEYS): line for line in read_records(args.records, "seconds", "controller")
    }
    for workload in args.workloads:
        candidates = load_workload(workload, 3 * prompts, data=args.data)
        held_out = [prompt for prompt in candidates if prompt.turns[0] not in fitted]
        for number, prompt in enumerate(held_out[:prompts]):
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
                        name = "plain" if method in ("plain", "again") else method
                        spent, made[method] = bench.decode(ids, name, temperature, number)
                        seconds[method].append(spent)
                line = {
                    **text,
                    "tokens": len(made["plain"].tokens),
                    "equal": all(x.tokens == made["plain"].tokens for x in made.values()),
                    "seconds": {method: min(some) for method, some in seconds.items()},
                    "steps": {method: made[method].stats.steps for method in methods},
                    "rows": {method: made[method].stats.rows for method in methods},
                }
                lines.append(line)
                ratios = {m: round(s / line["seconds"]["plain"], 3) for m, s in line["seconds"].items()}
                print(
                    workload, number, f"T={temperature:g}", line["tokens"], line["equal"], ratios, flush=True
                )
                with RecordWriter(args.records, append=True) as writer:
                    writer.write(line)
    return lines


def figures(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Totals by dtype, temperature and workload. Speed-ups are over plain decoding; ``over`` counts texts that took
    more than 1.02 times its time; ``again`` is the time of plain decoding's second run over that of its first.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        for workload in ("all", line["workload"]):
            groups[line["dtype"], line["temperature"], workload].append(line)
    totals = []
    for (dtype, temperature, workload), some in sorted(groups.items()):
        total = {m: sum(line["seconds"][m] for line in some) for m in some[0]["seconds"]}
        best = min((m for m in total if m.startswith("fixed")), key=lambda m: total[m])
        ratios, rule, again = (
            sorted(line["seconds"][m] / line["seconds"]["plain"] for line in some if m in line["seconds"])
            for m in ("adaptive", "rule", "again")
        )
        totals.append(
            {
                "dtype": dtype,
                "temperature": temperature,
                "workload": workload,
                "texts": len(some),
                "equal": sum(line["equal"] for line in some),
                "adaptive": total["plain"] / total["adaptive"],
                "rule": total["plain"] / total["rule"],
                "best": best,
                "best_fixed": total["plain"] / total[best],
                "of_best": total[best] / total["adaptive"],
                "median": median(ratios),
                "slowest": ratios[-1],
                "over": sum(r > LIMIT for r in ratios),
                "rule_slowest": rule[-1],
                "rule_over": sum(r > LIMIT for r in rule),
                "again": [again[0], again[-1]] if again else None,
                "again_over": sum(r > LIMIT for r in again),
            }
        )
    return totals


def body(lines: list[dict[str, Any]], groups: list[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """The page's table and the slow texts."""
    heads = [
        "dtype",
        "T",
        "workload",
        "texts",
        "equal",
        "adaptive",
        "bare rule",
        "best fixed",
        "rows",
        "adaptive / best",
    ]
    heads += ["median text", "slowest text", "over 1.02", "the rule's slowest", "over 1.02"]
    heads += ["plain again", "again over 1.02"]
    rows = [
        [
            x["dtype"],
            f"{x['temperature']:g}",
            x["workload"],
            str(x["texts"]),
            str(x["equal"]),
            f"{x['adaptive']:.2f}",
            f"{x['rule']:.2f}",
            f"{x['best_fixed']:.2f}",
            x["best"].split()[1],
            f"{x['of_best']:.2f}",
            f"{x['median']:.3f}",
            f"{x['slowest']:.3f}",
            str(x["over"]),
            f"{x['rule_slowest']:.3f}",
            str(x["rule_over"]),
            "{:.3f} to {:.3f}".format(*x["again"]) if x["again"] else "",
            str(x["again_over"]),
        ]
        for x in groups
    ]
    slow = [
        f"- {line['seconds']['adaptive'] / line['seconds']['plain']:.3f}"
        f" ({line['seconds'].get('again', 0) / line['seconds']['plain']:.3f}): {line['workload']}"
        f" {line['prompt']}, {line['dtype']}, T = {line['temperature']:g}, {line['tokens']} tokens"
        for line in lines
        if line["seconds"]["adaptive"] > LIMIT * line["seconds"]["plain"]
    ]
    clock = "the wall's" if args.wall else "a quiet machine's: t(k) for a pass, CPU time for everything else"
    return [
        f"Chat template, at most {args.new_tokens} new tokens, cold each time; prompts that the priors were fitted "
        f"to are left out. Time is {clock}, after the prefill. All methods decode each text in turn, plain decoding "
        "twice with the wall's time: its second run shows the noise. The bare rule maximises F(k) - lambda t(k), "
        "without regret budget, cooldowns, correction of F and bonus. Speed-ups are over plain decoding; the best of "
        f"{', '.join(map(str, args.fixed))} rows is chosen after the fact for each line, and a text's ratio is its "
        "time over plain decoding's.",
        "",
        markdown_table(heads, rows, texts=3),
        "",
        f"{sum(line['equal'] for line in lines)} of {len(lines)} texts are equal to plain decoding by all methods. "
        f"Over {LIMIT} are {len(slow)}, with plain decoding's own second run in brackets:",
        "",
        *slow,
    ]


def texts_of(text: str) -> dict[str, int]:
    """dtype -> prompts of each workload."""
    return {dtype: int(count) for dtype, count in (part.split(":") for part in text.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("model", nargs="?")
    add("--data", type=Path, required=True)
    add("--texts", type=texts_of, default="bfloat16:20,float32:20", help="prompts of each workload by dtype")
    add("--fixed", type=lambda text: [int(k) for k in text.split(",")], default=list(FIXED), help="rows")
    add("--workloads", type=lambda text: text.split(","), default=list(WORKLOADS))
    add("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 0.7, 1.0])
    add("--new-tokens", type=int, default=128)
    add("--longest", type=int, default=1024, help="most tokens of a prompt; its end is kept")
    add("--times", default="", help="t(k) in milliseconds, as in 1:18,4:21,8:26; measured if left out")
    add("--repeats", type=int, default=10, help="passes for each t(k); the fastest counts")
    add("--wall", action="store_true", help="wall time in place of the quiet clock")
    add("--rounds", type=int, default=1, help="with --wall; the fastest of a text counts")
    add(
        "--records", type=Path, default=Path("build/results/controller.jsonl"), help="JSON lines; appended to"
    )
    add("--out", type=Path, default=Path("docs/results/controller"), help="page and JSON")
    args = parser.parse_args()
    args.records.parent.mkdir(parents=True, exist_ok=True)
    lines = [line for dtype, count in args.texts.items() for line in measure(args, dtype, count)]
    groups = figures(lines)
    where = {**lines[-1], "dtype": " and ".join(dict.fromkeys(line["dtype"] for line in lines))}
    print(
        write_page(
            args.out,
            f"The controller, text by text: {where['dtype']}",
            where,
            finite(groups),
            body(lines, groups, args),
        )
    )


if __name__ == "__main__":
    main()
