"""From token trees to what a transformers model wants: token ids, positions and additive 4-D masks.

A bool 4-D mask is silently added to the scores by eager attention, so masks are always additive floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..attention.bits import pack_bits, unpack_bits
from ..core import TokenTree


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """Which attention patterns a model's layers use; a model of several takes a mask for each by name.

    Attributes:
        kinds: names as in ``config.layer_types``; one entry where all layers are alike.
        sliding_window: keys seen by sliding layers, own row included; 0 for none.
        chunk: size of attention chunks; 0 for none.
    """

    kinds: tuple[str, ...]
    sliding_window: int
    chunk: int

    @classmethod
    def of(cls, config: Any) -> LayerKinds:
        """Read them from a text config."""
        window = getattr(config, "sliding_window", None) or 0
        chunk = getattr(config, "attention_chunk_size", None) or 0
        kinds = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
        return cls(kinds or (("sliding_attention",) if window else ("full_attention",)), window, chunk)


def stack_rows(trees: Sequence[TokenTree], lengths: Sequence[int], rows: int) -> tuple[Any, Any]:
    """Token ids and positions, both (B, Q); short trees are padded with copies of their root."""
    ids, positions = [], []
    for tree, length in zip(trees, lengths, strict=True):
        missing = rows - len(tree)
        ids.append(tree.tokens + [tree.tokens[0]] * missing)
        positions.append([length + depth for depth in tree.depths] + [length] * missing)
    return torch.tensor(ids), torch.tensor(positions)


def tree_bits(trees: Sequence[TokenTree], rows: int) -> torch.Tensor:
    """(B, Q, Q) bool: entry [b, i, j] says whether row i of tree b sees row j. Padding sees the root."""
    return unpack_bits(pack_bits([tree.ancestors for tree in trees], rows))


def key_positions(positions: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """(B, longest prefix + Q): the logical position of every cache column; columns past the rows count as far off."""
    rows = positions.shape[1]
    result = torch.arange(max(lengths) + rows).repeat(len(lengths), 1)
    for b, length in enumerate(lengths):
        result[b, length : length + rows] = positions[b]
        result[b, length + rows :] = 0
    return result


def attention_masks(
    kinds: LayerKinds,
    trees: Sequence[TokenTree],
    lengths: Sequence[int],
    positions: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """The mask of one pass: a tensor (B, 1, Q, width), or a dict of them by layer kind.

    0 where a row sees a key (the committed prefix, its ancestors, itself), the dtype's lowest number elsewhere.
    """
    rows, query = positions.shape[1], positions[:, :, None]
    keys = key_positions(positions, lengths)[:, None]
    seen = torch.zeros(len(trees), rows, keys.shape[2], dtype=torch.bool)
    bits = tree_bits(trees, rows)
    for b, length in enumerate(lengths):
        seen[b, :, :length] = True
        seen[b, :, length : length + rows] = bits[b]
    masks = {}
    for kind in kinds.kinds:
        allowed = seen
        if kind == "sliding_attention" and kinds.sliding_window:
            allowed = seen & (query - keys < kinds.sliding_window)
        elif kind == "chunked_attention" and kinds.chunk:
            allowed = seen & (query // kinds.chunk == keys // kinds.chunk)
        mask = torch.full(seen.shape, torch.finfo(dtype).min, dtype=dtype, device=device)
        masks[kind] = mask.masked_fill_(allowed.to(device), 0)[:, None]
    return masks if len(masks) > 1 else masks[kinds.kinds[0]]
