"""Where each architecture keeps its parts: tensors of the model, not copies.

To let an architecture join, register a ``Spec`` under the name of its causal LM class. What is assumed:
pre-norm blocks of RMS norms, rotary positions on halves, grouped-query attention, a gated feed-forward with
SiLU. Anything else is refused here by name or found by the probe at load, and runs on transformers' code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from .formats import Linear

#: Rotary types whose angles depend on the position alone.
FIXED_ROTARY = frozenset({"default", "linear", "llama3", "yarn"})


class Unsupported(Exception):
    """Why a model cannot be compiled, in one line for people."""


def _window_everywhere(config: Any, layer: int) -> int:
    return getattr(config, "sliding_window", None) or 0


def _window_by_type(config: Any, layer: int) -> int:
    types = getattr(config, "layer_types", None)
    return _window_everywhere(config, layer) if types and types[layer] == "sliding_attention" else 0


@dataclass(frozen=True, slots=True)
class Spec:
    """Attribute paths, from the model for the upper block and from a layer for the lower one.

    Attributes:
        window: (config, layer) -> keys that a row sees, its own included; 0 for all.
        rotates: (config, layer) -> whether the layer has rotary positions.
        query_norm, key_norm: RMS norms over each head, "" for none.
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    rotary: str = "model.rotary_emb"
    norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    attention: str = "self_attn"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    query_norm: str = ""
    key_norm: str = ""
    feed_forward_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    window: Callable[[Any, int], int] = lambda config, layer: 0
    rotates: Callable[[Any, int], bool] = lambda config, layer: True


REGISTRY: dict[str, Spec] = {
    "LlamaForCausalLM": Spec(),
    "MistralForCausalLM": Spec(window=_window_everywhere),
    "Qwen2ForCausalLM": Spec(window=_window_by_type),
    "Qwen3ForCausalLM": Spec(
        query_norm="self_attn.q_norm", key_norm="self_attn.k_norm", window=_window_by_type
    ),
    "SmolLM3ForCausalLM": Spec(
        window=_window_by_type, rotates=lambda config, layer: bool(config.no_rope_layers[layer])
    ),
}


def register(name: str, spec: Spec) -> None:
    """Let the causal LM class ``name`` be compiled."""
    REGISTRY[name] = spec


def spec_of(model: nn.Module, config: Any) -> Spec:
    """The spec of a model's class.

    Raises:
        Unsupported: the class is not registered, or the model is not what is assumed.
    """
    name = type(model).__name__
    if name not in REGISTRY:
        raise Unsupported(f"{name} is not among the architectures of the compiled path")
    activation = getattr(config, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise Unsupported(f"the compiled path knows SiLU feed-forwards, this model has {activation!r}")
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in FIXED_ROTARY:
        raise Unsupported(f"rotary positions of type {rotary!r} change with the length of the text")
    if model.training and getattr(config, "attention_dropout", False):
        raise Unsupported("the model is in training mode with dropout; call model.eval()")
    if _global_forward_hooks or _global_forward_pre_hooks:
        raise Unsupported("torch has hooks for every module, which compiled passes would not call")
    for path, module in model.named_modules():
        where = f"{type(module).__name__} {path}".strip()
        if module._forward_hooks or module._forward_pre_hooks:
            raise Unsupported(f"{where} has hooks, which compiled passes would not call")
        if "forward" in vars(module):
            raise Unsupported(f"{where} has a forward of its own, which compiled passes would not call")
    return REGISTRY[name]


def plain(module: nn.Module, path: str, kind: type[nn.Module]) -> Any:
    """The part, if it is exactly of this kind: an adapter or a quantised layer computes something else."""
    part = module.get_submodule(path)
    if type(part) is not kind:
        raise Unsupported(f"a part of the model is {type(part).__name__}, not a plain {kind.__name__}")
    return part


def linear_of(module: nn.Module, path: str) -> Linear:
    """Weight and bias of a linear; zeros for a bias that is not there."""
    linear = plain(module, path, nn.Linear)
    weight = linear.weight.detach()
    return Linear(weight, weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach())


class Norm(NamedTuple):
    """Weight (n,) and epsilon of an RMS norm."""

    weight: torch.Tensor
    epsilon: float


def norm_of(module: nn.Module, path: str) -> Norm:
    """An RMS norm's numbers."""
    norm: Any = module.get_submodule(path)
    return Norm(norm.weight.detach(), float(norm.variance_epsilon))
