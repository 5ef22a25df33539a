"""What is learned from decoding: the logit cache and the calibration of one way of decoding."""

from __future__ import annotations

from .calibration import new_calibration
from .config import AdaptiveConfig
from .sources.logit_cache import LogitCache


class Tables:
    """Greedy and sampled rows are kept apart: they hold different numbers of tokens, of different worth."""

    def __init__(self, config: AdaptiveConfig, sampled: bool) -> None:
        self.logits = LogitCache(config.max_entries, config.sampled_top if sampled else config.top)
        self.calibration = new_calibration(sampled)
