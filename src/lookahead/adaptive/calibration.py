"""What a proposal is worth: the observed share of right ones among proposals like it.

A bucket is a kind of proposal ("third best of a row seen behind the same three tokens, 2.1 logits behind").
Its estimate is (hits + 4 * prior) / (trials + 4), so that it starts at the prior and ends at the truth.
"""

from __future__ import annotations

from collections.abc import Sequence

PRIOR_WEIGHT = 4.0
#: No edge is surer than this, and the edges under one node together are not either.
SURE = 0.98
#: Trials after which old ones begin to fade, so that a warm state follows a change of workload.
MEMORY = 4000.0


class Calibration:
    """Buckets of one source.

    Attributes:
        estimate: probability by bucket, kept up to date; read it, do not write it.
    """

    __slots__ = ("estimate", "levels", "hits", "priors", "trials")

    def __init__(self, priors: Sequence[float]) -> None:
        self.priors = list(priors)
        self.clear()

    def clear(self) -> None:
        """Back to the priors."""
        self.hits = [0.0] * len(self.priors)
        self.trials = [0.0] * len(self.priors)
        self.estimate = [min(SURE, p) for p in self.priors]
        self.levels = [level(p) for p in self.estimate]

    def learn(self, bucket: int, hit: bool) -> None:
        """One proposal was right or wrong, whether or not it was verified."""
        trials = self.trials[bucket] + 1.0
        hits = self.hits[bucket] + hit
        if trials > MEMORY:
            trials *= 0.5
            hits *= 0.5
        self.trials[bucket] = trials
        self.hits[bucket] = hits
        estimate = (hits + PRIOR_WEIGHT * self.priors[bucket]) / (trials + PRIOR_WEIGHT)
        self.estimate[bucket] = estimate if estimate < SURE else SURE
        self.levels[bucket] = level(estimate)


#: Levels of confidence: the upper ends of their ranges.
LEVELS = (0.005, 0.015, 0.04, 0.1, 0.2, 0.35, 0.55, 0.75, 0.9)
NL = len(LEVELS) + 1
NONE = 2 * NL


def level(p):
    n = 0
    for x in LEVELS:
        n += p > x
    return n


class Joint:
    """cell[D][lv][sv]"""
    def __init__(self):
        mid = [0.002, 0.008, 0.025, 0.07, 0.15, 0.27, 0.45, 0.65, 0.83, 0.95]
        W = self.W = 2 * NL + 1
        self.hits = [0.0] * (2 * W * W)
        self.trials = [0.0] * (2 * W * W)
        self.prior = [0.0] * (2 * W * W)
        for D in (0, 1):
            for a in range(W):
                for b in range(W):
                    pa = mid[a] if a < NL else 0.0
                    pb = mid[b] if b < NL else 0.0
                    p = max(pa, pb)
                    self.prior[(D * W + a) * W + b] = p
        self.p = list(self.prior)

    def learn(self, cell, hit):
        t = self.trials[cell] + 1
        h = self.hits[cell] + hit
        self.trials[cell] = t
        self.hits[cell] = h
        p = (h + 4 * self.prior[cell]) / (t + 4)
        self.p[cell] = p if p < SURE else SURE
