"""The forward pass: rows of any number of sequences, in as few torch calls per layer as possible.

    x = x + o(attention(rope(qkv(norm(x)))))
    x = x + down(silu(gate(norm(x))) * up(norm(x)))

At these sizes a call costs as much as its work, so: query, key and value are one linear; the two halves of
a rotary pair lie side by side (the weights' rows are reordered at load), so that a rotation is one complex
product for all heads, values included with angle 0; keys and values are written by one copy; silu, the
gate's product and both residual sums are fused into the linears. The rows of several sequences lie behind one
another without padding; only attention is called once for each sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .cache import LeanCache
from .linear import Linear, PackedLinear, PlainLinear, best_kind
from .specs import LayerParts, LinearParts, ModelParts, Norm


@dataclass(frozen=True, slots=True)
class Block:
    """One sequence's share of a pass.

    Attributes:
        slot: its place in the cache.
        length: T, committed tokens.
        rows: how many, behind those of the blocks before.
        masks: per distinct window an additive mask (1, 1, rows, columns), or None where every row sees
            every column.
        begins: per distinct window the first column that any row sees.
    """

    slot: int
    length: int
    rows: int
    masks: dict[int, torch.Tensor | None]
    begins: dict[int, int]


@dataclass(frozen=True, slots=True)
class Layer:
    """One block, laid out for the pass."""

    attention_norm: RMSNorm
    qkv: Linear
    head_norm: HeadNorm | None
    output: Linear
    feed_forward_norm: RMSNorm
    gate: Linear
    up: Linear
    down: Linear
    window: int
    rotates: bool


class RMSNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight, in fp32, rounded once; the same bits for any number of rows.

    With n entries that is x / hypot(|x|, sqrt(n epsilon)) * (sqrt(n) weight): four calls in fp32, six in
    bf16, where torch's own rms_norm takes about twice the time on CPU.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float, dtype: torch.dtype) -> None:
        size = weight.shape[-1]
        self.weight = weight.float() * math.sqrt(size)
        self.floor = torch.tensor(math.sqrt(size * epsilon))
        self.dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        length = torch.linalg.vector_norm(x, 2, -1, True)
        return torch.div(x, length.hypot_(self.floor)).mul_(self.weight).to(self.dtype)


class HeadNorm:
    """The RMS norms of queries and keys, over each head: rows (Q, H + 2K, D), values left as they are."""

    def __init__(self, query: Norm, key: Norm, order: torch.Tensor, heads: int, key_heads: int) -> None:
        weights = [query.weight[order]] * heads + [key.weight[order]] * key_heads
        self.normed = heads + key_heads
        self.norm = RMSNorm(torch.stack(weights), query.epsilon, torch.float32)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        rows[:, : self.normed] = self.norm(rows[:, : self.normed])
        return rows


class LeanModel:
    """A model's weights in the layout of the pass.

    Args:
        parts: tensors of a loaded model; they are copied where their layout changes, never written.
        kind: the linears; the best for this machine by default.

    Attributes:
        layout: what the linears are, in a few words.
    """

    def __init__(self, parts: ModelParts, kind: type[PackedLinear] | type[PlainLinear] | None = None) -> None:
        self.dtype = parts.embedding.dtype
        best, self.layout = best_kind(self.dtype)
        make = kind if kind is not None else best
        self.heads, self.key_heads, self.head_size = parts.heads, parts.key_heads, parts.head_size
        self.groups = parts.heads // parts.key_heads
        self.scale = parts.scale
        self.embedding = parts.embedding
        self.windows = sorted({layer.window for layer in parts.layers})
        half = parts.head_size // 2
        # Rotary pairs (i, i + D/2) become neighbours (2i, 2i + 1).
        order = torch.arange(parts.head_size).view(2, half).t().reshape(-1)
        self.layers = [self._layer(layer, make, order) for layer in parts.layers]
        self.norm = self._norm(parts.norm)
        self.head = make(parts.head)
        self._rotary = parts.rotary
        self._turns = torch.empty(0, half, dtype=torch.complex64)

    def _layer(self, parts: LayerParts, make: type[Linear], order: torch.Tensor) -> Layer:
        def paired(linear: LinearParts) -> LinearParts:
            rows = torch.arange(linear.weight.shape[0]).view(-1, self.head_size)[:, order].reshape(-1)
            return LinearParts(linear.weight[rows], None if linear.bias is None else linear.bias[rows])

        return Layer(
            attention_norm=self._norm(parts.attention_norm),
            qkv=make(_joined(paired(parts.query), paired(parts.key), parts.value)),
            head_norm=None
            if parts.query_norm is None or parts.key_norm is None
            else HeadNorm(parts.query_norm, parts.key_norm, order, self.heads, self.key_heads),
            output=make(parts.output),
            feed_forward_norm=self._norm(parts.feed_forward_norm),
            gate=make(parts.gate),
            up=make(parts.up),
            down=make(parts.down),
            window=parts.window,
            rotates=parts.rotates,
        )

    def _norm(self, norm: Norm) -> RMSNorm:
        return RMSNorm(norm.weight, norm.epsilon, self.dtype)

    def nbytes(self) -> int:
        """Bytes of weights held beside the model's own."""
        linears = [self.head]
        for layer in self.layers:
            linears += [layer.qkv, layer.output, layer.gate, layer.up, layer.down]
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
    ) -> torch.Tensor:
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
            x = self.norm(x)
        with torch.no_grad():  # the logits leave as ordinary tensors, which processors may write to
            return self.head.of(x)

    def _body(
        self, x: torch.Tensor, turns: torch.Tensor, blocks: Sequence[Block], cache: LeanCache
    ) -> torch.Tensor:
        rows, lanes = x.shape[0], self.heads + 2 * self.key_heads
        pairs = (rows, lanes, self.head_size // 2, 2)
        shape = (rows, lanes, self.head_size)
        attend = Attention(self, blocks, cache)
        for index, layer in enumerate(self.layers):
            y = layer.qkv.of(layer.attention_norm(x)).float()
            if layer.head_norm is not None:
                y = layer.head_norm(y.view(shape))
            if layer.rotates:
                y = torch.view_as_real(torch.view_as_complex(y.view(pairs)) * turns)
            x = layer.output.plus(attend(index, layer.window, y.view(shape)), x)
            h = layer.feed_forward_norm(x)
            x = layer.down.plus(layer.up.times(h, layer.gate.silu(h)), x)
        return x

    def _angles(self, positions: Sequence[int]) -> torch.Tensor:
        """(Q, H + 2K, D/2) complex: the turn of each row's heads; 1 for values."""
        longest = max(positions) + 1
        if longest > len(self._turns):
            self._turns = self._table(1 << (longest - 1).bit_length())
        turns = torch.ones(
            len(positions), self.heads + 2 * self.key_heads, self.head_size // 2, dtype=torch.complex64
        )
        turns[:, : self.heads + self.key_heads] = self._turns[torch.tensor(positions)][:, None]
        return turns

    def _table(self, longest: int) -> torch.Tensor:
        """Turns of positions 0..longest, from the model's own rotary module."""
        probe = torch.empty(1, dtype=torch.float32)
        cos, sin = self._rotary(probe, torch.arange(longest)[None])
        half = self.head_size // 2
        return torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())


class Attention:
    """Attention of one pass: views on the cache are made once for all layers."""

    def __init__(self, model: LeanModel, blocks: Sequence[Block], cache: LeanCache) -> None:
        self.model = model
        self.blocks = blocks
        self._new = [cache.rows(b.slot, b.length, b.rows) for b in blocks]
        self._seen = [
            {
                window: cache.heads(b.slot, begin, b.length + b.rows, model.groups)
                for window, begin in b.begins.items()
            }
            for b in blocks
        ]

    def __call__(self, layer: int, window: int, y: torch.Tensor) -> torch.Tensor:
        """Write keys and values of rows y (Q, H + 2K, D), attend; (Q, H * D) in the model's dtype."""
        heads, start = self.model.heads, 0
        results = []
        for block, new, seen in zip(self.blocks, self._new, self._seen, strict=True):
            rows = block.rows
            mine = y[start : start + rows] if len(self.blocks) > 1 else y
            start += rows
            query, fresh = mine.split((heads, 2 * self.model.key_heads), 1)
            new[layer].copy_(fresh.transpose(0, 1))
            keys, values = seen[window]
            result = F.scaled_dot_product_attention(
                query.unflatten(1, (self.model.key_heads, self.model.groups)).permute(1, 2, 0, 3),
                keys[layer],
                values[layer],
                block.masks[window],
                scale=self.model.scale,
            )
            results.append(result.permute(2, 0, 1, 3).reshape(rows, -1))
        joined = results[0] if len(results) == 1 else torch.cat(results)
        return joined.to(self.model.dtype)


def _joined(*linears: LinearParts) -> LinearParts:
    """Several linears of one input as one."""
    weight = torch.cat([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return LinearParts(weight, None)
    biases = [
        linear.bias if linear.bias is not None else weight.new_zeros(len(linear.weight)) for linear in linears
    ]
    return LinearParts(weight, torch.cat(biases))
