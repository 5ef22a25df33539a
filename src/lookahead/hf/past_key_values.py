"""Returns the keys and values of a sequence in transformers' own cache (``past_key_values``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import Cache

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


def fill_cache(target: Any, given: Any, mask: torch.Tensor | None) -> Cache:
    """Copy the keys and values of slot 0 into an empty cache, as transformers would have filled it.

    Args:
        target: see ``KeepingTarget``; its sequence has no padding.
        given: the cache that transformers or the caller made for this call.
        mask: the attention mask (1, L) of the prompt; None without padding. Hidden columns become zeros, because the
            caller's mask hides them in later calls too.
    """
    for layer, pair in enumerate(target.read(0)):
        if pair is not None:
            parts = [tensor_of(part) if isinstance(part, np.ndarray) else part for part in pair]
            keys, values = (_with_padding(part, mask) for part in parts)
            given.update(keys, values, layer)
    return given


def _with_padding(part: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Keys or values (1, H, n, D) with zeros in the columns that the mask hides."""
    if mask is None:
        return part
    seen = mask[0].bool().to(part.device)
    hidden = int((~seen).sum())
    seen = torch.cat([seen, seen.new_ones(part.shape[2] + hidden - len(seen))])
    whole = part.new_zeros(*part.shape[:2], len(seen), part.shape[3])
    whole[:, :, seen] = part
    return whole
