"""What is learned from decoding: the logit cache and the calibrations of one way of decoding."""

from __future__ import annotations

from .calibration import Calibration
from .config import AdaptiveConfig
from .logits import ORDERS, LogitCache
from .priors import joint_priors, logit_priors, suffix_priors


class Calibrations:
    """The buckets of one way of decoding, greedy or sampled."""

    def __init__(self, sampled: bool) -> None:
        self.logits = [Calibration(logit_priors(order, sampled)) for order in range(ORDERS)]
        self.suffix = Calibration(suffix_priors(sampled))
        self.corpus = Calibration(suffix_priors(sampled))
        self.joint = Calibration(joint_priors(sampled))

    def all(self) -> list[Calibration]:
        """In the order in which they are saved."""
        return [*self.logits, self.suffix, self.corpus, self.joint]


class Tables:
    """Logits and calibrations of one way of decoding: greedy and sampled rows are kept differently."""

    def __init__(self, config: AdaptiveConfig, sampled: bool) -> None:
        self.logits = LogitCache(config.max_entries)
        self.calibrations = Calibrations(sampled)
