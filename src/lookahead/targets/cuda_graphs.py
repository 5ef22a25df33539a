"""The step on a GPU: static cache, row buckets, one captured graph per bucket.

At one row per step a model of 7B is a few hundred small kernels, and launching them from Python takes longer
than they run. So the pass over a bucket of rows is captured once and replayed: all that changes from step to
step (token ids, depths, ancestor bits, the live length) lies in one buffer of int32 that is copied to the
device once per step, and one copy brings the argmaxes back. Rows up to the bucket's size are padded with
rows that see the root alone; the cache is handed to attention whole, with its live length on the device.

A bucket's first step runs uncaptured, which sets up libraries and compiles kernels; its second is captured.
Cache and graphs outlive their target: the next target of the same model takes them over, so that a short text
does not pay for capturing anew. One such arena per model is kept while none is in use.

One sequence at a time is captured; several share an ordinary pass, without a mask where the attention is a kernel.
On a CPU the same code runs without capture, which is how it is tested.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.backends import KERNELS
from ..attention.bits import pack_bits, word_count
from ..core import Scores, SettingsError, TokenTree
from .attention_hook import TreeAttention, enabled
from .cache import Placement, TreeCache
from .facts import ModelFacts, memory_errors
from .logits import LogitsBatch, LogitsRows
from .norms import fused_norms, one_kernel_norms
from .transformers import TransformersTarget

#: Rows of a captured pass. Up to 64 by eights: a tile of a matrix product has 8 or 16 rows.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
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


class _StepLogits(LogitsBatch):
    """Logits whose argmaxes were taken in the pass itself: (1, Q), -1 for NaN."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        super().__init__(logits)
        self._tokens = tokens

    def all_best(self) -> torch.Tensor:
        return self._tokens


class _Pass:
    """The forward pass of one bucket in one slot, captured where there is a GPU."""

    def __init__(self, slot: int, bucket: int, device: torch.device) -> None:
        self.bucket = bucket
        self.slot = slot
        self.on_gpu = device.type == "cuda"
        self.host = torch.zeros(buffer_size(bucket), dtype=torch.int32, pin_memory=self.on_gpu)
        self.numbers = torch.zeros(buffer_size(bucket), dtype=torch.int32, device=device)
        self.columns = torch.arange(bucket, device=device)
        self.slots = torch.tensor([[slot]], device=device)
        self.copied: Any = torch.cuda.Event() if self.on_gpu else None  # type: ignore[no-untyped-call]
        self.graph: Any = None
        self.results: tuple[torch.Tensor, torch.Tensor] | None = None
        self.steps = 0

    def run(self, target: CudaGraphTarget, tree: TokenTree, length: int) -> _StepLogits:
        """The tree's logits (1, Q, V) and argmaxes (1, Q), in memory of their own."""
        if self.copied is not None:
            self.copied.synchronize()  # the last step's copy may still be under way where nobody read its logits
        fill(self.host, tree, length, self.bucket)
        self.numbers.copy_(self.host, non_blocking=True)
        if self.copied is not None:
            self.copied.record()
        self.steps += 1
        results: tuple[torch.Tensor, torch.Tensor] | None
        if not self.on_gpu or self.steps == 1:
            results = self.evaluate(target)
        else:
            if self.graph is None:
                self._capture(target)
            self.graph.replay()
            results = self.results
        assert results is not None
        # Cloned, because the next replay writes to the same place.
        logits, tokens = (result[:, : len(tree)].clone() for result in results)
        return _StepLogits(logits, tokens)

    def _capture(self, target: CudaGraphTarget) -> None:
        graph, before, arena = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), target.arena
        try:
            # One stream for all captures: each new one would have a cuBLAS workspace of its own. Other threads may
            # go on allocating; only this one is watched.
            with torch.cuda.graph(graph, arena.memory_pool, arena.stream, capture_error_mode="thread_local"):
                self.results = self.evaluate(target)
        finally:
            torch.cuda.set_stream(before)  # a capture that fails leaves its own stream in force
        self.graph = graph

    def evaluate(self, target: CudaGraphTarget) -> tuple[torch.Tensor, torch.Tensor]:
        """Everything that is captured, from the numbers to the argmaxes: no host value is read or made here."""
        rows, cache = self.bucket, target.cache
        length, ids, depths, words = torch.split(self.numbers, [1, rows, rows, rows * word_count(rows)])
        at = (length + self.columns)[None].long()
        # Attention masks nothing of the cache: it is handed over whole, and its live length is read on the device.
        cache.placement = Placement([self.slot], [0], rows, (self.slots, at), cache.capacity)
        keywords: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        if target.facts.takes_positions:
            keywords["position_ids"] = (length + depths)[None].long()
        attention = target.attention
        with (
            torch.no_grad(),
            one_kernel_norms(target.norms),
            attention.switched(target.model),
            attention.within(words.view(1, rows, -1), depths[None], length),
        ):
            logits = target.model(input_ids=ids[None].long(), return_dict=True, **keywords).logits
        values, tokens = logits.max(dim=-1)
        return logits, tokens.masked_fill(values.isnan(), -1)


class _Arena:
    """What outlives a target: the cache, and the passes captured over it. Knows no model, so it keeps none."""

    def __init__(self, model: PreTrainedModel, facts: ModelFacts, capacity: int) -> None:
        self.weights = _weights(model)
        self.cache = TreeCache(facts.shapes, facts.dtype, model.device, capacity)
        self.passes: dict[tuple[int, int], _Pass] = {}
        self.on_gpu = model.device.type == "cuda"
        self.memory_pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        self.stream = torch.cuda.Stream(model.device) if self.on_gpu else None  # type: ignore[no-untyped-call]
        self.sound = True

    def reserve(self, slots: int, capacity: int) -> None:
        """Room in the cache; where that moves it, passes are captured anew."""
        room = self.cache.slots, self.cache.capacity
        self.cache.reserve(slots, capacity)
        if (self.cache.slots, self.cache.capacity) != room:
            self.drop_passes()

    def drop_passes(self) -> None:
        """Forget what was captured. A pool must not be used again when all its graphs are gone."""
        self.passes.clear()
        if self.on_gpu:
            self.memory_pool = torch.cuda.graph_pool_handle()


_idle: weakref.WeakKeyDictionary[Any, _Arena] = weakref.WeakKeyDictionary()


def _weights(model: PreTrainedModel) -> tuple[int, ...]:
    """Where the weights lie: captured passes read them there."""
    return tuple(parameter.data_ptr() for parameter in model.parameters())


def _take_arena(model: PreTrainedModel, facts: ModelFacts, capacity: int) -> _Arena:
    arena = _idle.pop(model, None)
    if arena is None or arena.weights != _weights(model):
        return _Arena(model, facts, capacity)
    arena.cache.clear()
    arena.reserve(1, capacity)
    return arena


def _give_back(model: weakref.ref[Any], arena: _Arena) -> None:
    held = model()
    if held is not None and arena.sound:
        _idle.setdefault(held, arena)


def drop_arena(model: PreTrainedModel) -> None:
    """Free the cache and the captured passes that are kept for a model's next target."""
    _idle.pop(model, None)


class CudaGraphTarget(TransformersTarget):
    """``TransformersTarget`` with captured passes. Same logits, up to the arithmetic.

    Args:
        model: a causal language model.
        facts: what is known of it.
        capacity: tokens per slot to begin with; when storage grows, passes are captured anew.
        attention: from ``attention_hook.prepare``; None takes what ``enable`` has put in force.
        reason: one line that says why this path was taken.

    Raises:
        SettingsError: no attention was given and none is in force.
    """

    path = "cuda-graph"

    def __init__(
        self,
        model: PreTrainedModel,
        facts: ModelFacts | None = None,
        capacity: int = CAPACITY,
        attention: TreeAttention | None = None,
        reason: str = "",
    ) -> None:
        attention = attention if attention is not None else enabled(model)
        if attention is None:
            raise SettingsError(
                "captured passes need the tree attention; call "
                "lookahead.targets.attention_hook.enable(model) first"
            )
        facts = facts if facts is not None else ModelFacts(model)
        # Memory that inference mode made could not be written outside of it, and it is to be used again.
        with torch.inference_mode(False):
            self.arena = _take_arena(model, facts, capacity)
        super().__init__(model, facts, capacity, reason, self.arena.cache)
        self.attention = attention
        self.refused = ""
        self.norms = fused_norms(model)
        weakref.finalize(self, _give_back, weakref.ref(model), self.arena)

    @property
    def passes(self) -> dict[tuple[int, int], _Pass]:
        """By slot and bucket."""
        return self.arena.passes

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Scores]:
        with torch.inference_mode(False), self.attention.lock, memory_errors("the cache of a prompt"):
            for slot, prompt in prompts:
                self.arena.reserve(slot + 1, len(prompt))
        with self.attention.lock, _current(self.model.device):
            return super().prefill(prompts)

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        rows = max(len(tree) for _, tree in trees)
        bucket = bucket_of(rows)
        with torch.inference_mode(False), self.attention.lock, _current(self.model.device):
            # Padding is written too, so the room is the bucket's.
            with memory_errors(f"a step of {rows} rows for {len(trees)} sequences"):
                for slot, _ in trees:
                    self.arena.reserve(slot + 1, self.lengths[slot] + (bucket or rows))
            unfit = self.refused or self.facts.alibi is not None or self.facts.rope_type
            if len(trees) > 1 and not unfit and self.attention.backend in KERNELS:
                with self.attention.switched(self.model):  # uncaptured, but without a mask
                    return super().forward(trees)
            if unfit or len(trees) > 1 or bucket is None:
                return super().forward(trees)
            ((slot, tree),) = trees
            one = self.passes.get((slot, bucket))
            if one is None:
                one = self.passes[slot, bucket] = _Pass(slot, bucket, self.model.device)
            try:
                with memory_errors(f"a step of {bucket} rows"):
                    logits = one.run(self, tree, self.lengths[slot])
            except RuntimeError as error:
                if one.graph is not None or not _refuses_capture(error):
                    raise
                self._refuse(error)
                return super().forward(trees)
        self._pending[slot] = tree
        return [LogitsRows(logits, 0)]

    def _refuse(self, error: RuntimeError) -> None:
        """A model or backend that cannot be captured goes the ordinary way from now on."""
        self.refused = (str(error).splitlines() or [""])[0][:160]
        self.arena.sound = False
        self.arena.drop_passes()
        warnings.warn(
            f"this model's step cannot be captured ({self.refused}); going on without graphs, with the same result",
            RuntimeWarning,
            stacklevel=3,
        )


def _refuses_capture(error: RuntimeError) -> bool:
    """Whether an error says that a pass cannot be captured, rather than that the device has failed."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return not isinstance(error, torch.AcceleratorError) or "captur" in str(error)


def _current(device: torch.device) -> Any:
    """Makes a GPU the current one, which is where kernels are launched and graphs are captured."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
