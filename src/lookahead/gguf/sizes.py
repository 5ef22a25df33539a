"""Checks the sizes claimed by a GGUF file against its tensors, before anything is allocated.

A header gives each size twice, as a number in the metadata and in tensor shapes. For the architectures in
``GGUF_NAMES``, ``read_sizes`` checks that every tensor has the shape implied by the metadata, that none is missing,
and that none is left over, as llama.cpp does. ``check_counts`` checks files of other architectures, about which less
is known. Both take time and memory proportional to the number of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core import SettingsError
from ..core.errors import Unsupported
from .families import FACTORS_BY_LENGTH, FREQUENCY_FACTORS, GGUFNames
from .file import GGUFFile

#: The most positions that a file may claim; no tensor confirms this number.
MOST_POSITIONS = 1 << 30
#: The largest finite fp32 number; settings are computed in fp32.
LARGEST = 3.4e38
#: The tensor that chooses experts.
ROUTER = "blk.0.ffn_gate_inp.weight"

#: The meaning of tensor dimensions, in terms of metadata keys.
_HEADS, _KEY_HEADS = "attention.head_count * head size", "attention.head_count_kv * head size"
_HIDDEN, _INNER, _VOCABULARY = "embedding_length", "feed_forward_length", "vocabulary"
_QKV = "(attention.head_count + 2 * attention.head_count_kv) * head size"
#: Part -> the dimensions of its tensor, rows first. Query and key norms are not listed, because they have two shapes.
_SHAPES = {
    "embedding": (_VOCABULARY, _HIDDEN),
    "positions": ("context_length", _HIDDEN),
    "head": (_VOCABULARY, _HIDDEN),
    "query": (_HEADS, _HIDDEN),
    "key": (_KEY_HEADS, _HIDDEN),
    "value": (_KEY_HEADS, _HIDDEN),
    "qkv": (_QKV, _HIDDEN),
    "output": (_HIDDEN, _HEADS),
    "gate": (_INNER, _HIDDEN),
    "up": (_INNER, _HIDDEN),
    "gate_up": ("2 * feed_forward_length", _HIDDEN),
    "down": (_HIDDEN, _INNER),
    "norm": (_HIDDEN,),
    "attention_norm": (_HIDDEN,),
    "attention_post_norm": (_HIDDEN,),
    "feed_forward_norm": (_HIDDEN,),
    "feed_forward_post_norm": (_HIDDEN,),
}
_WITHOUT_BIAS = ("embedding", "positions")
#: Keys of counts in files of any architecture; no count exceeds the largest tensor dimension.
_COUNTS = (
    "feed_forward_length",
    "expert_feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "expert_count",
)
#: Keys of settings that make all logits NaN unless they are finite and above 0.
_POSITIVE = ("rope.freq_base", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
#: Tokens that begin or end a sequence.
_ROLES = ("bos", "eos", "eot", "eom")
#: Some files write -1 as an unsigned number for a missing token.
MISSING_TOKEN = 0xFFFFFFFF


def contradiction(file: GGUFFile, what: str) -> SettingsError:
    """The error of a file whose header contradicts itself.

    Args:
        what: the requirement, and the value found.
    """
    return SettingsError(f"the header of {file.path} is wrong: {what}; download or convert the file again")


class Metadata:
    """Reads a file's metadata, in which any value may be missing or have the wrong type.

    Args:
        file: the file.
        architecture: its architecture, the prefix of its keys.
        names: the keys of the architecture's settings.
    """

    def __init__(self, file: GGUFFile, architecture: str, names: GGUFNames) -> None:
        self.file = file
        self.architecture = architecture
        self.names = names

    def get(self, key: str, default: Any = None) -> Any:
        """A value of any type by its key, without the architecture prefix."""
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number by its key; an array must have the same number for every layer.

        Raises:
            Unsupported: the array has different numbers.
            SettingsError: the number is missing, or is not finite.
        """
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iuf":
            if (value != value[0]).any():
                raise Unsupported(f"{self.architecture}.{key} must be the same for all layers")
            value = value[0].item()
        if value is None:
            raise contradiction(self.file, f"it must have {self.architecture}.{key}, and does not")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
            raise contradiction(
                self.file,
                f"{self.architecture}.{key} must be one finite number for all layers, got {value!r:.60}",
            )
        return value

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number by its key, at least ``least``.

        Raises:
            Unsupported, SettingsError: as in ``number``, or the number is fractional or too small.
        """
        value = self.number(key, default)
        if value < least or value != int(value):
            raise contradiction(
                self.file,
                f"{self.architecture}.{key} must be a whole number of at least {least}, got {value}",
            )
        return int(value)

    def setting(self, field: str, default: float) -> float:
        """A field of the transformers config, or the default if the architecture or the file lacks it."""
        key = self.names.settings.get(field)
        return float(self.number(key, default)) if key else default


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model, confirmed by its tensors.

    Attributes:
        vocabulary, hidden, inner, heads, key_heads, head_size, layer_count: as in ``blueprint.Blueprint``.
        rotary_size: R, the number of elements of a head that rotate.
        max_positions: positions that the model was trained for.
    """

    vocabulary: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    head_size: int
    layer_count: int
    rotary_size: int
    max_positions: int


def read_sizes(read: Metadata) -> Sizes:
    """Read the sizes of a file without experts, and check its tensors against them.

    Raises:
        SettingsError: sizes and tensors contradict each other.
    """
    file = read.file
    names = read.names
    vocabulary, hidden = _check_vocabulary(file, read.architecture)
    layer_count = _check_layers(file, read.architecture)
    if read.whole("expert_count", 0, least=0):
        raise contradiction(file, f"{read.architecture}.expert_count must be 0 without the tensor {ROUTER}")
    # Heads.
    heads = read.whole("attention.head_count")
    key_heads = read.whole("attention.head_count_kv", heads)
    if heads % key_heads:
        raise contradiction(
            file,
            f"{read.architecture}.attention.head_count must be a multiple of attention.head_count_kv, got {heads} "
            f"and {key_heads}",
        )
    if read.get("attention.key_length") is None and hidden % heads:
        raise contradiction(
            file,
            f"{read.architecture}.embedding_length must be a multiple of attention.head_count, got {hidden} and "
            f"{heads}",
        )
    head_size = read.whole("attention.key_length", hidden // heads)
    if (value_length := read.whole("attention.value_length", head_size)) != head_size:
        raise contradiction(
            file,
            f"{read.architecture}.attention.value_length must be the size of a head, {head_size}, got {value_length}",
        )
    # Positions.
    rotary_size = read.whole("rope.dimension_count", head_size)
    rotates = any(map(names.rotates, range(layer_count)))
    if (
        (rotates and rotary_size % 2)
        or rotary_size > head_size
        or (names.permuted and rotary_size != head_size)
    ):
        raise contradiction(
            file,
            f"{read.architecture}.rope.dimension_count must be {'' if names.permuted else 'even and at most '}"
            f"{head_size}, the size of a head, got {rotary_size}",
        )
    max_positions = read.whole("context_length", MOST_POSITIONS)
    if max_positions > MOST_POSITIONS:
        raise contradiction(
            file,
            f"{read.architecture}.context_length must be at most {MOST_POSITIONS:,}, got {max_positions:,}",
        )
    # All sizes are known; check the tensors against them.
    inner = read.whole("feed_forward_length")
    sizes = Sizes(
        vocabulary, hidden, inner, heads, key_heads, head_size, layer_count, rotary_size, max_positions
    )
    _check_tensors(file, names, sizes)
    return sizes


def check_counts(file: GGUFFile) -> None:
    """Check a file of any architecture: counts where its tensors determine them, and settings that must be positive.

    Raises:
        SettingsError: counts and tensors contradict each other.
    """
    architecture = str(file.metadata.get("general.architecture"))
    if "token_embd.weight" in file.tensors:
        _, hidden = _check_vocabulary(file, architecture)
        _check_heads(file, architecture, hidden)
    if any(map(_layer_of, file.tensors)):
        _check_layers(file, architecture)
    largest = max((max(tensor.shape) for tensor in file.tensors.values()), default=0)
    for key, most in (*((key, largest) for key in _COUNTS), ("context_length", MOST_POSITIONS)):
        value = file.metadata.get(f"{architecture}.{key}", 0)
        # Some architectures have one number per layer.
        for number in value.tolist() if isinstance(value, np.ndarray) else [value]:
            if not isinstance(number, int | float) or not 0 <= number <= most:
                raise contradiction(
                    file, f"{architecture}.{key} must be a number from 0 to {most:,}, got {number!r:.60}"
                )
    for key in _POSITIVE:
        number = file.metadata.get(f"{architecture}.{key}", 1.0)
        if isinstance(number, int | float) and not 0 < number <= LARGEST:
            raise contradiction(file, f"{architecture}.{key} must be finite and above 0, got {number}")


def _check_heads(file: GGUFFile, architecture: str, hidden: int) -> None:
    """Check the numbers of heads against the rows of the projections.

    Files whose heads differ between layers (``key_length_swa``) are not checked, nor is multi-head latent attention
    (DeepSeek), whose keys are shorter than ``key_length`` (``key_length_mla``).
    """
    prefix = f"{architecture}.attention."
    heads = file.metadata.get(f"{prefix}head_count")
    size = file.metadata.get(f"{prefix}key_length")
    other = any(f"{prefix}key_length_{kind}" in file.metadata for kind in ("swa", "mla"))
    if other or not isinstance(heads, int) or heads < 1 or not isinstance(size, int | None):
        return
    size = hidden // heads if size is None else size
    for part, key in (("attn_q", "head_count"), ("attn_k", "head_count_kv")):
        count = file.metadata.get(f"{prefix}{key}", heads)
        tensor = file.tensors.get(f"blk.0.{part}.weight")
        if tensor is not None and isinstance(count, int) and tensor.shape[0] != count * size:
            raise contradiction(
                file,
                f"{prefix}{key} times the size of a head, {size}, must be {tensor.shape[0]}, the rows of "
                f"blk.0.{part}.weight, got {count} heads",
            )


#: (tensor name) -> a match whose group is the layer number; None for a tensor outside the layers.
_layer_of = re.compile(r"blk\.(\d{1,9})\.").match


def _check_layers(file: GGUFFile, architecture: str) -> int:
    """The number of layers, one more than the largest layer number in a tensor name."""
    found = [int(match[1]) for match in map(_layer_of, file.tensors) if match is not None]
    claimed = file.metadata.get(f"{architecture}.block_count")
    count = max(found, default=-1) + 1
    if count > len(file.tensors):
        raise contradiction(file, f"its layers must be numbered from 0 on, got the number {count - 1}")
    if isinstance(claimed, np.ndarray) or claimed != count:
        raise contradiction(
            file,
            f"{architecture}.block_count must be {count}, the number of layers that have tensors, "
            f"got {claimed!r:.60}",
        )
    return count


def _check_vocabulary(file: GGUFFile, architecture: str) -> tuple[int, int]:
    """The shape of the embedding, which the metadata must confirm: (vocabulary, hidden)."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        given = "none" if embedding is None else f"the shape {embedding.shape}"
        raise contradiction(file, f"token_embd.weight must have a row for each token, got {given}")
    vocabulary, hidden = embedding.shape
    sizes = {"embedding_length": hidden}
    if f"{architecture}.vocab_size" in file.metadata:
        sizes["vocab_size"] = vocabulary
    for key, size in sizes.items():
        claimed = file.metadata.get(f"{architecture}.{key}")
        if isinstance(claimed, np.ndarray) or claimed != size:
            raise contradiction(
                file,
                f"{architecture}.{key} must be {size}, as in the shape of token_embd.weight, got {claimed!r:.60}",
            )
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocabulary:
        raise contradiction(
            file, f"token_embd.weight must have a row for each of the {len(tokens)} tokens, got {vocabulary}"
        )
    for role in _ROLES:
        key = f"tokenizer.ggml.{role}_token_id"
        token = file.metadata.get(key, 0)
        if not isinstance(token, int) or not (0 <= token < vocabulary or token == MISSING_TOKEN):
            raise contradiction(file, f"{key} must be a token from 0 to {vocabulary - 1}, got {token!r:.60}")
    return vocabulary, hidden


def _check_tensors(file: GGUFFile, names: GGUFNames, sizes: Sizes) -> None:
    """Check that the file has every tensor of a model of these sizes, in the right shape, and no others."""
    numbers = {
        _VOCABULARY: sizes.vocabulary,
        _HIDDEN: sizes.hidden,
        _INNER: sizes.inner,
        "2 * feed_forward_length": 2 * sizes.inner,
        "context_length": sizes.max_positions,
        "head size": sizes.head_size,
        _HEADS: sizes.heads * sizes.head_size,
        _KEY_HEADS: sizes.key_heads * sizes.head_size,
        _QKV: (sizes.heads + 2 * sizes.key_heads) * sizes.head_size,
        "half of rope.dimension_count": sizes.rotary_size // 2,
    }
    known = set[str]()
    for name, shapes, optional in _expected(names, sizes.layer_count):
        known.add(name)
        tensor = file.tensors.get(name)
        if tensor is None:
            if optional:
                continue
            raise contradiction(file, f"it must have the tensor {name!r}, and does not")
        if tensor.shape not in [tuple(numbers[each] for each in shape) for shape in shapes]:
            # A head norm has two possible shapes; report the common one.
            shape = tuple(numbers[each] for each in shapes[0])
            raise contradiction(
                file,
                f"the tensor {name!r} must have the shape {shape} ({', '.join(shapes[0])}), got {tensor.shape}",
            )
    for name in file.tensors:
        if name not in known:
            raise contradiction(
                file,
                f"each tensor must belong to a part of the model, which has {sizes.layer_count} layers, and "
                f"{name!r:.80} does not",
            )


def _expected(names: GGUFNames, layer_count: int) -> Iterator[tuple[str, list[tuple[str, ...]], bool]]:
    """For each tensor that a model may have: its name, its allowed shapes, and whether it may be missing."""
    for part, pattern in names.tensors.items():
        if part in ("query_norm", "key_norm"):
            # One norm per head, or one over all heads together (OLMo 2).
            shapes: list[tuple[str, ...]] = [
                ("head size",),
                (_HEADS if part == "query_norm" else _KEY_HEADS,),
            ]
        else:
            shapes = [_SHAPES[part]]
        is_norm = len(shapes[0]) == 1
        has_bias = part not in _WITHOUT_BIAS and (not is_norm or names.norm_type == 2)
        for layer in range(layer_count if "{layer}" in pattern else 1):
            name = pattern.format(layer=layer)
            yield f"{name}.weight", shapes, part == "head"
            if has_bias:
                yield f"{name}.bias", [shape[:1] for shape in shapes], True
    for name in (FREQUENCY_FACTORS, *FACTORS_BY_LENGTH):
        yield name, [("half of rope.dimension_count",)], True
