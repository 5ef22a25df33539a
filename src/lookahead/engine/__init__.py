"""From a model to text: the engine, loading, options, stop strings, streaming.

``loading.load`` makes an ``llm.LLM``. ``LLM.prepare`` turns a prompt into a request, ``engine.Engine`` decodes
requests together, and ``text.TextStream`` turns their tokens into text that is safe to show.

``options`` and ``fields`` do not load torch, and the names of this package are imported on first use, so ``--help``
does not load it either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoints import BUNDLED, default_model
    from .engine import Engine
    from .llm import LLM
    from .loading import load, refresh
    from .options import Options
    from .results import Result, Sequence, Stream, Update

__all__ = [
    "BUNDLED",
    "LLM",
    "Engine",
    "Options",
    "Result",
    "Sequence",
    "Stream",
    "Update",
    "default_model",
    "load",
    "refresh",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import checkpoints, engine, llm, loading, options, results

    modules = (checkpoints, engine, llm, loading, options, results)
    return next(getattr(module, name) for module in modules if hasattr(module, name))
