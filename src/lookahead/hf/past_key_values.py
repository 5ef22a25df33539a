"""Returns the keys and values of a sequence in transformers' own cache (``past_key_values``)."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import DynamicCache

from ..core import Target
from .module_families import tensor_of


class KeepingTarget:
    """A target that keeps its only sequence after its end, so that its cache can be read."""

    def __init__(self, target: Target) -> None:
        self._target: Any = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def release(self, slot: int) -> None:
        """Keep the slot."""


def fill_cache(target: Any, given: Any, config: Any) -> DynamicCache:
    """Copy the keys and values of slot 0 into ``given`` if it is an empty ``DynamicCache``, else into a new one."""
    cache = given
    if not isinstance(cache, DynamicCache) or cache.get_seq_length() > 0:
        cache = DynamicCache(config=config)
    for layer, pair in enumerate(target.read(0)):
        if pair is not None:
            keys, values = (tensor_of(part) if isinstance(part, np.ndarray) else part for part in pair)
            cache.update(keys, values, layer)
    return cache
