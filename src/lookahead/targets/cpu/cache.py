"""Keys and values of the lean path: one tensor for all layers, written in place, kept in fp32.

(layers, S slots, 2K, C capacity, D): the first K of the third axis are keys, the others values, so that a
layer's new rows are one copy and a commit is one gather and one scatter for the whole model. fp32 whatever
the model's dtype: without AMX the CPU attention of torch is several times slower in bf16, and sums in fp32
keep a row's value all but independent of the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class LeanCache:
    """Preallocated keys and values of many sequences; capacity and slots grow by doubling."""

    def __init__(
        self,
        layers: int,
        key_heads: int,
        head_size: int,
        capacity: int = 256,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.key_heads = key_heads
        self.slots = 1
        self.capacity = capacity
        self.storage = torch.zeros(layers, 1, 2 * key_heads, capacity, head_size, dtype=dtype)

    def nbytes(self) -> int:
        """Bytes held."""
        return self.storage.numel() * self.storage.element_size()

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for at least this many slots and tokens per slot, doubling what is too small."""
        new_slots, new_capacity = self.slots, self.capacity
        while new_slots < slots:
            new_slots *= 2
        while new_capacity < capacity:
            new_capacity *= 2
        if (new_slots, new_capacity) == (self.slots, self.capacity):
            return
        layers, _, heads, _, size = self.storage.shape
        new = self.storage.new_zeros(layers, new_slots, heads, new_capacity, size)
        new[:, : self.slots, :, : self.capacity] = self.storage
        self.storage, self.slots, self.capacity = new, new_slots, new_capacity

    def address(self, layer: int, slot: int, length: int) -> int:
        """Where row ``length`` of the slot's first key head lies in memory."""
        _, slots, lanes, capacity, size = self.storage.shape
        place = ((layer * slots + slot) * lanes * capacity + length) * size
        return self.storage.data_ptr() + place * self.storage.element_size()

    def heads(
        self, slot: int, begin: int, end: int, groups: int
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Keys and values of columns begin..end per layer, each (K, groups, end - begin, D), without a copy."""
        both = self.storage[:, slot, :, None, begin:end].expand(-1, -1, groups, -1, -1)
        return both[:, : self.key_heads].unbind(0), both[:, self.key_heads :].unbind(0)

    def move(self, slot: int, length: int, path: Sequence[int]) -> None:
        """Commit: bring the pending rows ``path`` of a slot in line behind its ``length`` tokens."""
        # Rows that already lie in place stay; path is increasing, so nothing is overwritten too early.
        start = next((i for i, row in enumerate(path) if row != i), len(path))
        if start == len(path):
            return
        source = torch.tensor([length + row for row in path[start:]])
        rows = self.storage[:, slot].index_select(2, source)
        self.storage[:, slot, :, length + start : length + len(path)] = rows
