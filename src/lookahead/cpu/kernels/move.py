"""Moving columns of the KV cache when a step commits rows of another branch (``execution_plan.KVCache``)."""

from __future__ import annotations

from typing import Any

from ...machine_code import entry
from ..execution_plan import KEY_BLOCK
from .operations import integers_at, numbers_at


def _move_of(bytes_each: int) -> Any:
    numbers_of = numbers_at(f"i{bytes_each}")

    def move(
        slot: int,
        layers: int,
        heads: int,
        capacity: int,
        size: int,
        key_heads: int,
        key_pair: int,
        length: int,
        rows: int,
        count: int,
    ) -> None:
        """Move columns ``length + path[i]`` to columns ``length + i``.

        Numbers are moved one by one, because numba takes five seconds to compile a slice assignment.

        Args:
            slot: address of the heads of a slot, (layers, heads, capacity * size).
            rows: address of the ``count`` rows of the path; they are ascending, so nothing is overwritten early.
        """
        path = integers_at(rows)
        for each in range(layers * heads):
            head = numbers_of(slot + bytes_each * each * capacity * size)
            for index in range(count):
                target, source = length + index, length + path[index]
                if each % heads >= key_heads:
                    for n in range(size):
                        head[target * size + n] = head[source * size + n]
                else:
                    to = target // KEY_BLOCK * KEY_BLOCK * size + target % KEY_BLOCK * key_pair
                    start = source // KEY_BLOCK * KEY_BLOCK * size + source % KEY_BLOCK * key_pair
                    for pair in range(size // key_pair):
                        for n in range(pair * KEY_BLOCK * key_pair, pair * KEY_BLOCK * key_pair + key_pair):
                            head[to + n] = head[start + n]

    return move


for _bytes in (2, 4):
    entry(_move_of(_bytes), f"move_{_bytes}")
