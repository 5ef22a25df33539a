"""Compiled twin of ``observe``, ``logits`` and ``calibration``: learning from a step."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..calibration import LEVELS, MEMORY, PRIOR_WEIGHT, SURE
from ..logits import BIN_OF, BINS, FINE, FURTHEST, KINDS, ON_PATH, REJECTED, WINDOW
from ..observe import ANSWERS, KEEP, MAX_KEYS
from .layout import (
    C_CORPUS,
    C_JACOBI,
    C_LOGITS,
    C_NGRAMS,
    C_SUFFIX,
    C_WINDOW,
    DEEPEST,
    EMPTY,
    F_TEMPERATURE,
    G_ANSWERS,
    G_BUCKETS,
    G_CELLS,
    G_COLUMNS,
    G_CORPUS_AT,
    G_COUNT,
    G_CREDIT,
    G_CREDITED,
    G_DEPTHS,
    G_ESTIMATE,
    G_FLOATS,
    G_FOUND,
    G_HITS,
    G_IDS,
    G_JOINT_AT,
    G_KINDS,
    G_LENGTH,
    G_LEVELS,
    G_META,
    G_NGRAMS,
    G_NOISE,
    G_NOISE_SIZE,
    G_ODDS,
    G_PAIRS,
    G_PARENTS,
    G_PATH,
    G_PRIORS,
    G_PROPOSED,
    G_RECORDS,
    G_SAMPLED,
    G_SIZE,
    G_STRIDE,
    G_SUFFIX_AT,
    G_TABLES,
    G_TAIL,
    G_TOKENS,
    G_TRIALS,
    G_TRUTHS,
    G_USE_JACOBI,
    G_USE_LOGITS,
    G_WINDOW,
    L_KEYS,
    L_MASK,
    L_MOST,
    L_NEXT,
    L_OLDEST,
    L_RECORDS,
    L_RING,
    L_SLOTS,
    L_WIDTH,
    M_ASKED,
    M_COUNT,
    M_KINDS,
    M_MATCH,
    M_MATCHED,
    M_ORDER,
    M_RECALL,
    M_RECALLED,
    META,
    N_MASK,
    N_SLOTS,
    N_USED,
)
from .memory import code, find, float32s, float64s, index, int32s, int64s, remove
from .proposals import ask


@code
def _learn(g: Any, at: int, buckets: Any, start: int, count: int, right: int) -> None:
    hits, trials, priors = float64s(g[G_HITS]), float64s(g[G_TRIALS]), float64s(g[G_PRIORS])
    estimates, levels = float64s(g[G_ESTIMATE]), int64s(g[G_LEVELS])
    for place in range(count):
        bucket = at + buckets[start + place]
        hit = hits[bucket]
        if place == right:
            hit += 1.0
        trial = trials[bucket] + 1.0
        if trial > MEMORY:
            trial *= 0.5
            hit *= 0.5
        hits[bucket], trials[bucket] = hit, trial
        estimate = (hit + PRIOR_WEIGHT * priors[bucket]) / (trial + PRIOR_WEIGHT)
        estimates[bucket] = estimate if estimate < SURE else SURE
        level = 0
        for end in LEVELS:
            level += 1 if end < estimate else 0
        levels[bucket] = level


@code
def _says_ngram(g: Any, node: int, truth: int) -> bool:
    n = int64s(g[G_NGRAMS])
    slots = int64s(n[N_SLOTS])
    found = find(slots, n[N_MASK], 1 + KEEP, int64s(g[G_PAIRS])[node])
    return slots[found] != EMPTY and index(slots, found + 1, KEEP, truth) >= 0


@code
def _witness(g: Any, node: int, truth: int, right: int, in_match: int, in_recall: int) -> int:
    meta = int64s(g[G_META])
    m = node * META
    if in_match == 0:
        return C_SUFFIX
    if in_recall == 0:
        return C_CORPUS
    if 0 <= right < meta[m + M_KINDS]:
        kind = int64s(g[G_KINDS])[node * g[G_STRIDE] + right]
        return C_WINDOW if kind // KINDS % 3 == WINDOW else C_LOGITS
    if in_match > 0:
        return C_SUFFIX
    if in_recall > 0:
        return C_CORPUS
    if _says_ngram(g, node, truth):
        return C_NGRAMS
    return C_JACOBI if right >= 0 else C_WINDOW


@code
def _judge(g: Any) -> None:
    """Every proposal at the visited nodes is a label for its bucket."""
    meta, path, truths = int64s(g[G_META]), int64s(g[G_PATH]), int64s(g[G_TRUTHS])
    proposed, cells, kinds, credit = (
        int64s(g[G_PROPOSED]),
        int64s(g[G_CELLS]),
        int64s(g[G_KINDS]),
        int64s(g[G_CREDIT]),
    )
    length = g[G_LENGTH]
    credited = 0
    for i in range(length):
        node, truth = path[i], truths[i]
        m, start = node * META, node * g[G_STRIDE]
        if meta[m + M_ASKED] == 0:
            ask(g, node)
        right = index(proposed, start, meta[m + M_COUNT], truth)
        in_match = index(meta, m + M_MATCH, meta[m + M_MATCHED], truth)
        in_recall = index(meta, m + M_RECALL, meta[m + M_RECALLED], truth)
        _learn(g, g[G_JOINT_AT], cells, start, meta[m + M_COUNT], right)
        _learn(g, meta[m + M_ORDER] * g[G_BUCKETS], kinds, start, meta[m + M_KINDS], right)
        _learn(g, g[G_SUFFIX_AT], meta, m + M_MATCH + 3, meta[m + M_MATCHED], in_match)
        _learn(g, g[G_CORPUS_AT], meta, m + M_RECALL + 3, meta[m + M_RECALLED], in_recall)
        if i < length - 1:
            source = _witness(g, node, truth, right, in_match, in_recall)
            credit[source] += 1
            if source in (C_WINDOW, C_NGRAMS):
                credited += 1
    g[G_CREDITED] = credited


@code
def _record_of(t: Any, key: int) -> int:
    """Where the key's record begins, after giving it one if need be."""
    slots = int64s(t[L_SLOTS])
    at = find(slots, t[L_MASK], 2, key)
    if slots[at] == EMPTY:
        slots[at], slots[at + 1] = key + 1, t[L_NEXT]
        int64s(t[L_KEYS])[t[L_NEXT] & t[L_RING]] = key
        t[L_NEXT] += 1
    return (slots[at + 1] & t[L_RING]) * (1 + 2 * t[L_WIDTH])


@code
def _write(g: Any, t: Any, record: int, node: int, origin: int) -> None:
    """One row goes into its record."""
    words, singles, width = int32s(t[L_RECORDS]), float32s(t[L_RECORDS]), t[L_WIDTH]
    ids, odds, columns = int64s(g[G_IDS]), float32s(g[G_ODDS]), g[G_COLUMNS]
    start = node * columns
    if g[G_SAMPLED]:
        words[record] = columns | origin << 8
        for i in range(columns):
            words[record + 1 + i] = ids[start + i]
        for i in range(columns):
            singles[record + 1 + width + i] = odds[start + i]
        return
    count = 0
    for i in range(columns):
        if i > 0 and not odds[start + i] > FURTHEST:
            break
        count += 1
        words[record + 1 + i] = ids[start + i]
        lag = _bin(odds[start + i])
        if i == 0:
            lag = _bin(odds[start + 1]) if columns > 1 else BINS // 2
        words[record + 1 + width + i] = origin * KINDS + (BINS + lag if i > 0 else lag)
    words[record] = count | origin << 8


@code
def _bin(odds: float) -> int:
    place = odds * np.float32(-FINE)
    return BIN_OF[np.int64(place)] if 0 <= place < 255 else BIN_OF[255]  # NaN is furthest


@code
def _key(g: Any, order: int, node: int) -> int:
    """Key of the last ``order`` + 1 tokens of a row."""
    if order == 0:
        return int64s(g[G_TOKENS])[node]
    pairs, size = int64s(g[G_PAIRS]), g[G_SIZE]
    if order == 1:
        return pairs[node]
    token = int64s(g[G_TOKENS])[node]
    if node == 0:
        return (g[G_TAIL] * size + g[G_TAIL + 1]) * size + token
    return pairs[int64s(g[G_PARENTS])[node]] * size + token


@code
def _write_rows(g: Any) -> None:
    """All rows go into the logit cache, likelier rows later and the path's last."""
    tables, path, records = int64s(g[G_TABLES]), int64s(g[G_PATH]), int64s(g[G_RECORDS])
    count, length = g[G_COUNT], g[G_LENGTH]
    for order in range(3):
        t = int64s(tables[order])
        # All places first: tables are in slow memory after a forward pass, and look-ups wait for it together.
        for i in range(count):
            records[i] = _record_of(t, _key(g, order, count - 1 - i))
        for i in range(count):
            node = count - 1 - i
            origin = REJECTED if node < g[G_WINDOW] else WINDOW
            _write(g, t, records[i], node, origin)
        for i in range(length):
            _write(g, t, records[count - 1 - path[i]], path[i], ON_PATH)
        over = t[L_NEXT] - t[L_OLDEST] - t[L_MOST]
        if over > 0:
            slots, keys = int64s(t[L_SLOTS]), int64s(t[L_KEYS])
            for _ in range(t[L_MOST] // 8 + over):
                remove(slots, t[L_MASK], keys[t[L_OLDEST] & t[L_RING]])
                t[L_OLDEST] += 1


@code
def _answer(g: Any) -> None:
    """By node the target's own token there, as far as it can be told."""
    found, ids, odds, columns = int64s(g[G_FOUND]), int64s(g[G_IDS]), float32s(g[G_ODDS]), g[G_COLUMNS]
    noise, depths, size = int64s(g[G_NOISE]), int64s(g[G_DEPTHS]), g[G_NOISE_SIZE]
    temperature = np.float32(float64s(g[G_FLOATS])[F_TEMPERATURE])
    for node in range(g[G_COUNT]):
        top = start = node * columns
        if g[G_SAMPLED]:
            row = float32s(noise[depths[node]])
            best = np.float32(-np.inf)
            for i in range(start, start + columns):
                if 0 <= ids[i] < size:
                    score = odds[i] / temperature + row[ids[i]]
                    if score > best:
                        best, top = score, i
        found[node] = ids[top]


@code
def _place_answers(g: Any) -> None:
    """J: by depth below the next root, what this step's rows answered there."""
    answers, found, depths = int64s(g[G_ANSWERS]), int64s(g[G_FOUND]), int64s(g[G_DEPTHS])
    for depth in range(DEEPEST):
        answers[4 * depth] = 0
    for node in range(g[G_COUNT]):
        depth = depths[node] - g[G_LENGTH]
        if 0 <= depth < DEEPEST:
            count = answers[4 * depth]
            if count < ANSWERS and index(answers, 4 * depth + 1, count, found[node]) < 0:
                answers[4 * depth + 1 + count] = found[node]
                answers[4 * depth] = count + 1


@code
def study(grower: int) -> None:
    """Learn all that a step can teach: judge the proposals, keep every row, place the answers."""
    g = int64s(grower)
    _judge(g)
    _answer(g)
    if g[G_USE_LOGITS]:
        _write_rows(g)
    if g[G_USE_JACOBI]:
        _place_answers(g)


@code
def keep(ngrams: int, keys: int, tokens: int, count: int) -> None:
    """Two tokens (a key) were followed by a token in the window; there must be room for all of them."""
    n = int64s(ngrams)
    slots, contexts, following = int64s(n[N_SLOTS]), int64s(keys), int64s(tokens)
    width = 1 + KEEP
    for i in range(count):
        at = find(slots, n[N_MASK], width, contexts[i])
        if slots[at] == EMPTY:
            if n[N_USED] >= MAX_KEYS:
                for place in range((n[N_MASK] + 1) * width):
                    slots[place] = EMPTY
                n[N_USED] = 0
                at = find(slots, n[N_MASK], width, contexts[i])
            n[N_USED] += 1
            slots[at], slots[at + 1] = contexts[i] + 1, following[i]
            for j in range(2, width):
                slots[at + j] = -1
        else:
            place = index(slots, at + 1, KEEP, following[i])
            for j in range(place if place >= 0 else KEEP - 1, 0, -1):
                slots[at + 1 + j] = slots[at + j]
            slots[at + 1] = following[i]
