"""The data of a pass: records that compiled code reads, the buffers of one caller, and the KV cache.

Memory fields are addresses; strides and buffer sizes are in bytes. Compiled code uses the same field names
(``operations.record_at``).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from ..core import TokenTree
from ..core.kv_storage import KVStorage
from ..machine_code import kernel
from ..sampling.top import scratch_words
from .formats import BF16, ROW_BLOCK, ArrayMemory, Format, round_up
from .packed import GROUP

#: Number of columns whose keys are interleaved in the cache, and of columns whose scores are computed at once.
KEY_BLOCK, SCORE_BLOCK = 16, 64
#: Number of queries whose attention is computed at once.
QUERY_BLOCK = 16
#: The window of layers without a sliding window.
EVERYTHING = 1 << 40


class LinearRecord(NamedTuple):
    """A linear as compiled code reads it. Its outputs are factor * W x + bias, in groups of 32.

    Attributes:
        weights: address of the first group: packed weights, or the table of a packed matrix's panels and kernels.
        group_bytes: bytes from group to group.
        bias: address of a bias for each output, fp32.
        steps: steps of the kernel over the inner size.
        groups: number of groups.
        factor: multiplies the sums.
        a, b: parameters of the activation (``blueprint.ACTIVATIONS``).
        cap: soft cap of the outputs, 0 for none.
    """

    weights: int
    group_bytes: int
    bias: int
    steps: int
    groups: int
    factor: float
    a: float
    b: float
    cap: float


class NormRecord(NamedTuple):
    """A norm (``blueprint.Norm``): the addresses of its weights and biases, its type, and its epsilon."""

    weight: int
    bias: int
    type: int
    epsilon: float


def record_of(fields: type[Any]) -> np.dtype[Any]:
    """The dtype of a named tuple of integers (64 bits) and floats (32 bits); a tuple can be assigned to a record."""
    types = get_type_hints(fields)
    return np.dtype([(name, "i8" if each is int else "f4") for name, each in types.items()], align=True)


def record(**fields: Any) -> np.dtype[Any]:
    """A dtype with named fields."""
    return np.dtype(list(fields.items()), align=True)


LINEAR, NORM = record_of(LinearRecord), record_of(NormRecord)
#: ``blueprint.LayerParts``; ``cap`` is 0 for none.
LAYER = record(
    attention_norm=NORM,
    attention_post_norm=NORM,
    feed_forward_norm=NORM,
    feed_forward_post_norm=NORM,
    head_norm=NORM,
    qkv=LINEAR,
    output=LINEAR,
    up=LINEAR,
    down=LINEAR,
    window="i8",
    rotates="i8",
    joint_norm="i8",
    gated="i8",
    scale="f4",
    cap="f4",
)
#: The rows of one sequence in a pass.
SEGMENT = record(
    cache="i8",  # address of its keys and values
    cache_layer="i8",  # bytes from layer to layer
    cache_head="i8",  # bytes from head to head
    length="i8",  # T, its number of committed tokens
    first_row="i8",
    rows="i8",
    is_chain="i8",  # whether each row sees all rows before it (a prompt)
)
#: The fields of a plan that change from step to step, all integers:
STEP_FIELDS = (
    # The rows. A tree row sees the prefix and path_columns[path_ends[row]:path_ends[row + 1]].
    *(
        "rows",
        "reads",
        "segment_count",
        "tokens",
        "positions",
        "read_rows",
        "segments",
        "path_ends",
        "path_columns",
    ),
    *("rotary", "rotary_each"),
    # The results: logits and peaks, the ``top`` best tokens of each row and their log-odds against the best, and the
    # input of the LM head if ``states`` is not 0.
    *("logits", "peaks", "top_ids", "top_odds", "states"),
)
#: Everything that a pass reads. A name with ``_stride`` is the number of bytes from row to row.
PLAN = record(
    # The model.
    hidden="i8",
    heads="i8",
    key_heads="i8",
    head_size="i8",  # D
    padded_head="i8",  # D rounded up, as in the cache and in queries
    vocabulary="i8",
    layer_count="i8",
    layers="i8",
    embedding="i8",
    position_embedding="i8",
    embedding_scale="f4",
    final_norm=NORM,
    lm_head=LINEAR,
    # The rows x, and the inputs and outputs of gemms.
    x="i8",
    x_stride="i8",
    normed="i8",  # for each thread
    normed_stride="i8",
    normed_each="i8",
    attended="i8",
    attended_stride="i8",
    gated="i8",
    gated_stride="i8",
    qkv="i8",  # also for outputs that are normalized before they are added to x
    qkv_stride="i8",
    query="i8",
    # Scratch space of each thread.
    scratch="i8",
    scratch_each="i8",
    score_line="i8",
    tile_config="i8",
    # The sizes of the results.
    logits_stride="i8",
    peaks_stride="i8",
    top="i8",
    states_stride="i8",
    **dict.fromkeys(STEP_FIELDS, "i8"),
)


class Segment(NamedTuple):
    """One sequence's part of a pass: its slot in the cache, its number of committed tokens T, and its number of rows.

    ``tree`` has these rows. None for part of a prompt, in which each row sees all rows before it.
    """

    slot: int
    length: int
    rows: int
    tree: TokenTree | None


class ExecutionState:
    """A plan and its buffers, for one pass at a time; concurrent callers have separate states.

    Args:
        model: a plan in which the fields of the model are set.
        fmt: the model's format.

    Attributes:
        owners: objects that keep the plan's memory alive during a pass.
    """

    def __init__(self, model: np.ndarray[Any, Any], fmt: Format) -> None:
        self.records = model.copy()
        self.plan = self.records[0]
        self.address: int = self.records.ctypes.data
        self._fmt = fmt
        # The fields of the step, so that they can be written together: after a pass, when caches are cold, each
        # call of numpy takes about 5 us.
        fields: Any = PLAN.fields
        _, first = fields[STEP_FIELDS[0]]
        self._fields = self.records.view(np.uint8).data[first : first + 8 * len(STEP_FIELDS)].cast("q")
        self._capacity = (0, 0, 0)
        self._buffers: dict[str, Any] = {}
        self._step: Any = None
        self.owners: Any = None

    def reserve(self, rows: int, length: int, threads: int) -> None:
        """Ensure that the buffers have room for this many rows, columns and threads."""
        have_rows, have_length, have_threads = self._capacity
        if have_rows >= rows and have_length >= length and have_threads >= threads:
            return
        rows = max(1 << (rows - 1).bit_length(), have_rows, ROW_BLOCK)
        length = max(1 << (length - 1).bit_length(), have_length)
        threads = max(threads, have_threads)
        self._capacity = rows, length, threads
        p = self.plan
        # Round sizes up. Numbers that pad the inner size of a row must stay zero.
        p["score_line"] = line = 4 * (round_up(length, SCORE_BLOCK) + SCORE_BLOCK)
        head = int(p["padded_head"])
        sums = 4 * ROW_BLOCK * GROUP
        attention = QUERY_BLOCK * (line + 4 * head + 4)
        search = 8 * scratch_words(int(p["vocabulary"]), int(p["top"]))
        p["scratch_each"] = each = round_up(max(sums, attention, search), 4096) + 4096 + 64
        p["normed_each"] = normed = round_up(rows * int(p["normed_stride"]), 64) + 64
        sizes = {
            "x": rows * int(p["x_stride"]),
            "normed": threads * normed,
            "attended": rows * int(p["attended_stride"]),
            "gated": rows * int(p["gated_stride"]),
            "qkv": rows * int(p["qkv_stride"]),
            "query": self._fmt.query.bytes * (rows * int(p["heads"]) + QUERY_BLOCK) * head,
            "scratch": threads * each,
            "tile_config": 64,
        }
        memory = ArrayMemory(sum(round_up(size, 64) for size in sizes.values()))
        self._buffers = {name: memory.take(size) for name, size in sizes.items()}
        for name, buffer in self._buffers.items():
            p[name] = buffer.ctypes.data
        self.tile_config = self._buffers["tile_config"]

    def describe(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        reads: Sequence[int],
        cache: KVCache,
        *results: int,
    ) -> None:
        """Write the part of the plan that changes from step to step.

        Args:
            tokens, positions, segments, reads, cache: as in ``CompiledModel.run``.
            results: the fields from ``rotary`` on.
        """
        # By segment, its record; by row of a tree, the columns of its path.
        table = list[int]()
        ends = [0]
        columns = list[int]()
        first = 0
        for segment in segments:
            tree = None if segment.rows == 1 else segment.tree
            table += (*cache.layout(segment.slot), segment.length, first, segment.rows, tree is None)
            first += segment.rows
            if tree is None:
                ends += [len(columns)] * segment.rows
                continue
            paths: list[list[int]] = []
            for node, parent in enumerate(tree.parents, segment.length):
                path = [*paths[parent], node] if parent >= 0 else [node]
                paths.append(path)
                columns += path
                ends.append(len(columns))
        # One array for all parts.
        self._step = array("q", [*tokens, *positions, *reads, *table, *ends, *columns])
        address, _ = self._step.buffer_info()
        addresses = list[int]()
        for part in (tokens, positions, reads, table, ends, columns):
            addresses.append(address)
            address += 8 * len(part)
        self._fields[:] = array("q", [len(tokens), len(reads), len(segments), *addresses, *results])


class KVCache(KVStorage):
    """Keys and values in the format's type (``Format.cached``), written in place and moved only by a commit.

    Each slot has its own array (layers, 2K, C, D), so a growing slot moves no other slot. The first K heads are keys,
    the others values; ``attention`` describes the order within a head. The padding of D stays zero. The capacity C is
    a multiple of 64, because kernels compute whole blocks of columns.

    An example of a commit: T = 3, and a step added the rows 0 .. 4 in columns 3 .. 7; the accepted path is 0, 2, 4:

        before    t t t 0 1 2 3 4
        after     t t t 0 2 4 - -     columns 5 and 7 move to 4 and 5; the new T is 6

    Args:
        layers, key_heads: L and K.
        head_size: D, padded.
        capacity: initial capacity of a slot, in tokens.
        fmt: the model's format.

    Attributes:
        storage: an array of integers for each slot, with the bits of that type. Zeros take no memory until they are
            overwritten.
    """

    def __init__(self, layers: int, key_heads: int, head_size: int, capacity: int, fmt: Format) -> None:
        self.key_heads = key_heads
        self._key_pair = fmt.key_pair
        self._dtype = np.dtype(f"i{fmt.cached.bytes}")
        self._shown_as = self._dtype if fmt.cached == BF16 else np.dtype(f"f{fmt.cached.bytes}")
        self._shape = layers, 2 * key_heads, round_up(max(capacity, 1), SCORE_BLOCK), head_size
        self.storage: list[np.ndarray[Any, Any]] = []
        self._layouts: list[tuple[int, int, int]] = []
        self._capacities: list[int] = []

    def capacity(self, length: int) -> int:
        """C of a slot with this many tokens."""
        capacity = self._shape[2]
        while capacity < length:
            capacity *= 2
        return capacity

    def make_room(self, slot: int, length: int) -> None:
        if slot < len(self._capacities) and length <= self._capacities[slot]:
            return
        while len(self.storage) <= slot:
            self._place(len(self.storage), np.zeros(self._shape, self._dtype))
        old = self.storage[slot]
        layers, heads, have, size = old.shape
        capacity = self.capacity(length)
        if capacity > have:
            new = np.zeros((layers, heads, capacity, size), self._dtype)
            new[:, :, :have] = old
            self._place(slot, new)

    def _place(self, slot: int, array: np.ndarray[Any, Any]) -> None:
        self.storage[slot : slot + 1] = [array]
        self._capacities[slot : slot + 1] = [array.shape[2]]
        self._layouts[slot : slot + 1] = [(array.ctypes.data, array.strides[0], array.strides[1])]

    def free(self, slot: int) -> None:
        """Free the memory by which a slot has grown."""
        if self.storage[slot].shape != self._shape:
            self._place(slot, np.zeros(self._shape, self._dtype))

    def layout(self, slot: int) -> tuple[int, int, int]:
        """Address of a slot's memory, bytes from layer to layer, and bytes from head to head."""
        return self._layouts[slot]

    def copy(self, slot: int, source: int, length: int) -> None:
        columns = round_up(length, SCORE_BLOCK)  # keys are interleaved in blocks of columns
        self.storage[slot][:, :, :columns] = self.storage[source][:, :, :columns]

    def read(self, slot: int, length: int) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Copies of the keys and values of a slot's first ``length`` tokens, per layer, (1, K, length, padded D).

        fp32 or fp16; bf16 is returned as int16.
        """
        array = self.storage[slot]
        heads = self.key_heads
        layers, _, capacity, size = array.shape
        blocks = array[:, :heads].reshape(
            layers, heads, capacity // KEY_BLOCK, size // self._key_pair, KEY_BLOCK, self._key_pair
        )
        keys = blocks.transpose(0, 1, 2, 4, 3, 5).reshape(layers, heads, capacity, size)

        def copied(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return numbers[None, :, :length].copy().view(self._shown_as)

        return [(copied(keys[i]), copied(array[i, heads:])) for i in range(layers)]

    def move(self, moves: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        for slot, length, path in moves:
            if list(path) == list(range(len(path))):  # the rows are in place already
                continue
            array = self.storage[slot]
            layers, heads, capacity, size = array.shape
            rows = np.array(path, np.int64)
            where = array.ctypes.data, layers, heads, capacity, size, self.key_heads, self._key_pair
            kernel(f"move_{self._dtype.itemsize}")(*where, length, rows.ctypes.data, len(rows))
