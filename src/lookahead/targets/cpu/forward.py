"""The forward pass: rows of any number of sequences, in as few torch calls per layer as possible.

    x = x + o(attention(rope(qkv(norm(x)))))
    x = x + down(silu(gate(norm(x))) * up(norm(x)))

At these sizes a call costs as much as its work, so: query, key and value are one linear; the two halves of
a rotary pair lie side by side (the weights' rows are reordered at load), so that a rotation is one complex
product for all heads; gate and up are one linear; both residual sums are fused into the linears, and what is
left between the linears is one kernel each (``kernels.py``). The rows of several sequences lie behind one
another without padding; only attention is called once for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from ..masks import tree_bits
from .cache import LeanCache
from .kernels import Norm, TorchKernels, Turns, best_kernels
from .layout import Block, PlainScores, RotaryTable, head_norms, joined, paired
from .linear import Int8Linear, Linear, PackedLinear, PlainLinear, best_kind
from .specs import LayerParts, LinearParts, ModelParts, NormParts


@dataclass(frozen=True, slots=True)
class Layer:
    """One block, laid out for the pass."""

    attention_norm: Norm
    qkv: Linear
    head_norm: Norm | None
    output: Linear
    feed_forward_norm: Norm
    gate_up: Linear
    down: Linear
    window: int
    rotates: bool


class LeanModel:
    """A model's weights in the layout of the pass.

    Args:
        parts: tensors of a loaded model; they are copied where their layout changes, never written.
        weights: "same" for the model's own numbers, "int8" for bytes (see ``Int8Linear``).
        kind, kernels: the linears, and what runs between them; the best for this machine by default.

    Attributes:
        layout: what the linears are, in a few words.
    """

    def __init__(
        self,
        parts: ModelParts,
        weights: str = "same",
        kind: type[PackedLinear] | type[PlainLinear] | None = None,
        kernels: type[TorchKernels] | None = None,
    ) -> None:
        self.dtype = parts.embedding.dtype
        best, layout = best_kind(self.dtype)
        make: Callable[[LinearParts], Linear] = kind if kind is not None else best
        best_between, between = best_kernels()
        self.layout = f"{layout}, {between}"
        self.kernels = (kernels or best_between)(parts.heads, parts.key_heads, parts.head_size, self.dtype)
        if weights == "int8":
            make = partial(Int8Linear, kernels=self.kernels)
            self.layout = f"weights as int8 (outputs are near the model's, not its own), {between}"
        self.heads, self.key_heads, self.head_size = parts.heads, parts.key_heads, parts.head_size
        self.groups = parts.heads // parts.key_heads
        self.scale = parts.scale
        self.embedding = parts.embedding
        self.windows = sorted({layer.window for layer in parts.layers})
        self.layers = [self._layer(layer, make) for layer in parts.layers]
        self.norm = _norm(parts.norm)
        self.head = make(parts.head)
        self._turns = RotaryTable(parts.rotary, parts.head_size)

    def _layer(self, parts: LayerParts, make: Callable[[LinearParts], Linear]) -> Layer:
        size = self.head_size
        heads = head_norms(parts, self.heads, self.key_heads)
        return Layer(
            attention_norm=_norm(parts.attention_norm),
            qkv=make(joined(paired(parts.query, size), paired(parts.key, size), parts.value)),
            head_norm=None if heads is None else _norm(heads),
            output=make(parts.output),
            feed_forward_norm=_norm(parts.feed_forward_norm),
            gate_up=make(joined(parts.gate, parts.up)),
            down=make(parts.down),
            window=parts.window,
            rotates=parts.rotates,
        )

    def nbytes(self) -> int:
        """Bytes of weights held beside the model's own."""
        linears = [self.head]
        for layer in self.layers:
            linears += [layer.qkv, layer.output, layer.gate_up, layer.down]
        return sum(linear.nbytes() for linear in linears)

    def new_cache(self, capacity: int) -> LeanCache:
        """An empty cache of this model's shape."""
        return LeanCache(len(self.layers), self.key_heads, self.head_size, capacity)

    def run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        blocks: Sequence[Block],
        read: Sequence[int],
        cache: LeanCache,
    ) -> PlainScores:
        """Evaluate rows and write their keys and values.

        Args:
            tokens, positions: of all rows, block after block.
            read: the rows whose logits are wanted, increasing.

        Returns:
            Logits (len(read), V) in the model's dtype.
        """
        with torch.inference_mode():
            x = F.embedding(torch.tensor(tokens), self.embedding)
            x = self._body(x, self._angles(positions), blocks, cache)
            if len(read) < len(tokens):
                x = x[torch.tensor(read, dtype=torch.long)]
            x = self.kernels.norm(x, self.norm)
        with torch.no_grad():  # the logits leave as ordinary tensors, which processors may write to
            return PlainScores(self.head.of(x))

    def _body(self, x: torch.Tensor, turns: Turns, blocks: Sequence[Block], cache: LeanCache) -> torch.Tensor:
        kernels, attend = self.kernels, Attention(self, blocks, cache)
        places = [(block.slot, block.length, block.rows) for block in blocks]
        for index, layer in enumerate(self.layers):
            y = layer.qkv.of(kernels.norm(x, layer.attention_norm))
            query = kernels.turn(y, turns if layer.rotates else None, layer.head_norm, cache, index, places)
            x = layer.output.plus(attend(index, layer.window, query), x)
            both = layer.gate_up.of(kernels.norm(x, layer.feed_forward_norm))
            x = layer.down.plus(kernels.gate(both), x)
        return x

    def _angles(self, positions: Sequence[int]) -> Turns:
        turns = self._turns.up_to(max(positions))
        return Turns(turns[torch.tensor(positions)], self.heads, self.key_heads)


class Attention:
    """Attention of one pass: masks and views on the cache are made once for all layers."""

    def __init__(self, model: LeanModel, blocks: Sequence[Block], cache: LeanCache) -> None:
        self.model = model
        self.blocks = blocks
        self._shape = (model.key_heads, model.groups, model.head_size)
        self._masks = [{window: mask(block, window) for window in model.windows} for block in blocks]
        self._seen = [
            {
                window: cache.heads(b.slot, first_column(b, window), b.length + b.rows, model.groups)
                for window in model.windows
            }
            for b in blocks
        ]

    def __call__(self, layer: int, window: int, query: torch.Tensor) -> torch.Tensor:
        """Queries (Q, H, D), whose keys and values are in the cache; (Q, H * D) in the model's dtype."""
        results, start = [], 0
        for block, masks, seen in zip(self.blocks, self._masks, self._seen, strict=True):
            mine = query[start : start + block.rows] if len(self.blocks) > 1 else query
            start += block.rows
            keys, values = seen[window]
            result = F.scaled_dot_product_attention(
                mine.view(block.rows, *self._shape).permute(1, 2, 0, 3),
                keys[layer],
                values[layer],
                masks[window],
                scale=self.model.scale,
            )
            results.append(result.permute(2, 0, 1, 3).reshape(block.rows, -1).to(self.model.dtype))
        return results[0] if len(results) == 1 else torch.cat(results)


def first_column(block: Block, window: int) -> int:
    """The first column that any row of a block sees."""
    return max(0, min(block.positions) + 1 - window) if window else 0


def mask(block: Block, window: int) -> torch.Tensor | None:
    """What is added to the scores, (1, 1, rows, columns from the first that is seen); None where all are seen."""
    rows, length = block.rows, block.length
    if rows == 1:
        return None
    begin = first_column(block, window)
    if block.tree is None:
        bits = torch.ones(rows, rows, dtype=torch.bool).tril_()
    else:
        bits = tree_bits([block.tree], rows)[0]
    result = torch.zeros(rows, length + rows - begin, dtype=torch.float32)
    result[:, length - begin :].masked_fill_(~bits, -torch.inf)
    if window:
        at = torch.tensor(block.positions)
        columns = torch.cat((torch.arange(begin, length), at))
        result.masked_fill_(at[:, None] - columns >= window, -torch.inf)
    return result[None, None]


def _norm(parts: NormParts) -> Norm:
    return Norm(parts.weight, parts.epsilon)
