"""Sizes and properties of a transformers model that targets need. Read once."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from ..model import NO_LIMIT, Limits, positions_of
from .masks import LayerTypes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PassFacts(Limits):
    """The facts that every forward pass of a model needs, in addition to ``Limits``.

    Attributes:
        config: the text config.
        cache_name: the name of the cache among the arguments of ``forward``.
        accepts_position_ids, accepts_logits_to_keep: whether ``forward`` has an argument of that name.
        layer_types: the types of attention layers.
        rotary: resets rotary frequencies; call its ``before`` ahead of every pass.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config.get_text_config(decoder=True)
        super().__init__(int(config.vocab_size), positions_of(config) or NO_LIMIT)
        self.config = config
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = cache_name(model)
        self.accepts_position_ids = "position_ids" in parameters
        self.accepts_logits_to_keep = "logits_to_keep" in parameters
        self.layer_types = LayerTypes.of(self.config)
        self.rope_type, self.rope_boundary = _rope_boundary(self.config)
        self.rotary = RotaryReset(model)


class ModelFacts(PassFacts):
    """The facts that passes over token trees need, in addition to ``PassFacts``.

    Attributes:
        shapes: per layer (key heads, key head size, value head size); None for a layer without keys and values.
        dtype: dtype of keys, values and masks.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.shapes: list[tuple[int, int, int] | None] = []
        self.dtype: torch.dtype = model.dtype
        for pair in keys_and_values(model, self.config):
            if pair is None:
                self.shapes.append(None)
                continue
            keys, values = pair
            self.shapes.append((keys.shape[1], keys.shape[3], values.shape[3]))
            self.dtype = keys.dtype


def cache_name(model: PreTrainedModel) -> str:
    """The name of the cache among the arguments of ``forward``."""
    parameters = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in parameters else "past_key_values"


def keys_and_values(model: PreTrainedModel, config: Any) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """What the model's own cache has after one token, per layer: keys and values (1, heads, 1, size), or None for one
    without them, such as a recurrent one.

    Args:
        model: a causal language model.
        config: its text config.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    with torch.no_grad():
        first = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        model(input_ids=first, **{cache_name(model): cache})
    pairs = ((getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers)
    return [
        None if keys is None or values is None or keys.dim() != 4 else (keys, values)
        for keys, values in pairs
    ]


def _rope_boundary(config: Any) -> tuple[str, int]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for entry in by_layer_type or [parameters]:
        rope_type = entry.get("rope_type") or entry.get("type") or ""
        if rope_type == "dynamic":
            return rope_type, int(config.max_position_embeddings)
        if rope_type == "longrope":
            name = "original_max_position_embeddings"
            original = entry.get(name) or getattr(config, name, None)
            return rope_type, int(original or config.max_position_embeddings)
    return "", NO_LIMIT


class RotaryReset:
    """Makes rotary frequencies depend on the current sequence only.

    With dynamic NTK scaling, transformers computes new frequencies for each new maximum length, and returns to the
    original ones only for a sequence shorter than the trained length. A sequence of a length in between would be
    decoded with the frequencies of an earlier one.

    Args:
        model: any model; a no-op without such scaling.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules: list[Any] = [
            module for module in model.modules() if "dynamic" in str(getattr(module, "rope_type", ""))
        ]

    def before(self, positions: torch.Tensor) -> None:
        """Reset the frequencies if necessary. Call it before a pass over rows at these positions."""
        for module in self._modules:
            length = int(positions.max()) + 1
            for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
                if getattr(module, name) > max(length, module.original_max_seq_len):
                    # Models with several types of layers keep frequencies for each, with the type as a name prefix.
                    prefix = name.removesuffix("max_seq_len_cached")
                    original = getattr(module, f"{prefix}original_inv_freq")
                    original = original.to(getattr(module, f"{prefix}inv_freq"))
                    module.register_buffer(f"{prefix}inv_freq", original, persistent=False)
                    setattr(module, name, module.original_max_seq_len)
