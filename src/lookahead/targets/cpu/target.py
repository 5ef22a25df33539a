"""Token trees on a compiled model. Fulfils ``lookahead.core.Target`` beside ``TransformersTarget``."""

from __future__ import annotations

import threading
import weakref
from bisect import insort_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core import TokenTree
from ..cache import StoredTarget
from ..limits import Limits, memory_errors
from ..logits import HostLogits, LogitsRows
from .compiled_model import CompiledModel
from .execution_plan import KVCache, Segment

if TYPE_CHECKING:
    import torch

Numbers = np.ndarray[Any, np.dtype[Any]]
#: Rows of a prompt that are evaluated together.
PROMPT_CHUNK = 512


class BufferPool:
    """Owns the buffers that nobody uses, because fresh pages cost more than filling them.

    Whoever acquires one owns it until it is released.

    Args:
        most: free buffers that are kept; the smallest goes where there are more.
    """

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._free: list[Numbers] = []  # smallest first
        self._lock = threading.Lock()

    def acquire(self, size: int) -> Numbers:
        """At least ``size`` bytes, uint8, of any contents: the smallest free buffer that fits, or a new one."""
        with self._lock:
            for i, buffer in enumerate(self._free):
                if len(buffer) >= size:
                    return self._free.pop(i)
        return np.empty(1 << max(0, size - 1).bit_length(), np.uint8)

    def release(self, buffer: Numbers) -> None:
        """Give a buffer back; its owner must not touch it any more."""
        with self._lock:
            insort_left(self._free, buffer, key=len)  # the first of its size: its pages are in cache
            del self._free[: -self._most]


#: Of all passes of the process.
buffers = BufferPool()


class PassLogits(HostLogits):
    """What one pass has read: logits (1, R, V) in the pass's memory until ``detach``.

    Args:
        memory: (bytes,) uint8; holds the logits (R, width), then the peaks (R, width / 32) fp32.
    """

    def __init__(self, memory: Numbers, compiled: CompiledModel, rows: int) -> None:
        stride, peaks_stride = compiled.logits_strides
        logits, peaks = np.split(memory[: rows * (stride + peaks_stride)], [rows * stride])
        numbers = logits.reshape(rows, stride).view(
            np.int16 if compiled.numbers.stored.is_bf16 else np.float32
        )
        super().__init__(
            numbers[:, : compiled.vocabulary],
            peaks.reshape(rows, peaks_stride).view(np.float32),
        )
        self.memory = memory
        self._best: list[int] | None = None

    def detach(self) -> Numbers:
        """Go on with a copy of the logits; returns the memory, which is free now."""
        assert self.peaks is not None
        self.rows, self.peaks = self.rows.copy(), self.peaks.copy()
        return self.memory

    def argmax(self, b: int, r: int) -> int:
        if self._best is None:
            assert self.peaks is not None
            self._best = np.where(np.isnan(self.peaks).any(1), -1, self.top(1)[0][0, :, 0]).tolist()
        return self._best[r]


class CpuTarget(StoredTarget):
    """Many sequences over one compiled model; one thread at a time may use it.

    Args:
        compiled: the model; several targets, each in a thread of its own, may share it.
        facts: what is known of the model.
        capacity: tokens per slot to begin with; a slot's doubles when it is full.
        reason: one line that says why this path was taken.
    """

    path = "cpu"
    cache: KVCache
    keeps_prefixes = True  # a row has the same bits wherever it is evaluated

    def __init__(self, compiled: CompiledModel, facts: Limits, capacity: int = 256, reason: str = "") -> None:
        self.compiled = compiled
        self.facts = facts
        self.reason = reason
        self.vocabulary: int = facts.vocabulary
        self.cache = compiled.new_cache(capacity)
        self.lengths: dict[int, int] = {}
        self._last: weakref.ref[PassLogits] | None = None
        self._memory: Numbers | None = None

    def depth_limit(self, slot: int) -> int:
        """Room up to the model's last position."""
        return max(0, self.facts.max_positions - 1 - self.lengths[slot])

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[LogitsRows]:
        """Prompts one after the other, in chunks of rows, from where ``reuse`` has left off."""
        scores = []
        for slot, prompt in prompts:
            with memory_errors(f"a prompt of {len(prompt)} tokens"):
                self.cache.make_room(slot, len(prompt))
                for begin in range(self.lengths.get(slot, 0), len(prompt), PROMPT_CHUNK):
                    tokens = prompt[begin : begin + PROMPT_CHUNK]
                    end = begin + len(tokens)
                    segment = Segment(slot, begin, len(tokens), None)
                    reads = [len(tokens) - 1] if end == len(prompt) else []
                    logits = self._run(tokens, range(begin, end), [segment], reads)
                    buffers.release(logits.detach())  # of one row at most
            self.lengths[slot] = len(prompt)
            scores.append(LogitsRows(logits, 0, [0]))
        return scores

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[LogitsRows]:
        """One pass over all trees; their rows lie behind one another, without padding."""
        self._recycle()
        tokens, positions, reads = list[int](), list[int](), list[int]()
        segments, parts = [], []
        for slot, tree in trees:
            length, nodes = self.lengths[slot], tree.needs_logits_nodes()
            segments.append(Segment(slot, length, len(tree), tree))
            parts.append((len(reads), nodes))
            reads += [len(tokens) + node for node in nodes]
            tokens += tree.tokens
            positions += [length + depth for depth in tree.depths]
        with memory_errors(f"a step of {len(tokens)} rows for {len(trees)} sequences"):
            for segment in segments:
                self.cache.make_room(segment.slot, segment.length + segment.rows)
            logits = self._run(tokens, positions, segments, reads)
        self._last, self._memory = weakref.ref(logits), logits.memory
        return [LogitsRows(logits, 0, nodes, start) for start, nodes in parts]

    def _run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        reads: Sequence[int],
    ) -> PassLogits:
        memory = buffers.acquire(len(reads) * sum(self.compiled.logits_strides) + 64)
        self.compiled.run(tokens, positions, segments, reads, self.cache, memory)
        return PassLogits(memory, self.compiled, len(reads))

    def _recycle(self) -> None:
        """The last step's logits give their buffer back; whoever still holds their scores goes on with a copy."""
        logits = self._last() if self._last is not None else None
        if logits is not None:
            logits.detach()
        if self._memory is not None:
            buffers.release(self._memory)
        self._last = self._memory = None

    def read(self, slot: int) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Copies of the slot's keys and values, per layer, each (1, heads, T, size)."""
        from .dense import tensor_of

        layers = self.compiled.read(self.cache, slot, self.lengths[slot])
        return [(tensor_of(keys), tensor_of(values)) for keys, values in layers]

    def release(self, slot: int) -> None:
        super().release(slot)
        if not self.lengths:
            self._recycle()
