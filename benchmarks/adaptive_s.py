"""S of the adaptive drafter alongside the paper's method and prompt lookup, and the gain from each draft source.

    python -m benchmarks.adaptive_s --data FOLDER --prompts 10     code and maths, greedy and at temperature 1
    python -m benchmarks.adaptive_s --data FOLDER --method "adaptive cold" --dtype auto    the credit of each source

S is counted in forward passes, so it does not depend on the machine: tokens after the first over forward passes
after the prefill, bonus token included, over all prompts of a workload. Adaptive has a fixed number of rows here (no
budget). Every output is compared with plain decoding; a difference ends the run. ``cold``: nothing is kept between
prompts. ``warm``: prompts in order share a state; the paper's method keeps its pool. ``warm+corpus``: adaptive also
proposes from earlier sequences. ``hf-prompt-lookup`` is transformers' own, for models that it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lookahead
from lookahead.bench import ModelUnderTest, RunOptions
from lookahead.bench.methods import Outcome, make_request, timed_decode
from lookahead.bench.record import describe, environment
from lookahead.core import Drafter, Stats
from lookahead.drafters import Adaptive, Lookahead, NGramPool, Plain, PromptLookup
from lookahead.drafters.adaptive.settings import DEFAULT_SOURCES
from lookahead.drafters.adaptive.state import AdaptiveState
from lookahead.hf.model import HFModel

from .datasets import load_workload
from .page import write_report
from .peers import make_methods
from .report import command_line, markdown_table

WORKLOADS = {"code": "humaneval", "maths": "gsm8k"}
PAPER = (15, 5, 15)
#: transformers' own prompt lookup, among the methods of benchmarks.
TRANSFORMERS = "hf-prompt-lookup"
#: The methods whose credit by source is kept.
CREDITED = ("adaptive cold", "adaptive warm", "adaptive warm+corpus")


class Runner:
    """One model, one workload, one temperature. Plain decoding runs once; every other completion is compared with
    it."""

    def __init__(self, model: ModelUnderTest, prompts: list[list[int]], options: RunOptions) -> None:
        self.model = model
        self.prompts = prompts
        self.options = options
        self.plain = [self._decode(number, Plain()).tokens for number in range(len(prompts))]

    def _decode(self, number: int, drafter: Drafter) -> Outcome:
        options = replace(self.options, seed=number)
        return timed_decode(self.model, make_request(self.model, self.prompts[number], drafter, options))

    def measure(self, method: Callable[[], Callable[[], Drafter]]) -> dict[str, Any]:
        """S, rows per step and accepted tokens per step by source."""
        make = method()
        total = Stats()
        figures: Counter[str] = Counter()
        for number, plain in enumerate(self.plain):
            outcome = self._decode(number, make())
            if outcome.tokens != plain:
                raise SystemExit(f"prompt {number}: the output differs from plain decoding")
            total.steps += outcome.stats.steps
            total.rows += outcome.stats.rows
            total.new_tokens += outcome.stats.new_tokens - 1
            figures.update(outcome.stats.drafter)
        steps = max(1, total.steps)
        prefix = "accepted_by_"
        return {
            "s": total.new_tokens / steps,
            "steps": total.steps,
            "tokens": total.new_tokens,
            "rows": total.rows / steps,
            "expected_s": 1 + figures["expected_acceptance"] / steps,
            "credit": {
                key.removeprefix(prefix): round(value / steps, 4)
                for key, value in figures.items()
                if key.startswith(prefix)
            },
        }

    def prompt_lookup_of_transformers(self) -> dict[str, Any]:
        """transformers' own prompt lookup, greedy.

        Its first pass evaluates the prompt and the first candidates together. Tokens of that pass beyond the first
        count as free, in its favour.
        """
        (method,) = make_methods(TRANSFORMERS, self.model)
        steps = tokens = rows = 0
        for prompt in self.prompts:
            outcome = method.decode(self.model, prompt, self.options)
            steps += outcome.stats.steps
            rows += outcome.stats.rows
            tokens += len(outcome.tokens) - 1
        return {"s": tokens / max(1, steps), "steps": steps, "tokens": tokens, "rows": rows / max(1, steps)}


def methods(rows: int) -> dict[str, Callable[[], Callable[[], Drafter]]]:
    """Label -> function that returns a maker of drafters. The drafters of one maker share their state.

    Args:
        rows: maximum rows of adaptive.
    """

    def paper(warm: bool) -> Callable[[], Drafter]:
        pool = NGramPool(PAPER[2]) if warm else None
        return lambda: Lookahead(*PAPER, pool=pool)

    def adaptive(warm: bool, most: int = rows, **settings: Any) -> Callable[[], Drafter]:
        drafter = Adaptive(rows=most, **settings)
        drafter = replace(drafter, state=AdaptiveState(drafter) if warm else None)
        return lambda: drafter

    corpus = (*DEFAULT_SOURCES, "corpus")
    made: dict[str, Callable[[], Callable[[], Drafter]]] = {
        "lookahead 15,5,15 cold": lambda: paper(False),
        "lookahead 15,5,15 warm": lambda: paper(True),
        "prompt-lookup": lambda: lambda: PromptLookup(),
        "adaptive cold": lambda: adaptive(False),
        "adaptive warm": lambda: adaptive(True),
        "adaptive warm+corpus": lambda: adaptive(True, sources=corpus),
    }
    for most in (8, 16, 32):
        made[f"adaptive cold, {most} rows"] = lambda most=most: adaptive(False, most)
    for name in DEFAULT_SOURCES:
        others = tuple(other for other in DEFAULT_SOURCES if other != name)
        made[f"adaptive cold without {name}"] = lambda others=others: adaptive(False, sources=others)
        made[f"adaptive cold {name} alone"] = lambda name=name: adaptive(False, sources=(name,))
    return made


def body(records: Sequence[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """The page's tables."""
    lines = [
        f"The first {args.prompts} prompts of each, at most {args.new_tokens} new tokens. **Every text of every row "
        "is equal to plain decoding, token for token.**",
        "",
        "S is tokens per forward pass after the prefill, bonus token included; it does not depend on the machine. "
        f"The rule for rows is off: adaptive has up to {args.rows} rows in every step. *cold* keeps nothing "
        "between prompts, *warm* shares what was learned (the paper's method: its pool), *+corpus* also drafts from "
        "earlier texts.",
        "",
    ]
    groups: dict[tuple[str, float], dict[str, dict[str, Any]]] = defaultdict(dict)
    for record in records:
        groups[record["workload"], record["temperature"]][record["method"]] = record
    for (workload, temperature), by_method in groups.items():
        labels = {state: f"lookahead {','.join(map(str, PAPER))} {state}" for state in ("cold", "warm")}
        known = {state: by_method[label]["s"] for state, label in labels.items() if label in by_method}
        heads = ["method", "S", "rows per step", *(f"against the paper's, {state}" for state in known)]
        rows = [
            [name, f"{x['s']:.2f}", f"{x['rows']:.1f}", *(f"{x['s'] / s:.2f}" for s in known.values())]
            for name, x in by_method.items()
        ]
        what = "greedy" if not temperature else f"temperature {temperature:g}"
        lines += [f"## {workload}, {what}", "", markdown_table(heads, rows), ""]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of data sets")
    add("--model", help="default: SmolLM2")
    add("--dtype", default="bfloat16")
    add("--prompts", type=int, default=60)
    add("--new-tokens", type=int, default=128)
    add("--rows", type=int, default=64)
    add("--temperatures", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 1.0])
    add("--workloads", type=lambda text: text.split(","), default=list(WORKLOADS))
    add("--method", action="append", metavar="LABEL", help="can be repeated; default: all")
    add("--out", type=Path, default=Path("build/results/adaptive"), help="figures, without suffix")
    add(
        "--credit",
        type=Path,
        default=Path("docs/results/adaptive-credit.json"),
        help="accepted tokens by source",
    )
    args = parser.parse_args()
    made = methods(args.rows)
    unknown = [label for label in args.method or () if label not in made]
    if unknown:
        parser.error(f"--method must be one of {'; '.join(made)}, got {'; '.join(unknown)}")

    # Measure every method on each workload and temperature.
    llm = lookahead.load(args.model, dtype=args.dtype)
    model = ModelUnderTest.of(llm)
    records: list[dict[str, Any]] = []
    for temperature in args.temperatures:
        for workload in args.workloads:
            source = load_workload(WORKLOADS.get(workload, workload), args.prompts, data=args.data)
            prompts = [prompt.tokens(llm.tokenizer) for prompt in source]
            runner = Runner(model, prompts, RunOptions(args.new_tokens, temperature))
            print(f"\n{workload}, {len(prompts)} prompts, temperature {temperature:g}")
            measures: dict[str, Callable[[], dict[str, Any]]] = {
                label: partial(runner.measure, make) for label, make in made.items()
            }
            if not temperature and isinstance(llm.model, HFModel):
                measures[TRANSFORMERS] = runner.prompt_lookup_of_transformers
            for label in args.method or measures:
                measure = measures[label]
                record = {"workload": workload, "temperature": temperature, "method": label, **measure()}
                records.append(record)
                print(f"  {label:32} S {record['s']:.3f}  rows {record['rows']:5.1f}", flush=True)

    # Save the credit of each source and the figures.
    where = {**environment(), "model": llm.name, "dtype": llm.dtype, "path": llm.path}
    credited = [
        {name: record[name] for name in ("workload", "temperature", "method", "credit")}
        for record in records
        if record["method"] in CREDITED
    ]
    command = command_line(sys.argv[1:], "python -m benchmarks.adaptive_s")
    facts = {"command": command, "where": describe(where), "figures": credited}
    args.credit.write_text(json.dumps(facts, indent=1) + "\n")
    title = "S of the adaptive drafter, and what each source is worth"
    write_report(args.out, title, where, records, body(records, args))


if __name__ == "__main__":
    main()
