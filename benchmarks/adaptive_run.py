"""The adaptive drafter step by step: rows chosen, tokens emitted, and how well its estimates are calibrated.

    python -m benchmarks.adaptive_run --data FOLDER
    python -m benchmarks.adaptive_run --draw         redraw the plots from the committed figures

Decodes code and maths prompts sequentially, cold for each prompt: with plain decoding, with the default, and with 64
rows in every step. Draws two plots: rows and tokens of every step; and, over the steps of 64 rows, the share of
correct drafted children of accepted nodes, by estimated probability. The figures go into one JSON object. Every
completion is compared with plain decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import lookahead
from lookahead.bench.record import describe, environment
from lookahead.core import Drafter, DraftState, Engine, Request, Start, Target, TokenTree
from lookahead.drafters import Adaptive, Plain
from lookahead.drafters.adaptive.draft_state import AdaptiveDraftState
from lookahead.drafters.prepare import Preparation
from lookahead.llm import chooser_of
from lookahead.options import Options

from .datasets import load_workload
from .plots import COLOURS, new_figure, save
from .quiet import processor
from .report import command_line

WORKLOADS = {"code": "humaneval", "maths": "gsm8k"}
#: Lower bounds of the bins of estimated probability.
LEVELS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class Watched(Drafter):
    """The adaptive drafter; its estimates are compared with the target's choices.

    Args:
        drafter: the drafter to watch.
        levels: for each bin, [drafted children, correct ones, sum of their estimates]; updated.

    Attributes:
        without_tree: by step, whether no tree was grown.
    """

    def __init__(self, drafter: Adaptive, levels: list[list[float]]) -> None:
        self.drafter = drafter
        self.levels = levels
        self.without_tree: list[bool] = []

    def prepare(self, model: Any, target: Target) -> Drafter:
        self.drafter = self.drafter.prepare(model, target)
        return self

    def start(self, sequence: Start) -> DraftState:
        return WatchedState(self, self.drafter.start(sequence))


class WatchedState(DraftState):
    """The draft state of one sequence."""

    def __init__(self, watched: Watched, state: AdaptiveDraftState) -> None:
        self.watched = watched
        self.drafter = state
        self.levels = watched.levels

    def draft(self, max_depth: int, max_rows: int = 1 << 20, batch: int = 1) -> TokenTree:
        tree = self.drafter.draft(max_depth, max_rows, batch)
        self.estimates = self.drafter.estimates
        self.watched.without_tree.append(not self.drafter.estimates)
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


def rows_over_time(runs: Sequence[dict[str, Any]]) -> Any:
    """Rows and tokens of each step of one completion of each workload: the one whose rows vary the most."""
    figure, axes = new_figure(7.2, 3.6)
    axes.remove()
    texts = {}
    for run in runs:
        if run["temperature"] == 0:
            best = texts.get(run["workload"])
            if best is None or len(set(run["rows"])) > len(set(best["rows"])):
                texts[run["workload"]] = run
    for row, (workload, run) in enumerate(texts.items(), 1):
        axes = figure.add_subplot(len(texts), 1, row)
        ends = []
        total = 0
        for tokens in run["tokens"]:
            total += tokens
            ends.append(total)
        begins = [0, *ends]
        label: str | None = "no tree grown"
        for number, plain in enumerate(run["without_tree"][: len(ends)]):
            if plain:
                axes.axvspan(begins[number], ends[number], color="#e6e6e6", linewidth=0, label=label)
                label = None
        axes.step(ends, run["rows"], where="post", color=COLOURS[0], linewidth=1.2, label="rows of the step")
        axes.plot(ends, run["tokens"], "o", color=COLOURS[1], markersize=3, label="tokens it gave")
        axes.set_yscale("log", base=2)
        axes.set_yticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
        axes.set_ylim(0.8, 150)
        axes.set_title(f"{workload}, greedy", fontsize=9)
        axes.grid(alpha=0.3)
        if row == 1:
            axes.legend(fontsize=7, ncols=3, loc="upper right")
    axes.set_xlabel("tokens of the text so far")
    return figure


def calibration(by_temperature: dict[str, list[list[float]]]) -> Any:
    """Estimated probability of a drafted child of an accepted node, against how often it was correct."""
    figure, axes = new_figure(7.0, 4.4)
    axes.plot([0, 1], [0, 1], color="#888888", linewidth=1, label="as estimated")
    for number, (temperature, levels) in enumerate(by_temperature.items()):
        points = [(sure / count, right / count, count) for count, right, sure in levels if count >= 20]
        axes.plot(
            [x for x, _, _ in points],
            [y for _, y, _ in points],
            color=COLOURS[number],
            marker="os"[number % 2],
            label=f"T = {float(temperature):g}, {sum(int(c) for _, _, c in points):,} candidates",
        )
    axes.set_xlabel("estimated probability")
    axes.set_ylabel("share that was right")
    axes.legend(fontsize=8)
    return figure


def draw(facts: Mapping[str, Any], folder: Path) -> None:
    """Both plots, from the figures alone."""
    save(rows_over_time(facts["runs"]), folder / "adaptive-rows", facts["where"])
    save(calibration(facts["calibration"]), folder / "adaptive-calibration", facts["where"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", help="folder of data sets")
    add("--draw", action="store_true", help="only redraw the plots, from the figures in --out")
    add("--model", help="default: SmolLM2")
    add("--dtype", default="auto")
    add("--prompts", type=int, default=20)
    add("--new-tokens", type=int, default=128)
    add("--temperatures", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 1.0])
    add("--out", type=Path, default=Path("docs/results/adaptive-run.json"))
    add("--pictures", type=Path, default=Path("docs/images"))
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(args.out.read_text()), args.pictures)
        return
    if args.data is None:
        parser.error("--data must be a folder with the data sets (docs/benchmarks.md names them)")

    llm = lookahead.load(args.model, dtype=args.dtype)
    target = llm.target()
    prepare = Preparation(llm.model, llm.model.probe.drafts, lambda: target)

    # Decode every prompt with each method.
    runs: list[dict[str, Any]] = []
    levels = {str(temperature): [[0.0, 0.0, 0.0] for _ in LEVELS] for temperature in args.temperatures}
    for temperature in args.temperatures:
        for workload, name in WORKLOADS.items():
            for number, item in enumerate(load_workload(name, args.prompts, data=args.data)):
                prompt = item.tokens(llm.tokenizer)
                made = {}
                for method in ("plain", "adaptive", "64 rows"):
                    drafter: Any = Plain()
                    if method == "adaptive":
                        drafter = Watched(Adaptive(), [[0.0] * 3 for _ in LEVELS])
                    elif method == "64 rows":
                        drafter = Watched(Adaptive(rows=64), levels[str(temperature)])
                    engine = Engine(lambda: target, prepare=prepare)
                    start = perf_counter()
                    options = Options(temperature=temperature)
                    seed = number if temperature else None
                    choose, noise = chooser_of(llm.model)(
                        options, prompt, seed, llm.eos, None, llm.vocabulary, llm.model.device
                    )
                    sequence = engine.add(
                        Request(prompt, drafter, args.new_tokens, choose, eos=llm.eos, noise=noise)
                    )
                    steps = []
                    while engine.busy:
                        steps += [(update.rows, len(update.tokens)) for update in engine.step()]
                    made[method] = sequence, steps[1:], perf_counter() - start, drafter
                plain = made["plain"]
                sequence, steps, seconds, drafter = made["adaptive"]
                runs.append(
                    {
                        "workload": workload,
                        "temperature": temperature,
                        "rows": [rows for rows, _ in steps],
                        "tokens": [tokens for _, tokens in steps],
                        "without_tree": [int(plain) for plain in drafter.without_tree],
                        "seconds": seconds,
                        "plain_seconds": plain[2],
                        "equal": sequence.tokens == plain[0].tokens == made["64 rows"][0].tokens,
                        "drafter": dict(sequence.stats.drafter),
                    }
                )

    # Save the figures, and draw them.
    where = describe({**environment(), "model": llm.name, "dtype": llm.dtype, "path": llm.path})
    command = command_line(sys.argv[1:], "python -m benchmarks.adaptive_run")
    facts = {"command": command, "where": where, "processor": processor(), "levels": LEVELS}
    facts |= {"calibration": levels, "runs": runs}
    args.out.write_text(json.dumps(facts) + "\n")
    draw(facts, args.pictures)
    equal = sum(run["equal"] for run in runs)
    print(f"{len(runs)} texts, {equal} equal to plain decoding; written to {args.out}")


if __name__ == "__main__":
    main()
