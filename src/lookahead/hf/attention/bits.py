"""Ancestor bits as 32-bit words, and the argument checks shared by all backends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.errors import SettingsError

#: Largest head size of any backend.
LARGEST_HEAD = 256


def word_count(rows: int) -> int:
    """W, the number of words for ``rows`` bits."""
    return (rows + 31) // 32


def pack_bits(ancestors: Sequence[Sequence[int]], rows: int) -> torch.Tensor:
    """Ancestor bits as words (B, Q, W) int32, on the CPU.

    Args:
        ancestors: per sequence and row, a number whose bit c is set if the row sees row c.
        rows: Q; padding rows of shorter sequences see only the root.
    """
    width = 4 * word_count(rows)
    data = bytearray()
    for sequence in ancestors:
        for bits in sequence:
            data += bits.to_bytes(width, "little")
        data += (1).to_bytes(width, "little") * (rows - len(sequence))
    return torch.frombuffer(data, dtype=torch.int32).view(len(ancestors), rows, -1)


def unpack_bits(words: torch.Tensor) -> torch.Tensor:
    """(B, Q, Q) bool from the words; entry [b, i, c] is whether row i sees row c."""
    rows = words.shape[1]
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 1).flatten(2)[..., :rows].bool()


def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, words: torch.Tensor) -> None:
    """Raise SettingsError if the shapes do not match or a head is too large."""
    heads, kv_heads, size = query.shape[1], key.shape[1], query.shape[-1]
    if heads % kv_heads:
        raise SettingsError(f"query heads must be a multiple of key heads, got {heads} and {kv_heads}")
    if not 1 <= max(size, value.shape[-1]) <= LARGEST_HEAD:
        raise SettingsError(
            f"head sizes must be 1 to {LARGEST_HEAD}, got {size} and {value.shape[-1]}; use reference or eager"
        )
    wanted = (query.shape[0], query.shape[2], word_count(query.shape[2]))
    if tuple(words.shape) != wanted:
        raise SettingsError(f"ancestor words must have shape {wanted}, got {tuple(words.shape)}")
