"""The algorithm in plain Python. It uses only the standard library: no torch, no numpy.

Notation throughout the library:
    B sequences   Q rows of a step   T committed length   V vocabulary   H heads   D head size
    W window size   N n-gram size   G candidates per step (guess set size)   S compression ratio

Read in this order: ``tree``, ``target``, ``verify``, ``drafter``, ``sequence``, ``loop``; then
``lookahead.drafters``.
"""

from .drafter import UNLIMITED_ROWS, Drafter, DraftState, Noise, Start
from .errors import LookaheadError, NumericalError, OutOfMemory, SettingsError
from .loop import Engine, PassFailed, decode
from .sequence import Request, Result, Sequence, Update
from .stats import Stats, common_prefix, first_divergence
from .target import Scores, Target
from .tree import TokenTree
from .verify import Choose, greedy, verify

__all__ = [
    "UNLIMITED_ROWS",
    "Choose",
    "DraftState",
    "Drafter",
    "Engine",
    "LookaheadError",
    "Noise",
    "NumericalError",
    "OutOfMemory",
    "PassFailed",
    "Request",
    "Result",
    "Scores",
    "Sequence",
    "SettingsError",
    "Start",
    "Stats",
    "Target",
    "TokenTree",
    "Update",
    "common_prefix",
    "decode",
    "first_divergence",
    "greedy",
    "verify",
]
