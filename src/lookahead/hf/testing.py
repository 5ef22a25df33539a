"""Tiny transformers models, for tests of this library and of code that uses it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def tiny_model(model_type: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """A small random model in fp32 on the CPU, in evaluation mode (vocabulary 96, 2 layers).

    Args:
        model_type: the family's name in transformers.
        seed: seed of the random weights.
        **overrides: fields of the config, or ``attn_implementation``.
    """
    tokens = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    known = AutoConfig.for_model(model_type, **tokens)
    fields = {name: value for name, value in sizes.items() if hasattr(known, name)} | tokens
    attention = overrides.pop("attn_implementation", None)
    config = AutoConfig.for_model(model_type, **{**fields, "initializer_range": 0.2, **overrides})
    torch.manual_seed(seed)
    factory: Any = AutoModelForCausalLM
    return factory.from_config(config, attn_implementation=attention).eval()
