"""What a method of the benchmark is, and the one counter of what its texts cost.

The counter, for all sides: the first forward pass of the target is the prefill, every later one is a step;
its rows are the positions it evaluates, its tokens those that it adds to the text, the ending token included.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..core import SettingsError, Stats
from .model import ModelUnderTest

#: Tokens that prompt lookup drafts at most: the example of transformers' documentation, and ours.
LOOKUP_TOKENS = 10


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How every method decodes."""

    max_new_tokens: int = 128  # at least 1
    temperature: float = 0.0  # 0 is greedy; otherwise tokens are drawn
    top_k: int = 0  # draw among the k likeliest only; 0 for all
    seed: int = 0  # of the draws
    repeats: int = 1  # how often every prompt is decoded
    warm: bool = True  # also measure methods that keep state with the state of the earlier prompts

    def __post_init__(self) -> None:
        for name, low in (("max_new_tokens", 1), ("repeats", 1), ("temperature", 0), ("top_k", 0)):
            if getattr(self, name) < low:
                raise SettingsError(f"{name} must be at least {low}, got {getattr(self, name)}")


@dataclass(slots=True)
class Outcome:
    """One text, and what it cost.

    The counts of other libraries' methods hold the steps only: tokens that a prefill gives beyond the first one,
    because it verified a draft too, are not in ``stats``.
    """

    tokens: list[int]  # the new ones
    stats: Stats
    prefill_tokens: int  # how many of the tokens the prefill gave
    prefill_seconds: float  # until those were there
    step_tokens: list[int] = field(default_factory=list)  # per step, as the next two
    step_rows: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


class Method(ABC):
    """Decodes one prompt after the other."""

    label: str  # name with its settings
    state: str = ""  # "cold" or "warm" where the method keeps state
    settings: dict[str, Any]  # for the records

    @abstractmethod
    def decode(self, model: ModelUnderTest, prompt: Sequence[int], options: RunOptions) -> Outcome:
        """Decode one prompt."""

    def comparable(self, options: RunOptions) -> bool:
        """Whether the text must equal that of plain decoding, token for token."""
        return True

    def forget(self) -> None:  # noqa: B027
        """Drop kept state; called before every repeat."""


def counted(
    prompt_tokens: int, tokens: list[int], rows: list[int], sizes: list[int], times: list[float]
) -> Outcome:
    """What another library's decoding cost.

    Args:
        prompt_tokens: length of the prompt.
        tokens: the new ones.
        rows: of every step.
        sizes: tokens that came from the prefill, and from every step.
        times: when it began, and when each of these tokens came, in seconds.
    """
    prefill, *steps = sizes
    if len(steps) != len(rows) or len(tokens) != sum(sizes):
        raise AssertionError(
            f"{len(rows)} steps gave tokens {len(steps)} times, {sum(sizes)} of {len(tokens)}"
        )
    stats = Stats(prompt_tokens=prompt_tokens, new_tokens=1 + sum(steps))
    for evaluated, size in zip(rows, steps, strict=True):
        stats.count_step(evaluated, evaluated - 1, size)
    first, *seconds = (b - a for a, b in pairwise(times))
    return Outcome(tokens, stats, prefill, first, steps, rows, seconds)
