"""The names of parts and settings in GGUF files, by architecture, as written by llama.cpp's converter.

``gguf.sizes`` uses these names to check the sizes of a file, ``gguf.settings`` to read its settings, and
``cpu.gguf_blueprint`` to make a model.

| architecture | classes | q and k rows | norm weights | settings not in the file |
|---|---|---|---|---|
| llama | Llama, Mistral | permuted | as they are | |
| granite | Granite | permuted | as they are | |
| smollm3 | SmolLM3 | permuted | as they are | every fourth layer has no rotary positions |
| qwen2, qwen3 | Qwen2, Qwen3 | as they are | as they are | |
| olmo2 | Olmo2, Olmo3 | as they are | as they are | |
| gemma | Gemma | as they are | 1 added | embeddings times sqrt(hidden) |
| gemma2 | Gemma2 | as they are | 1 added | the same; every second layer slides; scale of the scores |
| gemma3 | Gemma3 (text) | as they are | 1 added | the same; five of six layers slide |
| phi3 | Phi3 | one tensor for q, k, v | as they are | |
| starcoder2 | Starcoder2 | as they are | layer norms | |
| gpt2 | GPT2LMHead | one tensor for q, k, v | layer norms | |

Every linear is (outputs, inputs), including GPT-2's, which are transposed in transformers. Tensor names end in
``.weight`` or ``.bias``; biases are optional. Without ``output.weight``, the head is ``token_embd.weight``.

**Permuted rows.** Rotary positions rotate pairs of a head's D outputs. transformers pairs i with i + D/2; llama.cpp's
``llama`` pairs 2i with 2i + 1, and its converter permutes rows (and biases) accordingly. With D = 6 the rows of a
head have this order in the file:

    0 3 1 4 2 5        row 2i of the file is row i of transformers, row 2i + 1 is row i + D/2

This is the order of ``formats.paired`` if the whole head rotates, so such rows are packed unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class GGUFNames:
    """The names and properties of a value of ``general.architecture``.

    Attributes:
        model_class: the transformers class, a key of ``module_families.REGISTRY``.
        tensors: part of a ``Spec`` -> tensor name without its ending; ``{layer}`` stands for the layer's number.
        settings: field of the transformers config -> metadata key without the architecture prefix. Keys shared by all
            architectures are not listed.
        permuted: whether the rows and biases of queries and keys are permuted (see above).
        norm_type: 1 for RMS norms, 2 for layer norms.
        activation: the activation of the feed-forward, by its name in ``blueprint.ACTIVATIONS``.
        scaled_embedding: whether embeddings are multiplied by sqrt(hidden).
        slides: (layer) -> whether it has a sliding window, for files with a window but no pattern.
        rotates: (layer) -> whether it has rotary positions.
    """

    model_class: str
    tensors: Mapping[str, str]
    settings: Mapping[str, str]
    permuted: bool = False
    norm_type: int = 1
    activation: str = "silu"
    scaled_embedding: bool = False
    slides: Callable[[int], bool] | None = None
    rotates: Callable[[int], bool] = lambda layer: True


_TENSORS = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "blk.{layer}.attn_norm",
    "query": "blk.{layer}.attn_q",
    "key": "blk.{layer}.attn_k",
    "value": "blk.{layer}.attn_v",
    "output": "blk.{layer}.attn_output",
    "feed_forward_norm": "blk.{layer}.ffn_norm",
    "gate": "blk.{layer}.ffn_gate",
    "up": "blk.{layer}.ffn_up",
    "down": "blk.{layer}.ffn_down",
}
_HEAD_NORMS = {"query_norm": "blk.{layer}.attn_q_norm", "key_norm": "blk.{layer}.attn_k_norm"}
_POST_NORMS = {
    "attention_post_norm": "blk.{layer}.post_attention_norm",
    "feed_forward_post_norm": "blk.{layer}.post_ffw_norm",
}
_QKV = {"qkv": "blk.{layer}.attn_qkv"}
_SETTINGS = {"rope_theta": "rope.freq_base", "norm_eps": "attention.layer_norm_rms_epsilon"}
_LAYER_NORM = {"norm_eps": "attention.layer_norm_epsilon"}


def _without(names: Mapping[str, str], *parts: str) -> dict[str, str]:
    return {part: name for part, name in names.items() if part not in parts}


_LLAMA = GGUFNames("LlamaForCausalLM", _TENSORS, _SETTINGS, permuted=True)
_QWEN2 = replace(_LLAMA, model_class="Qwen2ForCausalLM", permuted=False)
_GEMMA = replace(
    _QWEN2,
    model_class="GemmaForCausalLM",
    activation="gelu_pytorch_tanh",
    scaled_embedding=True,
)
_GEMMA2 = replace(
    _GEMMA,
    model_class="Gemma2ForCausalLM",
    tensors=_TENSORS | _POST_NORMS,
    settings=_SETTINGS
    | {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    slides=lambda layer: layer % 2 < 1,
)
#: general.architecture -> names.
GGUF_NAMES: dict[str, GGUFNames] = {
    "llama": _LLAMA,
    "granite": replace(
        _LLAMA,
        model_class="GraniteForCausalLM",
        settings=_SETTINGS
        | {
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "smollm3": replace(_LLAMA, model_class="SmolLM3ForCausalLM", rotates=lambda layer: (layer + 1) % 4 != 0),
    "qwen2": _QWEN2,
    "qwen3": replace(_QWEN2, model_class="Qwen3ForCausalLM", tensors=_TENSORS | _HEAD_NORMS),
    "olmo2": replace(
        _QWEN2,
        model_class="Olmo2ForCausalLM",
        tensors=_without(_TENSORS, "attention_norm", "feed_forward_norm") | _HEAD_NORMS | _POST_NORMS,
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": replace(
        _GEMMA2,
        model_class="Gemma3ForCausalLM",
        tensors=_TENSORS | _POST_NORMS | _HEAD_NORMS,
        settings=_without(_GEMMA2.settings, "attn_logit_softcapping")
        | {"rope_local_base_freq": "rope.freq_base_swa"},
        slides=lambda layer: layer % 6 < 5,
    ),
    "phi3": replace(
        _QWEN2,
        model_class="Phi3ForCausalLM",
        tensors=_without(_TENSORS, "query", "key", "value", "gate", "up")
        | _QKV
        | {"gate_up": "blk.{layer}.ffn_up"},
        slides=lambda layer: True,
    ),
    "starcoder2": replace(
        _QWEN2,
        model_class="Starcoder2ForCausalLM",
        tensors=_without(_TENSORS, "gate"),
        settings=_SETTINGS | _LAYER_NORM,
        norm_type=2,
        activation="gelu_pytorch_tanh",
        slides=lambda layer: True,
    ),
    "gpt2": replace(
        _QWEN2,
        model_class="GPT2LMHeadModel",
        tensors=_without(_TENSORS, "query", "key", "value", "gate") | _QKV | {"positions": "position_embd"},
        settings=_LAYER_NORM,
        norm_type=2,
        activation="gelu_pytorch_tanh",
        rotates=lambda layer: False,
    ),
}
#: The tensor that divides rotary frequencies (Llama 3), and the tensors of models with two length ranges (Phi-3).
FREQUENCY_FACTORS = "rope_freqs.weight"
FACTORS_BY_LENGTH = ("rope_factors_long.weight", "rope_factors_short.weight")
