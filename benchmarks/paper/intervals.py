"""95 % bootstrap intervals: prompts are drawn with replacement, and all methods use the same draws.

The completions of a prompt (its turns and repeats) stay together, because they are not independent. The difference
between two methods is computed within each draw, so that the difficulty of a prompt, which affects both, cancels out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from typing import Any

import numpy as np

from lookahead.bench.record import Record

#: Number of bootstrap draws.
DRAWS = 2000
Numbers = np.ndarray[Any, np.dtype[np.float64]]


def drawn_ratios(records: Sequence[Record], methods: Sequence[str], draws: int = DRAWS) -> Numbers:
    """S of each method in each draw of prompts, shape (draws, methods). NaN if a method has no steps in a draw.

    Example: with prompts A (10 tokens in 5 steps) and B (12 in 10), the draw (A, A) has S = 20 / 10, and (A, B) has
    S = 22 / 15.
    """
    return drawn_sums(records, methods, lambda r: (r["new_tokens"] - r["prefill_tokens"], r["steps"]), draws)


def drawn_sums(
    records: Sequence[Record],
    methods: Sequence[str],
    parts: Callable[[Record], tuple[float, float]],
    draws: int = DRAWS,
) -> Numbers:
    """For each draw, the sum of numerators over the sum of denominators, shape (draws, methods).

    Args:
        parts: record -> (numerator, denominator).
    """
    # The two sums of each prompt and method.
    kept = [record for record in records if "skipped" not in record]
    prompts = {key: i for i, key in enumerate(dict.fromkeys((r["workload"], r["prompt"]) for r in kept))}
    sums = np.zeros((2, len(prompts), len(methods)))
    for record in kept:
        if record["method"] in methods:
            place = prompts[record["workload"], record["prompt"]], methods.index(record["method"])
            sums[:, *place] += parts(record)

    # A draw is how often each prompt was drawn.
    if not prompts:
        return np.full((draws, len(methods)), nan)
    weights = np.random.default_rng(0).multinomial(len(prompts), [1 / len(prompts)] * len(prompts), draws)
    above = weights @ sums[0]
    below = weights @ sums[1]
    return np.divide(above, below, out=np.full_like(above, nan), where=below > 0)


def interval(values: Any) -> tuple[float, float]:
    """The 2.5th and 97.5th percentiles of the values; NaN if there are none."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    if not len(known):
        return nan, nan
    low, high = np.percentile(known, (2.5, 97.5))
    return float(low), float(high)


def differ(a: Any, b: Any) -> bool:
    """Whether the interval of the difference within each draw excludes zero."""
    low, high = interval(np.asarray(a) - np.asarray(b))
    return low > 0 or high < 0
