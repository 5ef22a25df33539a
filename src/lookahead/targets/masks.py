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
    """Which attention patterns a model's layers use.

    Attributes:
        kinds: names as in ``config.layer_types``; one entry where all layers are alike.
        as_dict: whether the model takes {kind: mask}.
        sliding_window: keys seen by sliding layers, own row included; 0 for none.
        chunk: size of attention chunks; 0 for none.
    """

    kinds: tuple[str, ...]
    as_dict: bool
    sliding_window: int
    chunk: int

    @classmethod
    def of(cls, config: Any) -> LayerKinds:
        """Read them from a text config."""
        window = getattr(config, "sliding_window", None) or 0
        chunk = getattr(config, "attention_chunk_size", None) or 0
        kinds = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
        if not kinds:
            kinds = ("sliding_attention",) if window else ("full_attention",)
        return cls(kinds, len(kinds) > 1, window, chunk)


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


def key_positions(positions: torch.Tensor, lengths: Sequence[int], width: int) -> torch.Tensor:
    """(B, width): the logical position of every cache column; columns past the rows count as far away."""
    result = torch.arange(width).repeat(len(lengths), 1)
    for b, length in enumerate(lengths):
        result[b, length : length + positions.shape[1]] = positions[b]
        result[b, length + positions.shape[1] :] = 0
    return result


def visible(trees: Sequence[TokenTree], lengths: Sequence[int], rows: int) -> torch.Tensor:
    """(B, Q, width) bool: the committed prefix and the row's ancestors, width = longest prefix + Q."""
    width = max(lengths) + rows
    bits = tree_bits(trees, rows)
    seen = torch.zeros(len(trees), rows, width, dtype=torch.bool)
    for b, length in enumerate(lengths):
        seen[b, :, :length] = True
        seen[b, :, length : length + rows] = bits[b]
    return seen


def additive(seen: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(B, 1, Q, width): 0 where seen, the dtype's lowest number elsewhere."""
    mask = torch.full(seen.shape, torch.finfo(dtype).min, dtype=dtype, device=device)
    return mask.masked_fill_(seen.to(device), 0)[:, None]


def attention_masks(
    kinds: LayerKinds,
    trees: Sequence[TokenTree],
    lengths: Sequence[int],
    positions: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """The mask of one pass: a tensor (B, 1, Q, width), or a dict of them by layer kind."""
    seen = visible(trees, lengths, positions.shape[1])
    keys = key_positions(positions, lengths, seen.shape[2])
    masks = {}
    for kind in kinds.kinds:
        allowed = seen
        query = positions[:, :, None]
        if kind == "sliding_attention" and kinds.sliding_window:
            allowed = seen & (query - keys[:, None] < kinds.sliding_window)
        elif kind == "chunked_attention" and kinds.chunk:
            allowed = seen & (query // kinds.chunk == keys[:, None] // kinds.chunk)
        masks[kind] = additive(allowed, dtype, device)
    return masks if kinds.as_dict else masks[kinds.kinds[0]]
