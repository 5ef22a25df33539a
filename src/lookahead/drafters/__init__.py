"""The drafting methods, one file each. Importing this package loads no numpy.

A new method is a subclass of ``lookahead.core.Drafter`` and one of ``lookahead.core.DraftState``. ``parse.METHODS``
lists the methods of this package by name.
"""

from .adaptive.drafter import Adaptive
from .jacobi import Jacobi
from .lookahead import PRESETS, Lookahead
from .parse import METHODS, as_drafter, known_names, with_old_keywords
from .plain import Plain
from .prompt_lookup import PromptLookup
from .window import Window

__all__ = [
    "METHODS",
    "PRESETS",
    "Adaptive",
    "Jacobi",
    "Lookahead",
    "Plain",
    "PromptLookup",
    "Window",
    "as_drafter",
    "known_names",
    "with_old_keywords",
]
