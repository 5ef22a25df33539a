"""The logit cache: the best tokens of every row that was evaluated, by its last one, two and three tokens.

Rejected branches and window rows cost as much to evaluate as accepted ones and know as much about what the
target says behind their last tokens; here nothing of them is lost. (Token Recycling keeps such a table by
one token; three tell far more.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

ORDERS = 3
#: Where a row stood: on the path, on a rejected branch, in the window.
ON_PATH, REJECTED, WINDOW = 0, 1, 2
# The best token is judged by its lead over the second, the others by their distance from the best.
EDGES = np.array([0.1, 0.25, 0.5, 0.8, 1.2, 1.7, 2.4, 3.3, 4.5, 6.5, 9.0], dtype=np.float32)
BINS = len(EDGES) + 1
KINDS = 2 * BINS
# The same by table, in steps of 1 / FINE: a search per number takes several times as long.
FINE = 20
BIN_OF = np.searchsorted(EDGES, np.arange(256) / FINE).astype(np.uint8)
#: Candidates further behind than this are not kept: about one in a thousand of them is right.
FURTHEST = -6.0
#: With sampling also: how far the best score, noise included, stands above the row's best logit.
HEIGHTS = np.array([0.5, 1.5, 3.0], dtype=np.float32)
#: Buckets of one order.
LOGIT_BUCKETS = 3 * KINDS
SAMPLED_BUCKETS = 3 * KINDS * (len(HEIGHTS) + 1)

#: (tokens, buckets) of one row when decoding greedily; (ids, log-odds, origin) when sampling.
Entry = tuple[Any, ...]


class LogitCache:
    """Three tables by key of the last m tokens, m = 1, 2, 3. A key is an exact number in base V.

    Args:
        max_entries: contexts per table, oldest out first.
    """

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.tables: list[dict[int, Entry]] = [{} for _ in range(ORDERS)]

    def clear(self) -> None:
        """Forget everything."""
        for table in self.tables:
            table.clear()

    def write(self, keys: Sequence[Sequence[int]], entries: Sequence[Entry]) -> None:
        """Take rows in order of rising trust: of two rows with one key the later stays.

        Args:
            keys: three lists, the keys of the rows' last one, two and three tokens.
            entries: one per row.
        """
        for table, table_keys in zip(self.tables, keys, strict=True):
            table.update(zip(table_keys, entries, strict=True))
            if len(table) > self.max_entries:
                # An eighth at once: taking single entries from a dict's front is slow.
                for key in list(islice(table, self.max_entries // 8 + len(table) - self.max_entries)):
                    del table[key]


def greedy_entries(ids: Any, odds: Any, path: Sequence[int], window: int) -> list[Entry]:
    """Entries of all rows from (n, k) best tokens and log-odds; the window's rows begin at ``window``."""
    kinds = BIN_OF[np.fmin(odds * -FINE, 255.0).astype(np.intp)]
    best = kinds[:, 1].copy() if kinds.shape[1] > 1 else BINS // 2
    kinds += BINS + KINDS * REJECTED
    kinds[:, 0] = best
    kinds[:, 0] += KINDS * REJECTED
    kinds[window:] += KINDS * (WINDOW - REJECTED)
    for node in path:
        kinds[node] -= KINDS * ((REJECTED if node < window else WINDOW) - ON_PATH)
    counts = np.maximum((odds > FURTHEST).sum(axis=1), 1).tolist()
    width = kinds.shape[1]
    packed = kinds.tobytes()
    # Tuples of numbers and bytes: the garbage collector need not walk them.
    return [
        (tuple(tokens[:count]), packed[start : start + count])
        for tokens, count, start in zip(ids.tolist(), counts, range(0, len(packed), width), strict=True)
    ]


def sampled_entries(ids: Any, odds: Any, path: Sequence[int], window: int) -> list[Entry]:
    """The same when sampling; buckets need the noise and are made while drafting."""
    origins = [REJECTED] * window + [WINDOW] * (len(ids) - window)
    for node in path:
        origins[node] = ON_PATH
    return list(zip(ids, odds, origins, strict=True))


#: Candidates of a sampled row that are proposed.
SAMPLED_KEEP = 8


def under_noise(entry: Entry, noise: Any, temperature: float) -> Entry:
    """(tokens, buckets) of a sampled entry at one position, the best score under its noise first."""
    ids, odds, origin = entry
    scores = odds / temperature + noise[ids]
    order = (-scores).argsort(kind="stable")[:SAMPLED_KEEP]
    ranked = scores[order]
    best = ranked[0]
    lags = np.searchsorted(EDGES, best - ranked)
    base = (int(np.searchsorted(HEIGHTS, best)) * 3 + origin) * KINDS
    kinds = (lags + (base + BINS)).tolist()
    kinds[0] = base + (int(lags[1]) if len(kinds) > 1 else BINS // 2)
    return ids[order].tolist(), kinds
