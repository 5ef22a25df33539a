"""S of the adaptive drafter beside the paper's method and prompt lookup, and what each source is worth.

    python benchmarks/adaptive_s.py --data FOLDER                  code and maths, greedy and at temperature 1
    python benchmarks/adaptive_s.py --data FOLDER --prompts 10 --quick

S is counted in forward passes, so it does not depend on the machine: tokens after the first one over forward
passes after the prefill, bonus token included, over all prompts of a workload. Adaptive has a fixed number of
rows here (no budget). Every output is compared with plain decoding, and a difference ends the run.
``cold``: nothing is kept between prompts. ``warm``: prompts in order share a state; the paper's method keeps
its pool. ``warm+corpus``: adaptive also proposes from earlier texts. ``hf-prompt-lookup`` is transformers' own.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lookahead
from lookahead.bench import ModelUnderTest, RunOptions, load_workload, make_methods
from lookahead.bench.method import Outcome
from lookahead.bench.methods import make_request, timed_decode
from lookahead.bench.record import environment
from lookahead.core import Drafter, NGramPool, Stats
from lookahead.core.records import RecordWriter
from lookahead.drafters import make_drafter
from lookahead.drafters.adaptive import AdaptiveState
from lookahead.drafters.adaptive.config import DEFAULT_SOURCES

WORKLOADS = {"code": "humaneval", "maths": "gsm8k"}
PAPER = (15, 5, 15)


class Runner:
    """One model, one workload, one temperature; plain decoding is run once and compared with."""

    def __init__(self, model: ModelUnderTest, prompts: list[list[int]], options: RunOptions) -> None:
        self.model = model
        self.prompts = prompts
        self.options = options
        self.plain = [
            self._decode(number, make_drafter("autoregressive")).tokens for number in range(len(prompts))
        ]

    def _decode(self, number: int, drafter: Drafter) -> Outcome:
        options = replace(self.options, seed=number)
        return timed_decode(
            self.model.target, make_request(self.model, self.prompts[number], drafter, options)
        )

    def measure(self, make: Callable[[], Drafter]) -> dict[str, Any]:
        """S, rows per step and accepted tokens per step by source."""
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
        steps, prefix = max(1, total.steps), "accepted_by_"
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

        Its first pass evaluates the prompt and the first candidates together. What that pass brings beyond one token
        is counted as if it had cost nothing, to the peer's advantage.
        """
        (method,) = make_methods("hf-prompt-lookup", self.model)
        steps = tokens = rows = 0
        for prompt in self.prompts:
            outcome = method.decode(self.model, prompt, self.options)
            steps += outcome.stats.steps
            rows += outcome.stats.rows
            tokens += len(outcome.tokens) - 1
        return {"s": tokens / max(1, steps), "steps": steps, "tokens": tokens, "rows": rows / max(1, steps)}


def methods(size: int, rows: int, quick: bool) -> dict[str, Callable[[], Callable[[], Drafter]]]:
    """Label -> (fresh) -> maker of drafters; a maker's drafters share what is kept. ``size`` is V."""

    def paper(warm: bool) -> Callable[[], Drafter]:
        pool = NGramPool(PAPER[2]) if warm else None
        return lambda: make_drafter("lookahead", PAPER, size, pool)

    def adaptive(warm: bool, most: int = rows, **settings: Any) -> Callable[[], Drafter]:
        config = {"budget": False, "max_rows": most, **settings}
        state = AdaptiveState(config, keep=warm)
        return lambda: make_drafter("adaptive", config, size, state)

    corpus = (*DEFAULT_SOURCES, "corpus")
    found: dict[str, Callable[[], Callable[[], Drafter]]] = {
        "lookahead 15,5,15 cold": lambda: paper(False),
        "lookahead 15,5,15 warm": lambda: paper(True),
        "prompt-lookup": lambda: lambda: make_drafter("prompt-lookup"),
        "adaptive cold": lambda: adaptive(False),
        "adaptive warm": lambda: adaptive(True),
        "adaptive warm+corpus": lambda: adaptive(True, sources=corpus),
    }
    if quick:
        return found
    for most in (8, 16, 32):
        found[f"adaptive cold, {most} rows"] = lambda most=most: adaptive(False, most)
    for name in DEFAULT_SOURCES:
        others = tuple(other for other in DEFAULT_SOURCES if other != name)
        found[f"adaptive cold without {name}"] = lambda others=others: adaptive(False, sources=others)
        found[f"adaptive cold {name} alone"] = lambda name=name: adaptive(False, sources=(name,))
    found["adaptive cold without window"] = lambda: adaptive(False, window_size=0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", required=True, help="a folder with the data sets")
    add("--model", help="in place of the bundled one")
    add("--dtype", default="float32")
    add("--prompts", type=int, default=60)
    add("--new-tokens", type=int, default=128)
    add("--rows", type=int, default=64)
    add("--temperatures", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 1.0])
    add("--workloads", type=lambda text: text.split(","), default=list(WORKLOADS))
    add("--quick", action="store_true", help="without the ablation")
    add("--out", help="JSON lines; appended to")
    args = parser.parse_args()
    llm = lookahead.load(args.model, dtype=args.dtype)
    model = ModelUnderTest.of(llm)
    about = {"model": llm.name, "new_tokens": args.new_tokens, **environment()}
    for temperature in args.temperatures:
        for workload in args.workloads:
            source = load_workload(WORKLOADS.get(workload, workload), args.prompts, data=args.data)
            prompts = [prompt.tokens(llm.tokenizer) for prompt in source]
            runner = Runner(model, prompts, RunOptions(args.new_tokens, temperature))
            results: dict[str, dict[str, Any]] = {}
            print(
                f"\n{workload}, {len(prompts)} prompts, temperature {temperature:g}: every output equal to plain"
            )
            for label, make in methods(llm.vocabulary, args.rows, args.quick).items():
                results[label] = runner.measure(make())
                _show(label, results[label], results)
                _keep(
                    args.out,
                    {**about, "workload": workload, "temperature": temperature, "method": label},
                    results,
                )
            if not temperature:
                results["hf-prompt-lookup"] = runner.prompt_lookup_of_transformers()
                _show("hf-prompt-lookup", results["hf-prompt-lookup"], results)
                _keep(
                    args.out,
                    {**about, "workload": workload, "temperature": 0.0, "method": "hf-prompt-lookup"},
                    results,
                )


def _show(label: str, result: dict[str, Any], results: dict[str, dict[str, Any]]) -> None:
    cold, warm = (results.get(f"lookahead 15,5,15 {state}") for state in ("cold", "warm"))
    against = f"  x{result['s'] / cold['s']:.2f} of paper cold" if cold else ""
    against += f"  x{result['s'] / warm['s']:.2f} of paper warm" if warm else ""
    print(f"  {label:32} S {result['s']:.3f}  rows {result['rows']:5.1f}{against}", flush=True)


def _keep(path: str | None, about: dict[str, Any], results: dict[str, dict[str, Any]]) -> None:
    if path:
        with RecordWriter(path, append=True) as writer:
            writer.write({**about, **results[about["method"]]})


if __name__ == "__main__":
    main()
