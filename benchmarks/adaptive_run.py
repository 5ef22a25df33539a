"""What the adaptive drafter did, step by step: rows chosen, tokens won, and how sure it was of what came.

    python benchmarks/adaptive_run.py --data FOLDER --out docs/results/adaptive-run.json

Decodes code and maths prompts one after the other, cold for each prompt, plainly, with the budget, and with 64 rows
in every step, and writes one JSON object: per prompt the rows and tokens of every step, whether it was a plain one,
and the seconds; and, over the steps of 64 rows, by level of estimated probability, how many drafted children of
accepted nodes there were and how many of these were right. ``docs/draw_adaptive.py`` draws it. Every text is
compared with plain decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import lookahead
from lookahead.bench.record import environment
from lookahead.bench.workloads import load_workload
from lookahead.core import Decoder, Drafter, Request, TokenTree
from lookahead.drafters import make_drafter
from lookahead.drafters.adaptive import AdaptiveDrafter, AdaptiveState, times_for
from lookahead.sampling import SeededNoise, make_choose

WORKLOADS = {"code": "humaneval", "maths": "gsm8k"}
#: Lower ends of the levels of estimated probability.
LEVELS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class Watched(Drafter):
    """A drafter whose estimates are compared with what came true."""

    def __init__(self, drafter: AdaptiveDrafter, levels: list[list[float]]) -> None:
        self.drafter = drafter
        self.levels = levels
        self.plain: list[bool] = []

    def use_noise(self, noise: Any) -> None:
        self.drafter.use_noise(noise)

    def reset(self, prompt: Sequence[int], first: int, eos: frozenset[int]) -> None:
        self.drafter.reset(prompt, first, eos)

    def draft(self, max_depth: int, max_rows: int = 1 << 20) -> TokenTree:
        tree = self.drafter.draft(max_depth, max_rows)
        self.estimates = self.drafter.estimates
        self.plain.append(self.drafter.cooling)
        return tree

    def observe(self, tree: TokenTree, scores: Any, path: Sequence[int], tokens: Sequence[int]) -> None:
        estimates = self.estimates
        for node in range(1, len(estimates)):
            above = tree.parents[node]
            if above in path:
                truth = tokens[list(path).index(above)]
                sure = estimates[node] / estimates[above]
                level = self.levels[sum(sure >= low for low in LEVELS[1:])]
                level[0] += 1
                level[1] += tree.tokens[node] == truth
                level[2] += sure
        self.drafter.observe(tree, scores, path, tokens)

    def stats(self) -> dict[str, float]:
        return self.drafter.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", required=True, help="a folder with the data sets")
    add("--model", help="in place of the bundled one")
    add("--dtype", default="bfloat16")
    add("--prompts", type=int, default=20)
    add("--new-tokens", type=int, default=128)
    add("--temperatures", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 1.0])
    add("--out", type=Path, required=True)
    args = parser.parse_args()
    llm = lookahead.load(args.model, dtype=args.dtype)
    target, size = llm.target(), llm.vocabulary
    times = times_for(llm.model, target.path, lambda: target)
    runs: list[dict[str, Any]] = []
    levels = {str(temperature): [[0.0, 0.0, 0.0] for _ in LEVELS] for temperature in args.temperatures}
    for temperature in args.temperatures:
        for workload, name in WORKLOADS.items():
            for number, item in enumerate(load_workload(name, args.prompts, data=args.data)):
                prompt = item.tokens(llm.tokenizer)
                made = {}
                for method in ("autoregressive", "adaptive", "64 rows"):
                    noise = SeededNoise(number, len(prompt), size, temperature) if temperature else None
                    drafter: Any = make_drafter("autoregressive")
                    if method == "adaptive":
                        state = AdaptiveState(keep=False, times=times)
                        drafter = Watched(AdaptiveDrafter(None, size, state), [[0.0] * 3 for _ in LEVELS])
                    elif method == "64 rows":
                        drafter = Watched(AdaptiveDrafter({"budget": False}, size), levels[str(temperature)])
                    drafter.use_noise(noise)
                    decoder = Decoder(target)
                    start = perf_counter()
                    generation = decoder.add(
                        Request(prompt, drafter, args.new_tokens, make_choose(prompt, None, noise))
                    )
                    steps = []
                    while decoder.busy:
                        steps += [(step.rows, len(step.tokens)) for step in decoder.step()]
                    made[method] = generation, steps[1:], perf_counter() - start, drafter
                plain, (generation, steps, seconds, drafter) = made["autoregressive"], made["adaptive"]
                runs.append(
                    {
                        "workload": workload,
                        "temperature": temperature,
                        "rows": [rows for rows, _ in steps],
                        "tokens": [tokens for _, tokens in steps],
                        "plain_step": [int(one) for one in drafter.plain],
                        "seconds": seconds,
                        "plain_seconds": plain[2],
                        "equal": generation.tokens == plain[0].tokens == made["64 rows"][0].tokens,
                        "drafter": dict(generation.stats.drafter),
                    }
                )
    about = {"model": llm.name, "dtype": str(llm.model.dtype).removeprefix("torch."), **environment()}
    words = ["python", *sys.argv]
    words[words.index("--data") + 1] = "DIR"
    about |= {"command": " ".join(words), "path": getattr(target, "path", ""), "levels": LEVELS}
    args.out.write_text(json.dumps({"about": about, "calibration": levels, "runs": runs}) + "\n")
    equal = sum(run["equal"] for run in runs)
    print(f"{len(runs)} texts, {equal} equal to plain decoding; written to {args.out}")


if __name__ == "__main__":
    main()
