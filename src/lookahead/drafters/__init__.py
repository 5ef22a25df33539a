"""The drafting methods, one module or package each. Importing this package does not import numpy.

A new method is a subclass of ``lookahead.core.Drafter`` and one of ``lookahead.core.DraftState``. ``names.METHODS``
lists the methods of this package by name.
"""

from .adaptive.drafter import Adaptive
from .jacobi import Jacobi
from .lookahead import PRESETS, Lookahead
from .names import METHODS, as_drafter, known_names
from .plain import Plain
from .pool import NGramPool, ngrams_of
from .prompt_lookup import PromptLookup
from .window import Window

__all__ = [
    "METHODS",
    "PRESETS",
    "Adaptive",
    "Jacobi",
    "Lookahead",
    "NGramPool",
    "Plain",
    "PromptLookup",
    "Window",
    "as_drafter",
    "known_names",
    "ngrams_of",
]
