"""Compares a completion with plain decoding: are they equal, and if not, how close are the logits where they
diverge?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core import Result, SettingsError, first_divergence
from ..drafters import Plain
from ..llm import LLM


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt, decoded twice.

    Attributes:
        ours: the result with the drafter under test.
        plain: the result of plain decoding.
        first_divergence: index of the first different token; None if the completions are equal.
        gap: difference between the two largest logits there, from a causal pass over the common tokens. Near 0,
            rounding decided. None if the completions are equal.
        second: whether the different token of ``ours`` is one of these two.
    """

    ours: Result
    plain: Result
    first_divergence: int | None
    gap: float | None
    second: bool = True

    @property
    def equal(self) -> bool:
        return self.first_divergence is None

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        ours, plain = self.ours, self.plain
        return {
            "equal": self.equal,
            "first_divergence": self.first_divergence,
            "gap": self.gap,
            "steps": ours.stats.steps,
            "plain_steps": plain.stats.steps,
            "seconds": ours.seconds,
            "plain_seconds": plain.seconds,
        }


def plainly(seed: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """The options of plain decoding that must give the same completion as ``options`` with this seed."""
    return options | {"drafter": Plain(), "seed": seed}


def compare(llm: LLM, ours: Result, plain: Result) -> Comparison:
    """Compare two results for one prompt."""
    index = first_divergence(ours.tokens, plain.tokens)
    if index is None:
        return Comparison(ours, plain, None, None)
    target = llm.target()
    (scores,) = target.prefill([(0, plain.prompt_tokens + plain.tokens[:index])])
    best, log_odds = scores.top([0], 2)
    target.release(0)
    second = index == len(ours.tokens) or ours.tokens[index] in map(int, best[0])
    return Comparison(ours, plain, index, -float(log_odds[0][1]), second)


def reference_tokens(llm: LLM, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """The greedy completion of transformers' own ``model.generate``, as an independent reference."""
    module: Any = getattr(llm.model, "module", None)
    if module is None:
        raise SettingsError(
            f"--reference generate needs a transformers model, got {llm.model.description}; load it with "
            "--dtype float32 and without --engine, or use --reference plain"
        )
    from ..hf.model import generate_greedily

    room = (llm.context or sys.maxsize) - len(prompt)
    return generate_greedily(module, prompt, min(max_new_tokens, room), sorted(llm.eos))
