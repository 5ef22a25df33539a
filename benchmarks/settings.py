"""Which defaults pay: S of lookahead decoding by one setting at a time, on given prompts.

    python benchmarks/settings.py --humaneval HumanEval.jsonl --gsm8k test.jsonl --limit 40

S is the number of tokens per forward pass after the prefill; it does not depend on the machine. Every
output is compared with plain decoding.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lookahead
from lookahead.core.config import LookaheadConfig

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "pool_from_prompt: no": {"pool_from_prompt": False},
    "pool_from_output: no": {"pool_from_output": False},
    "neither": {"pool_from_prompt": False, "pool_from_output": False},
}
TRIPLES = [(15, 5, 15), (10, 5, 10), (7, 5, 7), (15, 7, 15), (15, 3, 15), (5, 5, 30), (30, 5, 5), (1, 5, 30)]


def prompts(path: Path, limit: int) -> list[str]:
    """Prompts of a HumanEval or a GSM8K file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    texts = [r["prompt"] if "prompt" in r else f"Question: {r['question']}\nAnswer:" for r in rows]
    return texts[:limit]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--humaneval", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=40, help="prompts of each")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    llm = lookahead.load()
    sets = {
        "code": prompts(arguments.humaneval, arguments.limit),
        "maths": prompts(arguments.gsm8k, arguments.limit),
    }
    options = {"max_new_tokens": arguments.max_new_tokens, "temperature": arguments.temperature, "seed": 0}
    plain = {
        name: [llm.generate(p, method="autoregressive", **options).tokens for p in texts]
        for name, texts in sets.items()
    }
    rows = [(name, LookaheadConfig.of(None, **variant)) for name, variant in VARIANTS.items()]
    rows += [(f"W,N,G = {','.join(map(str, t))}", LookaheadConfig.of(t)) for t in TRIPLES]
    print(f"{'setting':<26}" + "".join(f"{name + ' S':>10}{'rows':>7}{'equal':>9}" for name in sets))
    for label, config in rows:
        line = f"{label:<26}"
        for name, texts in sets.items():
            steps = tokens = evaluated = equal = 0
            for text, expected in zip(texts, plain[name], strict=True):
                result = llm.generate(text, method="lookahead", config=config, **options)
                steps += result.stats.steps
                tokens += result.stats.new_tokens - 1
                evaluated += result.stats.rows
                equal += result.tokens == expected
            line += f"{tokens / steps:>10.3f}{evaluated / steps:>7.0f}{equal:>5}/{len(texts):<3}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
