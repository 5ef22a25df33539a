"""The KV cache of the transformers target: rows are written in place, a commit moves only accepted rows.

All keys and values of one shape share one tensor (count, S slots, heads, C capacity, head size), so that a commit
is one gather and one scatter however many layers there are, and costs the same at any context length.
Capacity and slots grow by doubling. Layers with a sliding window are kept whole; the mask does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .kv_storage import SharedStorage


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the rows of one forward pass go, and what attention sees: B sequences, Q rows each.

    Attributes:
        slots, columns: one slot and a slice of Q columns, or two tensors that index together as (B, Q).
        seen: the slots (B) whose columns up to ``width`` attention is handed.
        length: of the longest sequence before the pass.
    """

    slots: int | torch.Tensor
    columns: slice | torch.Tensor
    seen: slice | torch.Tensor
    width: int
    length: int = 0


class TreeLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's window on the shared storage."""

    is_sliding = False

    def __init__(self, cache: TreeCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache
        self.index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: storage is laid out before the first pass."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write rows (B, heads, Q, head size); return (B, heads, width, head size) for both."""
        return self.cache.write(self.index, 0, key_states), self.cache.write(self.index, 1, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.placement.length

    def get_max_length(self) -> int:
        return -1


class TreeCache(SharedStorage, Cache):
    """Preallocated keys and values of many sequences.

    Args:
        shapes: per layer (heads, key head size, value head size); None for a layer that keeps nothing.
        dtype, device: of the keys and values.
        capacity: tokens per slot to begin with.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int] | None],
        dtype: torch.dtype,
        device: torch.device,
        capacity: int = 256,
    ) -> None:
        Cache.__init__(self, layers=[TreeLayer(self, i) for i in range(len(shapes))])
        self.device = device
        self.capacity = capacity
        self.slots = 1
        self.placement = Placement(0, slice(0), slice(1), 0)
        # (layer, 0 for keys or 1 for values) -> ((heads, head size), place among those of this shape)
        self._place: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
        counts: dict[tuple[int, int], int] = {}
        for layer, shape in enumerate(shapes):
            for which, size in enumerate(shape[1:] if shape is not None else ()):
                group = (shape[0], size)  # type: ignore[index]
                self._place[layer, which] = group, counts.get(group, 0)
                counts[group] = counts.get(group, 0) + 1
        self._storage = {
            (heads, size): torch.zeros(count, 1, heads, capacity, size, dtype=dtype, device=device)
            for (heads, size), count in counts.items()
        }

    def _grow(self, slots: int, capacity: int) -> None:
        for group, old in self._storage.items():
            count, _, heads, _, size = old.shape
            self._storage[group] = new = old.new_zeros(count, slots, heads, capacity, size)
            new[:, : self.slots, :, : self.capacity] = old

    def clear(self) -> None:
        """All numbers are 0 again, in the same memory."""
        for storage in self._storage.values():
            storage.zero_()

    def place(self, slots: Sequence[int], lengths: Sequence[int], rows: int) -> None:
        """Say where the next pass writes: ``rows`` of each slot behind its tokens; reserves the room."""
        longest = max(lengths)
        self.reserve(max(slots) + 1, longest + rows)
        if len(slots) == 1:
            slot, columns = slots[0], slice(longest, longest + rows)
            self.placement = Placement(slot, columns, slice(slot, slot + 1), longest + rows, longest)
            return
        at = torch.tensor(slots, device=self.device)
        first = torch.tensor(lengths, device=self.device)[:, None]
        together = list(slots) == list(range(slots[0], slots[0] + len(slots)))
        seen = slice(slots[0], slots[0] + len(slots)) if together else at
        columns_of_all = first + torch.arange(rows, device=self.device)
        self.placement = Placement(at[:, None], columns_of_all, seen, longest + rows, longest)

    def write(self, layer: int, which: int, states: torch.Tensor) -> torch.Tensor:
        """Put rows (B, heads, Q, size) in place; return the slots' (B, heads, width, size)."""
        storage, at = self._of(layer, which), self.placement
        if isinstance(at.columns, slice):
            storage[at.slots, :, at.columns] = states[0]
        else:
            storage[at.slots, :, at.columns] = states.transpose(1, 2)
        return storage[at.seen, :, : at.width]

    def copy(self, slot: int, source: int, length: int) -> None:
        for storage in self._storage.values():
            storage[:, slot, :, :length] = storage[:, source, :, :length]

    def move(self, slot: int, length: int, path: Sequence[int]) -> None:
        # Rows that already lie in place stay; path is increasing, so nothing is overwritten too early.
        start = next((i for i, row in enumerate(path) if row != i), len(path))
        if start == len(path):
            return
        source = torch.tensor([length + row for row in path[start:]], device=self.device)
        for storage in self._storage.values():
            rows = storage[:, slot].index_select(2, source)
            storage[:, slot, :, length + start : length + len(path)] = rows

    def read(self, slot: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Keys and values of a slot's first ``length`` tokens, per layer, each (1, heads, length, size)."""

        def copied(layer: int, which: int) -> torch.Tensor:
            return self._of(layer, which)[slot : slot + 1, :, :length].clone()

        layers = range(len(self.layers))
        return [(copied(i, 0), copied(i, 1)) if (i, 0) in self._place else None for i in layers]

    def _of(self, layer: int, which: int) -> torch.Tensor:
        """A layer's keys (0) or values (1), (S, heads, C, size)."""
        group, place = self._place[layer, which]
        return self._storage[group][place]
