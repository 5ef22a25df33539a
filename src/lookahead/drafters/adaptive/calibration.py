"""What a proposal is worth: the observed share of right ones among proposals like it.

A bucket is a kind of proposal ("second best of a row seen behind the same three tokens, 2.1 logits behind").
Its estimate is (hits + 4 * prior) / (trials + 4): it starts at the prior and ends at the truth. Two sources
that agree say more than either, so estimates of the two main sources are sorted into levels, and a second
table of buckets is indexed by the pair of levels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache

PRIOR_WEIGHT = 4.0
#: No edge is surer than this, and the edges under one node together are not either.
SURE = 0.98
#: Trials after which old ones begin to fade, so that a warm state follows a change of workload.
MEMORY = 4000.0
#: Upper ends of the levels of confidence but the last.
LEVELS = (0.005, 0.015, 0.04, 0.1, 0.2, 0.35, 0.55, 0.75, 0.9)
COUNT = len(LEVELS) + 1
#: What a source says of a token: a level; silent, the source's best being of a level; or no word at all.
SILENT = COUNT
NOTHING = 2 * COUNT
STATES = 2 * COUNT + 1
#: How far from the root: the root itself, its children, deeper.
ZONES = 3
#: Further voices: none, the last step's first or later answer at this position, the window's n-grams, both.
VOICES = 5
VOICE_NONE, VOICE_JACOBI, VOICE_JACOBI_LATER, VOICE_NGRAM, VOICE_BOTH = range(VOICES)
CELLS = ZONES * VOICES * STATES * STATES


class Calibration:
    """Buckets of one source.

    Attributes:
        estimate: probability by bucket. levels: its level of confidence. Both are kept up to date.
    """

    __slots__ = ("estimate", "hits", "levels", "priors", "trials")

    def __init__(self, priors: Sequence[float]) -> None:
        self.priors = tuple(priors)
        estimate, levels = _beginning(self.priors)
        self.hits = [0.0] * len(estimate)
        self.trials = [0.0] * len(estimate)
        self.estimate = list(estimate)
        self.levels = list(levels)

    def load(self, hits: Sequence[float], trials: Sequence[float]) -> None:
        """Take counts over; there must be as many as buckets."""
        self.hits = list(hits)
        self.trials = list(trials)
        for bucket in range(len(self.priors)):
            self._update(bucket)

    def learn(self, buckets: Sequence[int], right: int) -> None:
        """Proposals were judged, verified or not: that at place ``right`` was right; -1 if none was."""
        hits, trials, priors = self.hits, self.trials, self.priors
        estimates, levels = self.estimate, self.levels
        for place, bucket in enumerate(buckets):
            hit = hits[bucket]
            if place == right:
                hit += 1.0
            trial = trials[bucket] + 1.0
            if trial > MEMORY:
                trial *= 0.5
                hit *= 0.5
            hits[bucket] = hit
            trials[bucket] = trial
            estimate = (hit + PRIOR_WEIGHT * priors[bucket]) / (trial + PRIOR_WEIGHT)
            estimates[bucket] = estimate if estimate < SURE else SURE
            levels[bucket] = bisect_left(LEVELS, estimate)

    def _update(self, bucket: int) -> None:
        estimate = (self.hits[bucket] + PRIOR_WEIGHT * self.priors[bucket]) / (
            self.trials[bucket] + PRIOR_WEIGHT
        )
        self.estimate[bucket] = estimate if estimate < SURE else SURE
        self.levels[bucket] = bisect_left(LEVELS, estimate)


@cache
def _beginning(priors: tuple[float, ...]) -> tuple[list[float], list[int]]:
    """Estimates and levels of buckets that nothing has been seen of."""
    return [min(SURE, prior) for prior in priors], [bisect_left(LEVELS, prior) for prior in priors]
