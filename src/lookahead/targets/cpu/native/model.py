"""A model's weights as compiled code wants them, and its passes."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
import torch

from ..layout import Block, RotaryTable, head_norms, joined, paired
from ..specs import LinearParts, ModelParts, NormParts
from . import jobs
from .attention import MOST, SIDE, TURN
from .cache import NativeCache
from .machine import PAIRS, PRODUCTS, TILES
from .packing import STEP, Arena, gate_and_up, pack, packed_size, tile_config
from .products import GROUP
from .scores import NativeScores, Shelf
from .team import team_of


def kind_of(dtype: torch.dtype) -> str:
    """How products of a dtype are computed on this machine."""
    if dtype == torch.bfloat16 and (TILES or PAIRS):
        return "tiles" if TILES else "pairs"
    return "vectors"


class NativeModel:
    """The compiled twin of ``LeanModel``: same parts, same ``run``, all layers in one call for each thread.

    Args:
        parts: tensors of a loaded model; linears are copied, never written.
        kind: of product; the best for this machine by default.

    Attributes:
        layout: what runs, in a few words.
        seconds: of the last pass, without what Python does before and after.
        shares: of these: products, attention, everything else.
    """

    def __init__(self, parts: ModelParts, kind: str | None = None) -> None:
        self.dtype = parts.embedding.dtype
        self.kind = kind or kind_of(self.dtype)
        self.on_tiles = self.kind in ("tiles", "bytes")
        products = PRODUCTS[str(self.dtype).removeprefix("torch.")] if kind is None else kind
        self.layout = f"compiled passes on {products}"
        if kind == "bytes":
            self.layout = (
                "compiled passes on AMX tiles, weights as int8 (outputs are near the model's, not its own)"
            )
        self.heads, self.key_heads, self.head_size = parts.heads, parts.key_heads, parts.head_size
        self.head = _up(parts.head_size, 2 * SIDE if self.on_tiles else SIDE)
        self.windows = sorted({layer.window for layer in parts.layers})
        self.embedding = parts.embedding.contiguous()
        self._turns = RotaryTable(parts.rotary, parts.head_size)
        self._parts: list[object] = []  # what the table's addresses point to
        self._table = self._fill_table(parts)
        self._job = jobs.pass_job(self.dtype, self.kind)
        self._shelf = Shelf()
        self._plan = np.zeros(jobs.PLAN_SIZE, np.int64)
        self._times = np.zeros(3, np.int64)
        self._status = np.zeros(1, np.int64)
        self._room = (0, 0, 0)
        self.seconds = 0.0
        self._fill_plan(parts)

    def _fill_table(self, parts: ModelParts) -> np.ndarray:
        linears: list[list[LinearParts]] = []
        for layer in parts.layers:
            size = self.head_size
            qkv = joined(paired(layer.query, size), paired(layer.key, size), layer.value)
            linears.append([qkv, layer.output, gate_and_up(layer.gate, layer.up), layer.down])
        table = np.zeros((len(parts.layers) + 1, jobs.LAYER_SIZE), np.int64)
        every = [*linears, [parts.head]]
        sizes = [packed_size(*p.weight.shape, self.kind, self.dtype) + 64 for line in every for p in line]
        self.bytes = sum(sizes)
        arena = Arena(self.bytes)
        places = (jobs.QKV_LINEAR, jobs.OUTPUT_LINEAR, jobs.GATE_LINEAR, jobs.DOWN_LINEAR)
        for row, line in zip(table, every, strict=True):
            for place, linear in zip(places, line, strict=False):
                packed = pack(linear, self.kind, arena)
                row[place : place + 5] = packed.fields()
                self._parts.append(packed)
            line.clear()
        for row, layer in zip(table, parts.layers, strict=False):
            row[jobs.FIRST_NORM : jobs.FIRST_EPSILON + 1] = self._norm(layer.attention_norm)
            row[jobs.SECOND_NORM : jobs.SECOND_EPSILON + 1] = self._norm(layer.feed_forward_norm)
            heads = head_norms(layer, self.heads, self.key_heads)
            if heads is not None:
                row[jobs.HEAD_NORM : jobs.HEAD_EPSILON + 1] = self._norm(heads)
            row[jobs.WINDOW], row[jobs.ROTATES] = layer.window, layer.rotates
        table[-1, jobs.FIRST_NORM : jobs.FIRST_EPSILON + 1] = self._norm(parts.norm)
        return table

    def _norm(self, parts: NormParts) -> list[int]:
        weight = parts.weight.float().contiguous()
        self._parts.append(weight)
        return [weight.data_ptr(), _bits(parts.epsilon)]

    def _fill_plan(self, parts: ModelParts) -> None:
        p, hidden = self._plan, parts.embedding.shape[1]
        p[jobs.HIDDEN], p[jobs.WIDTH] = hidden, _up(hidden, GROUP)
        p[jobs.HEADS], p[jobs.KEY_HEADS], p[jobs.SIZE], p[jobs.HEAD] = (
            self.heads, self.key_heads, self.head_size, self.head,
        )  # fmt: skip
        p[jobs.VOCABULARY], p[jobs.LAYERS] = parts.head.weight.shape[0], len(parts.layers)
        p[jobs.SCALE] = _bits(parts.scale)
        p[jobs.TABLE], p[jobs.EMBEDDING] = self._table.ctypes.data, self.embedding.data_ptr()
        p[jobs.LOGITS_WIDTH] = _up(int(p[jobs.VOCABULARY]), GROUP)
        p[jobs.TIMES], p[jobs.STATUS] = self._times.ctypes.data, self._status.ctypes.data
        step = STEP[self.kind]
        element = 4 if self.kind == "vectors" else 2
        inner = parts.layers[0].down.weight.shape[1]
        p[jobs.NORMED_STRIDE] = _up(hidden, step) * element
        p[jobs.ATTENDED_STRIDE] = _up(self.heads * self.head_size, step) * element
        p[jobs.MIDDLE_WIDTH] = _up(_up(inner, GROUP // 2), step)
        p[jobs.QKV_WIDTH] = _up((self.heads + 2 * self.key_heads) * self.head_size, GROUP)
        self._element = element

    @property
    def shares(self) -> tuple[float, float, float]:
        """Of the last pass's time: products, attention, everything else."""
        linears, attention, total = (int(t) for t in self._times)
        return linears / (total or 1), attention / (total or 1), 1 - (linears + attention) / (total or 1)

    def nbytes(self) -> int:
        """Bytes of weights held beside the model's own."""
        return self.bytes

    def new_cache(self, capacity: int) -> NativeCache:
        """An empty cache of this model's shape."""
        pair = 2 if self.on_tiles else 1
        return NativeCache(len(self._table) - 1, self.key_heads, self.head, capacity, self.dtype, pair)

    def _make_room(self, rows: int, length: int, team: int) -> None:
        """Buffers for at least so many rows, over so many columns, for so many threads."""
        if all(have >= want for have, want in zip(self._room, (rows, length, team), strict=True)):
            return
        rows, length = (
            max(1 << (n - 1).bit_length(), have) for n, have in zip((rows, length), self._room, strict=False)
        )
        rows, team = max(rows, 32), max(team, self._room[2])
        self._room = rows, length, team
        p, element = self._plan, self._element
        # Rows and 16 columns more than are used; what lies behind the used inner numbers must stay zero.
        line = 4 * (_up(length, TURN) + TURN)
        each = _up(max(4 * 32 * GROUP + 2048, MOST * line + 4 * MOST * (self.head + 1)), 4096) + 4096 + 64
        sizes = {
            jobs.X: 4 * rows * int(p[jobs.WIDTH]),
            jobs.NORMED: team * (rows * int(p[jobs.NORMED_STRIDE]) + 64),
            jobs.ATTENDED: rows * int(p[jobs.ATTENDED_STRIDE]),
            jobs.MIDDLE: rows * int(p[jobs.MIDDLE_WIDTH]) * element,
            jobs.QKV: 4 * rows * int(p[jobs.QKV_WIDTH]),
            jobs.QUERY: 4 * (rows * self.heads + MOST) * self.head,
            jobs.SCRATCH: team * each,
            jobs.TILE_SHAPES: 64,
            jobs.BEST: 8 * rows,
        }
        arena = Arena(sum(sizes.values()) + 64 * len(sizes))
        self._buffers = {field: arena.take(size) for field, size in sizes.items()}
        for field, tensor in self._buffers.items():
            p[field] = tensor.data_ptr()
        p[jobs.NORMED_EACH], p[jobs.SCRATCH_EACH], p[jobs.LINE] = (
            sizes[jobs.NORMED] // team // 64 * 64,
            each,
            line,
        )
        self._shapes = self._buffers[jobs.TILE_SHAPES].numpy()
        self._winners = self._buffers[jobs.BEST].numpy().view(np.int64)

    def run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        blocks: Sequence[Block],
        read: Sequence[int],
        cache: NativeCache,
    ) -> NativeScores:
        """Evaluate rows and write their keys and values; see ``LeanModel.run``.

        Raises:
            IndexError: a token is not in the vocabulary.
        """
        p, rows, team = self._plan, len(tokens), team_of(torch.get_num_threads())
        self._make_room(rows, max(block.length + block.rows for block in blocks), team.size)
        step = _Step(tokens, positions, blocks, read)
        step.enter(p)
        p[jobs.TURNS] = self._turns.up_to(max(positions)).data_ptr()
        p[jobs.CACHE] = cache.storage.data_ptr()
        p[jobs.CACHE_LAYER], p[jobs.CACHE_SLOT], p[jobs.CACHE_HEAD] = cache.strides()
        self._shapes[:] = tile_config(rows)
        width = int(p[jobs.LOGITS_WIDTH])
        logits = len(read) * width * self.dtype.itemsize
        memory = self._shelf.take(logits + 4 * len(read) * (width // GROUP) + 64)
        p[jobs.LOGITS], p[jobs.PEAKS] = memory.ctypes.data, memory.ctypes.data + logits
        self._status[0] = 0
        start = perf_counter()
        team.run(self._job, p.ctypes.data)
        self.seconds = perf_counter() - start
        if self._status[0]:
            raise IndexError(
                f"tokens must be 0 to {int(p[jobs.VOCABULARY]) - 1}, got {max(tokens)} or {min(tokens)}"
            )
        best = self._winners[: len(read)].tolist()
        return NativeScores(memory, self.dtype, len(read), int(p[jobs.VOCABULARY]), best)


class _Step:
    """What changes from step to step, as arrays."""

    def __init__(
        self, tokens: Sequence[int], positions: Sequence[int], blocks: Sequence[Block], read: Sequence[int]
    ) -> None:
        ends: list[int] = [0]
        columns: list[int] = []
        table: list[int] = []
        first = 0
        for block in blocks:
            chain = block.tree is None or block.rows == 1
            table += (block.slot, block.length, first, block.rows, chain)
            first += block.rows
            if block.tree is None or chain:
                ends += [len(columns)] * block.rows
                continue
            paths: list[list[int]] = []
            for node, parent in enumerate(block.tree.parents, block.length):
                path = [*paths[parent], node] if parent >= 0 else [node]
                paths.append(path)
                columns += path
                ends.append(len(columns))
        self.numbers = np.array([*tokens, *positions, *read, *table, *ends, *columns], np.int64)
        self.counts = len(tokens), len(read), len(blocks), len(ends)

    def enter(self, plan: np.ndarray) -> None:
        """Write the addresses into a plan."""
        rows, reads, blocks, ends = self.counts
        at = self.numbers.ctypes.data
        plan[jobs.ROWS], plan[jobs.READS], plan[jobs.BLOCK_COUNT] = rows, reads, blocks
        plan[jobs.TOKENS], plan[jobs.POSITIONS] = at, at + 8 * rows
        plan[jobs.CHOSEN] = at + 16 * rows
        plan[jobs.BLOCKS] = at = at + 16 * rows + 8 * reads
        plan[jobs.ENDS] = at = at + 8 * jobs.BLOCK_SIZE * blocks
        plan[jobs.COLUMNS] = at + 8 * ends


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _bits(number: float) -> int:
    """An fp32 number as the lower half of an integer."""
    return int(np.float32(number).view(np.uint32))
