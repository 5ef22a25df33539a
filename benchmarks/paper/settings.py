"""S of lookahead decoding with one setting changed at a time: which settings pay off?

    python -m benchmarks.paper settings --data DIR --workload humaneval --workload gsm8k --limit 40

S is the number of tokens per forward pass after the prefill; it does not depend on the machine. Every completion is
compared with plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lookahead.bench.methods import make_request, timed_decode
from lookahead.core import Drafter
from lookahead.drafters import Plain

from .study import Study
from .variants import VariantDrafter

TRIPLES = [(15, 5, 15), (10, 5, 10), (7, 5, 7), (15, 7, 15), (15, 3, 15), (5, 5, 30), (30, 5, 5), (1, 5, 30)]
#: Name -> (settings of ``Lookahead``, settings that only ``VariantDrafter`` has).
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "slide: emitted": ({}, {"slide": "emitted"}),
    "window_init: vocabulary": ({}, {"window_init": "vocabulary"}),
    "window_init: pool": ({}, {"window_init": "pool"}),
    "pool_from_prompt: no": ({"pool_from_prompt": False}, {}),
    "pool_from_output: no": ({"pool_from_output": False}, {}),
    "neither": ({"pool_from_prompt": False, "pool_from_output": False}, {}),
    "verify_window: yes": ({}, {"verify_window": True}),
    **{
        f"W,N,G = {w},{n},{g}": ({"window_size": w, "ngram_size": n, "guess_set_size": g}, {})
        for w, n, g in TRIPLES
    },
}


@dataclass(slots=True)
class Totals:
    """Sums over completions: tokens after the first, steps, rows, and completions equal to plain decoding."""

    tokens: int = 0
    steps: int = 0
    rows: int = 0
    equal: int = 0
    texts: int = 0


def variants() -> dict[str, Drafter]:
    """The drafters by name."""
    return {name: VariantDrafter(**own, **lost) for name, (own, lost) in VARIANTS.items()}


def settings(study: Study) -> dict[str, dict[str, Totals]]:
    """Print and return the totals, by variant and workload."""
    model = study.model
    sets: dict[str, list[list[int]]] = {}
    for prompt in study.prompts(12):
        sets.setdefault(prompt.workload, []).append(prompt.tokens(model.tokenizer))

    def decode(ids: list[int], drafter: Drafter) -> Any:
        return timed_decode(model, make_request(model, ids, drafter, study.options))

    plain = {name: [decode(ids, Plain()).tokens for ids in prompts] for name, prompts in sets.items()}
    print(f"{'setting':<26}" + "".join(f"{name + ' S':>16}{'rows':>7}{'equal':>9}" for name in sets))
    totals_by_label: dict[str, dict[str, Totals]] = {}
    for label, drafter in variants().items():
        line = f"{label:<26}"
        totals_by_label[label] = {}
        for name, prompts in sets.items():
            totals = totals_by_label[label][name] = Totals()
            for ids, expected in zip(prompts, plain[name], strict=True):
                outcome = decode(ids, drafter)
                totals.tokens += outcome.stats.new_tokens - 1
                totals.steps += outcome.stats.steps
                totals.rows += outcome.stats.rows
                totals.equal += outcome.tokens == expected
                totals.texts += 1
            steps = max(1, totals.steps)
            line += f"{totals.tokens / steps:>16.3f}{totals.rows / steps:>7.0f}{totals.equal:>5}/{totals.texts:<3}"
        print(line)
    return totals_by_label
