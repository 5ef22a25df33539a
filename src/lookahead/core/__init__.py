"""The algorithm, in plain Python: no torch, no numpy, nothing to install.

Letters used everywhere in the library:
    B sequences   Q rows of a step   T committed length   V vocabulary   H heads   D head size
    W window size   N n-gram size   G candidates per step (guess set size)   S compression ratio

Read in this order: ``tree``, ``verify``, ``decode``; then ``lookahead.drafters``, one file per method.
"""

from .config import OFF, PRESETS, LookaheadConfig
from .decode import Decoder, Generation, Request, Stats, Step, decode
from .drafter import Drafter
from .errors import LookaheadError, NumericalError, OutOfMemory, SettingsError
from .pool import NGramPool, PoolStats
from .target import Scores, Target
from .tree import TokenTree
from .verify import speculative_sample, verify

__all__ = [
    "OFF",
    "PRESETS",
    "Decoder",
    "Drafter",
    "Generation",
    "LookaheadConfig",
    "LookaheadError",
    "NGramPool",
    "NumericalError",
    "OutOfMemory",
    "PoolStats",
    "Request",
    "Scores",
    "SettingsError",
    "Stats",
    "Step",
    "Target",
    "TokenTree",
    "decode",
    "speculative_sample",
    "verify",
]
