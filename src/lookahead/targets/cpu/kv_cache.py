"""Keys and values as compiled attention reads them, in the model's dtype; written in place, moved only by a commit.

(layers, S slots, 2K, C capacity, D): the first K of the third axis are keys, the others values, so that a commit is
one gather and one scatter for the whole model. A head's keys lie in blocks of 16 columns, (C / 16, D, 16), or for
tiles (C / 16, D / 2, 16, 2); its values as (C, D). D is rounded up to whole vectors and tiles, and what is added
stays zero; C is a multiple of 64, so that kernels may compute a few columns too many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kv_storage import KVStorage
from .execution_plan import KEY_BLOCK, SCORE_BLOCK
from .packed_weights import round_up


class KVCache(KVStorage):
    """Preallocated keys and values of many sequences; capacity and slots grow by doubling.

    Args:
        capacity: tokens per slot to begin with.
        head_size: D as it is padded.
        key_pair: neighbours of a key that lie together.
    """

    def __init__(
        self, layers: int, key_heads: int, head_size: int, capacity: int, dtype: torch.dtype, key_pair: int
    ) -> None:
        self.key_heads, self.slots, self._key_pair = key_heads, 1, key_pair
        self.capacity = round_up(max(capacity, 1), SCORE_BLOCK)
        self.storage = torch.zeros(layers, 1, 2 * key_heads, self.capacity, head_size, dtype=dtype)

    def _grow(self, slots: int, capacity: int) -> None:
        layers, _, heads, _, size = self.storage.shape
        new = self.storage.new_zeros(layers, slots, heads, capacity, size)
        new[:, : self.slots, :, : self.capacity] = self.storage
        self.storage = new

    def strides(self) -> tuple[int, int, int]:
        """Bytes from layer to layer, slot to slot and head to head."""
        layer, slot, head = (stride * self.storage.element_size() for stride in self.storage.stride()[:3])
        return layer, slot, head

    def move(self, slot: int, length: int, path: Sequence[int]) -> None:
        if list(path) == list(range(len(path))):  # they lie in place
            return
        source, target = torch.tensor(path) + length, torch.arange(len(path)) + length
        mine = self.storage[:, slot]
        values = mine[:, self.key_heads :]
        values[:, :, target] = values[:, :, source]
        layers, _, capacity, head = mine.shape
        blocks = (capacity // KEY_BLOCK, head // self._key_pair, KEY_BLOCK, self._key_pair)
        keys = mine[:, : self.key_heads].view(layers, self.key_heads, *blocks)
        moved = keys[:, :, source // KEY_BLOCK, :, source % KEY_BLOCK]
        keys[:, :, target // KEY_BLOCK, :, target % KEY_BLOCK] = moved
