"""The k best tokens of rows of logits, by the largest logit of each group of the vocabulary (its peak)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .llvm import on_disk

#: The largest k.
MAX_TOP_K = 64


@on_disk
def _insert(ids: Any, values: Any, count: int, k: int, token: int, value: Any) -> int:
    """Insert into a list of at most k, largest first; what came earlier stays before its equals."""
    if count == k and not value > values[k - 1]:
        return count
    place = min(count, k - 1)
    while place > 0 and value > values[place - 1]:
        values[place], ids[place] = values[place - 1], ids[place - 1]
        place -= 1
    values[place], ids[place] = value, token
    return min(count + 1, k)


@on_disk
def top_tokens(logits: Any, shift: int, peaks: Any, vocabulary: int, ids: Any, odds: Any) -> None:
    """Fill in ids (R, k) and log-odds (R, k) against the best; the k best lie in the k groups with the largest peaks.

    Args:
        logits: (R, width) bits as unsigned integers; ``shift`` brings them to fp32's place.
        peaks: (R, groups) fp32.
    """
    rows, k = ids.shape
    groups = peaks.shape[1]
    size = logits.shape[1] // groups
    chosen, heights = np.empty(MAX_TOP_K, np.int32), np.empty(MAX_TOP_K, np.float32)
    for r in range(rows):
        count, found = 0, 0
        for g in range(groups):
            count = _insert(chosen, heights, count, k, g, peaks[r, g])
        # In the order of tokens, so that the first of equals stays first.
        for group in np.sort(chosen[:count]):
            for token in range(group * size, min((group + 1) * size, vocabulary)):
                value = np.uint32(np.uint32(logits[r, token]) << np.uint32(shift)).view(np.float32)
                # As many peaks as are wanted are not below the least of these; NaN goes on.
                if count == k and value < heights[k - 1]:
                    continue
                found = _insert(ids[r], odds[r], found, k, token, value)
        best = odds[r, 0]
        for n in range(k):
            odds[r, n] -= best
