"""A light head (``sources.head_file``) on packed weights: a few rows through its block and its output rows.

It runs between two passes, on the same threads, and reads 3 to 8 MB of weights for a model of 135M parameters, for
any number of rows. A pass leaves the caches cold, so that a numpy call takes ten times as long as usual; therefore a
single job does everything. It has five stages, separated by barriers:

    gate    every thread computes the inputs z = [norm(h); norm(e)], then its share of silu(gate z) * up z
    round   the sums are quantized to 8 bits, like every input of a packed product
    down    h' = h + down(...), then quantized
    output  the shortlist logits, and the largest of each group of 32
    best    the best tokens of each row and their log-probabilities
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import numpy as np

from ..drafters.adaptive.sources.head_file import QUANTIZE, HeadWeights
from ..machine_code import address
from ..sampling.top import scratch_words
from ..threads import thread_count
from .execution_plan import LINEAR, LinearRecord, record
from .formats import FORMATS, ROW_BLOCK, ArrayMemory, round_up
from .packed import BLOCK, GROUP, PANEL, TENSOR_TYPES, TYPE_INDEX, PackedLinear, kernel_address, pack_panels
from .thread_pool import thread_pool

Array = np.ndarray[Any, np.dtype[Any]]

#: The most rows of a call, and the most tokens that it returns for each.
MAX_ROWS = ROW_BLOCK
MAX_TOP = 64
EPSILON = 1e-6
FORMAT = FORMATS["packed", "float32"]
PLAN = record(
    # The head: sizes, weights of the norms, and its three products.
    hidden="i8",
    width="i8",
    hidden_norm="i8",
    embedding_norm="i8",
    gate=LINEAR,
    down=LINEAR,
    output=LINEAR,
    # Its tokens, and the model's embedding as a table of panels and their decoders; 0 if the caller gives embeddings.
    shortlist="i8",
    size="i8",
    embedding="i8",
    # The call: rows, their tokens, and how many of the best tokens are returned for each, with log-probabilities.
    rows="i8",
    tokens="i8",
    top="i8",
    top_ids="i8",
    top_odds="i8",
    # Buffers: states h (rows, hidden), which become h'; embeddings; inputs of products, z for each thread.
    x="i8",
    x_stride="i8",
    embedded="i8",
    embedded_stride="i8",
    z="i8",
    z_stride="i8",
    z_each="i8",
    gated="i8",
    gated_stride="i8",
    scratch="i8",
    scratch_each="i8",
    best="i8",
    best_each="i8",
    logits="i8",
    logits_stride="i8",
    peaks="i8",
    peaks_stride="i8",
)


def _packed_bytes(rows: Array, bits: int) -> int:
    count, inner = rows.shape
    return round_up(count, GROUP) // PANEL * TENSOR_TYPES[TYPE_INDEX[QUANTIZE[bits][0]]].panel_bytes(inner)


class CompiledHead:
    """A light head for models on a CPU. Several threads may call it.

    Args:
        weights: the head.
        output: the model's output rows of the shortlist, fp32 (S, hidden).
        embedding: the model's embedding: packed, or a function (tokens) -> embeddings, fp32 (n, hidden).
    """

    def __init__(
        self,
        weights: HeadWeights,
        output: Array,
        embedding: PackedLinear | Callable[[Sequence[int]], Array],
    ) -> None:
        self.hidden = weights.hidden
        self.levels = weights.levels
        self.shortlist = weights.shortlist
        self.counts = weights.counts
        self.cost = 0.0
        self._embed = None if isinstance(embedding, PackedLinear) else embedding
        self._lock = Lock()
        self._threads = 0
        self._kept = list[Any]()  # owners of the memory that the plan points to
        self._records = np.zeros(1, PLAN)
        self._fill(weights, output)
        if isinstance(embedding, PackedLinear):
            self._records["embedding"] = self._address(embedding.decoders)
            self._kept.append(embedding)
        self._job = address("head")
        # Views and an address, because looking them up in each call would take longer than the rest of it.
        self._plan = self._address(self._records)
        self._rows, self._top = self._records["rows"], self._records["top"]

    def _fill(self, weights: HeadWeights, output: Array) -> None:
        plan = self._records[0]
        hidden = weights.hidden
        width = weights.width
        bits = weights.bits
        # A group of the first product has 16 gates, then their 16 ups.
        halves = [part.reshape(-1, PANEL, 2 * hidden) for part in (weights.gate, weights.up)]
        both = np.stack(halves, 1).reshape(-1, 2 * hidden)
        # The three products, whose weights share one block of memory, and the norms.
        memory = ArrayMemory(sum(_packed_bytes(rows, bits) for rows in (both, weights.down, output)))
        plan["gate"] = self._linear(both, bits, memory)
        plan["down"] = self._linear(weights.down, bits, memory)
        plan["output"] = self._linear(output, bits, memory, weights.scale, float("-inf"))
        plan["hidden"] = hidden
        plan["width"] = width
        for name in ("hidden_norm", "embedding_norm"):
            plan[name] = self._address(np.ascontiguousarray(getattr(weights, name), np.float32))
        # The buffers of a call. Those of each thread are allocated when the number of threads is known.
        groups = -(-len(output) // GROUP)
        sizes = {
            "x": FORMAT.row_bytes(hidden),
            "embedded": 4 * hidden,
            "gated": FORMAT.row_bytes(width),
            "logits": 4 * GROUP * groups,
            "peaks": 4 * groups,
        }
        memory = ArrayMemory(sum(round_up(MAX_ROWS * size, 64) for size in sizes.values()))
        #: Buffers by plan field, fp32 (rows, row size).
        self._buffers = {}
        for name, size in sizes.items():
            array = memory.take(MAX_ROWS * size).view(np.float32).reshape(MAX_ROWS, -1)
            plan[name] = self._address(array)
            plan[f"{name}_stride"] = size
            self._buffers[name] = array
        # The tokens of a call, and what it finds.
        self._tokens = np.zeros(MAX_ROWS, np.int64)
        self._ids = np.zeros(MAX_ROWS * MAX_TOP, np.int32)
        self._odds = np.zeros(MAX_ROWS * MAX_TOP, np.float32)
        plan["tokens"], plan["top_ids"] = self._address(self._tokens), self._address(self._ids)
        plan["top_odds"] = self._address(self._odds)
        plan["shortlist"] = self._address(np.ascontiguousarray(weights.shortlist, np.int32))
        plan["size"] = len(output)
        plan["z_stride"] = FORMAT.row_bytes(2 * hidden)
        plan["z_each"] = MAX_ROWS * plan["z_stride"]
        plan["scratch_each"] = 4 * ROW_BLOCK * GROUP
        plan["best_each"] = round_up(8 * scratch_words(len(output), MAX_TOP), 64)

    def _address(self, array: Array) -> int:
        """The address of an array, which is kept alive."""
        self._kept.append(array)
        return int(array.ctypes.data)

    def _linear(
        self, rows: Array, bits: int, memory: ArrayMemory, scale: float = 1.0, padding: float = 0.0
    ) -> LinearRecord:
        """Quantize and pack outputs (n, inner) of a linear; ``padding`` is the value of outputs that fill up the last
        group."""
        name, quantized = QUANTIZE[bits]
        tensor_type = TENSOR_TYPES[TYPE_INDEX[name]]
        count, inner = rows.shape
        order = np.full(round_up(count, GROUP), -1)
        order[:count] = np.arange(count)
        panels = memory.take(_packed_bytes(rows, bits)).reshape(len(order) // PANEL, -1)
        pack_panels(tensor_type, quantized(rows), order.reshape(-1, PANEL), inner, panels)
        table = np.empty((len(panels), 2), np.int64)
        table[:, 0] = self._address(panels) + panels.strides[0] * np.arange(len(panels))
        table[:, 1] = kernel_address(tensor_type)
        bias = np.where(order >= 0, 0, padding).astype(np.float32)
        groups = len(panels) // 2
        return LinearRecord(
            weights=self._address(table),
            group_bytes=2 * table.strides[0],
            bias=self._address(bias),
            steps=inner // BLOCK,
            groups=groups,
            factor=scale,
            a=1.0,
            b=0.0,
            cap=0.0,
        )

    def guess(self, states: Array, tokens: Sequence[int], k: int) -> tuple[Array, Array, Array]:
        """One level: predict what follows each token, given the hidden state under which it was emitted or guessed.

        Args:
            states: (n, hidden) fp32, at most ``MAX_ROWS`` rows.
            tokens: n token ids.
            k: the number of tokens to return for each, at most ``MAX_TOP`` and the shortlist's size.

        Returns:
            the predicted states under the tokens, (n, hidden) fp32; the k best tokens, int32 (n, k); and their
            log-probabilities within the shortlist, fp32 (n, k).
        """
        count = len(tokens)
        k = min(k, MAX_TOP, len(self.shortlist))
        states_of = self._buffers["x"][:count, : self.hidden]
        pool = thread_pool(thread_count())
        with self._lock:
            if pool.size > self._threads:
                self._reserve(pool.size)
            states_of[:] = states
            self._tokens[:count] = tokens
            if self._embed is not None:
                self._buffers["embedded"][:count] = self._embed(tokens)
            self._rows[0], self._top[0] = count, k
            pool.run(self._job, self._plan, self)
            shape = count, k
            found = (
                self._ids[: count * k].reshape(shape).copy(),
                self._odds[: count * k].reshape(shape).copy(),
            )
            return states_of.copy(), *found

    def _reserve(self, threads: int) -> None:
        """Allocate the buffers of this many threads."""
        self._threads = threads
        for name in ("z", "scratch", "best"):
            size = threads * int(self._records[f"{name}_each"][0]) + 64
            self._records[name] = self._address(np.zeros(size, np.uint8))
