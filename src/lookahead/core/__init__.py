"""The algorithm, in plain Python: no torch, no numpy, nothing to install.

Letters used everywhere in the library:
    B sequences   Q rows of a step   T committed length   V vocabulary   H heads   D head size
    W window size   N n-gram size   G candidates per step (guess set size)   S compression ratio

Read in this order: ``tree``, ``verify``, ``decode``, then ``pool``, ``window`` and one drafter.
"""

from .config import OFF, PRESETS, LookaheadConfig
from .decode import Decoder, Generation, Request, Stats, Step, decode
from .drafter import Drafter
from .drafters import DEFAULT_METHOD, METHODS, make_drafter, method_for
from .errors import LookaheadError, NumericalError, OutOfMemory, SettingsError
from .pool import NGramPool, PoolStats
from .target import Scores, Target
from .tree import TokenTree
from .verify import speculative_sample, verify
from .window import Window

__all__ = [
    "DEFAULT_METHOD",
    "METHODS",
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
    "Window",
    "decode",
    "make_drafter",
    "method_for",
    "speculative_sample",
    "verify",
]
