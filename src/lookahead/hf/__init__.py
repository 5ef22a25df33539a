"""The function for ``model.generate(custom_generate=lookahead.generate)``."""

from .custom_generate import generate

__all__ = ["generate"]
