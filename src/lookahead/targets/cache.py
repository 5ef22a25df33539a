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

from .kv_storage import KVStorage


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the rows of one forward pass go: B slots, Q rows each, behind T_b committed tokens.

    Attributes:
        slots, lengths: B entries each.
        rows: Q.
        index: (slots (B, 1), columns (B, Q)) on the device; None where B = 1.
        width: columns that attention sees.
    """

    slots: list[int]
    lengths: list[int]
    rows: int
    index: tuple[torch.Tensor, torch.Tensor] | None
    width: int


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
        return max(self.cache.placement.lengths)

    def get_max_length(self) -> int:
        return -1


class TreeCache(KVStorage, Cache):
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
        self.placement = Placement([0], [0], 0, None, 0)
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
            new = old.new_zeros(count, slots, heads, capacity, size)
            new[:, : self.slots, :, : self.capacity] = old
            self._storage[group] = new

    def clear(self) -> None:
        """All numbers are 0 again, in the same memory."""
        for storage in self._storage.values():
            storage.zero_()

    def place(self, slots: Sequence[int], lengths: Sequence[int], rows: int) -> None:
        """Say where the next pass writes; reserves the room."""
        self.reserve(max(slots) + 1, max(lengths) + rows)
        index = None
        if len(slots) > 1:
            first = torch.tensor(lengths, device=self.device)[:, None]
            columns = first + torch.arange(rows, device=self.device)[None]
            index = torch.tensor(slots, device=self.device)[:, None], columns
        self.placement = Placement(list(slots), list(lengths), rows, index, max(lengths) + rows)

    def write(self, layer: int, which: int, states: torch.Tensor) -> torch.Tensor:
        """Put rows (B, heads, Q, size) in place; return the slots' (B, heads, width, size)."""
        storage = self._of(layer, which)
        at = self.placement
        if at.index is None:
            slot, length = at.slots[0], at.lengths[0]
            storage[slot, :, length : length + at.rows] = states[0]
        else:
            storage[at.index[0], :, at.index[1]] = states.transpose(1, 2)
        low, high = min(at.slots), max(at.slots)
        if at.slots == list(range(low, high + 1)):
            return storage[low : high + 1, :, : at.width]
        assert at.index is not None
        return storage[at.index[0][:, 0], :, : at.width]

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
        layers: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for layer in range(len(self.layers)):
            if (layer, 0) not in self._place:
                layers.append(None)
                continue
            keys, values = (self._of(layer, which)[slot : slot + 1, :, :length] for which in (0, 1))
            layers.append((keys.clone(), values.clone()))
        return layers

    def _of(self, layer: int, which: int) -> torch.Tensor:
        """A layer's keys (0) or values (1), (S, heads, C, size)."""
        group, place = self._place[layer, which]
        return self._storage[group][place]
