"""Token trees as inputs to transformers models: token ids, positions and additive 4-D masks.

A row sees the committed prefix, its ancestors and itself, and its position is T + depth. Example: a step with W = 3,
N = 3 and G = 1 after T committed tokens. The window has N - 1 = 2 levels: level 0 is the root r and the chain a1 a2
below it, and each row of level 1 (b0 b1 b2) hangs below the row of its column. The candidate is the chain c0 c1:

    r ─┬─ a1 ─┬─ a2 ── b2
       │      └─ b1
       ├─ b0
       └─ c0 ── c1

    row      r  a1 a2 b0 b1 b2 c0 c1
    column   0  1  2  3  4  5  6  7     in the cache: T + column
    depth    0  1  2  1  2  3  1  2     position: T + depth

    r        #  .  .  .  .  .  .  .     #: the row on the left sees this row (mask 0)
    a1       #  #  .  .  .  .  .  .     .: it does not (mask: the dtype's lowest number)
    a2       #  #  #  .  .  .  .  .     All rows see columns 0 to T - 1, the committed prefix.
    b0       #  .  .  #  .  .  .  .
    b1       #  #  .  .  #  .  .  .
    b2       #  #  #  .  .  #  .  .
    c0       #  .  .  .  .  .  #  .
    c1       #  .  .  .  .  .  #  #

(``tests/test_targets.py`` checks this drawing against the mask.) A row's column is not its position, so sliding
windows and chunks must use positions. Masks are additive floats, because eager attention silently
adds a boolean 4-D mask to the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core import TokenTree
from .attention.bits import pack_bits, unpack_bits
from .cuda import to_device

#: Model types whose classes use one mask for all layers, regardless of the layer types in the config.
ONE_MASK = (
    "doge",
    "ministral3",
    "mistral",
    "mixtral",
    "phi3",
    "phi4_multimodal",
    "phimoe",
    "qwen3_moe",
    "starcoder2",
)
#: Model types whose classes have no window, regardless of the config's ``sliding_window``.
WITHOUT_WINDOW = ("gemma", "gpt2", "granite", "llama", "olmo2")


def sliding_window(config: Any) -> int:
    """The number of keys that a row of a sliding layer sees, itself included; 0 for no limit."""
    return 0 if config.model_type in WITHOUT_WINDOW else getattr(config, "sliding_window", None) or 0


def layer_types(config: Any) -> Sequence[str]:
    """The type of each layer; () if the class treats all layers alike."""
    if config.model_type in (*ONE_MASK, *WITHOUT_WINDOW):
        return ()
    return getattr(config, "layer_types", None) or ()


def layer_window(config: Any, layer: int) -> int:
    """The number of keys that a row of one layer sees, itself included; 0 for all."""
    types = layer_types(config)
    return 0 if types and types[layer] != "sliding_attention" else sliding_window(config)


@dataclass(frozen=True, slots=True)
class LayerTypes:
    """The attention patterns of a model's layers. A model with several types expects a dict of masks by type.

    Attributes:
        names: the types, as in ``config.layer_types``; one entry if all layers are of the same type.
        sliding_window: keys that a row of a sliding layer sees, itself included; 0 for no limit.
        chunk: size of attention chunks; 0 for none.
    """

    names: tuple[str, ...]
    sliding_window: int
    chunk: int

    @classmethod
    def of(cls, config: Any) -> LayerTypes:
        """The types of a text config."""
        window = sliding_window(config)
        chunk = getattr(config, "attention_chunk_size", None) or 0
        names = tuple(dict.fromkeys(layer_types(config)))
        return cls(names or (("sliding_attention",) if window else ("full_attention",)), window, chunk)


def stack_rows(trees: Sequence[TokenTree], lengths: Sequence[int], rows: int) -> tuple[Any, Any]:
    """Token ids and positions of ``rows`` rows, both (B, Q); smaller trees are padded with copies of their root."""
    ids: list[list[int]] = []
    positions: list[list[int]] = []
    for tree, length in zip(trees, lengths, strict=True):
        missing = rows - len(tree)
        ids.append(tree.tokens + [tree.tokens[0]] * missing)
        positions.append([length + depth for depth in tree.depths] + [length] * missing)
    return torch.tensor(ids), torch.tensor(positions)


def key_positions(positions: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The position of the token in every cache column, (B, longest prefix + Q).

    Columns after a sequence's rows hold no token and get position 0; the mask hides them.
    """
    rows = positions.shape[1]
    result = torch.arange(max(lengths) + rows).repeat(len(lengths), 1)
    for b, length in enumerate(lengths):
        result[b, length : length + rows] = positions[b]
        result[b, length + rows :] = 0
    return result


def attention_masks(
    types: LayerTypes,
    trees: Sequence[TokenTree],
    lengths: Sequence[int],
    positions: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """The mask of one pass: a tensor (B, 1, Q, width), or a dict of such tensors by type of layer.

    It is 0 if a row sees a key, and the dtype's lowest number if not (drawn above).

    Args:
        types: the attention patterns of the layers.
        trees: the trees of the B sequences, of at most Q rows each.
        lengths: T of each sequence.
        positions: the position of each row, (B, Q).
        dtype, device: dtype and device of the mask.
    """
    rows = positions.shape[1]
    query = positions[:, :, None]
    keys = key_positions(positions, lengths)[:, None]
    seen = torch.zeros(len(trees), rows, keys.shape[2], dtype=torch.bool)
    bits = unpack_bits(pack_bits([tree.ancestors for tree in trees], rows))
    for b, length in enumerate(lengths):
        seen[b, :, :length] = True
        seen[b, :, length : length + rows] = bits[b]
    masks = {}
    for name in types.names:
        allowed = seen
        if name == "sliding_attention" and types.sliding_window:
            allowed = seen & (query - keys < types.sliding_window)
        elif name == "chunked_attention" and types.chunk:
            allowed = seen & (query // types.chunk == keys // types.chunk)
        mask = torch.full(seen.shape, torch.finfo(dtype).min, dtype=dtype, device=device)
        masks[name] = mask.masked_fill_(to_device(allowed, torch.bool, device), 0)[:, None]
    return masks if len(masks) > 1 else masks[types.names[0]]
