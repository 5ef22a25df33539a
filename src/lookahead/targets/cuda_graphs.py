"""The step on a GPU: one captured CUDA graph per bucket of rows, and whether a model's passes can be captured.

A pass of one row through a 7B model is a few hundred small kernels, and launching them from Python takes longer than
running them. So the pass is captured once per bucket of rows and replayed. Everything that changes from step to step
(the number of committed tokens, token ids, depths, ancestor bits) is in an int32 buffer that is copied to the device
once per step. A step with fewer rows than its bucket is padded with rows that see only the root. Attention gets the
whole cache and reads the number of committed tokens on the device.

Example, a step of 3 rows (root 7, its chain 9, 4) after T = 20 tokens in the bucket of 4:

    length | token ids | depths  | ancestor bits, one word per row
    20     | 7 9 4 7   | 0 1 2 0 | 0b0001 0b0011 0b0111 0b0001       row 3 is padding

A bucket's first step runs uncaptured, because it sets up libraries and compiles kernels; its second step is captured.
Cache and graphs are kept in a ``GraphStore`` that outlives its target: the next target of the same model takes it
over, so a short text does not wait for captures. Each model keeps at most one unused store.

Only steps of one sequence are captured; several sequences share an uncaptured pass. On a CPU, the same code runs
without captures, for tests.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention import get
from ..attention.bits import pack_bits, word_count
from ..core import OutOfMemory, Scores, SettingsError, TokenTree
from ..core.errors import summary
from ..core.target import UP_TO_ROUNDING
from .attention_hook import TreeAttention
from .equivalence import compare
from .facts import ModelFacts
from .fingerprint import forget, remember
from .limits import memory_errors
from .logits import LogitsBatch, LogitsRows, best_tokens
from .transformers import TransformersTarget, head_inputs, run_model
from .tree_cache import Placement, TreeCache

#: Numbers of rows of captured passes. Padding costs little while reading the weights takes most of a step.
BUCKETS = (1, 4, 8, 16, 32, 64, 128, 256)
#: Initial capacity of a cache, in tokens. When a cache grows, passes must be captured again.
CAPACITY = 1024


def bucket_of(rows: int) -> int | None:
    """The smallest bucket for ``rows`` rows; None if there is none."""
    return next((bucket for bucket in BUCKETS if bucket >= rows), None)


def fill(buffer: torch.Tensor, tree: TokenTree, length: int, bucket: int) -> None:
    """Write a step into a host buffer of ``buffer_size(bucket)`` int32; the example above shows the layout."""
    missing = bucket - len(tree)
    head = [length, *tree.tokens, *([tree.tokens[0]] * missing), *tree.depths, *([0] * missing)]
    buffer[: len(head)] = torch.tensor(head, dtype=torch.int32)
    buffer[len(head) :] = pack_bits([tree.ancestors], bucket).flatten()


def buffer_size(bucket: int) -> int:
    """The number of integers that describe a step of ``bucket`` rows."""
    return 1 + 2 * bucket + bucket * word_count(bucket)


def uncapturable(model: PreTrainedModel, facts: ModelFacts) -> str:
    """Why no pass of a model can be captured, as far as is known in advance; "" if no reason is known."""
    name = type(model).__name__
    devices = {str(p.device) for p in model.parameters()}
    if len(devices) > 1:
        return f"{name} is spread over {', '.join(sorted(devices))}, and a graph runs on one device"
    if facts.alibi is not None or facts.rope_type:
        what = "a bias by distance (ALiBi)" if facts.alibi is not None else f"{facts.rope_type} positions"
        return f"{name} has {what}, which change from step to step"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return f"{name} has hooks, which a captured pass would not call again"
    return ""


class CapturedPass:
    """The forward pass of one bucket in one slot; captured on a GPU."""

    def __init__(self, slot: int, bucket: int, device: torch.device) -> None:
        self.bucket = bucket
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(buffer_size(bucket), dtype=torch.int32, pin_memory=on_gpu)
        self.numbers = torch.zeros(buffer_size(bucket), dtype=torch.int32, device=device)
        self.columns = torch.arange(bucket, device=device)
        self.slots = torch.tensor([[slot]], device=device)
        self.read_slots = slice(slot, slot + 1)
        self.copied: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self.graph: Any = None
        self.results: list[torch.Tensor] = []

    def run(self, target: CudaGraphTarget, tree: TokenTree, length: int) -> LogitsBatch:
        """The tree's logits (1, Q, V), argmaxes (1, Q), and hidden states (1, Q, hidden) if it needs them, in memory
        that the next step does not overwrite."""
        if self.copied is not None:
            self.copied.synchronize()  # if no result of the last step was read, its copy may still be running
        fill(self.host, tree, length, self.bucket)
        self.numbers.copy_(self.host, non_blocking=True)
        if self.copied is not None:
            self.copied.record()
        if self.copied is None or not self.results:
            self.results = self.evaluate(target)
        else:
            if self.graph is None:
                self._capture(target)
            self.graph.replay()
        wanted = self.results if tree.needs_hidden else self.results[:2]
        # Cloned, because the next replay overwrites the results.
        return LogitsBatch(*(result[:, : len(tree)].clone() for result in wanted))

    def _capture(self, target: CudaGraphTarget) -> None:
        self.graph, self.results = target.graphs.capture(lambda: self.evaluate(target))

    def evaluate(self, target: CudaGraphTarget) -> list[torch.Tensor]:
        """The captured part of the pass, from the buffer to the logits, the argmaxes and, if the model has an output
        matrix, its inputs, which exist anyway. It neither reads nor makes values on the host."""
        rows, cache = self.bucket, target.cache
        length, ids, depths, words = torch.split(self.numbers, [1, rows, rows, rows * word_count(rows)])
        write_columns = (length + self.columns)[None].long()
        cache.placement = Placement(self.slots, write_columns, self.read_slots, cache.capacity)
        visible = target.attention.installed(target.model, length, words.view(1, rows, -1), depths[None])
        with visible, head_inputs(target.model, True) as states:
            positions = (length + depths)[None].long()
            logits = run_model(target.model, target.facts, cache, ids[None].long(), positions)
        return [logits, best_tokens(logits), *states]


class GraphStore:
    """A KV cache and the passes captured over it, which outlive a target. Holds no reference to the model."""

    def __init__(self, model: PreTrainedModel, facts: ModelFacts, capacity: int) -> None:
        self.cache = TreeCache(facts.shapes, facts.dtype, model.device, capacity)
        self.passes: dict[Any, Any] = {}
        self.on_gpu = model.device.type == "cuda"
        self.memory_pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        self.stream = torch.cuda.Stream(model.device) if self.on_gpu else None  # type: ignore[no-untyped-call]

    def reserve(self, slots: int, capacity: int) -> None:
        """Ensure room in the cache. If that moves the cache, captured passes are dropped."""
        before = self.cache.slots, self.cache.capacity
        self.cache.reserve(slots, capacity)
        if (self.cache.slots, self.cache.capacity) != before:
            self.passes.clear()
            if self.on_gpu:  # a memory pool must not be reused after its last graph is gone
                self.memory_pool = torch.cuda.graph_pool_handle()

    def capture(self, evaluate: Callable[[], Any]) -> tuple[Any, Any]:
        """Capture ``evaluate``. Returns the graph, and the tensors to which each replay writes its results."""
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # One stream for all captures, because each stream gets its own cuBLAS workspace. Other threads may
            # allocate memory during the capture.
            with torch.cuda.graph(graph, self.memory_pool, self.stream, capture_error_mode="thread_local"):
                return graph, evaluate()
        finally:
            torch.cuda.set_stream(before)  # a failed capture leaves its stream current

    def leave(self, idle: list[GraphStore]) -> None:
        """Keep the store for the next target with this attention, unless another store is already kept."""
        if not idle:
            idle.append(self)


class GraphTarget(TransformersTarget):
    """A target with a ``GraphStore``, which the next target with the same attention takes over."""

    attention: TreeAttention

    def take_graphs(
        self, model: PreTrainedModel, facts: ModelFacts, attention: TreeAttention, capacity: int
    ) -> TreeCache:
        """Take over an earlier target's store and empty its cache, or make a new store. Returns the cache."""
        # Tensors made in inference mode cannot be written to outside of it, where a later target may run.
        with torch.inference_mode(False):
            if attention.idle:
                self.graphs: GraphStore = attention.idle.pop()
                self.graphs.cache.clear()
                self.graphs.reserve(1, capacity)
            else:
                self.graphs = GraphStore(model, facts, capacity)
        weakref.finalize(self, self.graphs.leave, attention.idle)
        return self.graphs.cache

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Scores]:
        with self.with_room("the cache of a prompt", [(slot, len(prompt)) for slot, prompt in prompts]):
            return super().prefill(prompts)

    @contextmanager
    def with_room(self, what: str, room: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Ensure room in the cache for each (slot, tokens). In the block, the model's GPU is the current device."""
        device = self.model.device
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with torch.inference_mode(False), self.attention.lock, current:
            with memory_errors(what):
                for slot, tokens in room:
                    self.graphs.reserve(slot + 1, tokens)
            yield


class CudaGraphTarget(GraphTarget):
    """``TransformersTarget`` with captured passes and the tree attention. Its logits are the same up to rounding.

    Args:
        model: a causal language model.
        facts: the model's facts.
        attention: the attention for this model with its weights where they are now; captured passes hold their
            addresses.
        capacity: initial capacity of a slot, in tokens; when storage grows, passes are captured again.
        reason: why this path was chosen, in one line.
    """

    path = "cuda-graph"
    promise = UP_TO_ROUNDING

    def __init__(
        self,
        model: PreTrainedModel,
        facts: ModelFacts,
        attention: TreeAttention,
        capacity: int = CAPACITY,
        reason: str = "",
    ) -> None:
        super().__init__(model, facts, capacity, reason, self.take_graphs(model, facts, attention, capacity))
        self.attention = attention

    @property
    def passes(self) -> dict[tuple[int, int], CapturedPass]:
        """Captured passes by slot and bucket."""
        return self.graphs.passes

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        rows = max(len(tree) for _, tree in trees)
        bucket = bucket_of(rows)
        # Padding rows are written too, so there must be room for the whole bucket.
        room = [(slot, self.lengths[slot] + (bucket or rows)) for slot, _ in trees]
        with self.with_room(f"a step of {rows} rows for {len(trees)} sequences", room):
            if len(trees) > 1 or bucket is None:
                return super().forward(trees)
            ((slot, tree),) = trees
            self.cache.occupy(slot, self.lengths[slot] + bucket)
            if (slot, bucket) not in self.passes:
                self.passes[slot, bucket] = CapturedPass(slot, bucket, self.model.device)
            with memory_errors(f"a step of {bucket} rows"):
                logits = self.passes[slot, bucket].run(self, tree, self.lengths[slot])
            return [LogitsRows(logits, 0)]

    @contextmanager
    def _visibility(
        self, trees: Sequence[TokenTree], lengths: Sequence[int], positions: torch.Tensor
    ) -> Iterator[Any]:
        """Install the tree attention, which reads ancestor bits, so the model gets no mask."""
        committed = torch.tensor(lengths)
        words = pack_bits([tree.ancestors for tree in trees], positions.shape[1])
        arguments = (committed.int(), words, (positions - committed[:, None]).int())
        with self.attention.installed(self.model, *(tensor.to(self.model.device) for tensor in arguments)):
            yield None


def captured_attention(
    model: PreTrainedModel, facts: ModelFacts, backend: str = "auto"
) -> tuple[TreeAttention | None, str]:
    """The attention for ``CudaGraphTarget`` on this model. The result is remembered.

    Args:
        model: a causal language model.
        facts: from a probe with the mode "tree".
        backend: the attention backend; "auto" is triton on an NVIDIA GPU if it is installed, and sdpa elsewhere.

    Returns:
        the attention, or None if passes cannot be captured or compute different logits; and the reason, in one line.
    """

    def check() -> tuple[TreeAttention | None, str]:
        found = _check_captures(model, facts, backend)
        forget(model, "trial")
        return found

    return remember(model, f"cuda-graph {backend}", check)


def _check_captures(
    model: PreTrainedModel, facts: ModelFacts, backend: str
) -> tuple[TreeAttention | None, str]:
    name = type(model).__name__
    if why := uncapturable(model, facts):
        return None, why
    try:
        attention = TreeAttention(model, get(backend, model.device))
    except SettingsError as error:
        return None, str(error)
    try:
        if reads := host_reads(CudaGraphTarget(model, facts, attention)):
            return None, f"{name} reads values on the host in its pass ({reads})"
        result = compare(model, facts, lambda: CudaGraphTarget(model, facts, attention))
    except OutOfMemory:
        raise
    except (
        Exception
    ) as error:  # a model or a compiler may fail in any way on a pass that it was not designed for
        if isinstance(error, torch.AcceleratorError):
            torch.cuda.synchronize(model.device)  # raises if the device can no longer be used
        if attention.backend == "triton":
            warnings.warn(
                f"the attention kernel does not run here ({summary(error)}); using sdpa, with the same result",
                RuntimeWarning,
                stacklevel=7,
            )
            return _check_captures(model, facts, "sdpa")
        return None, f"{name} cannot be captured ({summary(error)})"
    if not result.ok:
        return None, f"{name}'s logits there differ from those of its own passes ({result.reason})"
    how = "captured passes" if model.device.type == "cuda" else "passes in buckets of rows, without capture"
    where = f"{name} on {model.device.type}: {how}, attention by {attention.backend}"
    return attention, f"{where} ({result.reason})"


def host_reads(target: CudaGraphTarget) -> str:
    """The first operation of a pass that reads a value on the host, which a graph cannot contain; "" if there is
    none, and on a CPU.

    Call it before anything is captured, because a failed capture leaves the device's random generator unusable.
    Every bucket is evaluated once before the check, so kernels are compiled, or fail to compile, before the first
    text.
    """
    device = target.model.device
    if device.type == "cpu":
        return ""
    with target.with_room("a step", [(0, BUCKETS[-1])]):
        passes = [CapturedPass(0, bucket, device) for bucket in BUCKETS]
        for captured_pass in passes:
            captured_pass.evaluate(target)
        try:
            with refused_host_reads():
                for captured_pass in passes:
                    captured_pass.evaluate(target)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return summary(error)
    return ""


@contextmanager
def refused_host_reads() -> Iterator[None]:
    """A context in which an operation that waits for the GPU to read a value on the host raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
