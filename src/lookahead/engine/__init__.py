"""The engine: requests in, tokens and text out, for any number of sequences on one model.

``engine.Engine`` decodes requests together; ``text.TextStream`` turns their tokens into text that is safe to show.
"""

from .engine import Engine, PassFailed
from .results import Result, Sequence, Stream, Update

__all__ = ["Engine", "PassFailed", "Result", "Sequence", "Stream", "Update"]
