"""What a drafter learns and may keep from one request to the next."""

from .calibration import Calibration, Joint
from .config import AdaptiveConfig
from .logits import LogitCache, logit_priors, ORDERS
from .suffix import SuffixTrie, suffix_priors

class AdaptiveState:
    def __init__(self, config, vocabulary):
        self.config = config
        self.suffix = SuffixTrie(config.suffix_order)
        self.logits = LogitCache(vocabulary, config.max_entries)
        self.logit_calibrations = [Calibration(logit_priors(o)) for o in range(ORDERS)]
        self.suffix_calibration = Calibration(suffix_priors())
        self.joint = Joint()
