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
import json
from collections.abc import Callable
from typing import Any

import torch

import lookahead
from lookahead.bench.record import environment
from lookahead.bench.workloads import load_workload
from lookahead.core import Decoder, Drafter, NGramPool, Request
from lookahead.drafters import make_drafter
from lookahead.drafters.adaptive import AdaptiveState
from lookahead.drafters.adaptive.config import DEFAULT_SOURCES
from lookahead.sampling import SeededNoise, make_choose

WORKLOADS = {"code": "humaneval", "maths": "gsm8k"}
PAPER = (15, 5, 15)


class Runner:
    """One model, one workload, one temperature; plain decoding is run once and compared with."""

    def __init__(self, llm: Any, prompts: list[list[int]], temperature: float, new_tokens: int) -> None:
        self.llm = llm
        self.prompts = prompts
        self.temperature = temperature
        self.new_tokens = new_tokens
        self.target = llm.target()
        self.plain = [
            self._decode(number, make_drafter("autoregressive")).tokens for number in range(len(prompts))
        ]

    def _decode(self, number: int, drafter: Drafter) -> Any:
        prompt, size = self.prompts[number], self.llm.vocabulary
        noise = process = None
        if self.temperature:
            noise = SeededNoise(number, len(prompt), size, self.temperature)
            if self.temperature != 1.0:

                def process(ids: Any, scores: Any) -> Any:
                    return scores / self.temperature

        drafter.use_noise(noise)
        request = Request(prompt, drafter, self.new_tokens, make_choose(prompt, process, noise), self.llm.eos)
        decoder = Decoder(self.target)
        generation = decoder.add(request)
        while decoder.busy:
            decoder.step()
        return generation

    def measure(self, make: Callable[[], Drafter]) -> dict[str, Any]:
        """S, rows per step and accepted tokens per step by source."""
        steps = tokens = rows = 0
        credit: dict[str, float] = {}
        expected = 0.0
        for number, plain in enumerate(self.plain):
            generation = self._decode(number, make())
            if generation.tokens != plain:
                raise SystemExit(f"prompt {number}: the output differs from plain decoding")
            stats = generation.stats
            steps += stats.steps
            tokens += stats.new_tokens - 1
            rows += stats.rows
            expected += stats.drafter.get("expected_acceptance", 0.0)
            for key, value in stats.drafter.items():
                if key.startswith("accepted_by_"):
                    credit[key.removeprefix("accepted_by_")] = (
                        credit.get(key.removeprefix("accepted_by_"), 0) + value
                    )
        steps = max(1, steps)
        return {
            "s": tokens / steps,
            "steps": steps,
            "tokens": tokens,
            "rows": rows / steps,
            "expected_s": 1 + expected / steps,
            "credit": {key: round(value / steps, 4) for key, value in credit.items()},
        }

    def prompt_lookup_of_transformers(self) -> dict[str, Any]:
        """transformers' own prompt lookup, greedy; forward passes counted by a hook, the prefill left out."""
        passes: list[int] = []
        hook = self.llm.model.register_forward_pre_hook(
            lambda module, args, kwargs: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        steps = tokens = rows = 0
        try:
            for prompt in self.prompts:
                passes.clear()
                out = self.llm.model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    do_sample=False,
                    max_new_tokens=self.new_tokens,
                    prompt_lookup_num_tokens=10,
                    max_matching_ngram_size=3,
                )
                # Its first pass evaluates the prompt and the first candidates together. What that pass brings
                # beyond one token is counted as if it had cost nothing, to the peer's advantage.
                steps += len(passes) - 1
                tokens += out.shape[1] - len(prompt) - 1
                rows += sum(passes[1:])
        finally:
            hook.remove()
        return {"s": tokens / max(1, steps), "steps": steps, "tokens": tokens, "rows": rows / max(1, steps)}


def methods(llm: Any, rows: int, quick: bool) -> dict[str, Callable[[], Callable[[], Drafter]]]:
    """Label -> (fresh) -> maker of drafters; a maker's drafters share what is kept."""
    size = llm.vocabulary

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
        rest = tuple(other for other in DEFAULT_SOURCES if other != name)
        found[f"adaptive cold without {name}"] = lambda rest=rest: adaptive(False, sources=rest)
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
    about = {"model": llm.name, "new_tokens": args.new_tokens, **environment()}
    for temperature in args.temperatures:
        for workload in args.workloads:
            source = load_workload(WORKLOADS.get(workload, workload), args.prompts, data=args.data)
            prompts = [prompt.tokens(llm.tokenizer) for prompt in source]
            runner = Runner(llm, prompts, temperature, args.new_tokens)
            results: dict[str, dict[str, Any]] = {}
            print(
                f"\n{workload}, {len(prompts)} prompts, temperature {temperature:g}: every output equal to plain"
            )
            for label, make in methods(llm, args.rows, args.quick).items():
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
        with open(path, "a") as file:
            file.write(json.dumps({**about, **results[about["method"]]}) + "\n")


if __name__ == "__main__":
    main()
