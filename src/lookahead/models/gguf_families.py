"""The names of parts and settings in GGUF files, by architecture, as llama.cpp's converter writes them.

``GGUF_NAMES`` has the names. ``read_settings`` reads the settings of a file; missing ones get llama.cpp's defaults.
This module does not import torch; ``packed_model`` turns the result into a model.

| architecture | classes | q and k rows | norm weights | settings that no file holds |
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

Every linear is (outputs, inputs), also in GPT-2, where transformers has the transpose. Tensor names end in
``.weight`` or ``.bias``; biases are optional. Without ``output.weight``, the head is ``token_embd.weight``.

**Permuted rows.** Rotary positions rotate pairs of a head's D outputs. transformers pairs i with i + D/2; llama.cpp's
``llama`` pairs 2i with 2i + 1, and its converter permutes rows (and biases) accordingly. With D = 6 the rows of a
head have this order in the file:

    0 3 1 4 2 5        row 2i of the file is row i of transformers, row 2i + 1 is row i + D/2

This is the order of ``formats.paired`` for a head that rotates as a whole, so such rows are packed unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .blueprint import Unsupported
from .gguf import GGUFFile


@dataclass(frozen=True, slots=True)
class GGUFNames:
    """The names and properties of a value of ``general.architecture``.

    Attributes:
        model_class: the transformers class, a key of ``architectures.REGISTRY``.
        tensors: part of a ``Spec`` -> tensor name without its ending; ``{layer}`` stands for the layer's number.
        settings: field of transformers' config -> metadata key without the architecture's name and the dot.
        permuted: whether the rows and biases of queries and keys are permuted (see above).
        norm_offset_included: whether the norm weights in the file include ``Spec.norm_offset``.
        norm_kind: 1 for RMS norms, 2 for layer norms.
        activation: the activation of the feed-forward, by its name in ``blueprint.ACTIVATIONS``.
        scaled_embedding: whether embeddings are multiplied by sqrt(hidden).
        slides: (layer) -> whether it has a sliding window, for files with a window but no pattern.
        rotates: (layer) -> whether it has rotary positions.
    """

    model_class: str
    tensors: Mapping[str, str]
    settings: Mapping[str, str]
    permuted: bool = False
    norm_offset_included: bool = False
    norm_kind: int = 1
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
_SETTINGS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rotary_dim": "rope.dimension_count",
    "rope_theta": "rope.freq_base",
    "norm_eps": "attention.layer_norm_rms_epsilon",
}
_LAYER_NORM = {"norm_eps": "attention.layer_norm_epsilon"}
_WINDOW = {"sliding_window": "attention.sliding_window"}


def _without(names: Mapping[str, str], *parts: str) -> dict[str, str]:
    return {part: name for part, name in names.items() if part not in parts}


_LLAMA = GGUFNames("LlamaForCausalLM", _TENSORS, _SETTINGS, permuted=True)
_QWEN2 = replace(_LLAMA, model_class="Qwen2ForCausalLM", permuted=False)
_GEMMA = replace(
    _QWEN2,
    model_class="GemmaForCausalLM",
    norm_offset_included=True,
    activation="gelu_pytorch_tanh",
    scaled_embedding=True,
)
_GEMMA2 = replace(
    _GEMMA,
    model_class="Gemma2ForCausalLM",
    tensors=_TENSORS | _POST_NORMS,
    settings=_SETTINGS
    | _WINDOW
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
        settings=_SETTINGS | _WINDOW,
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
        settings=_SETTINGS | _WINDOW,
        slides=lambda layer: True,
    ),
    "starcoder2": replace(
        _QWEN2,
        model_class="Starcoder2ForCausalLM",
        tensors=_without(_TENSORS, "gate"),
        settings=_SETTINGS | _LAYER_NORM | _WINDOW,
        norm_kind=2,
        activation="gelu_pytorch_tanh",
        slides=lambda layer: True,
    ),
    "gpt2": replace(
        _QWEN2,
        model_class="GPT2LMHeadModel",
        tensors=_without(_TENSORS, "query", "key", "value", "gate") | _QKV | {"positions": "position_embd"},
        settings=_without(_SETTINGS, "rotary_dim", "rope_theta") | _LAYER_NORM,
        norm_kind=2,
        activation="gelu_pytorch_tanh",
        rotates=lambda layer: False,
    ),
}
#: The tensor that divides the frequencies of rotary positions (Llama 3), and those of models for two lengths (Phi-3).
FREQUENCY_FACTORS = "rope_freqs.weight"
_FACTORS_BY_LENGTH = ("rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Angle i of position p is p / factor * base ** (-2 i / R), i below R / 2.

    If the file has ``FREQUENCY_FACTORS`` (R / 2,), angle i is also divided by the tensor's number i.
    """

    base: float
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class GGUFSettings:
    """The resolved settings of one file; the attributes are those of ``blueprint.Blueprint`` and ``LayerParts``.

    Attributes:
        names: the names and properties of the architecture.
        vocabulary, hidden, inner, heads, key_heads, head_size, layer_count: sizes.
        max_positions: positions that the model was trained for.
        rotary_size: R, how many numbers of a head rotate.
        epsilon: epsilon of all norms.
        scale: factor of the scores.
        attention_cap, head_cap: c in c * tanh(x / c); 0 for none.
        embedding_factor, residual_factor, head_factor: factors of the embeddings, of the outputs of attention and
            feed-forward, and of the logits.
        windows: by layer, the number of keys that a row sees, including its own; 0 for all.
        tables: tables of rotary positions.
        rotary: by layer, 0 for no rotary positions, else 1 + the index of the table.
        tied: whether the head is the embedding.
    """

    names: GGUFNames
    vocabulary: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    head_size: int
    layer_count: int
    max_positions: int
    rotary_size: int
    epsilon: float
    scale: float
    attention_cap: float
    head_cap: float
    embedding_factor: float
    residual_factor: float
    head_factor: float
    windows: tuple[int, ...]
    tables: tuple[RotaryTable, ...]
    rotary: tuple[int, ...]
    tied: bool


def read_settings(file: GGUFFile) -> GGUFSettings:
    """Read the settings of a file.

    Raises:
        Unsupported: the architecture is not in ``GGUF_NAMES``, a setting is not supported, or settings and
            tensors contradict each other.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in GGUF_NAMES:
        raise Unsupported(f"the architecture must be one of {', '.join(GGUF_NAMES)}, got {architecture!r}")
    names = GGUF_NAMES[architecture]
    read = _Metadata(file, architecture, names)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    key_heads = read.size("num_key_value_heads", heads)
    head_size = read.size("head_dim", hidden // heads)
    layer_count = read.size("num_hidden_layers")
    max_positions = read.size("max_position_embeddings", 1 << 30)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        given = "none" if embedding is None else f"of shape {embedding.shape}"
        raise Unsupported(f"token_embd.weight must have rows of {hidden} numbers, got {given}")
    if (value_length := read.get("attention.value_length", head_size)) != head_size:
        raise Unsupported(f"keys and values must have the same size, got {head_size} and {value_length}")
    if read.get("expert_count", 0):
        raise Unsupported("the compiled path has no mixtures of experts")
    window, slides = read.window(layer_count, max_positions)
    tables, rotary = read.rotary(layer_count, slides)
    rotary_size = read.size("rotary_dim", head_size) if tables else head_size
    if names.permuted and rotary_size != head_size:
        raise Unsupported(f"permuted heads must rotate as a whole, got {rotary_size} of {head_size} numbers")
    return GGUFSettings(
        names=names,
        vocabulary=embedding.shape[0],
        hidden=hidden,
        inner=read.size("intermediate_size"),
        heads=heads,
        key_heads=key_heads,
        head_size=head_size,
        layer_count=layer_count,
        max_positions=max_positions,
        rotary_size=rotary_size,
        epsilon=read.number("norm_eps", 1e-5),
        scale=read.scale(hidden, heads, head_size, layer_count),
        attention_cap=read.number("attn_logit_softcapping", 0.0),
        head_cap=read.number("final_logit_softcapping", 0.0),
        embedding_factor=read.number("embedding_multiplier", 0.0)
        or (math.sqrt(hidden) if names.scaled_embedding else 1.0),
        residual_factor=read.number("residual_multiplier", 0.0) or 1.0,
        head_factor=1.0 / (read.number("logits_scaling", 0.0) or 1.0),
        windows=tuple(window if sliding else 0 for sliding in slides),
        tables=tables,
        rotary=rotary,
        tied="output.weight" not in file.tensors,
    )


class _Metadata:
    """Reads the metadata of a file, by the fields of transformers' config."""

    def __init__(self, file: GGUFFile, architecture: str, names: GGUFNames) -> None:
        self._file, self._names, self._architecture = file, names, architecture

    def get(self, key: str, default: Any = None) -> Any:
        """A value by its key, without the architecture's name."""
        return self._file.metadata.get(f"{self._architecture}.{key}", default)

    def number(self, field: str, default: float | None = None) -> float:
        """A field, or the default if the architecture or the file does not have it."""
        key = self._names.settings.get(field)
        value = self.get(key) if key else None
        if value is None:
            if default is None:
                raise Unsupported(f"the file must have {self._architecture}.{key}, and does not")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Unsupported(
                f"{self._architecture}.{key} must be one number for all layers, got {value!r:.60}"
            )
        return float(value)

    def size(self, field: str, default: int | None = None) -> int:
        """A field that must be a whole number above 0."""
        value = self.number(field, default)
        if value < 1 or value != int(value):
            raise Unsupported(
                f"{self._architecture}.{self._names.settings[field]} must be 1 or more, got {value:g}"
            )
        return int(value)

    def scale(self, hidden: int, heads: int, head_size: int, layer_count: int) -> float:
        """Factor of the scores. Gemma 27B scales by hidden / heads; its layer count identifies it (as llama.cpp)."""
        if (multiplier := self.number("attention_multiplier", 0.0)) != 0:
            return multiplier
        large = {"gemma2": 46, "gemma3": 62}.get(self._architecture) == layer_count
        return 1 / math.sqrt(hidden / heads if large else head_size)

    def window(self, layer_count: int, max_positions: int) -> tuple[int, list[bool]]:
        """The sliding window, and for each layer whether it has it."""
        default = 4096 if self._architecture == "gemma2" else 0
        window = int(self.get("attention.sliding_window", default) or 0)
        if window <= 0:
            return 0, [False] * layer_count
        pattern = self.get("attention.sliding_window_pattern")
        if pattern is not None and not isinstance(pattern, int):  # one truth value per layer
            layers = [bool(sliding) for sliding in pattern]
            if len(layers) != layer_count:
                raise Unsupported(
                    f"the pattern of sliding windows must have {layer_count} layers, got {len(layers)}"
                )
            return window, layers
        if pattern:  # in each run of ``pattern`` layers, all but the last slide
            return window, [layer % pattern < pattern - 1 for layer in range(layer_count)]
        if self._names.slides is None:
            if window >= max_positions:  # the window has no effect
                return 0, [False] * layer_count
            raise Unsupported(
                f"the file must say which layers of {self._architecture} have its sliding window"
            )
        return window, [self._names.slides(layer) for layer in range(layer_count)]

    def rotary(self, layer_count: int, slides: list[bool]) -> tuple[tuple[RotaryTable, ...], tuple[int, ...]]:
        """``GGUFSettings.tables`` and ``GGUFSettings.rotary``."""
        rotates = [self._names.rotates(layer) for layer in range(layer_count)]
        if not any(rotates):
            return (), (0,) * layer_count
        kind = self.get("rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise Unsupported(f"the compiled path reads no rotary positions of type {kind!r} from GGUF files")
        for name in _FACTORS_BY_LENGTH:
            if name in self._file.tensors:
                raise Unsupported(f"rotary positions that change with the length of the text ({name})")
        factor = float(self.get("rope.scaling.factor", 1.0)) if kind == "linear" else 1.0
        table = RotaryTable(self.number("rope_theta", 10000.0), factor)
        if self._architecture != "gemma3":
            return (table,), tuple(map(int, rotates))
        local = RotaryTable(self.number("rope_local_base_freq", 10000.0))
        return (table, local), tuple(2 if sliding else 1 for sliding in slides)
