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


class ModelFacts:
    """Shapes and limits of one model.

    Attributes:
        config: the text config.
        vocabulary: V, columns of the logits.
        max_positions: positions that the model was made for; ``NO_LIMIT`` where it has no limit.
        shapes: per layer (key heads, key head size, value head size), None where a layer keeps nothing.
        dtype: of keys, values and masks.
        takes_positions, takes_rows: whether ``forward`` has ``position_ids``, ``logits_to_keep``.
        rope_type, rope_boundary: the rotary type that depends on the length, and the position from which it
            changes; ("", ``NO_LIMIT``) if none.
        rotary: is told of every pass's length.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.config: Any = model.config.get_text_config(decoder=True)
        self.kinds = LayerKinds.of(self.config)
        self.alibi = AlibiBias.of(model, self.config)
        parameters = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self.takes_rows = "logits_to_keep" in parameters
        self.vocabulary = int(self.config.vocab_size)
        self.max_positions = max_positions(self.config)
        self.rotary = RotaryReset(model)
        self.rope_type, self.rope_boundary = _rope_boundary(self.config)
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


def max_positions(config: Any) -> int:
    """Positions that a model was made for; ``NO_LIMIT`` where its config names none."""
    return int(getattr(config, "max_position_embeddings", None) or NO_LIMIT)


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

    def before(self, length: int) -> None:
        """Called before a pass over a text of ``length`` tokens, those in the cache and its own."""
        for module in self._modules:
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
