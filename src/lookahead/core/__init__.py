"""The algorithm, in plain Python: no torch, no numpy, nothing to install.

Letters used everywhere in the library:
    B sequences   Q rows of a step   T committed length   V vocabulary   H heads   D head size
    W window size   N n-gram size   G candidates per step (guess set size)   S compression ratio

Read in this order: ``tree``, ``target``, ``verify``, ``drafter``, ``decode``; then ``lookahead.drafters``.
"""

from .config import OFF, PRESETS, LookaheadConfig
from .decode import Decoder, Generation, Request, Step, decode
from .drafter import UNLIMITED_ROWS, Drafter, Noise
from .errors import LookaheadError, NumericalError, OutOfMemory, SettingsError
from .pool import NGramPool
from .stats import Stats, first_divergence
from .target import Scores, Target
from .tree import TokenTree
from .verify import Choose, greedy, verify

__all__ = [
    "OFF", "PRESETS", "UNLIMITED_ROWS", "Choose", "Decoder", "Drafter", "Generation", "LookaheadConfig",
    "LookaheadError", "NGramPool", "Noise", "NumericalError", "OutOfMemory", "Request", "Scores",
    "SettingsError", "Stats", "Step", "Target", "TokenTree", "decode", "first_divergence", "greedy", "verify",
]  # fmt: skip
