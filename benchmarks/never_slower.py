"""Never slower: adaptive against our own plain decoding, prompt by prompt, in one interleaved run.

    python benchmarks/never_slower.py --quick                      a few minutes
    python benchmarks/never_slower.py --out never_slower.jsonl     all cases
    python benchmarks/never_slower.py --page docs/results/never-slower.md --out FILE   a page from its lines

Cases: functions of the standard library on the bundled model, greedy and at temperature 1; prompts of random
tokens at temperature 1 on models of random weights in two Llama shapes, whose text nothing predicts; and the
same greedily, where such models loop. For each prompt both methods take turns ``--rounds`` times, in changing
order, on one target. The ratio is the smallest wall time of adaptive over the smallest of plain decoding,
prefill included; outputs must be equal (in bf16 a difference is counted, not refused). Adaptive begins every
prompt cold; step times are measured once per model, as ``lookahead.load`` does.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lookahead
from lookahead.bench.record import describe, environment
from lookahead.bench.workloads import load_workload
from lookahead.core import Decoder, Drafter, Request
from lookahead.drafters import make_drafter
from lookahead.drafters.adaptive import AdaptiveState, times_for
from lookahead.sampling import SeededNoise, make_choose
from lookahead.targets.factory import make_target

#: hidden, layers, heads, key-value heads, feed-forward, vocabulary
SHAPES = {"135m": (576, 30, 9, 3, 1536, 49152), "0.5b": (896, 24, 14, 2, 4864, 151936)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GOAL = 1.03


@dataclass
class Line:
    """One prompt. Times in seconds."""

    model: str
    dtype: str
    text: str
    temperature: float
    prompt: int
    tokens: int
    adaptive: float
    plain: float
    ratio: float
    steps: int
    rows: int
    equal: bool


def random_model(shape: str, dtype: torch.dtype) -> Any:
    hidden, layers, heads, kv_heads, wide, vocabulary = SHAPES[shape]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=wide,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


class Bench:
    """One model: its target, its step times, and the two methods on it."""

    def __init__(self, model: Any, rounds: int, new_tokens: int) -> None:
        self.target = make_target(model)
        self.vocabulary = self.target.vocabulary
        self.rounds = rounds
        self.new_tokens = new_tokens
        self.times = times_for(model, self.target.path, lambda: self.target)

    def once(self, prompt: list[int], drafter: Drafter, temperature: float, seed: int) -> tuple[float, Any]:
        """Wall seconds and the generation."""
        noise = SeededNoise(seed, len(prompt), self.vocabulary, temperature) if temperature else None
        process = None
        if temperature not in (0.0, 1.0):

            def process(ids: Any, scores: Any) -> Any:
                return scores / temperature

        drafter.use_noise(noise)
        decoder = Decoder(self.target)
        choose = make_choose(prompt, process, noise)
        start = perf_counter()
        generation = decoder.add(Request(prompt, drafter, self.new_tokens, choose))
        while decoder.busy:
            decoder.step()
        return perf_counter() - start, generation

    def compare(self, prompt: list[int], temperature: float, seed: int) -> dict[str, Any]:
        spent: dict[str, list[float]] = {"adaptive": [], "autoregressive": []}
        made: dict[str, Any] = {}
        for turn in range(self.rounds):
            for method in sorted(spent, reverse=bool(turn % 2)):
                state = AdaptiveState(keep=False, times=self.times) if method == "adaptive" else None
                drafter = make_drafter(method, None, self.vocabulary, state)
                seconds, made[method] = self.once(prompt, drafter, temperature, seed)
                spent[method].append(seconds)
        ours = made["adaptive"]
        best = {method: min(seconds) for method, seconds in spent.items()}
        return {
            "tokens": len(ours.tokens),
            "adaptive": best["adaptive"],
            "plain": best["autoregressive"],
            "ratio": best["adaptive"] / best["autoregressive"],
            "steps": ours.stats.steps,
            "rows": ours.stats.rows,
            "equal": ours.tokens == made["autoregressive"].tokens,
        }


def cases(args: argparse.Namespace) -> Iterator[Line]:
    if not args.skip_bundled:
        for dtype in args.dtypes:
            llm = lookahead.load(args.model, dtype={"bf16": "bfloat16", "fp32": "float32"}[dtype])
            bench = Bench(llm.model, args.rounds, args.new_tokens)
            workload = load_workload("stdlib", limit=args.prompts)
            prompts = [prompt.tokens(llm.tokenizer)[:512] for prompt in workload]
            for temperature in (0.0, 1.0):
                for number, prompt in enumerate(prompts):
                    figures = bench.compare(prompt, temperature, number)
                    yield Line(llm.name, dtype, "code", temperature, number, **figures)
    for shape in args.shapes:
        for dtype in args.dtypes:
            bench = Bench(random_model(shape, DTYPES[dtype]), args.rounds, args.random_tokens)
            rng = random.Random(1)
            for number in range(args.random_prompts):
                prompt = [rng.randrange(bench.vocabulary) for _ in range(64)]
                temperature = 0.0 if number % 4 == 3 else 1.0
                figures = bench.compare(prompt, temperature, number)
                yield Line(shape, dtype, "random", temperature, number, **figures)
            del bench
            gc.collect()


def page(path: str) -> str:
    """The lines of a file as a page: by case, then the worst prompts."""
    with open(path) as file:
        lines = [json.loads(line) for line in file]
    about = describe(lines[-1] | {"model": "several models", "dtype": "two dtypes"})
    groups: dict[tuple[str, str, str, float], list[dict[str, Any]]] = {}
    for line in lines:
        key = (line["model"], line["dtype"], line["text"], line["temperature"])
        groups.setdefault(key, []).append(line)
    text = [
        "# Never slower: adaptive against plain decoding, prompt by prompt",
        "",
        "`python benchmarks/never_slower.py --out never_slower.jsonl`",
        "",
        f"{about}.",
        f"Commits {', '.join(sorted({line['commit'] for line in lines}))}: the bundled model with",
        "`--shapes '' --rounds 5`,",
        "the others with `--skip-bundled` and three rounds.",
        "Each prompt is decoded by both methods in turn, so many times; a ratio is the smallest wall time of",
        "adaptive over that of our own plain decoding on the same path, prefill included. Below 1 is faster. `code`:",
        "functions of the standard library; `random`: random tokens on a model of random weights. Adaptive begins",
        "every prompt cold.",
        "",
        "| model | dtype | prompts | temperature | texts | equal | median ratio | best | worst | over 1.03 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, dtype, kind, temperature), some in groups.items():
        ratios = [line["ratio"] for line in some]
        text.append(
            f"| {model} | {dtype} | {kind} | {temperature:g} | {len(some)} | {sum(line['equal'] for line in some)} "
            f"| {statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} "
            f"| {sum(ratio > GOAL for ratio in ratios)} |"
        )
    over = sum(line["ratio"] > GOAL for line in lines)
    text += [
        "",
        f"{len(lines)} prompts, {over} over {GOAL}. The worst:",
        "",
        "| ratio | prompt | seconds | plain |",
    ]
    text.append("|---|---|---|---|")
    for line in sorted(lines, key=lambda line: -line["ratio"])[:12]:
        name = f"{line['model']} {line['dtype']} {line['text']} T = {line['temperature']:g} #{line['prompt']}"
        text.append(f"| {line['ratio']:.3f} | {name} | {line['adaptive']:.3f} | {line['plain']:.3f} |")
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", help="in place of the bundled one")
    add("--skip-bundled", action="store_true")
    add("--shapes", type=lambda text: [s for s in text.split(",") if s], default=list(SHAPES))
    add("--dtypes", type=lambda text: text.split(","), default=list(DTYPES))
    add("--prompts", type=int, default=12, help="for the bundled model, each greedy and sampled")
    add("--random-prompts", type=int, default=8, help="for each random model; every fourth one greedy")
    add("--new-tokens", type=int, default=128)
    add("--random-tokens", type=int, default=96)
    add("--rounds", type=int, default=3)
    add("--out", help="JSON lines; appended to")
    add("--quick", action="store_true", help="few prompts, the small shape, two rounds")
    add("--page", help="write a page from the lines of --out, and measure nothing")
    args = parser.parse_args()
    if args.page:
        with open(args.page, "w", encoding="utf-8") as file:
            file.write(page(args.out))
        return
    if args.quick:
        args.prompts, args.random_prompts, args.rounds = 3, 4, 2
        args.random_tokens, args.shapes = 64, args.shapes[:1]
    lines: list[Line] = []
    about = environment()
    for line in cases(args):
        lines.append(line)
        print(
            f"{line.model:8} {line.dtype} {line.text:6} T={line.temperature:g} #{line.prompt:<3} "
            f"{line.adaptive:7.3f} s against {line.plain:7.3f} s   {line.ratio:.3f}"
            f"{'' if line.equal else '   output differs'}",
            flush=True,
        )
        if args.out:
            with open(args.out, "a") as file:
                file.write(json.dumps({**asdict(line), **about}) + "\n")
    slow = sorted(lines, key=lambda line: line.ratio, reverse=True)
    over = [line for line in lines if line.ratio > GOAL]
    print(f"\n{len(lines)} prompts; over {GOAL}: {len(over)}; median ratio "
          f"{statistics.median(line.ratio for line in lines):.3f}; worst:")  # fmt: skip
    for line in slow[:8]:
        print(
            f"  {line.ratio:.3f}  {line.model} {line.dtype} {line.text} T={line.temperature:g} #{line.prompt}"
        )
    wrong = [line for line in lines if not line.equal and line.dtype == "fp32"]
    if wrong:
        raise SystemExit(f"{len(wrong)} outputs differ from plain decoding in fp32")


if __name__ == "__main__":
    main()
