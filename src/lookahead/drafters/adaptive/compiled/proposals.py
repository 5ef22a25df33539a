"""Compiled twin of the asking in ``grow``: what the sources say behind a node."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..calibration import NOTHING, SILENT, STATES, VOICE_JACOBI, VOICE_NGRAM, VOICES
from ..grow import VOICE, ZONE
from ..logits import BINS, EDGES, HEIGHTS, KINDS, SAMPLED_KEEP
from ..observe import KEEP
from .layout import (
    BESIDE,
    DEEPEST,
    EMPTY,
    F_TEMPERATURE,
    G_ANSWERS,
    G_BUCKETS,
    G_CELLS,
    G_CORPUS,
    G_CORPUS_AT,
    G_DEPTHS,
    G_FLOATS,
    G_KINDS,
    G_LEVELS,
    G_META,
    G_NGRAMS,
    G_NOISE,
    G_NOISE_SIZE,
    G_PAIRS,
    G_PARENTS,
    G_PLACES,
    G_PROPOSED,
    G_READER,
    G_RECALLS,
    G_SAID,
    G_SAMPLED,
    G_SIZE,
    G_STRIDE,
    G_SUFFIX_AT,
    G_TABLES,
    G_TAIL,
    G_TOKENS,
    G_USE_LOGITS,
    L_MASK,
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
)
from .memory import code, find, float32s, float64s, index, int32s, int64s
from .tries import match


@code
def look(table: int, key: int) -> int:
    """Where the key's record begins, or -1."""
    t = int64s(table)
    slots = int64s(t[L_SLOTS])
    at = find(slots, t[L_MASK], 2, key)
    return (slots[at + 1] & t[L_RING]) * (1 + 2 * t[L_WIDTH]) if slots[at] != EMPTY else -1


@code
def _under_noise(g: Any, table: int, record: int, depth: int, start: int) -> int:
    """Tokens and kinds of a sampled entry at one position, the best score under its noise first."""
    t = int64s(table)
    words, odds, width = int32s(t[L_RECORDS]), float32s(t[L_RECORDS]), t[L_WIDTH]
    noise, size = float32s(int64s(g[G_NOISE])[depth]), g[G_NOISE_SIZE]
    temperature = np.float32(float64s(g[G_FLOATS])[F_TEMPERATURE])
    proposed, kinds, scores = int64s(g[G_PROPOSED]), int64s(g[G_KINDS]), float32s(g[G_SAID] + 96)
    count, origin = min(words[record] & 255, g[G_STRIDE] - BESIDE), words[record] >> 8
    kept = 0
    for i in range(count):
        token = words[record + 1 + i]
        if not 0 <= token < size:  # a state from a file may hold anything
            continue
        score = odds[record + 1 + width + i] / temperature + noise[token]
        if score != score or (kept == SAMPLED_KEEP and score <= scores[kept - 1]):
            continue
        place = min(kept, SAMPLED_KEEP - 1)
        while place > 0 and score > scores[place - 1]:
            scores[place], proposed[start + place] = scores[place - 1], proposed[start + place - 1]
            place -= 1
        scores[place], proposed[start + place] = score, token
        kept = min(kept + 1, SAMPLED_KEEP)
    if kept == 0:
        return 0
    height = 0
    for edge in HEIGHTS:
        height += 1 if edge < scores[0] else 0
    base = (height * 3 + origin) * KINDS
    kinds[start] = base + BINS // 2
    for place in range(1, kept):
        lag = 0
        for edge in EDGES:
            lag += 1 if edge < scores[0] - scores[place] else 0
        kinds[start + place] = base + BINS + lag
        if place == 1:
            kinds[start] = base + lag
    return kept


@code
def _recalled(g: Any, node: int, meta: Any, start: int) -> int:
    """Proposals of the logit cache: their number; -1 where it knows nothing of the node's last tokens."""
    tokens, pairs, size = int64s(g[G_TOKENS]), int64s(g[G_PAIRS]), g[G_SIZE]
    tables = int64s(g[G_TABLES])
    m = node * META
    meta[m + M_ORDER] = 0
    if g[G_USE_LOGITS] == 0:
        return -1
    above = pairs[int64s(g[G_PARENTS])[node]] if node else g[G_TAIL] * size + g[G_TAIL + 1]
    order = 2
    record = look(tables[2], above * size + tokens[node])
    if record < 0:
        order = 1
        record = look(tables[1], pairs[node])
        if record < 0:
            order = 0
            record = look(tables[0], tokens[node])
            if record < 0:
                return -1
    meta[m + M_ORDER] = order
    if g[G_SAMPLED]:
        return _under_noise(g, tables[order], record, int64s(g[G_DEPTHS])[node], start)
    t = int64s(tables[order])
    words, width = int32s(t[L_RECORDS]), t[L_WIDTH]
    proposed, kinds = int64s(g[G_PROPOSED]), int64s(g[G_KINDS])
    # Another request of this state may keep more tokens than this one has room for.
    count = min(words[record] & 255, g[G_STRIDE] - BESIDE)
    for i in range(count):
        proposed[start + i] = words[record + 1 + i]
        kinds[start + i] = words[record + 1 + width + i]
    return np.int64(count)


@code
def _hear(g: Any, start: int, count: int, token: int, mine: int, nothing: int) -> int:
    """J or P says a token: it moves to another bucket, or is added. Returns the number of proposals."""
    proposed, cells = int64s(g[G_PROPOSED]), int64s(g[G_CELLS])
    at = index(proposed, start, count, token)
    if at < 0:
        proposed[start + count] = token
        cells[start + count] = nothing + mine * VOICE
        return count + 1
    before = cells[start + at] // VOICE % VOICES
    cells[start + at] += (VOICES - 1 - before if before else mine) * VOICE
    return count


@code
def _suffixes(g: Any, node: int, meta: Any, said: Any) -> int:
    """S and G at a node: number of tokens that either says; tokens, then the state of each, go to ``said``."""
    levels = int64s(g[G_LEVELS])
    m = node * META
    count = 0
    if g[G_READER]:
        count = match(g, g[G_READER], int64s(g[G_PLACES]), node, meta, m + M_MATCH)
        for i in range(count):
            said[i] = meta[m + M_MATCH + i]
            said[6 + i] = levels[g[G_SUFFIX_AT] + meta[m + M_MATCH + 3 + i]]
    meta[m + M_MATCHED] = count
    recalled = 0
    if g[G_CORPUS]:
        recalled = match(g, g[G_CORPUS], int64s(g[G_RECALLS]), node, meta, m + M_RECALL)
        for i in range(recalled):
            state = levels[g[G_CORPUS_AT] + meta[m + M_RECALL + 3 + i]]
            at = index(said, 0, count, meta[m + M_RECALL + i])
            if at >= 0:
                said[6 + at] = max(said[6 + at], state)
            else:
                said[count], said[6 + count] = meta[m + M_RECALL + i], state
                count += 1
    meta[m + M_RECALLED] = recalled
    return count


@code
def ask(g: Any, node: int) -> None:
    """What the sources say behind a node."""
    meta, said, levels = int64s(g[G_META]), int64s(g[G_SAID]), int64s(g[G_LEVELS])
    proposed, cells, kinds = int64s(g[G_PROPOSED]), int64s(g[G_CELLS]), int64s(g[G_KINDS])
    depth, pair = int64s(g[G_DEPTHS])[node], int64s(g[G_PAIRS])[node]
    m, start = node * META, node * g[G_STRIDE]
    base = 0 if depth == 0 else ZONE if depth < 3 else 2 * ZONE
    spoken = _suffixes(g, node, meta, said)
    best = 0
    for i in range(spoken):
        best = max(best, said[6 + i])
    silent = base + (SILENT + best if spoken else NOTHING) * STATES
    count = _recalled(g, node, meta, start)
    unheard = NOTHING
    count = max(count, 0)
    meta[m + M_KINDS] = count
    at = meta[m + M_ORDER] * g[G_BUCKETS]
    for i in range(count):
        state = levels[at + kinds[start + i]]
        cells[start + i] = silent + state
        if i == 0:
            unheard = SILENT + state
    for i in range(spoken):
        row = base + said[6 + i] * STATES
        place = index(proposed, start, count, said[i])
        if place >= 0:
            cells[start + place] = row + levels[at + kinds[start + place]]
        else:
            proposed[start + count] = said[i]
            cells[start + count] = row + unheard
            count += 1
    answers = int64s(g[G_ANSWERS])
    if depth < DEEPEST:
        for i in range(answers[4 * depth]):
            mine = VOICE_JACOBI + (1 if i > 0 else 0)
            count = _hear(g, start, count, answers[4 * depth + 1 + i], mine, silent + unheard)
    n = int64s(g[G_NGRAMS])
    slots = int64s(n[N_SLOTS])
    found = find(slots, n[N_MASK], 1 + KEEP, pair)
    if slots[found] != EMPTY:
        for i in range(1, 1 + KEEP):
            if slots[found + i] >= 0:
                count = _hear(g, start, count, slots[found + i], VOICE_NGRAM, silent + unheard)
    meta[m + M_COUNT] = count
    meta[m + M_ASKED] = 1
