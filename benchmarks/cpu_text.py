"""Whole generations on the compiled CPU path: tokens per second, and parity with other paths.

    python benchmarks/cpu_text.py --prompts HumanEval.jsonl --limit 20
    python benchmarks/cpu_text.py --prompts HumanEval.jsonl --dtype fp32 --method adaptive

Prompts are the field "prompt" (or "question") of each JSON line. Every way of decoding takes its turn on each
prompt, greedy, all counting the tokens that they emit; Hugging Face's own ``generate`` is the yardstick. Parity
is the share of prompts whose text is the same to the last token, and of places where the best token is the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from step import DTYPES

import lookahead
from lookahead.bench.record import environment
from lookahead.core import Request, TokenTree
from lookahead.drafters import METHODS, make_drafter
from lookahead.targets.factory import make_target
from lookahead.testing import run


def read_prompts(path: Path, limit: int, tokenizer: Any, longest: int) -> list[list[int]]:
    """Token ids of the first prompts that are not too long."""
    prompts = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        ids = tokenizer(record.get("prompt") or record["question"])["input_ids"]
        if 0 < len(ids) <= longest:
            prompts.append(ids)
        if len(prompts) == limit:
            break
    return prompts


def ways(llm: Any, method: str, new_tokens: int) -> dict[str, Callable[[list[int]], tuple[list[int], float]]]:
    """Name -> (prompt -> tokens, steps after the prefill)."""
    model, vocabulary = llm.model, llm.vocabulary
    eos = frozenset(llm.eos)

    def generate(prompt: list[int]) -> tuple[list[int], float]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens
            )
        tokens = out[0, len(prompt) :].tolist()
        return tokens, len(tokens) - 1

    def ours(target: Any, name: str) -> Callable[[list[int]], tuple[list[int], float]]:
        def decode(prompt: list[int]) -> tuple[list[int], float]:
            (result,) = run(
                target, [Request(prompt, make_drafter(name, None, vocabulary), new_tokens, eos=eos)]
            )
            return result.tokens, result.stats.steps

        return decode

    reference, compiled = make_target(model, path="transformers"), make_target(model, path="cpu")
    return {
        "transformers generate": generate,
        "transformers path, plain": ours(reference, "autoregressive"),
        f"transformers path, {method}": ours(reference, method),
        "cpu path, plain": ours(compiled, "autoregressive"),
        f"cpu path, {method}": ours(compiled, method),
    }


def same(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> str:
    """How many texts are the same."""
    return f"{sum(x == y for x, y in zip(a, b, strict=True))} of {len(a)}"


def quality(target: Any, prompts: list[list[int]], texts: list[list[int]]) -> tuple[float, list[int]]:
    """Mean negative log-likelihood of the texts in nats, and the best token at every place."""
    total, best = 0.0, []
    for prompt, text in zip(prompts, texts, strict=True):
        rows = [target.prefill([(0, prompt)])[0].row(0)]
        for start in range(0, len(text) - 1, 64):
            chain = text[start : min(start + 64, len(text) - 1)]
            tree = TokenTree(chain[0])
            tree.add_candidate(chain[1:])
            scores = target.forward([(0, tree)])[0]
            rows += [scores.row(node) for node in range(len(chain))]
            target.commit([(0, list(range(len(chain))))])
        target.release(0)
        logits = torch.stack(rows).float()
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(text), reduction="sum"))
        best += logits.argmax(-1).tolist()
    return total / len(best), best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines")
    parser.add_argument("--model", help="the bundled model by default")
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--method", default="lookahead", choices=sorted(METHODS))
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    llm = lookahead.load(options.model, dtype=str(DTYPES[options.dtype]).removeprefix("torch."))
    prompts = read_prompts(options.prompts, options.limit, llm.tokenizer, 1024)
    all_ways = ways(llm, options.method, options.new_tokens)
    for way in all_ways.values():  # warm-up
        way(prompts[0])
    texts: dict[str, list[list[int]]] = {name: [] for name in all_ways}
    speeds: dict[str, list[float]] = {name: [] for name in all_ways}
    steps = dict.fromkeys(all_ways, 0.0)
    for prompt in prompts:
        for name, way in all_ways.items():
            start = perf_counter()
            tokens, count = way(prompt)
            speeds[name].append(len(tokens) / (perf_counter() - start))
            texts[name].append(tokens)
            steps[name] += count
    print(f"{environment()}\ncommand: {' '.join(sys.argv)}\n{len(prompts)} prompts, {options.dtype}\n")
    print("| way | tokens/s, median | times generate | S | texts as generate's | as plain on the same path |")
    print("|---|---|---|---|---|---|")
    yardstick = "transformers generate"
    for name, mine in texts.items():
        ratios = [a / b for a, b in zip(speeds[name], speeds[yardstick], strict=True)]
        plain = name.split(",")[0] + ", plain"
        emitted = sum(map(len, mine)) - len(mine)
        print(
            f"| {name} | {statistics.median(speeds[name]):.0f} | {statistics.median(ratios):.2f} "
            f"| {emitted / max(1, steps[name]):.2f} | {same(mine, texts[yardstick])} "
            f"| {same(mine, texts[plain]) if plain in texts else '-'} |"
        )
    print(
        "\n| path | perplexity of generate's texts | best token as on the transformers path |\n|---|---|---|"
    )
    reference = None
    for name in ("transformers", "cpu"):
        loss, best = quality(make_target(llm.model, path=name), prompts, texts[yardstick])
        reference = reference or best
        agree = statistics.mean(float(a == b) for a, b in zip(best, reference, strict=True))
        print(f"| {name} | {torch.tensor(loss).exp():.4f} | {agree:.2%} |")


if __name__ == "__main__":
    main()
