"""Keys and values as compiled attention reads them, in the model's dtype.

(layers, S slots, 2K, C capacity, D): the first K of the third axis are keys, the others values. A head's keys lie
transposed within every 16 columns, (C / 16, D, 16), or for tiles (C / 16, D / 2, 16, 2); its values as (C, D). D is
rounded up to whole vectors and tiles, and what is added stays zero; C is a multiple of 64, so that kernels may
compute a few columns too many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache import LeanCache
from .attention import SIDE, TURN


class NativeCache(LeanCache):
    """See ``LeanCache``; what differs is where a column of keys lies."""

    def __init__(
        self, layers: int, key_heads: int, head: int, capacity: int, dtype: torch.dtype, pair: int
    ) -> None:
        self._pair = pair
        super().__init__(layers, key_heads, head, -(-capacity // TURN) * TURN, dtype)

    def strides(self) -> tuple[int, int, int]:
        """Bytes from layer to layer, slot to slot and head to head."""
        size = self.storage.element_size()
        layer, slot, head = self.storage.stride()[:3]
        return layer * size, slot * size, head * size

    def move(self, slot: int, length: int, path: Sequence[int]) -> None:
        """Commit: bring the pending rows ``path`` of a slot in line behind its ``length`` tokens."""
        start = next((i for i, row in enumerate(path) if row != i), len(path))
        if start == len(path):
            return
        source = torch.tensor([length + row for row in path[start:]])
        target = torch.arange(length + start, length + len(path))
        mine = self.storage[:, slot]
        values = mine[:, self.key_heads :]
        values[:, :, target] = values[:, :, source]
        layers, _, capacity, head = mine.shape
        shape = (layers, self.key_heads, capacity // SIDE, head // self._pair, SIDE, self._pair)
        keys = mine[:, : self.key_heads].view(shape)
        keys[:, :, target // SIDE, :, target % SIDE] = keys[:, :, source // SIDE, :, source % SIDE]
