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

from .cache import LeanCache
from .kernels import Norm, NumbaKernels, Seen, TorchKernels, Turns, best_kernels
from .linear import Int8Linear, Linear, PackedLinear, PlainLinear, best_kind
from .specs import LayerParts, LinearParts, ModelParts, NormParts

#: Up to this many products per thread of torch's, one row's attention is quicker on one thread.
ONE_THREAD = 600_000
FAR = 1 << 30


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
        half = parts.head_size // 2
        # Rotary pairs (i, i + D/2) become neighbours (2i, 2i + 1).
        order = torch.arange(parts.head_size).view(2, half).t().reshape(-1)
        self.layers = [self._layer(layer, make, order) for layer in parts.layers]
        self.norm = _norm(parts.norm)
        self.head = make(parts.head)
        self._rotary = parts.rotary
        self._turns = torch.empty(0, half, dtype=torch.complex64)

    def _layer(self, parts: LayerParts, make: Callable[[LinearParts], Linear], order: torch.Tensor) -> Layer:
        def paired(linear: LinearParts) -> LinearParts:
            rows = torch.arange(linear.weight.shape[0]).view(-1, self.head_size)[:, order].reshape(-1)
            return LinearParts(linear.weight[rows], None if linear.bias is None else linear.bias[rows])

        return Layer(
            attention_norm=_norm(parts.attention_norm),
            qkv=make(_joined(paired(parts.query), paired(parts.key), parts.value)),
            head_norm=self._head_norm(parts, order),
            output=make(parts.output),
            feed_forward_norm=_norm(parts.feed_forward_norm),
            gate_up=make(_joined(parts.gate, parts.up)),
            down=make(parts.down),
            window=parts.window,
            rotates=parts.rotates,
        )

    def _head_norm(self, parts: LayerParts, order: torch.Tensor) -> Norm | None:
        """One weight (H + K, D) for the norms over query and key heads."""
        query, key = parts.query_norm, parts.key_norm
        if query is None or key is None:
            return None
        weights = [query.weight[order]] * self.heads + [key.weight[order]] * self.key_heads
        return Norm(torch.stack(weights), query.epsilon)

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
            x = self.kernels.norm(x, self.norm)
        with torch.no_grad():  # the logits leave as ordinary tensors, which processors may write to
            return self.head.of(x)

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
        longest = max(positions) + 1
        if longest > len(self._turns):
            self._turns = self._table(1 << (longest - 1).bit_length())
        return Turns(self._turns[torch.tensor(positions)], self.heads, self.key_heads)

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
        self._cache = cache
        self._shape = (model.key_heads, model.groups, model.head_size)
        self._alone = [self._single(block) for block in blocks]
        self._seen = [
            {
                window: cache.heads(b.slot, begin, b.length + b.rows, model.groups)
                for window, begin in b.begins.items()
                if window not in alone
            }
            for b, alone in zip(blocks, self._alone, strict=True)
        ]

    def __call__(self, layer: int, window: int, query: torch.Tensor) -> torch.Tensor:
        """Queries (Q, H, D), whose keys and values are in the cache; (Q, H * D) in the model's dtype."""
        results, start = [], 0
        for block, seen, alone in zip(self.blocks, self._seen, self._alone, strict=True):
            mine = query[start : start + block.rows] if len(self.blocks) > 1 else query
            start += block.rows
            if window in alone:
                kernels, scale = self.model.kernels, self.model.scale
                results.append(kernels.attend(mine, self._cache, layer, block.slot, alone[window], scale))
                continue
            keys, values = seen[window]
            result = F.scaled_dot_product_attention(
                mine.view(block.rows, *self._shape).permute(1, 2, 0, 3),
                keys[layer],
                values[layer],
                block.masks[window],
                scale=self.model.scale,
            )
            results.append(result.permute(2, 0, 1, 3).reshape(block.rows, -1).to(self.model.dtype))
        return results[0] if len(results) == 1 else torch.cat(results)

    def _single(self, block: Block) -> dict[int, Seen]:
        """Per window what a block's only row sees, where the kernel on one thread is quicker than torch's."""
        model = self.model
        if block.rows > 1 or not isinstance(model.kernels, NumbaKernels):
            return {}
        threads = torch.get_num_threads()
        limit = ONE_THREAD // (threads * model.heads * model.head_size) if threads > 1 else FAR
        return {
            window: Seen.single(block.length, begin)
            for window, begin in block.begins.items()
            if block.length - begin < limit
        }


def _norm(parts: NormParts) -> Norm:
    return Norm(parts.weight, parts.epsilon)


def _joined(*linears: LinearParts) -> LinearParts:
    """Several linears of one input as one."""
    weight = torch.cat([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return LinearParts(weight, None)
    biases = [
        linear.bias if linear.bias is not None else weight.new_zeros(len(linear.weight)) for linear in linears
    ]
    return LinearParts(weight, torch.cat(biases))
