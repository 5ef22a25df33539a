"""Host cost of a step: what drafting and learning cost beside the forward pass, in microseconds.

    python benchmarks/host_cost.py                       bundled model, functions of the standard library
    python benchmarks/host_cost.py --model PATH --steps 300 --rows 64 --json

Measured inside real decoding, so that caches are as cold as a forward pass leaves them. Per step: ``draft`` and
``observe``, and apart from them what these ask of others: ``scores`` (argmaxes or the best tokens of all rows, which
is work on logits and grows with the vocabulary) and ``noise`` of positions that are still to come (plain sampling
draws the same numbers, later). Steps of fewer rows than asked for are left out. ``cpu`` is the thread's own time,
``wall`` the clock's; on a quiet machine they agree. ``prompt`` is what a request costs once: taking in a prompt of
2000 tokens and drafting the first tree.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from time import perf_counter, thread_time
from typing import Any

import lookahead
from lookahead.bench.record import environment
from lookahead.bench.workloads import load_workload
from lookahead.core import Decoder, Drafter, Request, TokenTree
from lookahead.core.drafter import Noise
from lookahead.drafters import make_drafter
from lookahead.drafters.adaptive import AdaptiveDrafter
from lookahead.sampling import SeededNoise, make_choose

CASES = {
    "lookahead": ("lookahead", (15, 5, 15), False),
    "adaptive": ("adaptive", None, False),
    "adaptive, T=1": ("adaptive", None, True),
}


class Watched:
    """Scores, or noise, that note what they cost."""

    def __init__(self, scores: Any) -> None:
        self.scores = scores
        self.wall = self.cpu = 0.0
        if hasattr(scores, "temperature"):
            self.temperature = scores.temperature

    def __call__(self, index: int) -> Any:
        return self.__getattr__("__call__")(index)

    def take(self) -> tuple[float, float]:
        """What was noted since the last time."""
        taken = self.wall, self.cpu
        self.wall = self.cpu = 0.0
        return taken

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.scores, name)

        def call(*arguments: Any) -> Any:
            wall, cpu = perf_counter(), thread_time()
            result = method(*arguments)
            self.wall += perf_counter() - wall
            self.cpu += thread_time() - cpu
            return result

        return call


class Clocked(Drafter):
    """A drafter that notes (rows, {part: (wall, cpu)}) of every step."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.steps: list[tuple[int, dict[str, tuple[float, float]]]] = []
        self._noise = Watched(None)

    def use_noise(self, noise: Noise | None) -> None:
        self._noise = Watched(noise)
        self.drafter.use_noise(self._noise if noise is not None else None)

    def reset(self, prompt: Sequence[int], first: int, eos: frozenset[int]) -> None:
        self.drafter.reset(prompt, first, eos)

    def draft(self, max_depth: int, max_rows: int = 1 << 20) -> TokenTree:
        wall, cpu = perf_counter(), thread_time()
        tree = self.drafter.draft(max_depth, max_rows)
        wall, cpu = perf_counter() - wall, thread_time() - cpu
        self._drawn = self._noise.take()
        self._drafted = wall - self._drawn[0], cpu - self._drawn[1]
        return tree

    def observe(self, tree: TokenTree, scores: Any, path: Sequence[int], tokens: Sequence[int]) -> None:
        watched = Watched(scores)
        wall, cpu = perf_counter(), thread_time()
        self.drafter.observe(tree, watched, path, tokens)
        wall, cpu = perf_counter() - wall - watched.wall, thread_time() - cpu - watched.cpu
        noise = self._noise.take()
        parts = {
            "draft": self._drafted,
            "observe": (wall - noise[0], cpu - noise[1]),
            "scores": watched.take(),
            "noise": (self._drawn[0] + noise[0], self._drawn[1] + noise[1]),
        }
        self.steps.append((len(tree), parts))


def measure(
    llm: Any, prompts: list[list[int]], case: str, rows: int, steps: int
) -> list[dict[str, tuple[float, float]]]:
    """Parts of the first ``steps`` steps of at least ``rows`` rows."""
    method, config, sampled = CASES[case]
    if method == "adaptive":
        config = {"budget": False, "max_rows": rows}
    found: list[dict[str, tuple[float, float]]] = []
    target = llm.target()
    for number, prompt in enumerate(prompts):
        if method == "adaptive":
            drafter = Clocked(AdaptiveDrafter(config, llm.vocabulary))
        else:
            drafter = Clocked(make_drafter(method, config, llm.vocabulary))
        noise = SeededNoise(number, len(prompt), llm.vocabulary) if sampled else None
        drafter.use_noise(noise)
        decoder = Decoder(target)
        decoder.add(Request(prompt, drafter, 128, make_choose(prompt, None, noise)))
        while decoder.busy:
            decoder.step()
        found += [parts for count, parts in drafter.steps if count >= rows]
        if len(found) >= steps:
            break
    return found[:steps]


def prompt_cost(vocabulary: int, length: int = 2000, repeats: int = 9) -> float:
    """Seconds to take in a prompt and draft the first tree: the median over random texts with repetitions."""
    spent = []
    for seed in range(repeats):
        rng = random.Random(seed)
        words = [rng.randrange(vocabulary) for _ in range(400)]
        prompt = [words[int(rng.random() ** 2 * 400)] for _ in range(length)]
        drafter = AdaptiveDrafter({"budget": False}, vocabulary)
        start = perf_counter()
        drafter.reset(prompt, words[0], frozenset())
        drafter.draft(100)
        spent.append(perf_counter() - start)
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a directory or a hub id; the bundled model without it")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--steps", type=int, default=200, help="steps per case")
    parser.add_argument("--rows", type=int, default=64, help="of adaptive; lookahead has 120")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    llm = lookahead.load(args.model, dtype=args.dtype)
    workload = load_workload("stdlib", limit=200)
    prompts = [prompt.tokens(llm.tokenizer)[:256] for prompt in workload]
    for case in CASES:
        rows = 105 if case == "lookahead" else args.rows  # a full window and most of its candidates
        measure(llm, prompts[:1], case, rows, 1)  # compiles, or loads what was compiled
        found = measure(llm, prompts, case, rows, args.steps)
        if not found:
            print(f"{case}: no step had {rows} rows")
            continue
        record: dict[str, Any] = {
            "case": case,
            "rows": rows,
            "steps": len(found),
            "model": llm.name,
            "dtype": str(llm.model.dtype).removeprefix("torch."),
            "vocabulary": llm.vocabulary,
        }
        for name in ("draft", "observe", "scores", "noise", "host"):
            for place, clock in enumerate(("wall", "cpu")):
                values = [
                    sum(p[n][place] for n in (("draft", "observe") if name == "host" else (name,)))
                    for p in found
                ]
                record[f"{name}_{clock}_us"] = round(statistics.median(values) * 1e6, 1)
                record[f"{name}_{clock}_p10_us"] = round(sorted(values)[len(values) // 10] * 1e6, 1)
        if case != "lookahead":
            record["prompt_2000_us"] = round(prompt_cost(llm.vocabulary) * 1e6)
        record |= environment()
        if args.json:
            print(json.dumps(record))
        else:
            print(
                f"{case:14} {rows:4} rows  draft {record['draft_wall_us']:6.0f}"
                f"  observe {record['observe_wall_us']:6.0f}  host {record['host_wall_us']:6.0f}"
                f" (cpu {record['host_cpu_us']:.0f}, p10 {record['host_wall_p10_us']:.0f})"
                f"  scores {record['scores_wall_us']:6.0f}  noise {record['noise_wall_us']:4.0f}"
                f"   us per step, medians of {record['steps']};"
                f" prompt of 2000: {record.get('prompt_2000_us', 0):.0f} us"
            )


if __name__ == "__main__":
    main()
