"""Host cost of a step: drafting and learning, in addition to the forward pass, in microseconds.

    python -m benchmarks.host_cost                       SmolLM2, functions of the standard library
    python -m benchmarks.host_cost --model PATH --steps 300 --rows 64

Measured during real decoding, so that caches are as cold as after a forward pass. Per step: ``draft`` and
``observe``, and separately ``scores`` (argmaxes or the best tokens of all rows, which grows with the vocabulary) and
``noise`` of later positions (plain sampling computes the same numbers, later). Steps with fewer rows than requested
are skipped. ``cpu`` is the thread's CPU time, ``wall`` is wall-clock time; on a quiet machine they agree. ``prompt``
is the one-off cost of a request: reading a prompt of 2000 tokens and drafting the first tree.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import lookahead
from lookahead.bench import ModelUnderTest, RunOptions, load_workload
from lookahead.bench.methods import make_request, timed_decode
from lookahead.bench.record import environment
from lookahead.bench.report import markdown_table
from lookahead.core import UNLIMITED_ROWS, Drafter, DraftState, Start, TokenTree
from lookahead.drafters import Adaptive, as_drafter

from .page import write_page

#: case -> (method, temperature)
CASES = {"lookahead": ("lookahead", 0.0), "adaptive": ("adaptive", 0.0), "adaptive, T=1": ("adaptive", 1.0)}


class Watched:
    """Scores, or noise, that record the time spent in their methods."""

    def __init__(self, scores: Any) -> None:
        self.scores = scores
        self.wall = self.cpu = 0.0
        if hasattr(scores, "temperature"):
            self.temperature = scores.temperature

    def __call__(self, index: int) -> Any:
        return self.__getattr__("__call__")(index)

    def take(self) -> tuple[float, float]:
        """(wall, cpu) seconds since the previous call."""
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
    """A drafter that records (rows, {part: (wall, cpu)}) of every step."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.steps: list[tuple[int, dict[str, tuple[float, float]]]] = []

    def start(self, sequence: Start) -> DraftState:
        noise: Any = Watched(sequence.noise)
        watched = replace(sequence, noise=noise if sequence.noise is not None else None)
        return ClockedState(self.steps, self.drafter.start(watched), noise)


class ClockedState(DraftState):
    """The state of one sequence."""

    def __init__(self, steps: list[Any], state: DraftState, noise: Watched) -> None:
        self.steps, self.drafter, self._noise = steps, state, noise

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
        wall, cpu = perf_counter(), thread_time()
        tree = self.drafter.draft(max_depth, max_rows, batch)
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
    model: ModelUnderTest, prompts: list[list[int]], case: str, rows: int, steps: int
) -> list[dict[str, tuple[float, float]]]:
    """Parts of the first ``steps`` steps of at least ``rows`` rows."""
    method, temperature = CASES[case]
    drafted = Adaptive(rows=rows) if method == "adaptive" else as_drafter(method)
    measured: list[dict[str, tuple[float, float]]] = []
    for number, prompt in enumerate(prompts):
        drafter = Clocked(drafted)
        options = RunOptions(128, temperature, seed=number)
        timed_decode(model.target, make_request(model, prompt, drafter, options))
        measured += [parts for count, parts in drafter.steps if count >= rows]
        if len(measured) >= steps:
            break
    return measured[:steps]


def prompt_cost(vocabulary: int, length: int = 2000, repeats: int = 9) -> float:
    """Seconds to read a prompt and draft the first tree: the median over random texts with repetitions."""
    spent = []
    for seed in range(repeats):
        rng = random.Random(seed)
        words = [rng.randrange(vocabulary) for _ in range(400)]
        prompt = [words[int(rng.random() ** 2 * 400)] for _ in range(length)]
        start = perf_counter()
        Adaptive(rows=64).start(Start(prompt, words[0], vocabulary=vocabulary)).draft(100)
        spent.append(perf_counter() - start)
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a directory, a .gguf file or a hub id; SmolLM2 without it")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--steps", type=int, default=200, help="steps per case")
    parser.add_argument("--rows", type=int, default=64, help="of adaptive; lookahead has 120")
    parser.add_argument("--out", type=Path, default=Path("docs/results/host-cost"), help="page and JSON")
    args = parser.parse_args()
    llm = lookahead.load(args.model, dtype=args.dtype)
    model = replace(ModelUnderTest.of(llm), eos=frozenset())  # completions that end early have few steps
    workload = load_workload("stdlib", limit=200)
    prompts = [prompt.tokens(llm.tokenizer)[:256] for prompt in workload]
    records, load = [], os.getloadavg()[0]
    for case in CASES:
        rows = 105 if case == "lookahead" else args.rows  # a full window and most of its candidates
        measure(model, prompts[:1], case, rows, 1)  # compiles, or loads compiled code
        parts = measure(model, prompts, case, rows, args.steps)
        if not parts:
            print(f"{case}: no step had {rows} rows")
            continue
        record: dict[str, Any] = {"case": case, "rows": rows, "steps": len(parts)}
        for name in ("draft", "observe", "scores", "noise", "host"):
            for place, clock in enumerate(("wall", "cpu")):
                values = [
                    sum(p[n][place] for n in (("draft", "observe") if name == "host" else (name,)))
                    for p in parts
                ]
                record[f"{name}_{clock}_us"] = round(statistics.median(values) * 1e6, 1)
                record[f"{name}_{clock}_p10_us"] = round(sorted(values)[len(values) // 10] * 1e6, 1)
        if case != "lookahead":
            record["prompt_2000_us"] = round(prompt_cost(llm.vocabulary) * 1e6)
        records.append(record)
        print(record, flush=True)
    heads = [
        "method",
        "rows",
        "draft",
        "observe",
        "both",
        "CPU time",
        "p10",
        "best tokens of all rows",
        "noise ahead",
    ]
    keys = (
        "draft_wall",
        "observe_wall",
        "host_wall",
        "host_cpu",
        "host_wall_p10",
        "scores_wall",
        "noise_wall",
    )
    rows_of = [
        [
            one["case"],
            str(one["rows"]),
            *(f"{one[key + '_us']:.0f}" for key in keys),
            str(one.get("prompt_2000_us", "")),
        ]
        for one in records
    ]
    where = {**environment(), "model": llm.name, "dtype": llm.dtype, "path": llm.path, "load": load}
    body = [
        f"Microseconds, medians of {args.steps} steps of functions of the standard library; V is {llm.vocabulary}.",
        "",
        markdown_table([*heads, "prompt of 2000"], rows_of),
        "",
        "`draft` and `observe` are all that the drafter does beside the forward pass: the tree, learning from it, "
        "reading the text. `best tokens` is the search for the best tokens of every row, among rows x V logits. "
        "`noise ahead` is the noise of later positions, which plain sampling computes too when it gets there. "
        "`prompt` is paid once: reading 2000 tokens and drafting the first tree. Measured between the forward passes "
        "of real decoding, whose weights evict the tables from the fast caches.",
    ]
    write_page(args.out, "Host cost of a step", where, records, body)


if __name__ == "__main__":
    main()
