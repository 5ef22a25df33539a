"""Where each architecture keeps its parts, and the parts themselves: tensors of the model, not copies.

To let an architecture join, register a ``Spec`` under the name of its causal LM class. What is assumed:
pre-norm blocks of RMS norms, rotary positions on halves, grouped-query attention, a gated feed-forward with
SiLU. Anything else is refused here by name or found by the probe at load, and runs on transformers' code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

#: Rotary types whose angles depend on the position alone.
FIXED_ROTARY = frozenset({"default", "linear", "llama3", "yarn"})


class Unsupported(Exception):
    """Why a model cannot be compiled, in one line for people."""


def _never(config: Any, layer: int) -> int:
    return 0


def _always(config: Any, layer: int) -> bool:
    return True


def _window_everywhere(config: Any, layer: int) -> int:
    return getattr(config, "sliding_window", None) or 0


def _window_by_type(config: Any, layer: int) -> int:
    types = getattr(config, "layer_types", None)
    sliding = types is not None and types[layer] == "sliding_attention"
    return (getattr(config, "sliding_window", None) or 0) if sliding else 0


def _rotates_by_list(config: Any, layer: int) -> bool:
    return bool(config.no_rope_layers[layer])


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
    window: Callable[[Any, int], int] = _never
    rotates: Callable[[Any, int], bool] = _always


REGISTRY: dict[str, Spec] = {
    "LlamaForCausalLM": Spec(),
    "MistralForCausalLM": Spec(window=_window_everywhere),
    "Qwen2ForCausalLM": Spec(window=_window_by_type),
    "Qwen3ForCausalLM": Spec(
        query_norm="self_attn.q_norm", key_norm="self_attn.k_norm", window=_window_by_type
    ),
    "SmolLM3ForCausalLM": Spec(window=_window_by_type, rotates=_rotates_by_list),
}


def register(name: str, spec: Spec) -> None:
    """Let the causal LM class ``name`` be compiled."""
    REGISTRY[name] = spec


@dataclass(frozen=True, slots=True)
class NormParts:
    """Weight (n,) and epsilon of an RMS norm."""

    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class LinearParts:
    """Weight (out, in) and bias (out,) or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One block."""

    attention_norm: NormParts
    query: LinearParts
    key: LinearParts
    value: LinearParts
    output: LinearParts
    query_norm: NormParts | None
    key_norm: NormParts | None
    feed_forward_norm: NormParts
    gate: LinearParts
    up: LinearParts
    down: LinearParts
    window: int
    rotates: bool
    scale: float


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A whole model: H query heads, K key heads, head size D."""

    embedding: torch.Tensor
    layers: list[LayerParts]
    norm: NormParts
    head: LinearParts
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
        parts = [_layer(layer, spec, config, index) for index, layer in enumerate(layers)]
        attention: Any = layers[0].get_submodule(spec.attention)
        size = int(attention.head_dim)
        return ModelParts(
            embedding=_plain(model.get_submodule(spec.embedding), nn.Embedding).weight,
            layers=parts,
            norm=_norm(model.get_submodule(spec.norm)),
            head=_linear(model.get_submodule(spec.head)),
            rotary=model.get_submodule(spec.rotary),
            heads=parts[0].query.weight.shape[0] // size,
            key_heads=parts[0].key.weight.shape[0] // size,
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
    def norm(path: str) -> NormParts | None:
        return _norm(layer.get_submodule(path)) if path else None

    def linear(path: str) -> LinearParts:
        return _linear(layer.get_submodule(path))

    attention: Any = layer.get_submodule(spec.attention)
    return LayerParts(
        attention_norm=_norm(layer.get_submodule(spec.attention_norm)),
        query=linear(spec.query),
        key=linear(spec.key),
        value=linear(spec.value),
        output=linear(spec.output),
        query_norm=norm(spec.query_norm),
        key_norm=norm(spec.key_norm),
        feed_forward_norm=_norm(layer.get_submodule(spec.feed_forward_norm)),
        gate=linear(spec.gate),
        up=linear(spec.up),
        down=linear(spec.down),
        window=spec.window(config, index),
        rotates=spec.rotates(config, index),
        scale=float(attention.scaling),
    )


def _plain(module: nn.Module, kind: type[nn.Module]) -> Any:
    """The module, if it is exactly of this kind: an adapter or a quantised layer computes something else."""
    if type(module) is not kind:
        raise Unsupported(f"a part of the model is {type(module).__name__}, not a plain {kind.__name__}")
    return module


def _linear(module: nn.Module) -> LinearParts:
    linear = _plain(module, nn.Linear)
    return LinearParts(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


def _norm(module: Any) -> NormParts:
    return NormParts(module.weight.detach(), float(module.variance_epsilon))
