"""Reads and fills the logit cache of the adaptive drafter."""

import numpy as np

from lookahead.drafters.adaptive.hashing import enter


def entries(logits, order):
    """Keys (n,), ids (n, width), log-odds (n, width) and origins (n,), oldest first."""
    cache = logits.arrays
    span = cache.spans[order]
    places = np.arange(span["oldest"], span["newest"]) & cache.keys.shape[1] - 1
    return tuple(part[order][places] for part in (cache.keys, cache.ids, cache.odds, cache.origins))


def fill(logits, order, keys, ids, odds):
    """Fill an empty table; the keys must be distinct, and all entries are on the path."""
    count, width = ids.shape
    logits.make_room(count, max(width, logits.width))
    cache = logits.arrays
    cache.keys[order, :count] = keys
    cache.origins[order, :count] = 0
    cache.ids[order, :count] = -1
    cache.ids[order, :count, :width] = ids
    cache.odds[order, :count] = np.nan
    cache.odds[order, :count, :width] = odds
    enter(cache.slots[order], cache.keys[order, :count])
    cache.spans["newest"][order] = count
