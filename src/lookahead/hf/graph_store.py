"""The common parts of targets with captured passes: a KV cache with its CUDA graphs, and the target that keeps them.

Cache and graphs are kept in a ``GraphStore`` that outlives its target: the next target of the same model takes it
over, so short completions do not wait for captures. Each model keeps at most one unused store.

On a CPU, the same code runs without captures, for tests.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from ..core import Scores
from ..core.memory import memory_errors, out_of_memory
from .attention_hook import TreeAttention
from .cuda import DeviceStream, is_gpu, memory
from .facts import ModelFacts
from .fingerprint import active_hooks, known
from .target import TransformersTarget
from .tree_cache import TreeCache

#: Initial capacity of a cache, in tokens. When a cache grows, passes must be captured again.
CAPACITY = 1024
#: Held during a capture: torch allows one at a time in a process.
capturing = threading.Lock()
_Pass = TypeVar("_Pass")


def uncapturable(model: PreTrainedModel, facts: ModelFacts) -> str:
    """Why no pass of a model can be captured, as far as known before capture; "" if no reason is known."""
    name = type(model).__name__
    devices = {str(p.device) for p in model.parameters()}
    if len(devices) > 1:
        return f"{name} is spread over {', '.join(sorted(devices))}, and a graph runs on one device"
    if facts.rope_type:
        return f"{name} has {facts.rope_type} positions, which change from step to step"
    if any(active_hooks(m._forward_hooks) or active_hooks(m._forward_pre_hooks) for m in model.modules()):
        return f"{name} has hooks, which a captured pass would not call again"
    return ""


class GraphStore:
    """A KV cache and the passes captured over it, which outlive a target. Holds no reference to the model.

    Attributes:
        cache: the cache.
        passes: passes by size, the least recently used first.
        checked_for_host_reads: in exact mode, whether a pass was checked for host reads.
        stream: the stream of all work on the cache and in the passes. Replays share memory and the workspace of
            matrix products, which the first pass on the stream allocates, so they must not overlap.
        limit: maximum bytes of the passes together with the logits that they share, and maximum bytes of the cache
            while no target uses it. All graphs of a store share a memory pool: the memory of a dropped graph is free
            for later captures, and it returns to the device when all graphs of the store are dropped.
    """

    def __init__(self, model: PreTrainedModel, facts: ModelFacts, capacity: int) -> None:
        self.device = model.device
        self.on_gpu = is_gpu(model.device)
        self.stream = DeviceStream(self.device)
        self.limit = graph_limit(model)
        with self.stream.use():
            self.cache = TreeCache(facts.shapes, facts.dtype, self.device, capacity)
        self.passes: dict[Any, Any] = {}
        self.checked_for_host_reads = False
        self._memory_pool: Any = None
        self._logits: dict[int, torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        """Memory of the passes and of the logits that they share."""
        passes: int = sum(one.bytes for one in self.passes.values())
        return passes + sum(shared.nbytes for shared in self._logits.values())

    def reserve(self, slots: int, capacity: int) -> None:
        """Ensure room in the cache. If the cache must move, captured passes are dropped first."""
        if self.cache.grown(slots, capacity) != (self.cache.slots, self.cache.capacity):
            self.drop_passes()
            self.cache.reserve(slots, capacity)

    def drop_passes(self, kept: Any = None) -> None:
        """Drop all passes except ``kept``."""
        self.passes = {key: one for key, one in self.passes.items() if one is kept}
        self._memory_pool = None  # a memory pool must not be reused after its last graph is gone
        self._logits = {}

    def shared(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of a pass's logits, in memory shared by all passes with the same number of rows."""
        rows = logits.shape[:-1].numel()
        if rows not in self._logits:  # allocated in the uncaptured pass
            self._logits[rows] = torch.empty_like(logits)
        return self._logits[rows].view(logits.shape).copy_(logits)

    def find(self, key: Any, make: Callable[[], _Pass]) -> _Pass:
        """The pass of a size, created on first use."""
        found: _Pass = self.passes.pop(key) if key in self.passes else make()
        self.passes[key] = found
        return found

    def capture(self, evaluate: Callable[[], Any]) -> tuple[Any, Any, int]:
        """Capture ``evaluate``, then drop the least recently used passes while ``bytes`` exceeds ``limit``.

        Returns:
            the graph, the tensors that each replay writes its results to, and the memory of both in bytes.

        Raises:
            MemoryError, RuntimeError: out of memory (``out_of_memory``), or the capture failed.
        """
        if self._memory_pool is None:
            self._memory_pool = torch.cuda.graph_pool_handle()
        with capturing:
            torch.cuda.empty_cache()  # as torch does when a capture begins
            graph = torch.cuda.CUDAGraph()
            before, _ = memory(self.device)
            try:
                # Other threads may allocate memory during the capture.
                with torch.cuda.graph(
                    graph, self._memory_pool, self.stream.cuda, capture_error_mode="thread_local"
                ):
                    results = evaluate()
            except RuntimeError as error:
                # A library that runs out of memory invalidates the capture, whose end then raises another error.
                if error.__context__ is not None and out_of_memory(error.__context__):
                    raise error.__context__ from None
                raise
        taken = max(0, int(before - memory(self.device)[0]))
        for key, one in list(self.passes.items()):
            if taken + self.bytes > self.limit and one.graph is not None:
                del self.passes[key]
                for rows in list(self._logits):
                    if all(other.sequences * other.rows != rows for other in self.passes.values()):
                        del self._logits[rows]
        return graph, results, taken

    def leave(self, idle: list[GraphStore]) -> None:
        """Keep the store for the next target with this attention, unless another store is already kept."""
        if not idle:
            if self.cache.bytes > self.limit:
                self.drop_passes()
                self.cache.free()
            idle.append(self)


def graph_limit(model: PreTrainedModel) -> float:
    """Maximum bytes of the captured passes of a model, and of the cache of an unused store."""
    return known(model).graph_memory * memory(model.device)[1]


class GraphTarget(TransformersTarget):
    """A target with a ``GraphStore``, which the next target with the same attention takes over.

    Args:
        attention: the attention for this model. Captured passes contain the addresses of its weights, which must not
            move.
        capacity: initial capacity of a slot, in tokens; when storage grows, passes are captured again.
        model, facts, reason: as for ``TransformersTarget``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        facts: ModelFacts,
        attention: TreeAttention,
        capacity: int = CAPACITY,
        reason: str = "",
    ) -> None:
        self.attention = attention
        self.graphs = self._take_graphs(model, facts, attention, capacity)
        weakref.finalize(self, self.graphs.leave, attention.idle)
        super().__init__(model, facts, capacity, reason, self.graphs.cache)

    @staticmethod
    def _take_graphs(
        model: PreTrainedModel, facts: ModelFacts, attention: TreeAttention, capacity: int
    ) -> GraphStore:
        """An earlier target's store with an empty cache, or a new store."""
        # Tensors created in inference mode cannot be written outside it, where a later target may run.
        with torch.inference_mode(False), attention.lock:
            if not attention.idle:
                return GraphStore(model, facts, capacity)
            graphs: GraphStore = attention.idle.pop()
            limit = graph_limit(model)
            with graphs.stream.use():
                if limit < graphs.limit:
                    graphs.drop_passes()  # all of them, so that their memory returns to the device
                graphs.limit = limit
                graphs.cache.clear()
                graphs.reserve(1, capacity)
            return graphs

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Scores]:
        with self.with_room("the cache of a prompt", [(slot, len(prompt)) for slot, prompt in prompts]):
            return super().prefill(prompts)

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        with torch.inference_mode(False), self.graphs.stream.use():
            super().commit(paths)

    def read(self, slot: int) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        with self.graphs.stream.use():
            return super().read(slot)

    @contextmanager
    def with_room(self, what: str, room: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Ensure room in the cache for each (slot, tokens). Inside the block, work is queued on the store's
        stream."""
        with torch.inference_mode(False), self.attention.lock, self.graphs.stream.use():
            with memory_errors(what):
                for slot, tokens in room:
                    self.graphs.reserve(slot + 1, tokens)
            yield
