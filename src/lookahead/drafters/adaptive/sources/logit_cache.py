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

from typing import Any

import numpy as np

from ....jit import compiled, int64
from ..calibration import (
    BIN_OF,
    BINS,
    DISTANCES,
    FINE,
    HEIGHTS,
    KINDS,
    NO_SECOND,
    ON_PATH,
    ORDERS,
    ORIGINS,
    REJECTED,
    interval_of,
)
from ..hashing import enter, find, new_slots, rehash, remove
from ..memory import BASE_PROPOSALS, OTHER_PROPOSALS, SPAN, Cache, Memory, Tree, noise_of

#: Greedy decoding keeps no candidates with smaller log-odds; only one in a thousand of them is correct.
FURTHEST = -6.0
#: Number of tokens proposed per row when sampling.
SAMPLED_PROPOSALS = 8
#: Initial capacity of a table, in entries.
FIRST_ENTRIES = 1 << 12


@compiled
def key_of(memory: Memory, order: int, node: int) -> int:
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
def propose(memory: Memory, node: int) -> None:
    """Propose the tokens cached for the same last three tokens, or else two, or else one; best first."""
    row = memory.tree.nodes[node]
    cache = memory.cache
    row.order = 0
    row.cached = 0
    if memory.step[0].use_logits == 0:
        return
    for order in range(ORDERS - 1, -1, -1):
        slots = cache.slots[order]
        slot = slots[find(slots, key_of(memory, order, node))]
        if slot.key != 0:
            row.order = order
            entry = slot.value & (len(cache.keys[order]) - 1)
            if memory.step[0].sampled:
                row.cached = _propose_sampled(memory, node, entry)
            else:
                row.cached = _propose_greedy(memory.tree, cache, order, node, entry)
            return


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
def _room(tree: Tree, ids: Any) -> int:
    """The number of tokens to read of an entry, in which another request with this state may have stored more."""
    return min(len(ids), int64(tree.proposals.shape[1]) - BASE_PROPOSALS - OTHER_PROPOSALS)


@compiled
def _propose_greedy(tree: Tree, cache: Cache, order: int, node: int, entry: int) -> int:
    ids, odds, origin = cache.ids[order, entry], cache.odds[order, entry], cache.origins[order, entry]
    proposals = tree.proposals[node]
    count = 0
    most = _room(tree, ids)
    while count < most and ids[count] >= 0:
        proposals[count].token, proposals[count].kind = ids[count], greedy_kind(odds, count, origin)
        count += 1
    return count


@compiled
def _propose_sampled(memory: Memory, node: int, entry: int) -> int:
    """Propose the best tokens under the noise with which the target will sample there."""
    step = memory.step[0]
    cache = memory.cache
    row = memory.tree.nodes[node]
    proposals = memory.tree.proposals[node]
    ids, odds = cache.ids[row.order, entry], cache.odds[row.order, entry]
    temperature = np.float32(step.temperature)

    # Insertion sort by score with noise.
    kept = 0
    for i in range(_room(memory.tree, ids)):
        token = ids[i]
        if token < 0:
            break
        if token >= step.vocabulary:  # a state from a file may hold any token
            continue
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
        base = (interval_of(HEIGHTS, best) * ORIGINS + cache.origins[row.order, entry]) * KINDS
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
def write_rows(memory: Memory, ids: Any, odds: Any, length: int) -> None:
    """Store all rows of a step, except those of NaN.

    Rows overwrite others with equal keys, so unlikely ones come first and the path last.

    Args:
        ids, odds: (rows, top): the best tokens of each row, and their log-odds against the best.
        length: number of accepted rows, at the start of ``memory.path``.
    """
    cache = memory.cache
    nodes = memory.tree.nodes
    count = memory.tree.sizes[0].rows
    keep_all = memory.step[0].sampled != 0
    for order in range(ORDERS):
        # All lookups come first, so that their cache misses overlap: a forward pass evicts the tables from the cache.
        for node in range(count - 1, -1, -1):
            if not np.isnan(odds[node, 0]):
                nodes[node].entry = _entry_for(cache, order, key_of(memory, order, node))
        for node in range(count - 1, -1, -1):
            if not np.isnan(odds[node, 0]):
                _write(cache, order, nodes[node].entry, ids[node], odds[node], REJECTED, keep_all)
        for i in range(length):
            node = memory.path[i]
            if not np.isnan(odds[node, 0]):
                _write(cache, order, nodes[node].entry, ids[node], odds[node], ON_PATH, keep_all)
        _evict(cache, order)


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
    """

    def __init__(self, max_entries: int, width: int) -> None:
        self.max_entries = max_entries
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

    def load(self, order: int, keys: Any, ids: Any, odds: Any, origins: Any) -> None:
        """The inverse of ``entries``, for an empty table; the keys must be distinct."""
        count, width = ids.shape
        self.make_room(count, max(width, self.width))
        cache = self.arrays
        cache.keys[order, :count] = keys
        cache.origins[order, :count] = origins
        cache.ids[order, :count] = -1
        cache.ids[order, :count, :width] = ids
        cache.odds[order, :count] = np.nan
        cache.odds[order, :count, :width] = odds
        enter(cache.slots[order], cache.keys[order, :count])
        cache.spans["newest"][order] = count
        self._unseen = 0

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
        return Cache(new_slots(ORDERS, 2 * entries), keys, origins, ids, odds, spans, self.max_entries)
