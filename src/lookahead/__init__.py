"""Exact, training-free, draft-free acceleration of LLM decoding (lookahead decoding).

    llm = lookahead.load("path-or-hub-id")        # no argument: SmolLM2-135M-Instruct
    result = llm.generate("def quicksort(a):", max_new_tokens=200, drafter=lookahead.Lookahead(15, 5, 15))

    model.generate(**inputs, custom_generate=lookahead.generate)

This package does not import torch or transformers; names that need them are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .core import LookaheadError, NumericalError, OutOfMemory, Result, SettingsError, Stats
from .drafters import Adaptive, Jacobi, Lookahead, NGramPool, Plain, PromptLookup, as_drafter

if TYPE_CHECKING:
    from .drafters.adaptive.state import AdaptiveState
    from .hf.custom_generate import generate
    from .hf.sampling import as_torch
    from .llm import LLM
    from .loading import BUNDLED, default_model, load, refresh
    from .options import Options

__version__ = "0.1.0"

__all__ = [
    "BUNDLED",
    "LLM",
    "Adaptive",
    "AdaptiveState",
    "Jacobi",
    "Lookahead",
    "LookaheadError",
    "NGramPool",
    "NumericalError",
    "Options",
    "OutOfMemory",
    "Plain",
    "PromptLookup",
    "Result",
    "SettingsError",
    "Stats",
    "__version__",
    "as_drafter",
    "as_torch",
    "default_model",
    "generate",
    "load",
    "refresh",
]
#: The module of each name that is imported on first use.
MODULES = {
    "BUNDLED": "loading",
    "LLM": "llm",
    "AdaptiveState": "drafters.adaptive.state",
    "Options": "options",
    "as_torch": "hf.sampling",
    "default_model": "loading",
    "generate": "hf.custom_generate",
    "load": "loading",
    "refresh": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{MODULES[name]}")
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise ImportError(
            f"lookahead.{name} needs {error.name}; pip install 'lookahead-decoding[transformers]'"
        ) from None
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
