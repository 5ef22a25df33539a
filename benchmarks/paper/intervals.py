"""95 % intervals by bootstrap over prompts: prompts are drawn with replacement, all methods on the same draw.

Texts of one prompt (its turns and repeats) stay together, because they are alike. Differences between two methods
are taken within a draw, so that what makes a prompt easy for both cancels out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from typing import Any

import numpy as np

from lookahead.bench.record import Record

#: Draws of the bootstrap.
DRAWS = 2000
Numbers = np.ndarray[Any, np.dtype[np.float64]]


def drawn_ratios(records: Sequence[Record], methods: Sequence[str], draws: int = DRAWS) -> Numbers:
    """S of each method in each draw of prompts, shape (draws, methods); NaN if a method has no steps in it.

    Example: of prompts A (10 tokens in 5 steps) and B (12 in 10), a draw (A, A) has S 20 / 10 and (A, B) 22 / 15.
    """
    return drawn_sums(records, methods, lambda r: (r["new_tokens"] - r["prefill_tokens"], r["steps"]), draws)


def drawn_sums(
    records: Sequence[Record],
    methods: Sequence[str],
    parts: Callable[[Record], tuple[float, float]],
    draws: int = DRAWS,
) -> Numbers:
    """In each draw the sum of the first part over the sum of the second, shape (draws, methods).

    Args:
        parts: of a record, (numerator, denominator).
    """
    kept = [record for record in records if "skipped" not in record]
    prompts = {key: i for i, key in enumerate(dict.fromkeys((r["workload"], r["prompt"]) for r in kept))}
    sums = np.zeros((2, len(prompts), len(methods)))
    for record in kept:
        if record["method"] in methods:
            place = prompts[record["workload"], record["prompt"]], methods.index(record["method"])
            sums[:, *place] += parts(record)
    if not prompts:
        return np.full((draws, len(methods)), nan)
    weights = np.random.default_rng(0).multinomial(len(prompts), [1 / len(prompts)] * len(prompts), draws)
    above, below = weights @ sums[0], weights @ sums[1]
    return np.divide(above, below, out=np.full_like(above, nan), where=below > 0)


def interval(values: Any) -> tuple[float, float]:
    """The middle 95 % of the values; NaN for none."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    if not len(known):
        return nan, nan
    low, high = np.percentile(known, (2.5, 97.5))
    return float(low), float(high)


def differ(a: Any, b: Any) -> bool:
    """Whether the interval of the difference, draw by draw, leaves zero out."""
    low, high = interval(np.asarray(a) - np.asarray(b))
    return low > 0 or high < 0
