"""The logit cache: the best tokens of every evaluated row, indexed by its last one, two and three tokens.

Rows of rejected branches cost as much as accepted rows, and their logits are as informative about the target's
predictions after their last tokens, so all rows are kept. (Token Recycling, Luo et al., 2024, keeps such
a table for the last token alone.) The key of m tokens is the number with these digits in base V.

An example with V = 100. A step evaluated a row with token 7 after the tokens 5 and 6, and its best tokens were 8
(log-odds 0), 3 (-0.4) and 9 (-2.1). The three tables get

    order 0    key 7                          [8, 3, 9], log-odds [0, -0.4, -2.1], origin REJECTED
    order 1    key 6 * 100 + 7 = 607          the same
    order 2    key (5 * 100 + 6) * 100 + 7    the same

Later, a row of a tree ends with 2 6 7. Order 2 has no key 20607, but order 1 has 607: the row gets the proposals 8, 3
and 9. The bucket of 8 is that of a best token with a lead of 0.4 over the second (bin 2, up to 0.5); the bucket of 9
is that of a distance of 2.1 (bin 6, up to 2.4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np

from ....machine_code import compiled, int64
from ..calibration import (
    BIN_OF,
    BINS,
    DISTANCES,
    FINE,
    HEIGHTS,
    KINDS,
    NO_SECOND,
    NOTHING,
    ON_PATH,
    ORDERS,
    ORIGINS,
    OTHER,
    REJECTED,
    count,
    interval_of,
    new_buckets,
)
from ..hashing import find, new_slots, rehash, remove
from ..layout import BUCKET, SLOT, noise_of, record
from .source import Setup, Source

#: Greedy decoding keeps no candidates with smaller log-odds; only one in a thousand of them is correct.
FURTHEST = -6.0
#: Number of tokens proposed per row when sampling.
SAMPLED_PROPOSALS = 8
#: Initial capacity of a table, in entries.
FIRST_ENTRIES = 1 << 12
#: The numbers of a table's entries run from ``oldest`` to ``newest`` - 1.
SPAN = record(oldest="i8", newest="i8")


class Cache(NamedTuple):
    """The logit cache: three tables of n entries, indexed by the last one, two and three tokens."""

    # (3, 2n) hash table: key -> entry number; the entry is stored at its number modulo n
    slots: Annotated[Any, SLOT, 2]
    keys: Annotated[Any, "i8", 2]  # (3, n)
    origins: Annotated[Any, "i4", 2, "strided"]  # (3, n): where the row was: ON_PATH or REJECTED
    ids: Annotated[Any, "i4", 3, "strided"]  # (3, n, width): the best tokens, best first; -1 after the last
    # (3, n, width): their log-odds against the best token; NaN after the last
    odds: Annotated[Any, "f4", 3, "strided"]
    spans: Annotated[Any, SPAN, 1]  # of the three
    max_entries: int
    most: int  # largest number of tokens read from an entry; another request may have stored more
    buckets: Annotated[Any, BUCKET, 2]  # (3, kinds): by order


@compiled
def key_of(memory: Any, order: int, node: int) -> int:
    """The key of the last ``order`` + 1 tokens of a row."""
    step = memory.step[0]
    nodes = memory.tree.nodes
    row = nodes[node]
    if order == 0:
        return int64(row.token)
    if order == 1:
        return int64(row.pair)
    above = nodes[row.parent].pair if node > 0 else step.before * step.vocabulary + step.previous
    return int64(above * step.vocabulary + row.token)


@compiled
def _propose(memory: Any, own: Cache, node: int, number: int) -> None:
    """Propose the tokens cached for the same last three tokens, or else two, or else one; best first."""
    row = memory.tree.nodes[node]
    proposals = memory.tree.proposals[node]
    row.order = 0
    for order in range(ORDERS - 1, -1, -1):
        slots = own.slots[order]
        slot = slots[find(slots, key_of(memory, order, node))]
        if slot.key != 0:
            row.order = order
            entry = slot.value & (len(own.keys[order]) - 1)
            if memory.step[0].sampled:
                row.recalled = _propose_sampled(memory, own, node, entry)
            else:
                row.recalled = _propose_greedy(memory, own, node, entry)
            break
    for index in range(row.recalled):
        proposal = proposals[index]
        proposal.source = number
        proposal.base_kind = proposal.pair = -1
        proposal.level = own.buckets[row.order, proposal.kind].level
    row.rest = OTHER + proposals[0].level if row.recalled else NOTHING


@compiled
def bin_of(odds: float) -> int:
    """The bin of a distance, given as log-odds; NaN falls into the last bin."""
    steps = odds * np.float32(-FINE)
    return int64(BIN_OF[int64(steps)] if 0 <= steps < 255 else BIN_OF[255])


@compiled
def greedy_kind(odds: Any, index: int, origin: int) -> int:
    """The bucket of the token at an index of an entry."""
    if index > 0:
        return origin * KINDS + BINS + bin_of(odds[index])
    lead = bin_of(odds[1]) if len(odds) > 1 and not np.isnan(odds[1]) else NO_SECOND
    return origin * KINDS + lead


@compiled
def _propose_greedy(memory: Any, own: Cache, node: int, entry: int) -> int:
    order = memory.tree.nodes[node].order
    ids, odds, origin = own.ids[order, entry], own.odds[order, entry], own.origins[order, entry]
    proposals = memory.tree.proposals[node]
    count = 0
    most = min(len(ids), own.most)
    while count < most and ids[count] >= 0:
        proposals[count].token, proposals[count].kind = ids[count], greedy_kind(odds, count, origin)
        count += 1
    return count


@compiled
def _propose_sampled(memory: Any, own: Cache, node: int, entry: int) -> int:
    """Propose the best tokens under the noise with which the target will sample there."""
    step = memory.step[0]
    row = memory.tree.nodes[node]
    proposals = memory.tree.proposals[node]
    ids, odds = own.ids[row.order, entry], own.odds[row.order, entry]
    temperature = np.float32(step.temperature)

    # Insertion sort by score with noise.
    kept = 0
    for i in range(min(len(ids), own.most)):
        token = ids[i]
        if token < 0:
            break
        score = odds[i] / temperature + noise_of(memory, int64(row.depth), token)
        if np.isnan(score) or (kept == SAMPLED_PROPOSALS and score <= proposals[kept - 1].score):
            continue
        index = min(kept, SAMPLED_PROPOSALS - 1)
        while index > 0 and score > proposals[index - 1].score:
            proposals[index].score, proposals[index].token = (
                proposals[index - 1].score,
                proposals[index - 1].token,
            )
            index -= 1
        proposals[index].score, proposals[index].token = score, token
        kept = min(kept + 1, SAMPLED_PROPOSALS)

    # Their buckets.
    if kept > 0:
        best = proposals[0].score
        base = (interval_of(HEIGHTS, best) * ORIGINS + own.origins[row.order, entry]) * KINDS
        for index in range(1, kept):
            proposals[index].kind = base + BINS + interval_of(DISTANCES, best - proposals[index].score)
        proposals[0].kind = proposals[1].kind - BINS if kept > 1 else base + NO_SECOND
    return kept


@compiled
def _entry_for(cache: Cache, order: int, key: int) -> int:
    """The index of the key's entry, which is added if missing."""
    slots = cache.slots[order]
    keys = cache.keys[order]
    slot = slots[find(slots, key)]
    if slot.key == 0:
        slot.key, slot.value = key + 1, cache.spans[order].newest
        keys[slot.value & (len(keys) - 1)] = key
        cache.spans[order].newest += 1
    return int64(slot.value & (len(keys) - 1))


@compiled
def _write(cache: Cache, order: int, entry: int, ids: Any, odds: Any, origin: int, keep_all: bool) -> None:
    """Overwrite an entry with the best tokens of one row."""
    kept_ids, kept_odds = cache.ids[order, entry], cache.odds[order, entry]
    cache.origins[order, entry] = origin
    ended = False
    for i in range(len(kept_ids)):
        kept_ids[i], kept_odds[i] = -1, np.nan
        if i < len(ids):
            ended = ended or not (keep_all or i == 0 or odds[i] > FURTHEST)
            kept_odds[i] = odds[i]
            if not ended:
                kept_ids[i] = ids[i]


@compiled
def _judge(memory: Any, own: Cache, node: int, number: int, right: int, truth: int) -> None:
    row = memory.tree.nodes[node]
    for index in range(row.recalled):
        kind = memory.tree.proposals[node, index].kind
        if kind >= 0:
            count(own.buckets[row.order, kind], index == right)


@compiled
def _learn(memory: Any, own: Cache, ids: Any, odds: Any, length: int) -> None:
    """Store all rows of a step, except those of NaN.

    Rows overwrite others with equal keys, so unlikely ones come first and the path last.
    """
    nodes = memory.tree.nodes
    rows = memory.tree.sizes[0].rows
    keep_all = memory.step[0].sampled != 0
    for order in range(ORDERS):
        # All lookups come first, so that their cache misses overlap: a forward pass evicts the tables from the cache.
        for node in range(rows - 1, -1, -1):
            if not np.isnan(odds[node, 0]):
                nodes[node].entry = _entry_for(own, order, key_of(memory, order, node))
        for node in range(rows - 1, -1, -1):
            if not np.isnan(odds[node, 0]):
                _write(own, order, nodes[node].entry, ids[node], odds[node], REJECTED, keep_all)
        for i in range(length):
            node = memory.path[i]
            if not np.isnan(odds[node, 0]):
                _write(own, order, nodes[node].entry, ids[node], odds[node], ON_PATH, keep_all)
        _evict(own, order)


@compiled
def _evict(cache: Cache, order: int) -> None:
    """If there are more than ``max_entries`` entries, evict the excess and the oldest eighth."""
    span = cache.spans[order]
    keys = cache.keys[order]
    over = span.newest - span.oldest - cache.max_entries
    if over > 0:
        for _ in range(cache.max_entries // 8 + over):
            remove(cache.slots[order], keys[span.oldest & (len(keys) - 1)])
            span.oldest += 1


class LogitCache:
    """Owns the cache's memory.

    Args:
        max_entries: largest number of entries per order.
        width: tokens per entry.
        buckets: the buckets of its proposals.
    """

    def __init__(self, max_entries: int, width: int, buckets: Any) -> None:
        self.max_entries = max_entries
        self._buckets = buckets
        self._unseen = FIRST_ENTRIES  # rows that certainly fit
        self.arrays = self._allot(FIRST_ENTRIES, width, np.zeros(ORDERS, SPAN))

    @property
    def width(self) -> int:
        """The largest number of tokens per entry."""
        return int(self.arrays.ids.shape[2])

    def size(self, order: int) -> int:
        """The number of entries of an order."""
        span = self.arrays.spans[order]
        return int(span["newest"] - span["oldest"])

    def entries(self, order: int) -> tuple[Any, Any, Any, Any]:
        """Keys (n,), ids (n, width), log-odds (n, width) and origins (n,), oldest first."""
        cache = self.arrays
        span = cache.spans[order]
        places = np.arange(span["oldest"], span["newest"]) & cache.keys.shape[1] - 1
        return tuple(part[order][places] for part in (cache.keys, cache.ids, cache.odds, cache.origins))

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more entries of each order."""
        self._unseen -= rows
        if self._unseen < 0:
            used = max(map(self.size, range(ORDERS)))
            self.make_room(used + rows, self.width)
            self._unseen = self.arrays.keys.shape[1] - used - rows

    def make_room(self, entries: int, width: int) -> None:
        """Enlarge the tables to ``entries`` entries of ``width`` tokens if needed; entries keep their numbers."""
        old = self.arrays
        room = max(old.keys.shape[1], 1 << (entries - 1).bit_length())
        if room == old.keys.shape[1] and width <= self.width:
            return
        self.arrays = new = self._allot(room, max(width, self.width), old.spans)
        for order in range(ORDERS):
            span = old.spans[order]
            numbers = np.arange(span["oldest"], span["newest"])
            before = numbers & old.keys.shape[1] - 1
            now = numbers & room - 1
            new.keys[order, now] = old.keys[order, before]
            new.origins[order, now] = old.origins[order, before]
            new.ids[order, now] = -1
            new.ids[order, now, : old.ids.shape[2]] = old.ids[order, before]
            new.odds[order, now] = np.nan
            new.odds[order, now, : old.ids.shape[2]] = old.odds[order, before]
            rehash(old.slots[order], new.slots[order])

    def _allot(self, entries: int, width: int, spans: Any) -> Cache:
        # The parts of an entry are adjacent: after a forward pass, every cache line has to be fetched from memory.
        memory = np.empty((ORDERS, entries, 1 + 2 * width), np.int32)
        origins = memory[:, :, 0]
        ids = memory[:, :, 1 : 1 + width]
        odds = memory[:, :, 1 + width :].view(np.float32)
        keys = np.empty((ORDERS, entries), np.int64)
        slots = new_slots(ORDERS, 2 * entries)
        return Cache(slots, keys, origins, ids, odds, spans, self.max_entries, width, self._buckets)


class Logits(Source):
    """The logit cache, which sequences may share."""

    name = "logits"
    Arrays = Cache
    propose = staticmethod(_propose)
    judge = staticmethod(_judge)
    learn = staticmethod(_learn)

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._cache = setup.tables.logits
        config = setup.config
        self._cache.make_room(0, config.sampled_top if setup.sampled else config.top)
        self.most = self._cache.width
        self._shared: Cache = self._cache.arrays
        self._arrays: Cache = self._shared

    @staticmethod
    def buckets(fits: Mapping[str, Any], sampled: bool) -> dict[str, Any]:
        return {"logits": new_buckets(fits["logits"], (ORDERS, -1))}

    @property
    def arrays(self) -> Cache:
        if self._shared is not self._cache.arrays:
            self._shared = self._cache.arrays
            self._arrays = self._shared._replace(most=self.most)
        return self._arrays

    def reserve(self, rows: int, tokens: int) -> bool:
        self._cache.reserve(rows)
        return False

    def proposed(self, memory: Any, node: int) -> list[int]:
        found = memory.tree.proposals[node, : memory.tree.nodes["recalled"][node]]
        tokens: list[int] = found["token"][found["kind"] >= 0].tolist()
        return tokens
