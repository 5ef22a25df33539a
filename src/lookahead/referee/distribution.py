"""Tests whether two samples of completions come from one distribution.

Statistic: chi-square of the two-sample table of texts, X = sum over texts c of (a_c - b_c)^2 / (a_c + b_c), summed
over the texts' first 4, 8, 16 and all characters. Its distribution under equality is found by permutation: the pooled
completions are dealt to the two sides again, so the error rate needs no assumption about counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

#: The probability that a server with equal distributions is called wrong, over all prompts of a run (Bonferroni).
ERROR_RATE = 0.01
#: Lengths in characters at which texts are compared; None is the whole text.
LENGTHS = (4, 8, 16, None)
#: Permutations for each prompt, at least: p-values are multiples of 1 / (1 + this).
PERMUTATIONS = 10_000


def p_value(one: Sequence[str], other: Sequence[str], prompts: int = 1, seed: int = 0) -> float:
    """The p-value of the hypothesis that both samples, of equal size, come from one distribution.

    Args:
        prompts: the number of tests of the run, among which the error rate is divided.
        seed: of the permutations.
    """
    pooled = Counter([*one, *other])
    texts = list(pooled)
    counts = np.array([pooled[text] for text in texts])
    given = Counter(one)
    first = np.array([[given[text] for text in texts]])
    permutations = max(PERMUTATIONS, round(10 * prompts / ERROR_RATE))
    dealt = np.random.default_rng(seed).multivariate_hypergeometric(counts, len(one), permutations)
    groups = [_groups(texts, length) for length in LENGTHS]
    observed = _statistic(first, counts, groups)[0]
    at_least = np.count_nonzero(_statistic(dealt, counts, groups) >= observed - 1e-9)
    return float((1 + at_least) / (1 + permutations))


def _groups(texts: Sequence[str], length: int | None) -> np.ndarray:
    """Which texts begin with the same characters, (texts, groups) of 0 and 1."""
    beginnings = [text[:length] for text in texts]
    names = {name: i for i, name in enumerate(dict.fromkeys(beginnings))}
    return np.eye(len(names))[[names[name] for name in beginnings]]


def _statistic(dealt: np.ndarray, counts: np.ndarray, groups: Sequence[np.ndarray]) -> np.ndarray:
    """The statistic of each row of ``dealt``, the counts of one side, (rows,)."""
    total = np.zeros(len(dealt))
    for group in groups:
        a, both = dealt @ group, counts @ group
        total += ((2 * a - both) ** 2 / both).sum(axis=1)
    return total
