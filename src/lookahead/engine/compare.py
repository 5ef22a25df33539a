"""The same prompts decoded twice, by a method and plainly: equal or not, and where they part by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core import SettingsError
from ..core.stats import first_divergence
from .llm import LLM
from .prompts import Prompt
from .results import Result

#: Warm-up, so that the first run of two is not charged for the process's first passes.
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt, decoded twice.

    Attributes:
        ours: by the method that is examined.
        plain: the reference.
        first_divergence: index of the first token that differs; None where the texts are equal.
        gap: logit of the likeliest token minus that of the second there, from one causal pass over the
            common text; a gap near 0 is a tie that rounding decides. None where the texts are equal.
    """

    ours: Result
    plain: Result
    first_divergence: int | None
    gap: float | None

    @property
    def equal(self) -> bool:
        return self.first_divergence is None

    @property
    def speedup(self) -> float:
        """Seconds of plain decoding over ours, prefill included."""
        return self.plain.seconds / max(self.ours.seconds, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "equal": self.equal,
            "first_divergence": self.first_divergence,
            "gap": self.gap,
            "steps": self.ours.stats.steps,
            "plain_steps": self.plain.stats.steps,
            "seconds": self.ours.seconds,
            "plain_seconds": self.plain.seconds,
        }


def warm_up(llm: LLM, prompt: Prompt, methods: Sequence[str | None] = (None, "autoregressive")) -> None:
    """A few tokens by each method, so that neither pays for what happens once in a process."""
    for method in methods:
        llm.generate(prompt, max_new_tokens=WARM_UP_TOKENS, method=method)


def compare(llm: LLM, ours: Result, prompt: Prompt, **options: Any) -> Comparison:
    """Decode ``prompt`` plainly with the options that gave ``ours`` and compare.

    Raises:
        SettingsError: ``ours`` was decoded with a pool or with ``method="autoregressive"`` only.
    """
    plain_options = dict(options, method="autoregressive", config=None, seed=ours.seed)
    plain_options.pop("pool", None)
    plain = llm.generate(prompt, **plain_options)
    return judge(llm, ours, plain)


def judge(llm: LLM, ours: Result, plain: Result) -> Comparison:
    """Compare two results of one prompt."""
    place = first_divergence(ours.tokens, plain.tokens)
    gap = None
    if place is not None:
        gap = logit_gap(llm, plain.prompt_tokens + plain.tokens[:place])
    return Comparison(ours, plain, place, gap)


def logit_gap(llm: LLM, tokens: Sequence[int]) -> float:
    """Difference of the two largest logits after ``tokens``, from one causal pass."""
    with torch.no_grad():
        ids = torch.tensor([list(tokens)], device=llm.model.device)
        row = llm.model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -1].float()
    top = row.topk(2).values
    return float(top[0] - top[1])


def reference_tokens(llm: LLM, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """What ``model.generate`` of transformers itself gives greedily, as a reference from outside."""
    from transformers import GenerationConfig

    eos = sorted(llm.eos)
    longest = llm.context - len(prompt) if llm.context is not None else max_new_tokens
    if longest < 1:
        raise SettingsError(f"the prompt must be shorter than the context of {llm.context} tokens")
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=min(max_new_tokens, longest),
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
    )
    ids = torch.tensor([list(prompt)], device=llm.model.device)
    with torch.no_grad():
        output = llm.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
