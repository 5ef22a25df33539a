"""Exact, training-free, draft-free acceleration of LLM decoding (lookahead decoding).

    llm = lookahead.load("path-or-hub-id")        # no argument: SmolLM2-135M-Instruct
    result = llm.generate("def quicksort(a):", max_new_tokens=200)

    model.generate(**inputs, custom_generate=lookahead.generate)

Importing this package loads neither torch nor transformers; what needs them is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .core import (
    PRESETS,
    LookaheadConfig,
    LookaheadError,
    NGramPool,
    NumericalError,
    OutOfMemory,
    SettingsError,
    Stats,
)
from .drafters import METHODS

if TYPE_CHECKING:
    from .engine import BUNDLED, LLM, Options, Result, load, refresh
    from .hf import generate

__version__ = "0.1.0"

__all__ = [
    "BUNDLED", "LLM", "METHODS", "PRESETS", "LookaheadConfig", "LookaheadError", "NGramPool", "NumericalError",
    "Options", "OutOfMemory", "Result", "SettingsError", "Stats", "__version__", "generate", "load", "refresh",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "lookahead.hf" if name == "generate" else "lookahead.engine"
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
