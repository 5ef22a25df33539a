"""What a proposal is worth: the observed share of right ones among proposals of its kind.

    probability of a bucket = (hits + prior_weight * prior) / (trials + prior_weight)

It starts at the prior and ends at the truth. ``buckets`` tells the kinds: two sources that agree say more than
either, so the levels of confidence of all of them choose a joint bucket, whose probability is the edge's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from .arrays import BUCKET, Calibration
from .buckets import LEVELS, ORDERS
from .compiling import compiled
from .priors import joint_priors, logit_priors, match_priors

PRIOR_WEIGHT = 4.0
#: No edge is surer than this, and the edges under one node together are not either.
MAX_PROBABILITY = 0.98
#: Trials after which old ones begin to fade, so that a warm state follows a change of workload.
MAX_TRIALS = 4000.0


@compiled
def learn(bucket: Any, right: bool) -> None:
    """A proposal of this kind was judged, verified or not."""
    hits = bucket.hits + (1.0 if right else 0.0)
    trials = bucket.trials + 1.0
    if trials > MAX_TRIALS:
        trials *= 0.5
        hits *= 0.5
    bucket.hits, bucket.trials = hits, trials
    estimate = (hits + PRIOR_WEIGHT * bucket.prior) / (trials + PRIOR_WEIGHT)
    bucket.probability = min(estimate, MAX_PROBABILITY)
    level = 0
    for end in LEVELS:
        level += 1 if end < estimate else 0
    bucket.level = level


def load(buckets: Any, hits: Any, trials: Any) -> None:
    """Take counts over; there must be as many as buckets."""
    estimate = (hits + PRIOR_WEIGHT * buckets["prior"]) / (trials + PRIOR_WEIGHT)
    buckets["hits"], buckets["trials"] = hits, trials
    buckets["probability"] = np.minimum(estimate, MAX_PROBABILITY)
    buckets["level"] = np.searchsorted(LEVELS, estimate)


def new_calibration(sampled: bool) -> Calibration:
    """Buckets of which nothing has been seen, for greedy or sampled decoding."""
    return Calibration(*(part.copy() for part in _beginning(sampled)))


@cache
def _beginning(sampled: bool) -> tuple[Any, Any, Any]:
    logits = [logit_priors(order, sampled) for order in range(ORDERS)]
    parts = []
    for priors in (logits, [match_priors(sampled)] * 2, joint_priors(sampled)):
        buckets = np.zeros(np.shape(priors), BUCKET)
        buckets["prior"] = priors
        load(buckets, buckets["hits"], buckets["trials"])
        parts.append(buckets)
    return parts[0], parts[1], parts[2]
