"""What every target must know of a model, found once; and the one translation of an allocator's failure."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..core import OutOfMemory
from .masks import AlibiBias, LayerKinds

#: More positions than any text has: the limit of a model that has none.
NO_LIMIT = 1 << 30


class PassFacts:
    """What any pass of a model needs.

    Attributes:
        config: the text config.
        vocabulary: V, columns of the logits.
        max_positions: positions that the model was made for; ``NO_LIMIT`` where it has no limit.
        cache_name: of the cache among the arguments of ``forward``.
        takes_positions, takes_rows: whether ``forward`` has ``position_ids``, ``logits_to_keep``.
        kinds: of its attention layers.
        rope_type, rope_boundary: the rotary type that depends on the length, and the position from which it
            changes; ("", ``NO_LIMIT``) if none.
        rotary: is told of every pass's positions.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.config: Any = model.config.get_text_config(decoder=True)
        self.vocabulary = int(self.config.vocab_size)
        self.max_positions = int(getattr(self.config, "max_position_embeddings", None) or NO_LIMIT)
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self.takes_positions = "position_ids" in parameters
        self.takes_rows = "logits_to_keep" in parameters
        self.kinds = LayerKinds.of(self.config)
        self.rope_type, self.rope_boundary = _rope_boundary(self.config)
        self.rotary = RotaryReset(model)


class ModelFacts(PassFacts):
    """What token trees need besides.

    Attributes:
        shapes: per layer (key heads, key head size, value head size), None where a layer keeps nothing.
        dtype: of keys, values and masks.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.alibi = AlibiBias.of(model, self.config)
        self.shapes: list[tuple[int, int, int] | None] = []
        self.dtype: torch.dtype = model.dtype
        # Keys and values of one token, through the model's own cache.
        cache = DynamicCache(config=self.config)
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache)
        for layer in cache.layers:
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None or keys.dim() != 4:
                self.shapes.append(None)
                continue
            self.shapes.append((keys.shape[1], keys.shape[3], values.shape[3]))
            self.dtype = keys.dtype


def _rope_boundary(config: Any) -> tuple[str, int]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    several = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    for entry in several:
        kind = entry.get("rope_type") or entry.get("type") or ""
        if kind == "dynamic":
            return kind, int(config.max_position_embeddings)
        if kind == "longrope":
            name = "original_max_position_embeddings"
            original = entry.get(name) or getattr(config, name, None)
            return kind, int(original or config.max_position_embeddings)
    return "", NO_LIMIT


class RotaryReset:
    """Rotary frequencies that depend on the length of a text alone, where a model keeps those of an earlier one.

    With dynamic NTK scaling transformers computes frequencies anew for each length that is longer than all before,
    and takes the first ones again only for a text shorter than the trained length. In between, a text would be
    decoded with the frequencies of whatever was decoded before it.

    Args:
        model: any; without such scaling there is nothing to do.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules: list[Any] = [
            one for one in model.modules() if "dynamic" in str(getattr(one, "rope_type", ""))
        ]

    def before(self, positions: torch.Tensor) -> None:
        """Called before a pass over rows at these positions."""
        for module in self._modules:
            length = int(positions.max()) + 1
            for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
                if getattr(module, name) > max(length, module.original_max_seq_len):
                    kind = name.removesuffix("max_seq_len_cached")  # of a layer, where kinds have their own
                    first = getattr(module, f"{kind}original_inv_freq").to(getattr(module, f"{kind}inv_freq"))
                    module.register_buffer(f"{kind}inv_freq", first, persistent=False)
                    setattr(module, name, module.original_max_seq_len)


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Turn an allocator's failure into ``OutOfMemory``, which the decoding loop knows how to answer.

    Args:
        what: what did not fit, for the message.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error).lower()
        named = "can't allocate memory" in text or "out of memory" in text
        if isinstance(error, OutOfMemory) or not (named or isinstance(error, MemoryError)):
            raise
        raise OutOfMemory(
            f"{what} did not fit in memory; use a shorter prompt, fewer sequences, "
            "a smaller dtype, or a smaller (W, N, G)"
        ) from error
