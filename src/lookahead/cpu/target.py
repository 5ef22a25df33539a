"""The target that evaluates token trees on a compiled model."""

from __future__ import annotations

import threading
import weakref
from bisect import insort_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..core import TokenTree
from ..core.kv_storage import StoredTarget
from ..core.memory import memory_errors
from ..core.target import BIT_EQUAL
from ..model import Limits
from ..sampling.scores import Logits, LogitsRows
from .compiled_model import CompiledModel
from .execution_plan import KVCache, Segment

if TYPE_CHECKING:
    pass

Array = np.ndarray[Any, np.dtype[Any]]
#: Rows of a prompt that are evaluated together.
PROMPT_CHUNK = 512
#: The largest number of buffers whose arrays are kept.
MOST_BUFFERS = 4


class BufferPool:
    """Keeps free buffers for reuse, because mapping new memory pages costs more than filling them.

    A buffer belongs to its caller from ``acquire`` to ``release``.

    Args:
        most: maximum number of free buffers; the smallest is dropped first.
    """

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._free: list[Array] = []  # smallest first
        self._lock = threading.Lock()

    def acquire(self, size: int) -> Array:
        """An uninitialized uint8 buffer of at least ``size`` bytes: the smallest free one that fits, or a new one."""
        with self._lock:
            for i, buffer in enumerate(self._free):
                if len(buffer) >= size:
                    return self._free.pop(i)
        return np.empty(1 << max(0, size - 1).bit_length(), np.uint8)

    def release(self, buffer: Array) -> None:
        """Return a buffer; the caller must no longer use it."""
        with self._lock:
            # Put it first among buffers of its size, because its pages are in the CPU cache.
            insort_left(self._free, buffer, key=len)
            del self._free[: -self._most]


#: The buffers of all passes in this process.
buffers = BufferPool()


class PassArrays(NamedTuple):
    """What a pass of R rows writes to its memory; see ``CompiledModel.run``.

    Attributes:
        address: of the memory.
        logits: (R, V) fp32, or int16 for the bits of bf16.
        peaks: the largest logit of each group of 32 tokens, (R, V / 32 rounded up) fp32.
        ids, odds: the best tokens (R, top) int32, and their log-odds against the best, fp32.
        states: the hidden states (R, hidden), if they are kept.
    """

    address: int
    logits: Array
    peaks: Array
    ids: Array
    odds: Array
    states: Array | None

    @classmethod
    def of(cls, memory: Array, compiled: CompiledModel, rows: int, hidden: bool = False) -> PassArrays:
        """The arrays in a buffer (bytes,) uint8."""
        numbers = np.int16 if compiled.fmt.stored.is_bf16 else np.float32
        begin = 0
        parts = list[Array]()
        for stride, dtype in zip(
            compiled.logits_strides, (numbers, np.float32, np.int32, np.float32), strict=True
        ):
            end = begin + rows * stride
            parts.append(memory[begin:end].view(dtype).reshape(rows, stride // np.dtype(dtype).itemsize))
            begin = end
        logits, peaks, ids, odds = parts
        states = None
        if hidden:
            end = begin + rows * compiled.states_stride
            states = memory[begin:end].view(np.int16 if compiled.fmt.input.is_bf16 else np.float32)
            states = states.reshape(rows, -1)
        return cls(
            memory.ctypes.data,
            logits[:, : compiled.vocabulary],
            peaks,
            ids,
            odds,
            states,
        )


class CpuTarget(StoredTarget):
    """``core.Target`` over a compiled model, for any number of sequences. Only one thread at a time may use it.

    Args:
        compiled: the model. Several targets in different threads may share it.
        facts: sizes and limits of the model.
        capacity: initial capacity of a slot in tokens; it doubles when a slot is full.
        reason: why this path was chosen, in one line.
    """

    path = "cpu"
    guarantee = BIT_EQUAL
    gives_hidden = True
    runs_compiled = True
    cache: KVCache
    keeps_prefixes = True  # a row is bit-identical wherever it is evaluated

    def __init__(self, compiled: CompiledModel, facts: Limits, capacity: int = 256, reason: str = "") -> None:
        self.compiled = compiled
        self.facts = facts
        self.reason = reason
        self.vocabulary: int = facts.vocabulary
        self.cache = compiled.new_cache(capacity)
        self.lengths: dict[int, int] = {}
        self._last: weakref.ref[Logits] | None = None
        self._memory: Array | None = None
        #: The arrays of earlier passes by buffer, number of rows, and whether they include hidden states. After a
        #: pass, when caches are cold, making them is slow.
        self._arrays: dict[tuple[int, int, bool], tuple[Array, PassArrays]] = {}

    def depth_limit(self, slot: int) -> int:
        """Positions left after the slot's tokens, up to the model's last one."""
        return max(0, self.facts.max_positions - 1 - self.lengths[slot])

    def capacity(self, tokens: int) -> int:
        return self.cache.capacity(tokens)

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[LogitsRows]:
        """Evaluate prompts sequentially, in chunks of rows, each from the end of the prefix that ``reuse`` copied."""
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
                    self._recycle()  # copies one row at most
            self.lengths[slot] = len(prompt)
            scores.append(LogitsRows(logits))
        return scores

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[LogitsRows]:
        """Evaluate all trees in one pass; their rows are concatenated without padding."""
        tokens, positions, reads = list[int](), list[int](), list[int]()
        segments = []
        parts = []
        for slot, tree in trees:
            length = self.lengths[slot]
            nodes = tree.needs_logits_nodes()
            segments.append(Segment(slot, length, len(tree), tree))
            parts.append((len(reads), None if len(nodes) == len(tree) else nodes))
            reads += [len(tokens) + node for node in nodes]
            tokens += tree.tokens
            positions += [length + depth for depth in tree.depths]
        with memory_errors(f"a step of {len(tokens)} rows for {len(trees)} sequences"):
            for segment in segments:
                self.cache.make_room(segment.slot, segment.length + segment.rows)
            hidden = any(tree.needs_hidden for _, tree in trees)
            logits = self._run(tokens, positions, segments, reads, hidden)
        return [LogitsRows(logits, start, nodes) for start, nodes in parts]

    def _run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        reads: Sequence[int],
        hidden: bool = False,
    ) -> Logits:
        self._recycle()
        row_bytes = sum(self.compiled.logits_strides) + self.compiled.states_stride * hidden
        memory = buffers.acquire(len(reads) * row_bytes + 64)
        key = id(memory), len(reads), hidden
        if key not in self._arrays:
            known = {address for address, _, _ in self._arrays}
            if id(memory) not in known and len(known) == MOST_BUFFERS:
                self._arrays.clear()
            self._arrays[key] = memory, PassArrays.of(memory, self.compiled, len(reads), hidden)
        _, arrays = self._arrays[key]
        self._memory = memory
        self.compiled.run(tokens, positions, segments, reads, self.cache, memory, arrays.address, hidden)
        logits = Logits(arrays.logits, arrays.peaks, arrays.states, (arrays.ids, arrays.odds))
        self._last = weakref.ref(logits)
        return logits

    def _recycle(self) -> None:
        """Release the buffer of the last step's logits for reuse. Scores still held by a caller get a copy."""
        logits = self._last() if self._last is not None else None
        if logits is not None:
            logits.detach()
        if self._memory is not None:
            buffers.release(self._memory)
        self._last = self._memory = None

    def read(self, slot: int) -> list[tuple[Array, Array]]:
        """Copies of the slot's keys and values, per layer, each (1, K, T, D); fp32, fp16, or bf16 as int16."""
        return self.compiled.read(self.cache, slot, self.lengths[slot])

    def release(self, slot: int) -> None:
        if slot < len(self.cache.storage):  # a prompt that did not fit in memory has no storage
            self.cache.free(slot)
        super().release(slot)
        if not self.lengths:
            self._recycle()
            self._arrays.clear()  # they refer to memory that others may use
