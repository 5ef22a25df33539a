"""From a model to text: loading, options, detokenisation, stop strings, streaming. Talks to targets and core.

``loading.load`` gives an ``llm.LLM``. Of a prompt, ``prompts.encode`` makes token ids, ``results.decode_prompts``
drives the core's Decoder, and ``text.TextStream`` gives text that is safe to show.

``options`` and ``fields`` load no torch, so that ``--help`` does not either: names are imported when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoints import BUNDLED
    from .llm import LLM
    from .loading import load, refresh
    from .options import Options
    from .results import Result, Stream, Update

__all__ = ["BUNDLED", "LLM", "Options", "Result", "Stream", "Update", "load", "refresh"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import checkpoints, llm, loading, options, results

    modules = (checkpoints, llm, loading, options, results)
    return next(getattr(module, name) for module in modules if hasattr(module, name))
