"""ALiBi models (Bloom, Falcon, MPT): the bias from logical positions.

These models number keys by their place in the cache. In a tree step a row's place is not its position, so
for the length of one pass the blocks' own bias is replaced by the same values taken at logical positions.
Module pre-hooks are the public way in; nothing of the model is changed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class AlibiBias:
    """Found by the blocks' signature: a parameter named ``alibi`` or ``position_bias``.

    Args:
        name: that parameter.
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
