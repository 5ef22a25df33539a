"""Between the query, key and value gemm and attention: head norms, rotary positions (Su et al. 2021), cache writes.

Rotary pairs (i, i + D/2) of a head are neighbours (2i, 2i + 1) here: the weights' rows are packed in that order.
"""

from __future__ import annotations

from typing import Any

import torch
from numba import carray
from torch import nn

from .execution_plan import KEY_BLOCK
from .llvm import REASSOCIATE, floats_at, jit
from .numeric_format import Format
from .rms_norm import inverse_rms


class RotaryTable:
    """Cosine and sine of each position from the model's own rotary module: (positions, D / 2, 2), grown on demand."""

    def __init__(self, rotary: nn.Module, head_size: int) -> None:
        self._rotary, self._half = rotary, head_size // 2
        self._table = torch.empty(0, self._half, 2)

    def up_to(self, position: int) -> torch.Tensor:
        """At least those of positions 0..position."""
        table = self._table
        if position >= len(table):
            with torch.no_grad():
                probe = torch.empty(1, dtype=torch.float32)
                cos, sin = self._rotary(probe, torch.arange(1 << position.bit_length())[None])
                table = torch.stack([x[0, :, : self._half].float() for x in (cos, sin)], -1).contiguous()
            self._table = table
        return table


def rope_of(numbers: Format) -> Any:
    """The code of a format."""
    query_at, to_query, query_bytes = numbers.query.pointer, numbers.query.narrow, numbers.query.bytes
    stored_at, to_stored, stored_bytes = numbers.stored.pointer, numbers.stored.narrow, numbers.stored.bytes
    pair = numbers.key_pair

    def rope(
        p: Any, layer: Any, y: int, lane: int, angles: int, query: int, row: int, rows: int, cache: int, column: int
    ) -> None:  # fmt: skip
        """Norm and rotate one head of one row; a query goes out scaled, a key or a value into the cache.

        Args:
            y: (D,) fp32, pairs side by side; it is overwritten.
            lane: which of H + 2K heads.
            angles: (D / 2, 2) cosine and sine of the row's position; 0 for no rotation.
            query: (K, rows, H / K, padded head) of the sequence; ``row`` is within it.
            cache: where the slot keeps this head; ``column`` is the row's.
        """
        size, head, heads, key_heads = p.head_size, p.padded_head, p.heads, p.key_heads
        ys = carray(floats_at(y), (size,))
        if lane < heads + key_heads:
            if layer.head_norm.weight != 0:
                ws = carray(floats_at(layer.head_norm.weight + 4 * lane * size), (size,))
                factor = inverse_rms(y, size, layer.head_norm.epsilon)
                for i in range(size):
                    ys[i] *= factor * ws[i]
            if angles != 0:
                turns = carray(floats_at(angles), (size,))
                for i in range(0, size, 2):
                    a, b = ys[i], ys[i + 1]
                    ys[i] = a * turns[i] - b * turns[i + 1]
                    ys[i + 1] = a * turns[i + 1] + b * turns[i]
        if lane < heads:
            groups = heads // key_heads
            place = ((lane // groups) * rows + row) * groups + lane % groups
            out = carray(query_at(query + query_bytes * place * head), (size,))
            scale = layer.scale
            for i in range(size):
                out[i] = to_query(ys[i] * scale)
        elif lane < heads + key_heads:
            place = column // KEY_BLOCK * head * KEY_BLOCK + column % KEY_BLOCK * pair
            stored = carray(stored_at(cache + place * stored_bytes), (size * KEY_BLOCK,))
            for i in range(size):
                stored[i // pair * (KEY_BLOCK * pair) + i % pair] = to_stored(ys[i])
        else:
            stored = carray(stored_at(cache + column * head * stored_bytes), (size,))
            for i in range(size):
                stored[i] = to_stored(ys[i])

    return jit(rope, numbers.name, fastmath=REASSOCIATE)
