"""The drafting methods, one file each, and the registry of their names. Importing this loads no numpy.

A new method is a file here, with one subclass of ``lookahead.core.Drafter``, and a line in ``registry.METHODS``.
"""

from .autoregressive import AutoregressiveDrafter
from .jacobi import JacobiDrafter
from .lookahead import LookaheadDrafter
from .prompt_lookup import PromptLookupDrafter
from .registry import DEFAULT_METHOD, METHODS, OWN_SETTINGS, make_drafter, method_for
from .window import Window

__all__ = [
    "DEFAULT_METHOD", "METHODS", "OWN_SETTINGS", "AutoregressiveDrafter", "JacobiDrafter", "LookaheadDrafter",
    "PromptLookupDrafter", "Window", "make_drafter", "method_for",
]  # fmt: skip
