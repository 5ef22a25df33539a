"""The function for ``model.generate(custom_generate=lookahead.generate)``."""

from .generate import generate

__all__ = ["generate"]
