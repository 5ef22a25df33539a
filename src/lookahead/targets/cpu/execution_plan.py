"""What a pass works on: a plan as records with named fields, the state of one caller, and the cache.

Fields that name memory hold addresses; strides and sizes of buffers are bytes. Compiled code reads the records by
the same names (``llvm.address_as``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ...core import TokenTree
from ..cache import KVStorage
from .formats import Arena, Format, round_up
from .gemm import ROW_BLOCK
from .packed import GROUP

#: Keys of so many columns lie side by side in the cache; scores are computed for so many columns at once.
KEY_BLOCK, SCORE_BLOCK = 16, 64
#: Queries that are attended together.
QUERY_BLOCK = 16
#: A window that leaves nothing out.
EVERYTHING = 1 << 40


def _record(*fields: tuple[str, Any]) -> np.dtype[Any]:
    """A record of (names, type)."""
    return np.dtype([(name, kind) for names, kind in fields for name in names.split()], align=True)


#: ``numbers`` are fp32: a factor of the sums, a and b of the activation (``architectures.ACTIVATIONS``), and a cap.
LINEAR = _record(("weights group_bytes bias steps groups numbers", "i8"))
#: ``architectures.Norm``.
NORM = _record(("weight bias kind", "i8"), ("epsilon", "f4"))
#: Weights of ``head_norm`` are (H + K, D); it is over each head, or over all (``joint_norm``). ``rotates`` is 0 for
#: no rotary positions, or which table. ``cap`` is the address of a number, 0 for none.
LAYER = _record(
    ("attention_norm attention_post_norm feed_forward_norm feed_forward_post_norm head_norm", NORM),
    ("qkv output up down", LINEAR),
    ("window rotates joint_norm gated cap", "i8"),
    ("scale", "f4"),
)
#: The rows of one sequence: its keys and values, how far from layer to layer and head to head, committed tokens T,
#: its first row in the pass, and how many; whether each row sees all rows before it, as in a prompt.
SEGMENT = _record(("cache cache_layer cache_head length first_row rows is_chain", "i8"))
PLAN = _record(
    # the model: D is the size of a head, padded_head what the cache and queries hold of it
    ("hidden heads key_heads head_size padded_head vocabulary layer_count layers embedding", "i8"),
    ("position_embedding rotary_each", "i8"),
    ("embedding_scale", "f4"),
    ("final_norm", NORM),
    ("lm_head", LINEAR),
    # buffers: rows, what gemms read and write (normed: one for each thread; qkv: also what is normed before it is
    # added to the rows), queries, scratch of each thread
    ("x x_stride normed normed_stride normed_each attended attended_stride gated gated_stride", "i8"),
    ("qkv qkv_stride query scratch scratch_each score_line tile_config", "i8"),
    # the step; a tree row's columns are path_columns[path_ends[row]:path_ends[row + 1]]
    ("rows reads tokens positions read_rows segments segment_count path_ends path_columns rotary", "i8"),
    ("logits logits_stride peaks peaks_stride", "i8"),
)


class Segment(NamedTuple):
    """One sequence's share of a pass: its slot in the cache, T committed tokens, and how many rows.

    ``tree`` says who sees whom; None for a piece of a prompt, where each row sees all rows before it.
    """

    slot: int
    length: int
    rows: int
    tree: TokenTree | None


class ExecutionState:
    """A plan and the buffers that it names, for one pass at a time; each concurrent caller has its own.

    Args:
        model: a plan whose fields on the model are filled in.
        numbers: the model's format.
    """

    def __init__(self, model: np.ndarray[Any, Any], numbers: Format) -> None:
        self.records = model.copy()
        self.plan = self.records[0]
        self.address: int = self.records.ctypes.data
        self._numbers = numbers
        self._capacity = (0, 0, 0)
        self._buffers: dict[str, Any] = {}
        self._step: Any = None
        #: What else the plan's addresses point to.
        self.holds: Any = None

    def reserve(self, rows: int, length: int, threads: int) -> None:
        """Buffers for at least so many rows, over so many columns, for so many threads."""
        have_rows, have_length, have_threads = self._capacity
        if have_rows >= rows and have_length >= length and have_threads >= threads:
            return
        rows = max(1 << (rows - 1).bit_length(), have_rows, ROW_BLOCK)
        length, threads = max(1 << (length - 1).bit_length(), have_length), max(threads, have_threads)
        self._capacity = rows, length, threads
        p = self.plan
        # Rows and columns more than are used; what lies behind the used inner numbers must stay zero.
        p["score_line"] = line = 4 * (round_up(length, SCORE_BLOCK) + SCORE_BLOCK)
        head = int(p["padded_head"])
        sums, attention = 4 * ROW_BLOCK * GROUP, QUERY_BLOCK * (line + 4 * head + 4)
        p["scratch_each"] = each = round_up(max(sums, attention), 4096) + 4096 + 64
        p["normed_each"] = normed = round_up(rows * int(p["normed_stride"]), 64) + 64
        sizes = {
            "x": rows * int(p["x_stride"]),
            "normed": threads * normed,
            "attended": rows * int(p["attended_stride"]),
            "gated": rows * int(p["gated_stride"]),
            "qkv": rows * int(p["qkv_stride"]),
            "query": self._numbers.query.bytes * (rows * int(p["heads"]) + QUERY_BLOCK) * head,
            "scratch": threads * each,
            "tile_config": 64,
        }
        arena = Arena(sum(round_up(size, 64) for size in sizes.values()))
        self._buffers = {name: arena.take(size) for name, size in sizes.items()}
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
    ) -> None:
        """Write what changes from step to step: rows, who sees whom, and the rows whose logits are wanted."""
        table, ends, columns, first = list[int](), [0], list[int](), 0
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
        parts = {
            "tokens": tokens, "positions": positions, "read_rows": reads, "segments": table, "path_ends": ends,
            "path_columns": columns,
        }  # fmt: skip
        self._step = np.array([number for part in parts.values() for number in part], np.int64)
        p, address = self.plan, self._step.ctypes.data
        for name, part in parts.items():
            p[name] = address
            address += 8 * len(part)
        p["rows"], p["reads"], p["segment_count"] = len(tokens), len(reads), len(segments)


@njit(error_model="numpy", cache=True)
def _move(slot: Any, key_heads: int, key_pair: int, length: int, path: Any) -> None:
    """Bring columns ``length + path`` in line behind ``length``: ``path`` rises, so none is lost before it is read.

    Not by torch, whose threads would go on spinning for a while, on the cores of the next pass.
    """
    layers, heads, capacity, size = slot.shape
    for layer, head, place in np.ndindex(layers, heads, len(path)):
        target, source = length + place, length + path[place]
        if head >= key_heads:
            slot[layer, head, target] = slot[layer, head, source]
        else:
            keys = slot[layer, head].reshape(capacity // KEY_BLOCK, size // key_pair, KEY_BLOCK, key_pair)
            moved = keys[source // KEY_BLOCK, :, source % KEY_BLOCK]
            keys[target // KEY_BLOCK, :, target % KEY_BLOCK] = moved


class KVCache(KVStorage):
    """Keys and values in the model's dtype, written in place and moved only by a commit.

    Each slot has memory of its own (layers, 2K, C capacity, D), so that one that grows moves no other: the first K
    are keys, the others values, and a commit is one gather and one scatter for the whole model. ``attention`` says
    how a head's numbers lie. What D is rounded up by stays zero; C is a multiple of 64, so that kernels may compute
    a few columns too many.

    Args:
        capacity: tokens of a slot to begin with.
        head_size: D as it is padded.
        numbers: the model's format: the dtype, and how many neighbours of a key lie together.

    Attributes:
        storage: by slot; whole numbers stand for the dtype's bits. Zeros cost nothing until they are written.
    """

    def __init__(self, layers: int, key_heads: int, head_size: int, capacity: int, numbers: Format) -> None:
        self.key_heads, self._key_pair = key_heads, numbers.key_pair
        self._dtype = np.dtype(f"i{numbers.stored.bytes}")
        self._shown_as = self._dtype if numbers.stored.is_bf16 else np.dtype(np.float32)
        self._shape = layers, 2 * key_heads, round_up(max(capacity, 1), SCORE_BLOCK), head_size
        self.storage: list[np.ndarray[Any, Any]] = []

    def make_room(self, slot: int, length: int) -> None:
        while len(self.storage) <= slot:
            self.storage.append(np.zeros(self._shape, self._dtype))
        old = self.storage[slot]
        layers, heads, have, size = old.shape
        capacity = have
        while capacity < length:
            capacity *= 2
        if capacity > have:
            self.storage[slot] = new = np.zeros((layers, heads, capacity, size), self._dtype)
            new[:, :, :have] = old

    def layout(self, slot: int) -> tuple[int, int, int]:
        """(address, bytes from layer to layer, from head to head)."""
        mine = self.storage[slot]
        return mine.ctypes.data, mine.strides[0], mine.strides[1]

    def copy(self, slot: int, source: int, length: int) -> None:
        columns = round_up(length, SCORE_BLOCK)  # a key's numbers lie in blocks of columns
        self.storage[slot][:, :, :columns] = self.storage[source][:, :, :columns]

    def read(self, slot: int, length: int) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Copies of keys and values of a slot's first ``length`` tokens, per layer, each (1, K, length, D as padded);
        bf16 as int16."""
        mine, heads = self.storage[slot], self.key_heads
        layers, _, capacity, size = mine.shape
        blocks = mine[:, :heads].reshape(
            layers, heads, capacity // KEY_BLOCK, size // self._key_pair, KEY_BLOCK, self._key_pair
        )
        keys = blocks.transpose(0, 1, 2, 4, 3, 5).reshape(layers, heads, capacity, size)

        def copied(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return numbers[None, :, :length].copy().view(self._shown_as)

        return [(copied(keys[i]), copied(mine[i, heads:])) for i in range(layers)]

    def move(self, slot: int, length: int, path: Sequence[int]) -> None:
        if list(path) == list(range(len(path))):  # they lie in place
            return
        _move(self.storage[slot], self.key_heads, self._key_pair, length, np.array(path))
