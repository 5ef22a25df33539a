"""The location of each transformers class's parts. The parts are the model's own tensors, not copies.

To add a class, register a ``Spec`` under its name. The compiled pass supports layers of grouped-query attention and a
feed-forward, each added to the residual stream; RMS or layer norms before them, after them or both; rotary positions
on pairs (i, i + R/2), or learned positions; SiLU or the tanh form of GELU. Other models are rejected here by name, or
by the comparison at load, and run on the transformers path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from ..core.errors import Unsupported
from ..cpu import dense, formats
from ..cpu.blueprint import ACTIVATIONS, NORMS, Array, Blueprint, LayerParts, Norm, head_norm_of
from ..cpu.dense import Linear
from .facts import ModelFacts
from .fingerprint import active_hooks
from .masks import layer_window


@dataclass(frozen=True, slots=True)
class Spec:
    """The parts of a class, as attribute paths, and the fields of its config that the pass reads.

    The paths up to ``head`` start at the model, the others at a layer. A path or field is "" if the class lacks it.

    Attributes:
        embedding, layers, rotary, norm, head: the token embedding, the list of layers, the module of rotary
            positions, the final norm and the LM head.
        positions: learned position embeddings.
        attention: the attention module, whose ``scaling`` is the factor of the scores.
        qkv, gate_up: a single linear instead of several.
        query, key, value, output, gate, up, down: linears. Without ``gate``, the feed-forward is activation(up).
        attention_norm, feed_forward_norm: norms of their inputs.
        attention_post_norm, feed_forward_post_norm: norms of their outputs, applied before the outputs are added.
        query_norm, key_norm: RMS norms over each head, or over all heads together.
        norm_offset: constant added to the weights of norms.
        activation, embedding_multiplier, residual_multiplier, logits_divisor, attention_cap, logits_cap: fields of
            the config; caps are c in c * tanh(x / c).
        rotates: (config, layer) -> whether the layer has rotary positions.
    """

    embedding: str = "model.embed_tokens"
    positions: str = ""
    layers: str = "model.layers"
    rotary: str = "model.rotary_emb"
    norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    attention: str = "self_attn"
    qkv: str = ""
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    query_norm: str = ""
    key_norm: str = ""
    attention_post_norm: str = ""
    feed_forward_norm: str = "post_attention_layernorm"
    gate_up: str = ""
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    feed_forward_post_norm: str = ""
    norm_offset: float = 0.0
    activation: str = "hidden_act"
    embedding_multiplier: str = ""
    residual_multiplier: str = ""
    logits_divisor: str = ""
    attention_cap: str = ""
    logits_cap: str = ""
    rotates: Callable[[Any, int], bool] = lambda config, layer: True


_QWEN3 = Spec(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
_GEMMA2 = Spec(
    attention_post_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    feed_forward_post_norm="post_feedforward_layernorm",
    norm_offset=1.0,
    activation="hidden_activation",
    logits_cap="final_logit_softcapping",
    attention_cap="attn_logit_softcapping",
)
_OLMO2 = replace(
    _QWEN3,
    attention_norm="",
    attention_post_norm="post_attention_layernorm",
    feed_forward_norm="",
    feed_forward_post_norm="post_feedforward_layernorm",
)
#: transformers class -> spec.
REGISTRY: dict[str, Spec] = {
    "LlamaForCausalLM": Spec(),
    "MistralForCausalLM": Spec(),
    "Qwen2ForCausalLM": Spec(),
    "Qwen3ForCausalLM": _QWEN3,
    "SmolLM3ForCausalLM": Spec(rotates=lambda config, layer: bool(config.no_rope_layers[layer])),
    "GraniteForCausalLM": Spec(
        embedding_multiplier="embedding_multiplier",
        residual_multiplier="residual_multiplier",
        logits_divisor="logits_scaling",
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": _OLMO2,
    "Phi3ForCausalLM": Spec(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
    "GemmaForCausalLM": Spec(norm_offset=1.0),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(
        _GEMMA2, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm", attention_cap=""
    ),
    "Starcoder2ForCausalLM": Spec(gate="", up="mlp.c_fc", down="mlp.c_proj"),
    "GPT2LMHeadModel": Spec(
        embedding="transformer.wte",
        positions="transformer.wpe",
        layers="transformer.h",
        rotary="",
        norm="transformer.ln_f",
        attention_norm="ln_1",
        attention="attn",
        qkv="attn.c_attn",
        output="attn.c_proj",
        feed_forward_norm="ln_2",
        gate="",
        up="mlp.c_fc",
        down="mlp.c_proj",
        activation="activation_function",
        rotates=lambda config, layer: False,
    ),
}


def register(name: str, spec: Spec) -> None:
    """Add the spec of the causal LM class ``name``, or replace it."""
    REGISTRY[name] = spec


def spec_of(model: nn.Module, facts: ModelFacts) -> Spec:
    """The spec of a model's class.

    Raises:
        Unsupported: the class is not registered, or the compiled pass does not support the model.
    """
    name = type(model).__name__
    if name not in REGISTRY:
        raise Unsupported(f"{name} is not an architecture of the compiled path")
    spec = REGISTRY[name]
    activation = getattr(facts.config, spec.activation, None)
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise Unsupported(
            f"the compiled path supports feed-forwards with {known}; this model has {activation!r}"
        )
    if facts.rope_type:
        raise Unsupported(f"rotary positions of type {facts.rope_type!r} change with the sequence length")
    if len(set(facts.shapes)) != 1 or None in facts.shapes:
        raise Unsupported("the compiled path needs the same key shape in all layers")
    if model.training and any("drop" in field and value for field, value in vars(facts.config).items()):
        raise Unsupported("the model is in training mode with dropout; call model.eval()")
    if _global_forward_hooks or _global_forward_pre_hooks:
        raise Unsupported("torch has hooks for every module, which compiled passes would not call")
    for path, module in model.named_modules():
        where = f"{type(module).__name__} {path}".strip()
        if active_hooks(module._forward_hooks) or active_hooks(module._forward_pre_hooks):
            raise Unsupported(f"{where} has hooks, which compiled passes would not call")
        if "forward" in vars(module):
            raise Unsupported(f"{where} has an overridden forward, which compiled passes would not call")
    return spec


def plain(module: nn.Module, path: str, kinds: tuple[type[nn.Module], ...]) -> Any:
    """The part at a path. Its type must be exactly one of ``kinds``, because subclasses may compute something else.

    Raises:
        Unsupported: it has another type.
        AttributeError: there is no such part.
    """
    part = module.get_submodule(path)
    if type(part) not in kinds:
        name = f"{type(part).__module__}.{type(part).__name__}"
        raise Unsupported(f"{path} is {name}, not a plain {kinds[0].__name__}")
    return part


def embedding_of(model: nn.Module, path: str) -> tuple[torch.Tensor, float]:
    """Weight (V, hidden) of an embedding, and the scale factor of a family's own class (Gemma).

    Raises:
        Unsupported, AttributeError: as in ``plain``.
    """
    part: Any = model.get_submodule(path)
    known = isinstance(part, nn.Embedding) and type(part).__module__ == type(model).__module__
    weight = plain(model, path, (type(part) if known else nn.Embedding,)).weight.detach()
    scale = getattr(part, "embed_scale", None)
    return weight.contiguous(), 1.0 if scale is None else float(scale.to(weight.dtype))


def bits_of(tensor: torch.Tensor) -> Array:
    """A tensor as an array that shares its memory; bf16, which numpy lacks, becomes int16."""
    array: Array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def tensor_of(bits: Array) -> torch.Tensor:
    """The inverse of ``bits_of``."""
    tensor = torch.from_numpy(bits)
    return tensor.view(torch.bfloat16) if bits.dtype == np.int16 else tensor


def linear_of(module: nn.Module, path: str) -> Linear:
    """Weight (out, in) and bias of a linear; zeros without a bias.

    Raises:
        Unsupported, AttributeError: as in ``plain``.
    """
    from transformers.pytorch_utils import Conv1D

    linear = plain(module, path, (nn.Linear, Conv1D))
    weight = bits_of(linear.weight.detach())
    weight = weight if type(linear) is nn.Linear else weight.T
    bias = linear.bias
    return Linear(
        weight, np.zeros(len(weight), np.float32) if bias is None else bias.detach().float().numpy()
    )


def norm_of(module: nn.Module, path: str, size: int, offset: float) -> Norm:
    """A norm, with ``offset`` added to its weights; ``Norm.none`` for the path ""."""
    if not path:
        return Norm.none(size)
    norm: Any = module.get_submodule(path)
    weight = (norm.weight.detach().float() + offset).numpy()
    if isinstance(norm, nn.LayerNorm):
        bias = np.zeros_like(weight) if norm.bias is None else norm.bias.detach().float().numpy()
        return Norm(weight, bias, norm.eps, 2)
    epsilon = getattr(norm, "variance_epsilon", None)
    return Norm(weight, np.zeros_like(weight), float(norm.eps if epsilon is None else epsilon), 1)


def _angles(rotary: Any, kinds: list[str], positions: int) -> Array:
    """Cosine and sine from a model's own module, (tables, positions, R / 2, 2)."""
    numbers = torch.arange(positions)[None]
    tables = []
    if rotary is None:
        return np.empty((1, positions, 0, 2), np.float32)
    for kind in kinds:
        with torch.no_grad():
            both = rotary(torch.empty(1, dtype=torch.float32), numbers, *([kind] if kind else []))
        tables.append(torch.stack([x[0, :, : x.shape[-1] // 2].float() for x in both], -1))
    return torch.stack(tables).numpy()


class _Parts:
    """Reads the parts of one model by its spec."""

    def __init__(self, model: nn.Module, facts: ModelFacts) -> None:
        self.model = model
        self.config = facts.config
        self.spec = spec_of(model, facts)
        (shape,) = set(facts.shapes)
        assert shape is not None
        self.key_heads, self.head_size, _ = shape
        self.heads = int(self.config.num_attention_heads)
        self.modules = list(model.get_submodule(self.spec.layers).children())
        self.rotary: Any = model.get_submodule(self.spec.rotary) if self.spec.rotary else None
        self.rotary_types = list(getattr(self.rotary, "layer_types", [""]))
        # The compiled model keeps this function, so it must not reference the whole model.
        self.angles = partial(_angles, self.rotary, self.rotary_types)
        self.rotary_size = 2 * self.angles(1).shape[2]
        self.order = formats.paired(self.head_size, self.rotary_size)

    def setting(self, name: str, default: float) -> float:
        """A field of the config if the spec names one and the config has it; else the default."""
        return float((getattr(self.config, name) if name else None) or default)

    def layers(self) -> Iterator[LayerParts]:
        """Make the layers one at a time, because their linears may be copies."""
        spec = self.spec
        config = self.config
        hidden = int(self.config.hidden_size)
        for index, layer in enumerate(self.modules):
            norms = {name: norm_of(layer, getattr(spec, name), hidden, spec.norm_offset) for name in NORMS}
            head_norm, joint = self.head_norm(layer)
            attention: Any = layer.get_submodule(spec.attention)
            kind = config.layer_types[index] if len(self.rotary_types) > 1 else self.rotary_types[0]
            yield LayerParts(
                linears=self.linears(layer),
                norms=norms,
                head_norm=head_norm,
                joint_norm=joint,
                gated=bool(spec.gate or spec.gate_up),
                scale=float(attention.scaling),
                window=layer_window(config, index),
                rotary=1 + self.rotary_types.index(kind) if spec.rotates(config, index) else 0,
                cap=self.setting(spec.attention_cap, 0),
            )

    def linears(self, layer: nn.Module) -> dict[str, Any]:
        """The linears of a layer, joined and reordered as in ``LayerParts.linears``."""
        spec = self.spec
        size = self.head_size
        if spec.qkv:
            sizes = (self.heads * size, self.key_heads * size, self.key_heads * size)
            query, key, value = dense.split(linear_of(layer, spec.qkv), *sizes)
        else:
            query, key, value = (linear_of(layer, path) for path in (spec.query, spec.key, spec.value))
        down = linear_of(layer, spec.down)
        if spec.gate_up:
            halves = [down.weight.shape[1]] * 2
            up = dense.gate_and_up(*dense.split(linear_of(layer, spec.gate_up), *halves))
        elif spec.gate:
            up = dense.gate_and_up(linear_of(layer, spec.gate), linear_of(layer, spec.up))
        else:
            up = linear_of(layer, spec.up)
        query, key = (dense.reordered(linear, self.order) for linear in (query, key))
        qkv = dense.joined(query, key, value)
        return {"qkv": qkv, "output": linear_of(layer, spec.output), "up": up, "down": down}

    def head_norm(self, layer: nn.Module) -> tuple[Norm | None, bool]:
        """``LayerParts.head_norm`` and ``joint_norm``."""
        spec = self.spec
        if not spec.query_norm:
            return None, False
        query, key = (norm_of(layer, path, 0, spec.norm_offset) for path in (spec.query_norm, spec.key_norm))
        weights = [(query.weight, self.heads), (key.weight, self.key_heads)]
        return head_norm_of(weights, self.order, key.epsilon)


def blueprint_of(model: nn.Module, facts: ModelFacts) -> Blueprint:
    """The parts of a transformers model of a registered class. The blueprint references its weights.

    Raises:
        Unsupported: the model does not match the spec of its class.
    """
    try:
        parts = _Parts(model, facts)
        spec = parts.spec
        config = parts.config
        embedding, factor = embedding_of(model, spec.embedding)
        head = linear_of(model, spec.head)
        down = linear_of(parts.modules[0], spec.down)
        return Blueprint(
            name=type(model).__name__,
            dtype=str(embedding.dtype).removeprefix("torch."),
            vocabulary=len(head.weight),
            hidden=embedding.shape[1],
            heads=parts.heads,
            key_heads=parts.key_heads,
            head_size=parts.head_size,
            inner=down.weight.shape[1],
            activation=ACTIVATIONS[getattr(config, spec.activation)],
            embedding=bits_of(embedding),
            layer_count=len(parts.modules),
            layers=parts.layers,
            final_norm=norm_of(model, spec.norm, embedding.shape[1], spec.norm_offset),
            head=head,
            embedding_factor=factor * parts.setting(spec.embedding_multiplier, 1),
            position_embedding=bits_of(embedding_of(model, spec.positions)[0]) if spec.positions else None,
            head_factor=1 / parts.setting(spec.logits_divisor, 1),
            head_cap=parts.setting(spec.logits_cap, 0),
            residual_factor=parts.setting(spec.residual_multiplier, 1),
            rotary_size=parts.rotary_size,
            angles=parts.angles if parts.rotary is not None else None,
        )
    except AttributeError as error:
        name = type(model).__name__
        raise Unsupported(
            f"{name} does not have the structure that the compiled path supports ({error})"
        ) from error
