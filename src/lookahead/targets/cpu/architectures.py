"""Where each architecture keeps its parts, and the parts themselves: tensors of the model, not copies.

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

#: Rotary types whose angles depend on the position alone.
FIXED_ROTARY = frozenset({"default", "linear", "llama3", "yarn"})
LINEARS = ("query", "key", "value", "output", "gate", "up", "down")
NORMS = ("attention_norm", "query_norm", "key_norm", "feed_forward_norm")


class Unsupported(Exception):
    """Why a model cannot be compiled, in one line for people."""


def _window_everywhere(config: Any, layer: int) -> int:
    return getattr(config, "sliding_window", None) or 0


def _window_by_type(config: Any, layer: int) -> int:
    types = getattr(config, "layer_types", None)
    sliding = types is not None and types[layer] == "sliding_attention"
    return _window_everywhere(config, layer) if sliding else 0


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


class Linear(NamedTuple):
    """Weight (out, in) and bias (out,) or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class Norm(NamedTuple):
    """Weight (n,) and epsilon of an RMS norm."""

    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One block; linears and norms by the names that ``Spec`` has for them."""

    linears: dict[str, Linear]
    norms: dict[str, Norm]
    window: int
    rotates: bool
    scale: float


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A whole model: H query heads, K key heads, head size D."""

    embedding: torch.Tensor
    layers: list[LayerParts]
    norm: Norm
    head: Linear
    rotary: nn.Module
    heads: int
    key_heads: int
    head_size: int


def read_parts(model: nn.Module, config: Any) -> ModelParts:
    """The parts of a model whose class is registered.

    Raises:
        Unsupported: the class is not registered, or the model is not what its spec assumes.
    """
    name = type(model).__name__
    spec = REGISTRY.get(name)
    if spec is None:
        raise Unsupported(f"{name} is not among the architectures of the compiled path")
    _check(model, config)
    try:
        layers = list(model.get_submodule(spec.layers).children())
        attention: Any = layers[0].get_submodule(spec.attention)
        parts = [_layer(layer, spec, config, index) for index, layer in enumerate(layers)]
        size = int(attention.head_dim)
        heads, key_heads = (len(parts[0].linears[kind].weight) // size for kind in ("query", "key"))
        return ModelParts(
            embedding=_plain(model, spec.embedding, nn.Embedding).weight,
            layers=parts,
            norm=_norm(model, spec.norm),
            head=_linear(model, spec.head),
            rotary=model.get_submodule(spec.rotary),
            heads=heads,
            key_heads=key_heads,
            head_size=size,
        )
    except AttributeError as error:
        raise Unsupported(
            f"{name} is built differently from what the compiled path knows ({error})"
        ) from error


def _check(model: nn.Module, config: Any) -> None:
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
    for name, module in model.named_modules():
        where = f"{type(module).__name__} {name}".strip()
        if module._forward_hooks or module._forward_pre_hooks:
            raise Unsupported(f"{where} has hooks, which compiled passes would not call")
        if "forward" in vars(module):
            raise Unsupported(f"{where} has a forward of its own, which compiled passes would not call")


def _layer(layer: nn.Module, spec: Spec, config: Any, index: int) -> LayerParts:
    linears = {name: _linear(layer, getattr(spec, name)) for name in LINEARS}
    norms = {name: _norm(layer, getattr(spec, name)) for name in NORMS if getattr(spec, name)}
    attention: Any = layer.get_submodule(spec.attention)
    scale = float(attention.scaling)
    return LayerParts(linears, norms, spec.window(config, index), spec.rotates(config, index), scale)


def _plain(module: nn.Module, path: str, kind: type[nn.Module]) -> Any:
    """The part, if it is exactly of this kind: an adapter or a quantised layer computes something else."""
    part = module.get_submodule(path)
    if type(part) is not kind:
        raise Unsupported(f"a part of the model is {type(part).__name__}, not a plain {kind.__name__}")
    return part


def _linear(module: nn.Module, path: str) -> Linear:
    linear = _plain(module, path, nn.Linear)
    return Linear(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


def _norm(module: nn.Module, path: str) -> Norm:
    norm: Any = module.get_submodule(path)
    return Norm(norm.weight.detach(), float(norm.variance_epsilon))
