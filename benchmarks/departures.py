"""The value of each departure from the paper: S of lookahead decoding with our choice and with the paper's.

    python -m benchmarks.departures [--model MODEL] [--prompts 6] [--new-tokens 128]
    python -m benchmarks.departures --presets       the presets alongside the adaptive drafter (docs/settings.md)

S is the number of tokens per forward pass after the prefill; it does not depend on the machine's speed. Every
completion is compared with plain decoding. docs/settings.md lists the departures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import lookahead
from lookahead.core import Drafter, DraftState, Request, Start
from lookahead.drafters import Lookahead, NGramPool, Plain

from .paper.variants import VariantDrafter

W, N, G = 15, 5, 15
FUNCTION = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)
"""
#: Code, edits of a given text, and prose. Code is completed as it is; questions go through the chat template.
PROMPTS: list[tuple[str, bool]] = [
    ('def quicksort(array):\n    """Sort a list of numbers."""\n', False),
    (f"Rename the variable total to result in this function and show all of it:\n\n{FUNCTION}", True),
    ("Explain in a few paragraphs why the sea is salty.", True),
    ('class Stack:\n    """A stack with push, pop and peek."""\n', False),
    (f"Add a docstring to this function and show all of it:\n\n{FUNCTION}", True),
    ("Write a short story about a lighthouse keeper.", True),
    ("import csv\n\n\ndef read_rows(path):\n", False),
    ("List ten capital cities of Europe with their countries.", True),
]


class LongNGramsOnly(NGramPool):
    """A pool without the n-grams of the warm-up, which are shorter than N."""

    def add(self, key: int, continuation: tuple[int, ...]) -> None:
        if len(continuation) == N - 1:
            super().add(key, continuation)


@dataclass(frozen=True)
class WithoutShortNGrams(Lookahead):
    """Lookahead decoding whose pool takes n-grams of N tokens only."""

    def start(self, sequence: Start) -> DraftState:
        return replace(Lookahead(W, N, G), pool=LongNGramsOnly(G)).start(sequence)


DEPARTURES: dict[str, Drafter] = {
    "library": Lookahead(W, N, G),
    "n-grams of the warm-up stay out of the pool": WithoutShortNGrams(W, N, G),
    "first guesses from the vocabulary": VariantDrafter(W, N, G, window_init="vocabulary"),
    "pool not filled from the output": Lookahead(W, N, G, pool_from_output=False),
    "the window moves on by all emitted tokens": VariantDrafter(W, N, G, slide="emitted"),
}


#: The presets alongside the adaptive drafter with fixed numbers of rows, so that step times have no effect.
PRESETS: dict[str, Drafter] = {
    **{name: Lookahead.preset(name) for name in ("code", "text", "creative", "cpu", "34b", "13b", "7b")},
    **{f"adaptive, {rows} rows": lookahead.Adaptive(rows=rows) for rows in (16, 64)},
}


def measure(
    llm: lookahead.LLM,
    count: int,
    new_tokens: int,
    show: Callable[[str], None],
    drafters: Mapping[str, Drafter] = DEPARTURES,
) -> None:
    """Print S and rows per step by drafter, S per completion, and how many completions equal plain decoding."""
    prompts = [
        llm.encode([{"role": "user", "content": text}] if chat else text) for text, chat in PROMPTS[:count]
    ]

    def decode(drafter: Drafter, prompt: list[int]) -> tuple[list[int], int, int]:
        engine = llm.engine()
        sequence = engine.add(Request(prompt, drafter, new_tokens, eos=llm.eos))
        while engine.busy:
            engine.step()
        if sequence.error is not None:
            raise sequence.error
        return sequence.tokens, sequence.stats.steps, sequence.stats.rows

    plain = [decode(Plain(), prompt)[0] for prompt in prompts]
    show(
        "| drafter, or the paper's choice | S | rows a step | S by text | equal |\n| --- | ---: | ---: | --- | ---: |"
    )
    for name, drafter in drafters.items():
        texts = [decode(drafter, prompt) for prompt in prompts]
        by_text = " ".join(f"{(len(tokens) - 1) / steps:.2f}" for tokens, steps, _ in texts)
        all_steps = sum(steps for _, steps, _ in texts)
        s = sum(len(tokens) - 1 for tokens, _, _ in texts) / all_steps
        rows = sum(rows for _, _, rows in texts) / all_steps
        equal = sum(tokens == reference for (tokens, _, _), reference in zip(texts, plain, strict=True))
        show(f"| {name} | {s:.3f} | {rows:.1f} | {by_text} | {equal}/{len(texts)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a directory, a .gguf file or a hub id (default: SmolLM2)")
    parser.add_argument("--prompts", type=int, default=6, choices=range(1, len(PROMPTS) + 1))
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--presets", action="store_true", help="measure presets and adaptive instead")
    options = parser.parse_args()
    llm = lookahead.load(options.model)
    print(
        f"{llm.name}, {llm.dtype}, ({W}, {N}, {G}), {options.prompts} prompts, {options.new_tokens} new tokens\n"
    )
    drafters = PRESETS if options.presets else DEPARTURES
    measure(llm, options.prompts, options.new_tokens, lambda line: print(line, flush=True), drafters)


if __name__ == "__main__":
    main()
