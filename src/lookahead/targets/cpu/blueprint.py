"""The parts of a model as compiled passes need them, wherever they come from.

``architectures.blueprint_of`` makes a ``Blueprint`` from a transformers model, ``packed_model.blueprint_of`` from a
GGUF file, and ``compiled_model.CompiledModel`` turns either into records that compiled code reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .packed import PackedLinear

if TYPE_CHECKING:
    from .dense import Linear

Numbers = np.ndarray[Any, np.dtype[Any]]

#: (a, b) of x * sigmoid(a x + b x^3): the tanh form of GELU is 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
ACTIVATIONS = dict.fromkeys(("silu", "swish"), (1.0, 0.0)) | dict.fromkeys(
    ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), ((8 / math.pi) ** 0.5, 0.044715 * (8 / math.pi) ** 0.5)
)
#: The norms of a layer, by their names in ``LayerParts.norms`` and in ``execution_plan.LAYER``.
NORMS = ("attention_norm", "attention_post_norm", "feed_forward_norm", "feed_forward_post_norm")


class Unsupported(Exception):
    """Why a model cannot be compiled, in one line for people."""


class Norm(NamedTuple):
    """Weight and bias (n,) fp32, epsilon, and the kind: 0 none, 1 RMS norm, 2 layer norm (subtracts the mean)."""

    weight: Numbers
    bias: Numbers
    epsilon: float
    kind: int

    @classmethod
    def none(cls, size: int) -> Norm:
        """A norm that changes nothing."""
        return cls(np.ones(size, np.float32), np.zeros(size, np.float32), 0.0, 0)


@dataclass(slots=True)
class LayerParts:
    """One layer.

    Attributes:
        linears: "qkv", with the outputs of each query and key head in the order of ``formats.paired``; "output";
            "up", whose groups of 32 outputs are 16 gates and their 16 ups where ``gated``; "down".
        norms: by the names in ``NORMS``.
        head_norm: RMS norm of queries and keys, weights (H + K, D) in the same order, or None.
        joint_norm: whether it is over all heads together (OLMo 2), not over each.
        scale: of the scores.
        window: keys that a row sees, its own included; 0 for all.
        rotary: 0 for no rotary positions, else 1 + the number of the table.
        cap: c in c * tanh(score / c), 0 for none.
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
        dtype: "float32" or "bfloat16", of the weights; "float32" for packed weights, decoded as they are read. Arrays
            of this dtype hold bf16 as int16 (``dense.bits_of``).
        hidden, inner: sizes of a row and of the feed-forward's inner row.
        activation: (a, b) of x * sigmoid(a x + b x^3).
        embedding: (V, hidden); packed weights have one output for each token.
        position_embedding: (positions, hidden) or None.
        layers: makes the layers one after another. Without packed weights each takes as much memory as the first.
        head_factor, head_cap: the logits are multiplied by the factor, then capped; 0 for no cap.
        residual_factor: what the outputs of attention and feed-forward are multiplied by.
        rotary_size: numbers of a head that rotate, R.
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
    embedding: Numbers | PackedLinear
    layer_count: int
    layers: Callable[[], Iterator[LayerParts]]
    final_norm: Norm
    head: Linear | PackedLinear
    embedding_factor: float = 1.0
    position_embedding: Numbers | None = None
    head_factor: float = 1.0
    head_cap: float = 0.0
    residual_factor: float = 1.0
    rotary_size: int = 0
    angles: Callable[[int], Numbers] | None = field(default=None, repr=False)
