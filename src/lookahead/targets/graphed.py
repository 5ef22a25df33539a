"""The step on a GPU: static cache, row buckets, one captured graph per bucket.

At one row per step a model of 7B is a few hundred small kernels, and launching them from Python takes longer
than they run. So the pass over a bucket of rows is captured once and replayed: all that changes from step to
step (token ids, depths, ancestor bits, the live length) lies in one buffer of int32 that is copied to the
device once per step, and one copy brings the argmaxes back. Rows up to the bucket's size are padded with
rows that see the root alone; the cache is handed to attention whole, with its live length on the device.

Needs the tree attention (``attention.register.enable``), which reads the length there. One sequence at a
time; several go the ordinary way. On a CPU the same code runs without capture, which is how it is tested.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.register import enabled
from ..core import SettingsError, TokenTree
from .scores import LogitsBatch, LogitsRows
from .transformers import ModelFacts, TransformersTarget, _memory_errors

#: Rows of a captured pass. Up to 64 by eights: a tile of a matrix product has 8 or 16 rows.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def bucket_of(rows: int) -> int | None:
    """The smallest bucket that holds so many rows; None where none does."""
    return next((bucket for bucket in BUCKETS if bucket >= rows), None)


def fill(buffer: torch.Tensor, tree: TokenTree, length: int, bucket: int) -> None:
    """Write a step into a host buffer of ``buffer_size(bucket)`` int32: length, ids, depths, words."""
    missing, width = bucket - len(tree), _width(bucket)
    head = [length, *tree.tokens, *([tree.tokens[0]] * missing), *tree.depths, *([0] * missing)]
    buffer[: len(head)] = torch.tensor(head, dtype=torch.int32)
    data = bytearray()
    for bits in tree.ancestors:
        data += bits.to_bytes(4 * width, "little")
    data += (1).to_bytes(4 * width, "little") * missing
    buffer[len(head) :] = torch.frombuffer(data, dtype=torch.int32)


def buffer_size(bucket: int) -> int:
    """Numbers that describe a step of so many rows."""
    return 1 + 2 * bucket + bucket * _width(bucket)


def _width(bucket: int) -> int:
    return (bucket + 31) // 32


@dataclass(slots=True)
class _Placement:
    """What ``cache.Placement`` is for ordinary passes, with the place of the rows on the device.

    ``width`` is the whole capacity: attention masks nothing, it reads the live length.
    """

    slots: list[int]
    lengths: list[int]
    rows: int
    index: tuple[torch.Tensor, torch.Tensor]
    width: int


class _Pass:
    """The forward pass of one bucket in one slot, captured where there is a GPU."""

    def __init__(self, target: GraphedTarget, slot: int, bucket: int) -> None:
        self.target = target
        self.bucket = bucket
        self.slot = slot
        device = target.model.device
        pin = device.type == "cuda"
        self.host = torch.zeros(buffer_size(bucket), dtype=torch.int32, pin_memory=pin)
        self.numbers = torch.zeros(buffer_size(bucket), dtype=torch.int32, device=device)
        self.columns = torch.arange(bucket, device=device)
        self.slots = torch.tensor([[slot]], device=device)
        self.graph: Any = None
        self.logits: torch.Tensor | None = None

    def run(self, tree: TokenTree, length: int) -> torch.Tensor:
        """Logits (1, bucket, V)."""
        # The last step's copy has been read before its logits came back, so the buffer is free.
        fill(self.host, tree, length, self.bucket)
        self.numbers.copy_(self.host, non_blocking=True)
        if self.numbers.device.type != "cuda":
            return self._evaluate()
        if self.graph is None:
            self._capture()
        self.graph.replay()
        assert self.logits is not None
        return self.logits

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries and kernels set themselves up outside of the graph
                self._evaluate()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=self.target.memory_pool):
            self.logits = self._evaluate()

    def _evaluate(self) -> torch.Tensor:
        """Everything that is captured: from the numbers to the logits."""
        target, rows = self.target, self.bucket
        length, ids, depths, words = self.numbers.split([1, rows, rows, rows * _width(rows)])
        cache = target.cache
        at = (length + self.columns)[None].long()
        cache.placement = _Placement([self.slot], [0], rows, (self.slots, at), cache.capacity)
        positions = (length + depths)[None].long()
        attention = enabled(target.model)
        assert attention is not None
        keywords: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        if target.facts.takes_positions:
            keywords["position_ids"] = positions
        with torch.no_grad(), attention.within(words.view(1, rows, -1), depths[None], length):
            return target.model(input_ids=ids[None].long(), return_dict=True, **keywords).logits


class GraphedTarget(TransformersTarget):
    """``TransformersTarget`` with captured passes. Same logits, up to the arithmetic.

    Args:
        model: has the tree attention enabled.
        facts: what is known of it.
        capacity: tokens per slot to begin with; when storage grows, passes are captured anew.
    """

    path = "graphed"

    def __init__(self, model: PreTrainedModel, facts: ModelFacts | None = None, capacity: int = 1024) -> None:
        if enabled(model) is None:
            raise SettingsError(
                "captured passes need the tree attention; call lookahead.attention.register.enable(model) first"
            )
        super().__init__(model, facts, capacity)
        self.refused = False
        self.passes: dict[tuple[int, int], _Pass] = {}
        self.memory_pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
        self._captured_for = (self.cache.slots, self.cache.capacity)

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[LogitsRows]:
        bucket = bucket_of(max(len(tree) for _, tree in trees))
        if (
            self.refused
            or len(trees) > 1
            or bucket is None
            or self.facts.alibi is not None
            or self.facts.rope_type
        ):
            return super().forward(trees)
        ((slot, tree),) = trees
        with _memory_errors(f"a step of {bucket} rows"):
            # Padding is written too, so the room is the bucket's.
            self.cache.reserve(slot + 1, self.lengths[slot] + bucket)
            room = (self.cache.slots, self.cache.capacity)
            if room != self._captured_for:
                self.passes.clear()
                self._captured_for = room
            one = self.passes.get((slot, bucket))
            if one is None:
                one = self.passes[slot, bucket] = _Pass(self, slot, bucket)
            try:
                logits = one.run(tree, self.lengths[slot])
            except RuntimeError as error:
                if one.graph is not None and one.logits is not None:
                    raise  # not the capture
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                self._refuse(error)
                return super().forward(trees)
        self._pending[slot] = tree
        return [LogitsRows(LogitsBatch(logits), 0)]

    def _refuse(self, error: RuntimeError) -> None:
        """A model or backend that cannot be captured goes the ordinary way from now on."""
        self.refused = True
        self.passes.clear()
        first_line = (str(error).splitlines() or [""])[0][:160]
        warnings.warn(
            f"this model's step cannot be captured ({first_line}); going on without graphs, with the same result",
            RuntimeWarning,
            stacklevel=3,
        )
