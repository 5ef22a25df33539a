"""The parts of a model that a compiled pass needs, from any source.

``module_families.blueprint_of`` makes a ``Blueprint`` from a transformers model, ``gguf_blueprint.blueprint_of_file``
from a GGUF file. ``compiled_model.CompiledModel`` turns it into records for compiled code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .dense import Linear
from .packed import PackedLinear

Array = np.ndarray[Any, np.dtype[Any]]

#: (a, b) of x * sigmoid(a x + b x^3): the tanh form of GELU is 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
ACTIVATIONS = dict.fromkeys(("silu", "swish"), (1.0, 0.0)) | dict.fromkeys(
    ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), ((8 / math.pi) ** 0.5, 0.044715 * (8 / math.pi) ** 0.5)
)
#: The norms of a layer, as named in ``LayerParts.norms`` and ``execution_plan.LAYER``.
NORMS = ("attention_norm", "attention_post_norm", "feed_forward_norm", "feed_forward_post_norm")


class Norm(NamedTuple):
    """Weight and bias (n,) fp32, epsilon, and the type: 0 for no norm, 1 for an RMS norm, 2 for a layer norm."""

    weight: Array
    bias: Array
    epsilon: float
    type: int

    @classmethod
    def none(cls, size: int) -> Norm:
        """The stand-in for a missing norm; rows of ``size`` numbers pass unchanged."""
        return cls(np.ones(size, np.float32), np.zeros(size, np.float32), 0.0, 0)


def head_norm_of(weights: Sequence[tuple[Array, int]], order: Array, epsilon: float) -> tuple[Norm, bool]:
    """The RMS norm of query and key heads, and whether it runs over all heads together (OLMo 2).

    Args:
        weights: weights of the query norm and of the key norm, each with its number of heads.
        order: order of a head's numbers (``formats.paired``).
        epsilon: epsilon of both norms.
    """
    size = len(order)
    # With a single key head, the key norm has the same shape in both cases, so the query norm decides.
    joint = any(len(weight) > size for weight, _ in weights)
    by_head = [np.broadcast_to(w.reshape(-1, size)[:, order], (heads, size)) for w, heads in weights]
    joined = np.concatenate(by_head)
    return Norm(joined, np.zeros_like(joined), epsilon, 1), joint


@dataclass(slots=True)
class LayerParts:
    """One layer.

    Attributes:
        linears: "qkv", with the outputs of each query and key head in the order of ``formats.paired``; "output";
            "up", and "down". If ``gated``, each group of 32 outputs of "up" has 16 gates, then their 16 ups.
        norms: the norms, by their names in ``NORMS``.
        head_norm: RMS norm of queries and keys, with weights (H + K, D) in the order of "qkv"; None for no norm.
        joint_norm: whether ``head_norm`` runs over all heads together (OLMo 2) instead of over each head.
        scale: factor of the attention scores.
        window: number of keys that a row sees, including its own; 0 for all.
        rotary: 0 for no rotary positions, else 1 + the index of the table of angles.
        cap: c in c * tanh(score / c); 0 for none.
    """

    linears: dict[str, Linear | PackedLinear]
    norms: dict[str, Norm]
    head_norm: Norm | None
    joint_norm: bool
    gated: bool
    scale: float
    window: int
    rotary: int
    cap: float = 0.0


@dataclass(slots=True)
class Blueprint:
    """A decoder-only model of attention and feed-forward layers.

    Attributes:
        name: the transformers class.
        dtype: dtype of the weights, "float32" or "bfloat16"; "float32" if they are packed. bf16 arrays are int16
            (``dense``).
        vocabulary: V.
        hidden, inner: sizes of a row and of a row inside the feed-forward.
        heads, key_heads, head_size: H, K and D.
        activation: (a, b) of x * sigmoid(a x + b x^3).
        embedding: (V, hidden); packed weights have one output for each token.
        layers: returns an iterator that makes the layers one at a time. Unless the weights are packed, all layers
            take the same amount of memory.
        embedding_factor, residual_factor: factor of the embeddings; factor of the outputs of attention and
            feed-forward.
        position_embedding: (positions, hidden) or None.
        head_factor, head_cap: the logits are multiplied by the factor, then capped; 0 for no cap.
        rotary_size: R, the number of elements of a head that rotate.
        angles: (positions) -> cosine and sine of positions 0 .. positions - 1, (tables, positions, R / 2, 2) fp32.
    """

    name: str
    dtype: str
    vocabulary: int
    hidden: int
    heads: int
    key_heads: int
    head_size: int
    inner: int
    activation: tuple[float, float]
    embedding: Array | PackedLinear
    layer_count: int
    layers: Callable[[], Iterator[LayerParts]]
    final_norm: Norm
    head: Linear | PackedLinear
    embedding_factor: float = 1.0
    position_embedding: Array | None = None
    head_factor: float = 1.0
    head_cap: float = 0.0
    residual_factor: float = 1.0
    rotary_size: int = 0
    angles: Callable[[int], Array] | None = field(default=None, repr=False)
