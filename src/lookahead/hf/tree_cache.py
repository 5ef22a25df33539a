"""The KV cache of the transformers target: shared tensors behind the cache interface of transformers models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..core.kv_storage import KVStorage
from .cuda import to_device

#: Capacities that were not reached by doubling are multiples of this.
STEP = 256
#: ((heads, head size), slot) -> keys or values (count, heads, T, head size).
Contents = dict[tuple[tuple[int, int], int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one forward pass writes its rows and which columns attention reads, for B sequences of Q rows.

    Attributes:
        slots, columns: where rows are written: one slot and a slice of Q columns, or two index tensors that broadcast
            to (B, Q).
        read_slots: the B slots that attention reads.
        width: the number of columns that attention reads, from the first on.
        length: T of the longest sequence before the pass.
    """

    slots: int | torch.Tensor
    columns: slice | torch.Tensor
    read_slots: slice | torch.Tensor
    width: int
    length: int = 0


class TreeLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a ``TreeCache``, with the interface that transformers models expect."""

    is_sliding = False

    def __init__(self, cache: TreeCache, index: int) -> None:
        super().__init__()
        self.cache = cache
        self.index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """No-op: the storage exists before the first pass."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values (B, heads, Q, head size) of this pass; return both as (B, heads, width, head
        size)."""
        return self.cache.write(self.index, 0, key_states), self.cache.write(self.index, 1, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.placement.length

    def get_max_length(self) -> int:
        return -1


class TreeCache(KVStorage, Cache):  # type: ignore[misc]
    """The KV cache of the transformers target.

    All keys and values of one shape share one tensor (count, S slots, heads, C capacity, head size), so a commit is
    one gather and one scatter for any number of layers and sequences, and a batch is a view of the tensor. Slots and
    capacity grow by doubling. Layers with a sliding window keep all columns; the mask limits what they see.

    Args:
        shapes: per layer (heads, key head size, value head size); None for a layer without keys and values.
        dtype, device: dtype and device of the keys and values.
        capacity: initial capacity of a slot, in tokens.

    Attributes:
        slots: number of sequences that fit.
        capacity: tokens per slot.
        lengths: by slot in use, T, the number of committed tokens; kept by the target.
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
        self.dtype = dtype
        self.capacity = capacity
        self.slots = 1
        self.lengths: dict[int, int] = {}
        self.placement = Placement(0, slice(0), slice(1), 0)
        self._waiting: Contents = {}  # sequences in host memory, while there is no memory for them on the device
        self._used: dict[int, int] = {}  # slot -> end of the columns that passes wrote; the others are 0
        # (layer, 0 for keys or 1 for values) -> ((heads, head size), index in the tensor of that shape)
        self._index: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}
        self._counts: dict[tuple[int, int], int] = {}
        for layer, shape in enumerate(shapes):
            for which, size in enumerate(shape[1:] if shape is not None else ()):
                group = (shape[0], size)  # type: ignore[index]
                self._index[layer, which] = group, self._counts.get(group, 0)
                self._counts[group] = self._counts.get(group, 0) + 1
        self._storage = self._filled(1, capacity, {})

    @property
    def bytes(self) -> int:
        """Memory of all keys and values."""
        return sum(storage.nbytes for storage in self._storage.values())

    def make_room(self, slot: int, length: int) -> None:
        self.reserve(slot + 1, length)

    def grown(self, slots: int, capacity: int) -> tuple[int, int]:
        """Slots and capacity with room for ``slots`` slots of ``capacity`` tokens, by doubling what is too small."""
        new_slots, new_capacity = self.slots, self.capacity or STEP
        while new_slots < slots:
            new_slots *= 2
        while new_capacity < capacity:
            new_capacity *= 2
        return new_slots, new_capacity

    def reserve(self, slots: int, capacity: int) -> None:
        """Ensure room for at least ``slots`` slots of ``capacity`` tokens.

        If no slot is in use, the old memory is freed before new memory is taken. Otherwise both exist while sequences
        are copied. If both do not fit, the sequences are staged in host memory; if the doubled size does not fit,
        only what the slots in use need is allocated.

        Raises:
            RuntimeError: out of memory. The cache is unchanged; or, if not even its old size fits any more, it has no
                memory, and the sequences in use stay in host memory until a later call finds room for them.
        """
        waiting = self._contents() if self._waiting else {}
        capacity = max([capacity, *(states.shape[2] for states in waiting.values())])
        in_use = max([slots, *(slot + 1 for slot in self.lengths)])
        before, wanted = (self.slots, self.capacity), self.grown(in_use, capacity)
        if wanted == before:
            return
        least = in_use, max(-(-capacity // STEP) * STEP, self.capacity)
        if self.lengths:
            try:
                self._replace(wanted, self._filled(*wanted, self._contents()))
                return
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                pass
        sizes = (wanted, least, before) if self.capacity else (wanted, least)
        self._waiting = self._contents(on_host=True)
        self._storage = {}
        self.slots = 1  # later calls ask only for the slots in use
        self.capacity = 0
        error = None
        for size in sizes:
            try:
                self._replace(size, self._filled(*size, self._waiting))
                break
            except RuntimeError as raised:
                error = raised.with_traceback(None)  # its frames hold the memory that was allocated
        if error is not None and (self.slots, self.capacity) not in (wanted, least):
            raise error

    def _contents(self, on_host: bool = False) -> Contents:
        """The keys and values of all slots in use, including pending rows."""
        if self._waiting:
            return {key: states for key, states in self._waiting.items() if key[1] in self.lengths}
        return {
            (group, slot): storage[:, slot, :, :end].to("cpu" if on_host else self.device)
            for group, storage in self._storage.items()
            for slot, end in self._used.items()
            if slot in self.lengths
        }

    def _filled(self, slots: int, capacity: int, contents: Contents) -> dict[tuple[int, int], torch.Tensor]:
        """New memory with these contents, and 0 elsewhere."""
        options: Any = {"dtype": self.dtype, "device": self.device}
        storage = {
            (heads, size): torch.zeros(count, slots, heads, capacity, size, **options)
            for (heads, size), count in self._counts.items()
        }
        for (group, slot), states in contents.items():
            storage[group][:, slot, :, : states.shape[2]] = states
        return storage

    def _replace(self, size: tuple[int, int], storage: dict[tuple[int, int], torch.Tensor]) -> None:
        self.slots, self.capacity = size
        self._storage = storage
        self._waiting = {}
        self._used = {slot: end for slot, end in self._used.items() if slot in self.lengths}

    def clear(self) -> None:
        """Set all keys and values to 0, in the same memory, and free all slots."""
        for storage in self._storage.values():
            storage.zero_()
        self._waiting = {}
        self._used.clear()
        self.lengths.clear()

    def free(self) -> None:
        """Free the memory. ``reserve`` allocates new memory."""
        self._storage = {}
        self._waiting = {}
        self.slots = 1
        self.capacity = 0
        self._used.clear()
        self.lengths.clear()

    def occupy(self, slot: int, end: int) -> None:
        """Prepare a pass that writes a slot's columns up to ``end``: zero everything after them.

        Attention may multiply columns that no row sees by a weight of 0. An earlier, longer sequence in the slot, or
        rejected rows of a larger step, may have left NaN or infinity there, and 0 times these is NaN.
        """
        used = self._used.get(slot, 0)
        if used > end:
            for storage in self._storage.values():
                storage[:, slot, :, end:used] = 0
        self._used[slot] = end

    def place(self, slots: Sequence[int], lengths: Sequence[int], rows: int) -> None:
        """Place the next pass: ``rows`` rows per slot, after its committed tokens. Reserves the room."""
        longest = max(lengths)
        self.reserve(max(slots) + 1, longest + rows)
        for slot, length in zip(slots, lengths, strict=True):
            self.occupy(slot, length + rows)
        if len(slots) == 1:
            slot = slots[0]
            columns = slice(longest, longest + rows)
            self.placement = Placement(slot, columns, slice(slot, slot + 1), longest + rows, longest)
            return
        index, starts = to_device([list(slots), list(lengths)], torch.long, self.device)
        # Adjacent slots are read as a view; other slots are gathered, which copies their whole context.
        adjacent = list(slots) == list(range(slots[0], slots[0] + len(slots)))
        read_slots = slice(slots[0], slots[0] + len(slots)) if adjacent else index
        write_columns = starts[:, None] + torch.arange(rows, device=self.device)
        self.placement = Placement(index[:, None], write_columns, read_slots, longest + rows, longest)

    def write(self, layer: int, which: int, states: torch.Tensor) -> torch.Tensor:
        """Write a layer's keys (0) or values (1), (B, heads, Q, size); return what attention reads of the layer,
        (B, heads, width, size)."""
        storage = self._of(layer, which)
        placement = self.placement
        if isinstance(placement.columns, slice):
            storage[placement.slots, :, placement.columns] = states[0]
        else:
            storage[placement.slots, :, placement.columns] = states.transpose(1, 2)
        return storage[placement.read_slots, :, : placement.width]

    def copy(self, slot: int, source: int, length: int) -> None:
        for storage in self._storage.values():
            storage[:, slot, :, :length] = storage[:, source, :, :length]
        self._used[slot] = max(length, self._used.get(slot, 0))

    def move(self, moves: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        # The first rows are often in place already. Gather before scattering, so that no row overwrites another.
        rows = [
            (slot, length + row, length + i)
            for slot, length, path in moves
            for i, row in enumerate(path)
            if row != i
        ]
        if rows:
            slots, sources, targets = to_device(rows, torch.long, self.device).T
            for storage in self._storage.values():
                storage[:, slots, :, targets] = storage[:, slots, :, sources]

    def read(self, slot: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Copies of the keys and values of a slot's first ``length`` tokens: per layer, each (1, heads, length,
        size)."""

        def copied(layer: int, which: int) -> torch.Tensor:
            return self._of(layer, which)[slot : slot + 1, :, :length].clone()

        layers = range(len(self.layers))
        return [(copied(i, 0), copied(i, 1)) if (i, 0) in self._index else None for i in layers]

    def _of(self, layer: int, which: int) -> torch.Tensor:
        """A layer's keys (0) or values (1), (S, heads, C, size)."""
        group, index = self._index[layer, which]
        return self._storage[group][index]
