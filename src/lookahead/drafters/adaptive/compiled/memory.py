"""Memory by address, and tables by key: open addressing with linear probing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from .layout import EMPTY, FAR, L_KEYS, L_MASK, L_SLOTS

code = njit(error_model="numpy")


@intrinsic
def pointer(context: Any, address: Any, tag: Any) -> Any:
    """The address as a pointer to values of the tag's type."""
    result = types.CPointer(tag)

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], target.get_value_type(result))

    return result(types.int64, tag), generate


@code
def int64s(address: int) -> Any:
    return carray(pointer(address, np.int64(0)), (FAR,))


@code
def int32s(address: int) -> Any:
    return carray(pointer(address, np.int32(0)), (FAR,))


@code
def float64s(address: int) -> Any:
    return carray(pointer(address, np.float64(0)), (FAR,))


@code
def float32s(address: int) -> Any:
    return carray(pointer(address, np.float32(0)), (FAR,))


@code
def _home(key: int, mask: int) -> int:
    return np.int64((np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & mask


@code
def find(slots: Any, mask: int, width: int, key: int) -> int:
    """Where the key's slot of ``width`` numbers begins, or the empty one that it would take."""
    place = _home(key, mask)
    while slots[place * width] != key + 1 and slots[place * width] != EMPTY:
        place = (place + 1) & mask
    return place * width


@code
def remove(slots: Any, mask: int, key: int) -> None:
    """Take a key out of slots of two numbers; those behind it move up, so that no gap parts them from home."""
    gap = find(slots, mask, 2, key) // 2
    place = gap
    while True:
        place = (place + 1) & mask
        if slots[2 * place] == EMPTY:
            break
        home = _home(slots[2 * place] - 1, mask)
        if ((place - home) & mask) >= ((place - gap) & mask):
            slots[2 * gap], slots[2 * gap + 1] = slots[2 * place], slots[2 * place + 1]
            gap = place
    slots[2 * gap] = EMPTY


@code
def rehash(old: int, old_mask: int, new: int, new_mask: int, width: int) -> None:
    """Move all keys from one array of slots to another, empty one."""
    source, slots = int64s(old), int64s(new)
    for place in range(old_mask + 1):
        mark = source[place * width]
        if mark != EMPTY:
            at = find(slots, new_mask, width, mark - 1)
            for i in range(width):
                slots[at + i] = source[place * width + i]


@code
def enlist(table: int, count: int) -> None:
    """Enter the keys of the first ``count`` entries of a table, all different, into its empty slots."""
    t = int64s(table)
    slots, keys = int64s(t[L_SLOTS]), int64s(t[L_KEYS])
    for number in range(count):
        at = find(slots, t[L_MASK], 2, keys[number])
        slots[at], slots[at + 1] = keys[number] + 1, number


@code
def index(values: Any, start: int, count: int, value: int) -> int:
    """Place of a value among ``count`` from ``start`` on, or -1."""
    for i in range(count):
        if values[start + i] == value:
            return i
    return -1
