"""The logit cache: the best tokens of every row that was evaluated, by the last one, two and three tokens.

Rejected branches and window rows cost as much to evaluate as accepted ones and know as much about what the
target says behind their last tokens; here nothing of them is lost. (Token Recycling keeps such a table by
one token; three tell far more.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

ORDERS = 3
#: Where a row stood: on the path, on a rejected branch, in the window.
ON_PATH, REJECTED, WINDOW = 0, 1, 2
# The best token is judged by its lead over the second, the others by their distance from the best.
LEADS = np.array([0.1, 0.25, 0.5, 0.8, 1.2, 1.7, 2.4, 3.3, 4.5, 6.5], dtype=np.float32)
LAGS = np.array([0.1, 0.25, 0.5, 0.8, 1.2, 1.7, 2.4, 3.3, 4.5, 6.5, 9.0], dtype=np.float32)
KINDS = len(LEADS) + 1 + len(LAGS) + 1
#: Buckets of one order.
LOGIT_BUCKETS = 3 * KINDS


class LogitCache:
    """Three tables: key of the last m tokens -> (tokens, buckets), best first, m = 1, 2, 3.

    A key is an exact number in base V, so there are no collisions.

    Args:
        vocabulary: V.
        max_entries: contexts per table, oldest out first.
    """

    def __init__(self, vocabulary: int, max_entries: int) -> None:
        self.vocabulary = vocabulary
        self.max_entries = max_entries
        self.tables: list[dict[int, tuple[list[int], list[int]]]] = [{} for _ in range(ORDERS)]

    def clear(self) -> None:
        """Forget everything."""
        for table in self.tables:
            table.clear()

    def write(self, keys: Sequence[tuple[int, int, int]], ids: Any, odds: Any, origins: Sequence[int]) -> None:
        """Take rows in order of rising trust: of two rows with one key the later stays.

        Args:
            keys: per row the keys of its last one, two and three tokens; -1 where there are not as many.
            ids, odds: (n, k), the best tokens of each row and their log-odds against the best.
            origins: per row ``ON_PATH``, ``REJECTED`` or ``WINDOW``.
        """
        kinds = np.empty(odds.shape, dtype=np.int32)
        if odds.shape[1] > 1:
            kinds[:, 0] = np.searchsorted(LEADS, -odds[:, 1])
            kinds[:, 1:] = np.searchsorted(LAGS, -odds[:, 1:])
            kinds[:, 1:] += len(LEADS) + 1
        else:
            kinds[:] = len(LEADS) // 2
        kinds += np.asarray(origins, dtype=np.int32)[:, None] * KINDS
        one, two, three = self.tables
        for (k1, k2, k3), entry in zip(keys, zip(ids.tolist(), kinds.tolist(), strict=True), strict=True):
            one[k1] = entry
            two[k2] = entry
            three[k3] = entry
        for table in self.tables:
            table.pop(-1, None)
            while len(table) > self.max_entries:
                del table[next(iter(table))]


def logit_priors(order: int) -> list[float]:
    """What a bucket is worth before anything was observed."""
    best = (0.16, 0.2, 0.25, 0.3, 0.36, 0.43, 0.52, 0.62, 0.72, 0.82, 0.9)
    other = (0.2, 0.17, 0.14, 0.11, 0.08, 0.06, 0.035, 0.018, 0.008, 0.003, 0.001, 0.0003)
    trust = (0.35, 0.65, 0.85)[order]
    return [p * trust * origin for origin in (1.0, 0.9, 0.8) for p in best + other]
