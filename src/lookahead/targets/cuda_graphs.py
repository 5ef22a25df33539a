"""The step on a GPU: static cache, row buckets, one captured graph per bucket.

At one row per step a model of 7B is a few hundred small kernels, and launching them from Python takes longer
than they run. So the pass over a bucket of rows is captured once and replayed: all that changes from step to
step (token ids, depths, ancestor bits, the live length) lies in one buffer of int32 that is copied to the
device once per step, and one copy brings the argmaxes back. Rows up to the bucket's size are padded with
rows that see the root alone; the cache is handed to attention whole, with its live length on the device.

A bucket's first step runs uncaptured, which sets up libraries and compiles kernels; its second is captured.
Cache and graphs outlive their target: the next target of the same model takes them over, so that a short text
does not pay for capturing anew. One such arena per model is kept while none is in use.

One sequence at a time is captured; several share an ordinary pass. On a CPU the same code runs without capture,
which is how it is tested.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.bits import pack_bits, word_count
from ..core import Scores, TokenTree
from .attention_hook import TreeAttention
from .cache import Placement, TreeCache
from .facts import ModelFacts, memory_errors
from .logits import LogitsBatch, LogitsRows, best_tokens
from .transformers import TransformersTarget, run_model

#: Rows of a captured pass. While weights are what a step reads, padding costs little.
BUCKETS = (1, 4, 8, 16, 32, 64, 128, 256)
#: Tokens of a cache to begin with; where it grows, passes are captured anew.
CAPACITY = 1024


def bucket_of(rows: int) -> int | None:
    """The smallest bucket that holds so many rows; None where none does."""
    return next((bucket for bucket in BUCKETS if bucket >= rows), None)


def fill(buffer: torch.Tensor, tree: TokenTree, length: int, bucket: int) -> None:
    """Write a step into a host buffer of ``buffer_size(bucket)`` int32: length, ids, depths, words."""
    missing = bucket - len(tree)
    head = [length, *tree.tokens, *([tree.tokens[0]] * missing), *tree.depths, *([0] * missing)]
    buffer[: len(head)] = torch.tensor(head, dtype=torch.int32)
    buffer[len(head) :] = pack_bits([tree.ancestors], bucket).flatten()


def buffer_size(bucket: int) -> int:
    """Numbers that describe a step of so many rows."""
    return 1 + 2 * bucket + bucket * word_count(bucket)


def uncapturable(model: PreTrainedModel, facts: ModelFacts) -> str:
    """Why no pass of a model can be captured, known before any is tried; "" where nothing speaks against it."""
    name = type(model).__name__
    devices = {str(p.device) for p in model.parameters()}
    if len(devices) > 1:
        return f"{name} is spread over {', '.join(sorted(devices))}, and a graph knows one device"
    if facts.alibi is not None or facts.rope_type:
        what = "a bias by distance (ALiBi)" if facts.alibi is not None else f"{facts.rope_type} positions"
        return f"{name} has {what}, which change from step to step"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return f"{name} has hooks, which a captured pass would not call again"
    return ""


class CapturedPass:
    """The forward pass of one bucket in one slot, captured where there is a GPU."""

    def __init__(self, slot: int, bucket: int, device: torch.device) -> None:
        self.bucket = bucket
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(buffer_size(bucket), dtype=torch.int32, pin_memory=on_gpu)
        self.numbers = torch.zeros(buffer_size(bucket), dtype=torch.int32, device=device)
        self.columns = torch.arange(bucket, device=device)
        self.slots = torch.tensor([[slot]], device=device)
        self.seen = slice(slot, slot + 1)
        self.copied: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self.graph: Any = None
        self.results: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self, target: CudaGraphTarget, tree: TokenTree, length: int) -> LogitsBatch:
        """The tree's logits (1, Q, V) and argmaxes (1, Q), in memory of their own."""
        if self.copied is not None:
            self.copied.synchronize()  # the last step's copy may still be under way where nobody read its logits
        fill(self.host, tree, length, self.bucket)
        self.numbers.copy_(self.host, non_blocking=True)
        if self.copied is not None:
            self.copied.record()
        if self.copied is None or self.results is None:
            self.results = self.evaluate(target)
        else:
            if self.graph is None:
                self._capture(target)
            self.graph.replay()
        # Cloned, because the next replay writes to the same place.
        return LogitsBatch(*(result[:, : len(tree)].clone() for result in self.results))

    def _capture(self, target: CudaGraphTarget) -> None:
        self.graph, self.results = target.arena.capture(lambda: self.evaluate(target))

    def evaluate(self, target: CudaGraphTarget) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything that is captured, from the numbers to the argmaxes: no host value is read or made here."""
        rows, cache = self.bucket, target.cache
        length, ids, depths, words = torch.split(self.numbers, [1, rows, rows, rows * word_count(rows)])
        at = (length + self.columns)[None].long()
        # Attention masks nothing of the cache: it is handed over whole, and its live length is read on the device.
        cache.placement = Placement(self.slots, at, self.seen, cache.capacity)
        with target.attention.within(target.model, length, words.view(1, rows, -1), depths[None]):
            positions = (length + depths)[None].long()
            logits = run_model(target.model, target.facts, cache, ids[None].long(), positions)
        return logits, best_tokens(logits)


class Arena:
    """What outlives a target: the cache, and the passes captured over it. Knows no model, so it keeps none."""

    def __init__(self, model: PreTrainedModel, facts: ModelFacts, capacity: int) -> None:
        self.cache = TreeCache(facts.shapes, facts.dtype, model.device, capacity)
        self.passes: dict[Any, Any] = {}
        self.on_gpu = model.device.type == "cuda"
        self.memory_pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        self.stream = torch.cuda.Stream(model.device) if self.on_gpu else None  # type: ignore[no-untyped-call]

    def reserve(self, slots: int, capacity: int) -> None:
        """Room in the cache; where that moves it, passes are captured anew."""
        room = self.cache.slots, self.cache.capacity
        self.cache.reserve(slots, capacity)
        if (self.cache.slots, self.cache.capacity) != room:
            self.passes.clear()
            if self.on_gpu:  # a pool must not be used again when all its graphs are gone
                self.memory_pool = torch.cuda.graph_pool_handle()

    def capture(self, evaluate: Callable[[], Any]) -> tuple[Any, Any]:
        """A graph, and where it writes its results."""
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # One stream for all captures: each new one would have a cuBLAS workspace of its own. Other threads may
            # go on allocating; only this one is watched.
            with torch.cuda.graph(graph, self.memory_pool, self.stream, capture_error_mode="thread_local"):
                return graph, evaluate()
        finally:
            torch.cuda.set_stream(before)  # a capture that fails leaves its own stream current

    def leave(self, idle: list[Arena]) -> None:
        """For the next target of this attention; one is enough."""
        if not idle:
            idle.append(self)


class InArena(TransformersTarget):
    """A target whose cache and captured passes outlive it: the next one of the same attention takes them over."""

    attention: TreeAttention

    def take_arena(
        self, model: PreTrainedModel, facts: ModelFacts, attention: TreeAttention, capacity: int
    ) -> TreeCache:
        """The arena that the last target left, emptied, or a new one; its cache."""
        # Memory that inference mode made could not be written outside of it, and it is to be used again.
        with torch.inference_mode(False):
            if attention.idle:
                self.arena: Arena = attention.idle.pop()
                self.arena.cache.clear()
                self.arena.reserve(1, capacity)
            else:
                self.arena = Arena(model, facts, capacity)
        weakref.finalize(self, self.arena.leave, attention.idle)
        return self.arena.cache

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Scores]:
        with self.in_arena("the cache of a prompt", [(slot, len(prompt)) for slot, prompt in prompts]):
            return super().prefill(prompts)

    @contextmanager
    def in_arena(self, what: str, room: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Room for (slot, tokens) in the arena; inside, the model's GPU is the current one, where kernels start."""
        device = self.model.device
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with torch.inference_mode(False), self.attention.lock, current:
            with memory_errors(what):
                for slot, tokens in room:
                    self.arena.reserve(slot + 1, tokens)
            yield


class CudaGraphTarget(InArena):
    """``TransformersTarget`` with captured passes and the tree attention. Same logits, up to the arithmetic.

    Args:
        model: a causal language model.
        facts: what is known of it.
        attention: of this model as its weights are now: captured passes read them where they lie.
        capacity: tokens per slot to begin with; when storage grows, passes are captured anew.
        reason: one line that says why this path was taken.
    """

    path = "cuda-graph"

    def __init__(
        self,
        model: PreTrainedModel,
        facts: ModelFacts,
        attention: TreeAttention,
        capacity: int = CAPACITY,
        reason: str = "",
    ) -> None:
        super().__init__(model, facts, capacity, reason, self.take_arena(model, facts, attention, capacity))
        self.attention = attention

    @property
    def passes(self) -> dict[tuple[int, int], CapturedPass]:
        """By slot and bucket."""
        return self.arena.passes

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        rows = max(len(tree) for _, tree in trees)
        bucket = bucket_of(rows)
        # Padding is written too, so the room is the bucket's.
        room = [(slot, self.lengths[slot] + (bucket or rows)) for slot, _ in trees]
        with self.in_arena(f"a step of {rows} rows for {len(trees)} sequences", room):
            if len(trees) > 1 or bucket is None:
                return super().forward(trees)
            ((slot, tree),) = trees
            if (slot, bucket) not in self.passes:
                self.passes[slot, bucket] = CapturedPass(slot, bucket, self.model.device)
            with memory_errors(f"a step of {bucket} rows"):
                logits = self.passes[slot, bucket].run(self, tree, self.lengths[slot])
            return [LogitsRows(logits, 0)]

    @contextmanager
    def _visibility(
        self, trees: Sequence[TokenTree], lengths: Sequence[int], positions: torch.Tensor
    ) -> Iterator[Any]:
        """Ancestor bits in place of a mask."""
        live, words = torch.tensor(lengths), pack_bits([tree.ancestors for tree in trees], positions.shape[1])
        rows = (live.int(), words, (positions - live[:, None]).int())
        with self.attention.within(self.model, *(tensor.to(self.model.device) for tensor in rows)):
            yield None
