"""From token trees to what a transformers model wants: token ids, positions and additive 4-D masks.

A bool 4-D mask is silently added to the scores by eager attention, so masks are always additive floats.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

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


class AlibiBias:
    """ALiBi models (Bloom, Falcon, MPT): the bias from logical positions.

    These models number keys by their place in the cache. In a tree step a row's place is not its position, so for
    the length of one pass the blocks' own bias is replaced by the same values taken at logical positions, by module
    pre-hooks.

    Args:
        name: the parameter of the blocks, ``alibi`` or ``position_bias``.
        blocks: the modules that take it.
        heads, head_size: of the attention.
    """

    def __init__(self, name: str, blocks: list[nn.Module], heads: int, head_size: int) -> None:
        self.name = name
        self.blocks = blocks
        self.heads = heads
        self.scale = 1 / math.sqrt(head_size)

    @property
    def one_sequence_only(self) -> bool:
        """MPT's bias has no batch axis."""
        return self.name == "position_bias"

    @classmethod
    def of(cls, model: nn.Module, config: Any) -> AlibiBias | None:
        """The bias of a model, or None where it has none."""
        if getattr(config, "alibi", True) is False:  # a Falcon with rotary positions
            return None
        for name in ("alibi", "position_bias"):
            blocks = [
                module
                for child in model.modules()
                if isinstance(child, nn.ModuleList)
                for module in child
                if name in inspect.signature(module.forward).parameters
            ]
            if blocks:
                heads = config.num_attention_heads
                return cls(name, blocks, heads, config.hidden_size // heads)
        return None

    @contextmanager
    def at(self, mask: torch.Tensor, keys: torch.Tensor) -> Iterator[None]:
        """For one pass: additive mask (B, 1, Q, width) and key positions (B, width) as given."""
        batch, width = keys.shape
        keys = keys.to(mask.device)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kwargs = dict(kwargs)
            if self.one_sequence_only:
                table = kwargs[self.name]  # (heads, 1, longest): distances to the last key
                kwargs[self.name] = table[:, :, -width:][:, :, keys[0]]
                kwargs["attention_mask"] = mask < 0
                return args, kwargs
            table = kwargs[self.name].reshape(batch, self.heads, 1, -1)
            bias = table.gather(3, keys[:, None, None].expand(batch, self.heads, 1, width))
            if kwargs[self.name].dim() == 3:  # Bloom: (B * heads, 1, width), the mask apart
                kwargs[self.name] = bias.reshape(batch * self.heads, 1, width)
                kwargs["attention_mask"] = mask
            else:  # Falcon: (B, heads, 1, width), and once more inside the mask
                kwargs[self.name] = bias
                kwargs["attention_mask"] = torch.masked_fill(
                    bias * self.scale, mask < 0, torch.finfo(mask.dtype).min
                )
            return args, kwargs

        handles = [block.register_forward_pre_hook(hook, with_kwargs=True) for block in self.blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
