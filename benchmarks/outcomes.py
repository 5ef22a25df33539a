"""The cost of another library's decoding, counted as ours is, and the error of a missing package."""

from __future__ import annotations

from itertools import pairwise

from lookahead.bench.methods import Outcome
from lookahead.core import SettingsError, Stats

#: Maximum tokens drafted by prompt lookup in any library; the example in transformers' documentation.
LOOKUP_TOKENS = 10


class MissingPackage(SettingsError):
    """A peer's package or program is not installed."""


def outcome_of(
    prompt_tokens: int, tokens: list[int], rows: list[int], sizes: list[int], times: list[float]
) -> Outcome:
    """The cost of another library's decoding.

    Args:
        prompt_tokens: length of the prompt.
        tokens: the new tokens.
        rows: rows of each step.
        sizes: number of tokens from the prefill, then from each step.
        times: seconds at which decoding began, the prefill's tokens arrived, and each step's tokens arrived.
    """
    prefill, *steps = sizes
    if len(steps) != len(rows) or len(tokens) != sum(sizes):
        raise AssertionError(
            f"every forward pass must give tokens once: {len(rows)} steps, {len(steps)} groups of tokens, "
            f"{sum(sizes)} tokens in groups, {len(tokens)} in the text"
        )
    stats = Stats(prompt_tokens=prompt_tokens, new_tokens=1 + sum(steps))
    for evaluated, size in zip(rows, steps, strict=True):
        stats.count_step(evaluated, evaluated - 1, size)
    first, *seconds = (b - a for a, b in pairwise(times))
    return Outcome(tokens, stats, prefill, first, steps, rows, seconds)
