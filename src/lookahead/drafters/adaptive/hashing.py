"""Hash tables: open addressing with linear probing, in arrays of ``SLOT`` whose length is a power of two.

Keys are integers from 0 to 2**62. A slot stores the key plus one, so that zeroed memory is an empty table.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from ...machine_code import compiled, entry, int64
from .layout import SLOT


def new_slots(*shape: int) -> Any:
    """Empty tables; the last dimension must be a power of two, and at most half of the slots may be used."""
    return np.zeros(shape, dtype=SLOT)


@compiled
def _home(slots: Any, key: int) -> int:
    """The preferred slot of a key. No product exceeds 63 bits, so uncompiled code computes the same slot."""
    key = int64(key)
    low, high = key & 0x7FFFFFFF, key >> 31
    mixed = low ^ high * 0x85EB
    mixed = (mixed ^ mixed >> 31) & 0x7FFFFFFF
    return (mixed * 0x9E3779B1 >> 24) & (len(slots) - 1)


@compiled
def find(slots: Any, key: int) -> int:
    """The index of the key's slot, or of the empty slot that it would take."""
    index = _home(slots, key)
    mask = len(slots) - 1
    while slots[index].key != key + 1 and slots[index].key != 0:
        index = (index + 1) & mask
    return index


@compiled
def remove(slots: Any, key: int) -> None:
    """Remove a key. Later keys move up, so that linear probing still finds them."""
    mask = len(slots) - 1
    gap = index = find(slots, key)
    while True:
        index = (index + 1) & mask
        if slots[index].key == 0:
            break
        home = _home(slots, slots[index].key - 1)
        if ((index - home) & mask) >= ((index - gap) & mask):
            slots[gap].key, slots[gap].value = slots[index].key, slots[index].value
            gap = index
    slots[gap].key = 0


@entry
def rehash(old: Annotated[Any, SLOT, 1], new: Annotated[Any, SLOT, 1]) -> None:
    """Insert all keys of one table into an empty one."""
    for slot in range(len(old)):
        if old[slot].key != 0:
            index = find(new, old[slot].key - 1)
            new[index].key, new[index].value = old[slot].key, old[slot].value


@entry
def enter(slots: Annotated[Any, SLOT, 1], keys: Annotated[Any, "i8", 1]) -> None:
    """Insert distinct keys into an empty table, with their indices in ``keys`` as values."""
    for value in range(len(keys)):
        index = find(slots, keys[value])
        slots[index].key, slots[index].value = keys[value] + 1, value
