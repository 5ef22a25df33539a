"""The probability that a proposed token is correct: the observed accuracy of proposals of its kind (its bucket).

    probability of a bucket = (hits + prior_weight * prior) / (trials + prior_weight)

Each source has its own buckets. Two sources that agree are more reliable than either alone, so the confidence levels
of all sources select a joint bucket, whose probability is the edge's.

An example. The suffix match proposes "the" as the only successor of five tokens, seen three times. Its bucket has
prior 0.60, hits 0, trials 0:

    before any proposal       (0 + 16 * 0.60) / (0 + 16) = 0.60      level 7, since 0.55 < 0.60 <= 0.75
    "the" was correct         (1 + 16 * 0.60) / (1 + 16) = 0.62      level 7
    29 more, 27 correct       (28 + 16 * 0.60) / (30 + 16) = 0.82    level 8, since 0.75 < 0.82 <= 0.9

The logit cache also proposes "the", as the best token with a lead of 1.5 over the second; its bucket has the estimate
0.50, level 6. The pair (match at level 8, cache at level 6), with the zone and the last step's answer, selects
the joint bucket. If that has 18 hits in 20 trials and the prior 0.85, the probability of the edge is
(18 + 16 * 0.85) / (20 + 16) = 0.88.

The features of a bucket:

- A suffix match: the order (number of matching tokens), the share of this token among all successors, how often it
  was seen, and whether it was last seen in this sequence.
- A row of the logit cache, one table for each order: the height (sampling only: the best score with noise minus the
  row's best logit), the origin (where the row was), and the lead of the best token over the second, or the distance
  of another token from the best.
- Joint: the zone (depth in the tree), the last step's answer at this position, the state of the suffix match,
  and the state of the logit cache. A state is a level of confidence in the token, or "proposes other tokens" with
  the level of the best one, or "proposes nothing".
- A guess of the light head: the level (how many of its own guesses the head has read), and the interval of its
  probability.
- Both, if the head has guessed: the level, the state of the head, and the state of all others together.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np

from ...machine_code import compiled
from .layout import BUCKET

#: Rows are the best of many proposals, so a small weight, whose estimates vary more, selects overestimated ones.
PRIOR_WEIGHT = 16.0
#: Upper limit of an edge's probability, and of the sum over the edges under one node.
MAX_PROBABILITY = 0.98
#: Beyond this many trials, hits and trials are halved, so that a warm state adapts to a new workload.
MAX_TRIALS = 4000.0

#: Upper ends of the confidence levels, except the last.
LEVELS = (0.005, 0.015, 0.04, 0.1, 0.2, 0.35, 0.55, 0.75, 0.9)
#: The logit cache has keys of the last one, two and three tokens.
ORDERS = 3
#: The origin of a row: on the path, or on a rejected branch.
ON_PATH, REJECTED = range(2)
ORIGINS = 2
#: Upper ends of the bins of leads and distances, except the last.
DISTANCES = np.array([0.1, 0.25, 0.5, 0.8, 1.2, 1.7, 2.4, 3.3, 4.5, 6.5, 9.0], dtype=np.float32)
BINS = len(DISTANCES) + 1
#: Leads of the best token, then distances of the others.
KINDS = 2 * BINS
#: The bin of the best token of a row without a second token.
NO_SECOND = BINS // 2
#: The bin of each distance in steps of 1 / FINE; the last entry is for all larger distances.
FINE = 20
BIN_OF = np.searchsorted(DISTANCES, np.arange(256) / FINE)
HEIGHTS = np.array([0.5, 1.5, 3.0], dtype=np.float32)
#: Joint buckets: the root's children, the next two depths, deeper.
ZONES = 3
#: Answers of the last step at a position: none or other tokens, this token first, this token later (``jacobi``).
ANSWERED = 3
#: States of a source: LEVELS, then OTHER + level, then NOTHING.
OTHER = len(LEVELS) + 1
NOTHING = 2 * OTHER
STATES = 2 * OTHER + 1
AGREEMENT = STATES * STATES
ZONE = ANSWERED * AGREEMENT


@compiled
def interval_of(ends: Any, value: float) -> int:
    """The index of the interval that contains a value, from the upper ends of the intervals."""
    index = 0
    for end in ends:
        index += 1 if end < value else 0
    return index


@compiled
def count(bucket: Any, right: bool) -> None:
    """Count one proposal of this bucket, whether or not it is a row of the tree."""
    hits = bucket.hits + (1.0 if right else 0.0)
    trials = bucket.trials + 1.0
    if trials > MAX_TRIALS:
        trials *= 0.5
        hits *= 0.5
    bucket.hits, bucket.trials = hits, trials
    estimate = (hits + PRIOR_WEIGHT * bucket.prior) / (trials + PRIOR_WEIGHT)
    bucket.probability = min(estimate, MAX_PROBABILITY)
    bucket.level = interval_of(LEVELS, estimate)


def load(buckets: Any, hits: Any, trials: Any) -> None:
    """Set the counts of all buckets; the arrays have the buckets' shape."""
    estimate = (hits + PRIOR_WEIGHT * buckets["prior"]) / (trials + PRIOR_WEIGHT)
    buckets["hits"] = hits
    buckets["trials"] = trials
    buckets["probability"] = np.minimum(estimate, MAX_PROBABILITY)
    buckets["level"] = np.searchsorted(LEVELS, estimate)


def new_buckets(fits: Sequence[Any], shape: tuple[int, ...] = (-1,)) -> Any:
    """Buckets without trials, with fitted priors.

    Args:
        fits: the log-odds of each axis of the buckets; a bucket's are their sum (``scripts/fit_priors.py``).
        shape: the shape of the result.
    """
    odds = reduce(np.add.outer, map(np.asarray, fits))
    return buckets_of(1 / (1 + np.exp(-odds.reshape(shape))))


def buckets_of(priors: Any) -> Any:
    """Buckets without trials, with these priors."""
    buckets = np.zeros(np.shape(priors), BUCKET)
    buckets["prior"] = priors
    load(buckets, buckets["hits"], buckets["trials"])
    return buckets


@cache
def fits_of(sampled: bool) -> dict[str, Any]:
    """The fitted log-odds by name, for greedy or sampled decoding."""
    fits = json.loads(Path(__file__).with_name("priors.json").read_text())
    return dict(fits["sampled" if sampled else "greedy"])
