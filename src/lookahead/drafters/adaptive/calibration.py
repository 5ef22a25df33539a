"""What a proposal is worth: the observed share of right ones among proposals of its kind.

    probability of a bucket = (hits + prior_weight * prior) / (trials + prior_weight)

Each source has buckets of its own; two sources that agree say more than either, so the levels of confidence of all of
them choose a joint bucket, whose probability is the edge's.

- A suffix match: by order (tokens that match), share of the token among what followed, times seen, and whether this
  text has seen it.
- A row of the logit cache, one table by order: by height (sampling only: the best score, noise included, above the
  row's best logit), by origin (where the row stood), and by the lead of the best token over the second or the
  distance of another token from the best.
- Joint: by zone (how far from the root), by what the last step answered at this position, by the state of the suffix
  match, by the state of the logit cache. A state is a level of confidence in the token; or that the source proposes
  other tokens, its best at such a level; or that it proposes nothing.
"""

from __future__ import annotations

import json
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np

from .arrays import BUCKET, Calibration
from .compiling import compiled

PRIOR_WEIGHT = 4.0
#: No edge is surer than this, and the edges under one node together are not either.
MAX_PROBABILITY = 0.98
#: Trials after which old ones begin to fade, so that a warm state follows a change of workload.
MAX_TRIALS = 4000.0

#: Upper ends of the levels of confidence but the last.
LEVELS = (0.005, 0.015, 0.04, 0.1, 0.2, 0.35, 0.55, 0.75, 0.9)
#: Suffix matches: longest order that is told apart, upper ends of shares, kinds of one order.
MATCH_ORDERS = 8
SHARES = (0.12, 0.3, 0.55, 0.9)
MATCH_KINDS = (len(SHARES) + 1) * 3 * 2
#: The logit cache: keys of the last one, two and three tokens.
ORDERS = 3
#: Where a row stood: on the path, on a rejected branch, in the window.
ON_PATH, REJECTED, WINDOW = range(3)
#: Upper ends of leads and distances but the last.
DISTANCES = np.array([0.1, 0.25, 0.5, 0.8, 1.2, 1.7, 2.4, 3.3, 4.5, 6.5, 9.0], dtype=np.float32)
BINS = len(DISTANCES) + 1
#: Leads of the best token, then distances of others.
KINDS = 2 * BINS
#: The bin of a best token with no second one beside it.
NO_SECOND = BINS // 2
#: Bins of distances in steps of 1 / FINE, the last one for all beyond.
FINE = 20
BIN_OF = np.searchsorted(DISTANCES, np.arange(256) / FINE)
HEIGHTS = np.array([0.5, 1.5, 3.0], dtype=np.float32)
#: Joint buckets: the root's children, the next two depths, deeper.
ZONES = 3
#: The last step answered other tokens at this position or none, this one best, this one later.
ANSWERED_NOT, ANSWERED_BEST, ANSWERED_LATER = range(3)
ANSWERED = 3
#: States of a source: LEVELS, then OTHER + level, then NOTHING.
OTHER = len(LEVELS) + 1
NOTHING = 2 * OTHER
STATES = 2 * OTHER + 1
AGREEMENT = STATES * STATES
ZONE = ANSWERED * AGREEMENT


@compiled
def place_in(ends: Any, value: float) -> int:
    """Place of a value among intervals with these upper ends."""
    place = 0
    for end in ends:
        place += 1 if end < value else 0
    return place


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
    bucket.level = place_in(LEVELS, estimate)


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
    """Priors are sums of log-odds, one for each feature of a bucket, as scripts/fit_priors.py has fitted them."""
    fits = json.loads(Path(__file__).with_name("priors.json").read_text())["sampled" if sampled else "greedy"]
    odds = {kind: reduce(np.add.outer, features) for kind, features in fits.items()}
    shapes = {"logits": (ORDERS, -1), "matches": (-1,), "joint": (-1,)}
    logits, matches, joint = (1 / (1 + np.exp(-odds[kind].reshape(shape))) for kind, shape in shapes.items())
    parts = []
    for priors in (logits, np.stack([matches] * 2), joint):
        buckets = np.zeros(priors.shape, BUCKET)
        buckets["prior"] = priors
        load(buckets, buckets["hits"], buckets["trials"])
        parts.append(buckets)
    return parts[0], parts[1], parts[2]
