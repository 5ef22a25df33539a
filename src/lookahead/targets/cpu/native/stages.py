"""What happens between the products, row by row: embedding, norms, rotation with the cache write, the best tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from .attention import SIDE
from .intrinsics import MATHS, bytes_of, input_tag, narrow, paired_keys, pointer, query_tag, widen
from .products import GROUP

#: Most tokens that ``top`` finds for a row.
MOST = 64


@njit(nogil=True, error_model="numpy")
def embed(
    tokens: int, table: int, size: int, vocabulary: int, out: int, width: int, begin: int, end: int, tag: Any
) -> bool:
    """Rows begin..end of the embedding (V, size) to out (any, width) in fp32; False for a token that is not there."""
    ids = carray(pointer(tokens, np.int64(0)), (end,))
    weights = carray(pointer(table, tag), (vocabulary, size))
    outs = carray(pointer(out, np.float32(0)), (end, width))
    good = True
    for r in range(begin, end):
        token = ids[r]
        if token < 0 or token >= vocabulary:
            good = False
            token = 0
        for i in range(size):
            outs[r, i] = widen(weights[token, i])
    return good


@njit(nogil=True, fastmath=MATHS, error_model="numpy")
def norm(
    x: int, width: int, chosen: int, weight: int, epsilon: float, out: int, stride: int,
    begin: int, end: int, size: int, kind: Any,
) -> None:  # fmt: skip
    """x / sqrt(mean(x^2) + epsilon) * weight of rows begin..end, as products read it.

    Args:
        x, width: (any, width) fp32, of which ``size`` numbers count.
        chosen: row r of the result is row ``chosen[r]`` of x; 0 where it is row r.
    """
    single, target = np.float32(0), input_tag(kind)
    ws = carray(pointer(weight, single), (size,))
    rows = carray(pointer(chosen, np.int64(0)), (end,))
    for r in range(begin, end):
        source = rows[r] if chosen != 0 else r
        xs = carray(pointer(x + 4 * width * source, single), (size,))
        outs = carray(pointer(out + stride * r, target), (size,))
        total = np.float32(0)
        for i in range(size):
            total += xs[i] * xs[i]
        factor = np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(epsilon))
        for i in range(size):
            outs[i] = narrow(xs[i] * factor * ws[i], target)


@njit(nogil=True, fastmath=MATHS, error_model="numpy")
def turn(
    y: int, lane: int, angles: int, weight: int, epsilon: float, scale: float, query: int, row: int, rows: int,
    store: int, column: int, heads: int, key_heads: int, size: int, head: int, kind: Any, tag: Any,
) -> None:  # fmt: skip
    """Norm and rotate one head of one row; a query goes out scaled, a key or a value into the cache.

    Args:
        y: (size,) fp32, pairs side by side; it is overwritten.
        lane: which of H + 2K heads.
        angles: (size,) cosine and sine by turns, of the row's position; 0 for no rotation.
        weight: (H + K, size) of the norm over each head; 0 for none.
        query: (K, rows, H / K, D) of the sequence; ``row`` is within it.
        store: where the slot keeps this head; ``column`` is the row's.
    """
    single = np.float32(0)
    ys = carray(pointer(y, single), (size,))
    if lane < heads + key_heads:
        if weight != 0:
            ws = carray(pointer(weight + 4 * lane * size, single), (size,))
            total = np.float32(0)
            for i in range(size):
                total += ys[i] * ys[i]
            factor = np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(epsilon))
            for i in range(size):
                ys[i] *= factor * ws[i]
        if angles != 0:
            turns = carray(pointer(angles, single), (size,))
            for i in range(0, size, 2):
                a, b = ys[i], ys[i + 1]
                ys[i] = a * turns[i] - b * turns[i + 1]
                ys[i + 1] = a * turns[i + 1] + b * turns[i]
    if lane < heads:
        groups = heads // key_heads
        place = ((lane // groups) * rows + row) * groups + lane % groups
        target = query_tag(kind)
        out = carray(pointer(query + bytes_of(target) * place * head, target), (size,))
        for i in range(size):
            out[i] = narrow(ys[i] * np.float32(scale), target)
    elif lane < heads + key_heads:
        pair = paired_keys(kind)
        side = store + (column // SIDE * head * SIDE + column % SIDE * pair) * bytes_of(tag)
        stored = carray(pointer(side, tag), (size * SIDE,))
        for i in range(size):
            stored[i // pair * (SIDE * pair) + i % pair] = narrow(ys[i], tag)
    else:
        stored = carray(pointer(store + column * head * bytes_of(tag), tag), (size,))
        for i in range(size):
            stored[i] = narrow(ys[i], tag)


@njit(nogil=True, error_model="numpy")
def best(logits: int, width: int, peaks: int, row: int, tag: Any) -> int:
    """The token with the largest logit of a row, the first of equals; -1 where a logit is NaN."""
    tops = carray(pointer(peaks + 4 * row * (width // GROUP), np.float32(0)), (width // GROUP,))
    odd = np.int32(0)
    largest = np.float32(-np.inf)
    for g in range(width // GROUP):
        value = tops[g]
        odd += np.int32(1) if value != value else np.int32(0)
        largest = value if value > largest else largest
    if odd > 0:
        return -1
    group = 0
    while group < width // GROUP - 1 and tops[group] != largest:
        group += 1
    scores = carray(pointer(logits + (row * width + group * GROUP) * bytes_of(tag), tag), (GROUP,))
    token = 0
    while token < GROUP - 1 and widen(scores[token]) != largest:
        token += 1
    return group * GROUP + token


@njit(nogil=True, error_model="numpy")
def _keep(ids: Any, found: Any, count: int, k: int, token: int, value: float) -> int:
    """Insert into a list of at most k, largest first; what came earlier stays before its equals."""
    if count == k and not value > found[k - 1]:
        return count
    place = min(count, k - 1)
    while place > 0 and value > found[place - 1]:
        found[place], ids[place] = found[place - 1], ids[place - 1]
        place -= 1
    found[place], ids[place] = value, token
    return min(count + 1, k)


@njit(nogil=True, error_model="numpy")
def top(
    logits: int, width: int, vocabulary: int, peaks: int, row: int, k: int, ids: int, odds: int, tag: Any
) -> None:
    """The k best tokens of a row and their log-odds against the best.

    They lie in the k groups with the largest peaks.
    """
    groups = width // GROUP
    tops = carray(pointer(peaks + 4 * row * groups, np.float32(0)), (groups,))
    scores = carray(pointer(logits + row * width * bytes_of(tag), tag), (width,))
    out_ids = carray(pointer(ids + 4 * row * k, np.int32(0)), (k,))
    out_odds = carray(pointer(odds + 4 * row * k, np.float32(0)), (k,))
    chosen, heights = np.empty(MOST, np.int32), np.empty(MOST, np.float32)
    count = 0
    for g in range(groups):
        count = _keep(chosen, heights, count, k, g, tops[g])
    found = 0
    # In the order of tokens, so that the first of equals stays first.
    order = np.sort(chosen[:count])
    for n in range(count):
        first = order[n] * GROUP
        for j in range(first, min(first + GROUP, vocabulary)):
            value = widen(scores[j])
            # As many peaks as are wanted are not below the least of these; NaN goes on.
            if count == k and value < heights[k - 1]:
                continue
            found = _keep(out_ids, out_odds, found, k, j, value)
    best_value = out_odds[0]
    for n in range(k):
        out_odds[n] -= best_value
