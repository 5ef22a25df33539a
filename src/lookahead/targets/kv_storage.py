"""What targets ask of any KV cache: room that grows by doubling, and a commit that moves accepted rows only.

``StoredTarget`` is what the targets over such a cache have in common.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class KVStorage(ABC):
    """Preallocated keys and values of many sequences, written in place."""

    @abstractmethod
    def make_room(self, slot: int, length: int) -> None:
        """Let a slot have room for so many tokens."""

    @abstractmethod
    def copy(self, slot: int, source: int, length: int) -> None:
        """Give a slot what another holds of its first ``length`` tokens; there is room for it."""

    @abstractmethod
    def move(self, slot: int, length: int, path: Sequence[int]) -> None:
        """Commit: bring the pending rows ``path`` (increasing) of a slot in line behind its ``length`` tokens."""


class SharedStorage(KVStorage):
    """All slots lie in the same tensors, so that a batch is one view of them, and have the same room.

    Attributes:
        slots: sequences that there is room for.
        capacity: tokens per slot.
    """

    slots: int
    capacity: int

    def make_room(self, slot: int, length: int) -> None:
        self.reserve(slot + 1, length)

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for at least this many slots and tokens per slot, doubling what is too small."""
        new_slots, new_capacity = self.slots, self.capacity
        while new_slots < slots:
            new_slots *= 2
        while new_capacity < capacity:
            new_capacity *= 2
        if (new_slots, new_capacity) != (self.slots, self.capacity):
            self._grow(new_slots, new_capacity)
            self.slots, self.capacity = new_slots, new_capacity

    @abstractmethod
    def _grow(self, slots: int, capacity: int) -> None:
        """Move to memory of this size; ``slots`` and ``capacity`` still say what the old one has."""


class StoredTarget:
    """Slots that lie in one storage.

    Attributes:
        cache: keys and values of all slots.
        lengths: by slot, its committed tokens.
    """

    cache: KVStorage
    lengths: dict[int, int]

    def reuse(self, slot: int, source: int, length: int) -> None:
        """Begin a slot with the first ``length`` tokens of another, or cut it to them where it is the same one."""
        if slot != source:
            self.cache.make_room(slot, length)
            self.cache.copy(slot, source, length)
        self.lengths[slot] = length

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Bring accepted rows in line; the cost does not depend on the context."""
        for slot, path in paths:
            self.cache.move(slot, self.lengths[slot], path)
            self.lengths[slot] += len(path)

    def release(self, slot: int) -> None:
        """Forget a sequence; its room is used again."""
        self.lengths.pop(slot, None)
