"""The tables that compiled code works on: suffix trie, logit cache and calibrations as arrays.

Twins of ``SuffixTrie``, ``LogitCache`` and ``Calibrations``; imported only where numba is there. Here memory is
owned and made larger; what stands in it is read and written in ``compiled``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from .calibration import LEVELS, PRIOR_WEIGHT, SURE
from .compiled import entries as code
from .compiled import layout
from .config import AdaptiveConfig
from .logits import ORDERS, Entry
from .priors import joint_priors, logit_priors, suffix_priors
from .suffix import FIELDS, TOTAL

#: Places of a new trie, and of a new table of the logit cache; powers of two. Memory that is not touched costs
#: nothing, while moving to more of it does.
FIRST_NODES, FIRST_ENTRIES = 1 << 12, 1 << 12


def address_of(array: Any) -> int:
    """Where an array's memory begins. Whoever keeps the number keeps the array too."""
    address: int = array.ctypes.data
    return address


def empty_slots(count: int, width: int) -> Any:
    """Slots of a table by key."""
    return np.zeros(count * width, dtype=np.int64)


class ArrayTrie:
    """Twin of ``SuffixTrie``: a node is a number from 0, its fields stand in ``FIELDS`` int32."""

    def __init__(self, order: int, max_nodes: int | None = None) -> None:
        self.order = order
        self.max_nodes = max_nodes
        self.texts = 0
        self.header = np.zeros(layout.TRIE, dtype=np.int64)
        self.address = address_of(self.header)
        self.header[layout.T_ORDER] = order
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.header[layout.T_GENERATION] += 1  # readers notice
        self._nodes = np.zeros(0, dtype=np.int32)
        self._slots = empty_slots(1, 2)
        self.header[layout.T_MASK] = self.header[layout.T_USED] = 0
        self._make_room(FIRST_NODES)
        self._nodes[:FIELDS] = 0
        self.header[layout.T_USED] = 1

    def begin(self) -> ArrayReader:
        """A new text."""
        self.texts += 1
        return ArrayReader(self, self.texts)

    @property
    def nodes(self) -> Any:
        """Fields of the nodes, (nodes, FIELDS)."""
        return self._nodes[: self.header[layout.T_USED] * FIELDS].reshape(-1, FIELDS)

    @property
    def children(self) -> dict[int, int]:
        """Key of node and token -> node; a copy."""
        return {int(mark) - 1: int(node) for mark, node in self._slots.reshape(-1, 2) if mark != layout.EMPTY}

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` more; a trie that is full starts afresh first."""
        if self.max_nodes is not None and self.header[layout.T_USED] > self.max_nodes:
            self.clear()
        needed = int(self.header[layout.T_USED]) + tokens * (self.order + 1)
        if needed * FIELDS > len(self._nodes):
            self._make_room(needed)

    def _make_room(self, needed: int) -> None:
        count = 1 << (needed - 1).bit_length()
        nodes = np.empty(count * FIELDS, dtype=np.int32)
        nodes[: len(self._nodes)] = self._nodes
        slots = empty_slots(2 * count, 2)
        code.rehash(
            address_of(self._slots), int(self.header[layout.T_MASK]), address_of(slots), 2 * count - 1, 2
        )
        self._nodes, self._slots = nodes, slots
        self.header[layout.T_NODES], self.header[layout.T_SLOTS] = address_of(nodes), address_of(slots)
        self.header[layout.T_MASK] = 2 * count - 1


class ArrayReader:
    """Twin of ``Reader``."""

    def __init__(self, trie: ArrayTrie, mark: int) -> None:
        self.trie = trie
        self.header = np.zeros(layout.R_FIRST + trie.order + 2, dtype=np.int64)
        self.address = address_of(self.header)
        self.header[layout.R_TRIE], self.header[layout.R_MARK] = trie.address, mark

    @property
    def matched(self) -> int:
        """Tokens of the text's end that have been followed by something before, at most the order."""
        nodes, header = self.trie._nodes, self.header
        for length in range(int(header[layout.R_ACTIVE]) - 1, 0, -1):
            if nodes[header[layout.R_FIRST + length] * FIELDS + TOTAL]:
                return length
        return 0

    def feed(self, tokens: Iterable[int]) -> None:
        """The text goes on."""
        text = np.array(list(tokens), dtype=np.int64)
        self.feed_from(address_of(text), len(text))

    def feed_from(self, address: int, count: int) -> None:
        """The same, of int64 in memory."""
        self.trie.reserve(count)
        self.catch_up()
        code.feed(self.address, address, count)

    def catch_up(self) -> None:
        """Begin at the root where the trie has started afresh."""
        generation = self.trie.header[layout.T_GENERATION]
        if self.header[layout.R_GENERATION] != generation:
            self.header[layout.R_GENERATION] = generation
            self.header[layout.R_ACTIVE], self.header[layout.R_FIRST] = 1, 0


class ArrayTable:
    """Twin of one dict of the logit cache: at most ``width`` tokens by key, in the order in which keys came.

    To be read like that dict; rows are written by compiled code, after ``reserve``.
    """

    def __init__(self, most: int, width: int, sampled: bool) -> None:
        self.sampled = sampled
        self.header = np.zeros(layout.TABLE, dtype=np.int64)
        self.address = address_of(self.header)
        self.header[layout.L_MOST] = most
        self._allot(FIRST_ENTRIES, width)

    @property
    def width(self) -> int:
        """Tokens per entry at most."""
        return int(self.header[layout.L_WIDTH])

    def __len__(self) -> int:
        return int(self.header[layout.L_NEXT] - self.header[layout.L_OLDEST])

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys[self._places()].tolist())

    def __contains__(self, key: int) -> bool:
        return key in set(self)

    def __getitem__(self, key: int) -> Entry:
        keys, ids, values, origins = self.arrays()
        row = keys.tolist().index(key)
        count = int((ids[row] >= 0).sum())
        if self.sampled:
            return ids[row, :count], values[row, :count], int(origins[row])
        return tuple(ids[row, :count].tolist()), values[row, :count].astype(np.uint8).tobytes()

    def arrays(self) -> tuple[Any, Any, Any, Any]:
        """Keys (n,), ids (n, width), values (n, width) and origins (n,) as they are saved."""
        places, width = self._places(), self.width
        records = self._records[places]
        counts, origins = records[:, 0] & 255, (records[:, 0] >> 8).astype(np.int8)
        width = max(1, int(counts.max())) if len(counts) else 1
        ids, values = records[:, 1 : 1 + width].copy(), records[:, 1 + self.width : 1 + self.width + width]
        behind = np.arange(width) >= counts[:, None]
        ids[behind] = -1
        values = values.copy().view(np.float32) if self.sampled else values.astype(np.float32)
        values[behind] = 0
        return self._keys[places], ids, values, origins if self.sampled else np.zeros_like(origins)

    def fill(self, keys: Any, ids: Any, values: Any, origins: Any) -> None:
        """The inverse of ``arrays``, for an empty table; the keys must differ."""
        count, width = ids.shape
        self.widen(width)
        self.reserve(count)
        self._keys[:count] = keys
        records = self._records[:count]
        records[:, 0] = (ids >= 0).sum(axis=1) | origins.astype(np.int32) << 8
        records[:, 1 : 1 + width] = ids
        packed = values.astype(np.float32).view(np.int32) if self.sampled else values.astype(np.int32)
        records[:, 1 + self.width : 1 + self.width + width] = packed
        code.enlist(self.address, count)
        self.header[layout.L_NEXT] = count

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more."""
        needed = int(self.header[layout.L_NEXT] - self.header[layout.L_OLDEST]) + rows
        if needed > len(self._keys):
            self._allot(1 << (needed - 1).bit_length(), self.width)

    def widen(self, width: int) -> None:
        """Make room for ``width`` tokens per entry."""
        if width > self.width:
            self._allot(len(self._keys), width)

    def _places(self) -> Any:
        return (
            np.arange(self.header[layout.L_OLDEST], self.header[layout.L_NEXT]) & self.header[layout.L_RING]
        )

    def _allot(self, entries: int, width: int) -> None:
        """Move to new memory; entries keep their numbers."""
        header = self.header
        keys = np.empty(entries, dtype=np.int64)
        records = np.empty((entries, 1 + 2 * width), dtype=np.int32)
        if len(self):
            old, places, before = self._records, self._places(), self.width
            new = np.arange(header[layout.L_OLDEST], header[layout.L_NEXT]) & entries - 1
            keys[new] = self._keys[places]
            records[new, : 1 + before] = old[places, : 1 + before]
            records[new, 1 + width : 1 + width + before] = old[places, 1 + before :]
        if not header[layout.L_SLOTS] or entries > len(self._keys):
            slots = empty_slots(2 * entries, 2)
            if header[layout.L_SLOTS]:
                code.rehash(
                    int(header[layout.L_SLOTS]),
                    int(header[layout.L_MASK]),
                    address_of(slots),
                    2 * entries - 1,
                    2,
                )
            self._slots = slots
            header[layout.L_SLOTS], header[layout.L_MASK] = address_of(slots), 2 * entries - 1
        self._keys, self._records = keys, records
        header[layout.L_KEYS], header[layout.L_RECORDS] = address_of(keys), address_of(records)
        header[layout.L_RING], header[layout.L_WIDTH] = entries - 1, width


class ArrayLogits:
    """Twin of ``LogitCache``."""

    def __init__(self, max_entries: int, width: int, sampled: bool) -> None:
        self.tables = [ArrayTable(max_entries, width, sampled) for _ in range(ORDERS)]
        self._addresses = np.array([table.address for table in self.tables], dtype=np.int64)
        self.address = address_of(self._addresses)


class ArrayCalibration:
    """Twin of ``Calibration``: a stretch of arrays that all calibrations share."""

    def __init__(self, owner: ArrayCalibrations, start: int, count: int) -> None:
        self.start = start
        part = slice(start, start + count)
        self.priors, self.hits, self.trials = owner.priors[part], owner.hits[part], owner.trials[part]
        self.estimate, self.levels = owner.estimate[part], owner.levels[part]

    def load(self, hits: Sequence[float], trials: Sequence[float]) -> None:
        """Take counts over; there must be as many as buckets."""
        self.hits[:], self.trials[:] = hits, trials
        estimate = (self.hits + PRIOR_WEIGHT * self.priors) / (self.trials + PRIOR_WEIGHT)
        self.estimate[:] = np.minimum(estimate, SURE)
        self.levels[:] = np.searchsorted(LEVELS, estimate)


class ArrayCalibrations:
    """Twin of ``Calibrations``."""

    def __init__(self, sampled: bool) -> None:
        priors, estimate, levels, sizes = _beginning(sampled)
        self.priors, self.estimate, self.levels = priors, estimate.copy(), levels.copy()
        self.hits, self.trials = np.zeros_like(priors), np.zeros_like(priors)
        ends = np.cumsum(sizes).tolist()
        parts = [ArrayCalibration(self, end - n, n) for end, n in zip(ends, sizes, strict=True)]
        self.logits, (self.suffix, self.corpus, self.joint) = parts[:ORDERS], parts[ORDERS:]

    def all(self) -> list[ArrayCalibration]:
        """In the order in which they are saved."""
        return [*self.logits, self.suffix, self.corpus, self.joint]


class ArrayTables:
    """Twin of ``Tables``."""

    def __init__(self, config: AdaptiveConfig, sampled: bool) -> None:
        width = config.sampled_top if sampled else config.top
        self.logits = ArrayLogits(config.max_entries, width, sampled)
        self.calibrations = ArrayCalibrations(sampled)


@cache
def _beginning(sampled: bool) -> tuple[Any, Any, Any, list[int]]:
    """Priors, estimates and levels of all buckets, and how many there are of each kind."""
    parts = [logit_priors(order, sampled) for order in range(ORDERS)]
    parts += [suffix_priors(sampled), suffix_priors(sampled), joint_priors(sampled)]
    priors = np.concatenate([np.array(part) for part in parts])
    levels = np.searchsorted(LEVELS, priors).astype(np.int64)
    return priors, np.minimum(priors, SURE), levels, [len(part) for part in parts]
