"""KV caches of targets: the interface, and the code shared by the targets that use it.

``tree_cache`` implements it for transformers models, ``cpu.execution_plan`` for compiled passes.

The rows of a step are written after the committed tokens of their slot. A commit moves the accepted rows together;
the next step overwrites the others. Example: a slot holds T = 10 tokens, a step of 6 rows was written to columns 10
to 15, and rows 0, 2 and 5 were accepted:

    column           9   10   11   12   13   14   15
    after the pass   t9  r0   r1   r2   r3   r4   r5
    after commit     t9  r0   r2   r5   -    -    -        T = 13; "-" is overwritten by the next step

Row 0, the root, is always accepted and already in place; only rows 2 and 5 are copied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from . import Target
from .memory import memory_errors


class KVStorage(ABC):
    """Preallocated keys and values of several sequences, one per slot, written in place."""

    @abstractmethod
    def make_room(self, slot: int, length: int) -> None:
        """Ensure that a slot has room for ``length`` tokens."""

    @abstractmethod
    def copy(self, slot: int, source: int, length: int) -> None:
        """Copy the first ``length`` tokens of slot ``source`` to ``slot``, which has room for them."""

    @abstractmethod
    def move(self, moves: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """For each (slot, length, path), move the accepted rows ``path`` (increasing) of the slot's last step to the
        columns after its ``length`` committed tokens."""


class StoredTarget(Target):
    """Shared code of targets with a ``KVStorage``.

    Attributes:
        cache: keys and values of all slots.
        lengths: T, the number of committed tokens, by slot.
    """

    cache: KVStorage
    lengths: dict[int, int]

    def reuse(self, slot: int, source: int, length: int) -> None:
        """Start a slot with the first ``length`` tokens of another; if ``slot == source``, truncate it to them."""
        if slot != source:
            with memory_errors(f"a copy of {length} tokens"):
                self.cache.make_room(slot, length)
                self.cache.copy(slot, source, length)
        self.lengths[slot] = length

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Keep the rows of each slot's path. The cost does not depend on the length of the context."""
        self.cache.move([(slot, self.lengths[slot], path) for slot, path in paths])
        for slot, path in paths:
            self.lengths[slot] += len(path)

    def release(self, slot: int) -> None:
        """Free a slot. Its memory may be reused."""
        self.lengths.pop(slot, None)
