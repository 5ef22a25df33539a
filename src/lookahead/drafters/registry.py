"""The drafting methods by name. A new one is a file here and a line in ``METHODS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core import Drafter, LookaheadConfig, NGramPool, SettingsError
from .autoregressive import AutoregressiveDrafter
from .jacobi import JacobiDrafter
from .lookahead import LookaheadDrafter
from .prompt_lookup import PromptLookupDrafter


def _adaptive(config: Any, vocabulary: int, pool: Any) -> Drafter:
    """Imported when it is asked for, because it loads numpy and numba."""
    from .adaptive import AdaptiveDrafter

    return AdaptiveDrafter(config, vocabulary, pool)


#: method -> (config, vocabulary size, pool to keep) -> drafter of one sequence
METHODS: dict[str, Callable[[Any, int, Any], Drafter]] = {
    "lookahead": lambda config, vocabulary, pool: LookaheadDrafter(config, pool),
    "autoregressive": lambda config, vocabulary, pool: AutoregressiveDrafter(),
    "jacobi": lambda config, vocabulary, pool: JacobiDrafter(max(8, config.window_size), config.seed),
    "prompt-lookup": lambda config, vocabulary, pool: PromptLookupDrafter(),
    "adaptive": _adaptive,
}
#: Methods with settings of their own, which are not a (W, N, G) -> the names that only these have.
OWN_SETTINGS = {
    "adaptive": frozenset(
        ["max_rows", "budget", "sources", "suffix_order", "top", "sampled_top", "max_entries"]
    )
}
#: How to draft where neither a method nor settings are named.
DEFAULT_METHOD = "adaptive"


def method_for(method: str | None, config: Any = None, pool: Any = None) -> str:
    """``method``; where it is None the one that such settings or such a pool are for."""
    if method is not None:
        return method
    if isinstance(pool, NGramPool):
        return "lookahead"
    if config is None:
        return DEFAULT_METHOD
    if isinstance(config, Mapping):
        names = frozenset(config)
        return next((name for name, own in OWN_SETTINGS.items() if names & own), "lookahead")
    return "lookahead" if isinstance(config, (LookaheadConfig, str, tuple, list)) else DEFAULT_METHOD


def make_drafter(method: str, config: Any = None, vocabulary: int = 0, pool: Any = None) -> Drafter:
    """A fresh drafter.

    Args:
        method: a name in ``METHODS``.
        config: anything that ``LookaheadConfig.of`` takes, and (1, 1, 0) makes every method plain decoding;
            "adaptive" takes a ``lookahead.drafters.adaptive.AdaptiveConfig`` or a mapping of its settings.
        vocabulary: V, which "adaptive" keeps its tables by.
        pool: what a method keeps across calls: an ``NGramPool`` for lookahead, a
            ``lookahead.drafters.adaptive.AdaptiveState`` for adaptive.
    """
    if method not in METHODS:
        raise SettingsError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if method in OWN_SETTINGS and not isinstance(config, (LookaheadConfig, str, tuple, list)):
        return METHODS[method](config, vocabulary, pool)
    settings = LookaheadConfig.of(config)
    if settings.off:
        return AutoregressiveDrafter()
    return METHODS[method](settings, vocabulary, pool)
