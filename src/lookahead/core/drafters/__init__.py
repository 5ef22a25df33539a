"""The drafting methods by name. A new one is a file here and a line in ``METHODS``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config import LookaheadConfig
from ..drafter import Drafter
from ..errors import SettingsError
from ..pool import NGramPool
from .autoregressive import AutoregressiveDrafter
from .jacobi import JacobiDrafter
from .lookahead import LookaheadDrafter
from .prompt_lookup import PromptLookupDrafter

__all__ = [
    "METHODS",
    "AutoregressiveDrafter",
    "JacobiDrafter",
    "LookaheadDrafter",
    "PromptLookupDrafter",
    "make_drafter",
]

#: method -> (config, vocabulary size, pool to keep) -> drafter of one sequence
METHODS: dict[str, Callable[[LookaheadConfig, int, NGramPool | None], Drafter]] = {
    "lookahead": LookaheadDrafter,
    "autoregressive": lambda config, vocabulary, pool: AutoregressiveDrafter(),
    "jacobi": lambda config, vocabulary, pool: JacobiDrafter(
        max(2, config.window_size), vocabulary, config.seed
    ),
    "prompt-lookup": lambda config, vocabulary, pool: PromptLookupDrafter(),
}


def make_drafter(
    method: str, config: Any = None, vocabulary: int = 0, pool: NGramPool | None = None
) -> Drafter:
    """A fresh drafter.

    Args:
        method: a name in ``METHODS``.
        config: anything that ``LookaheadConfig.of`` takes; (1, 1, 0) makes every method plain decoding.
        vocabulary: V, for guesses at random; 0 takes them from the prompt only.
        pool: an n-gram pool to keep across calls (lookahead only).
    """
    if method not in METHODS:
        raise SettingsError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    settings = LookaheadConfig.of(config)
    if settings.off:
        return AutoregressiveDrafter()
    return METHODS[method](settings, vocabulary, pool)
