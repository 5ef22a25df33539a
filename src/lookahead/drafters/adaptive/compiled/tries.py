"""Compiled twin of ``suffix``: feeding a trie, and what it says at a node of the tree."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..suffix import (
    COUNT,
    DEPTH,
    FIELDS,
    FIRST,
    LINK,
    MARK,
    ORDERS,
    SECOND,
    SHARES,
    SHIFT,
    THIRD,
    TOKEN,
    TOTAL,
)
from .layout import (
    EMPTY,
    G_PARENTS,
    G_TOKENS,
    R_ACTIVE,
    R_FIRST,
    R_GENERATION,
    R_MARK,
    R_TRIE,
    T_GENERATION,
    T_MASK,
    T_NODES,
    T_ORDER,
    T_SLOTS,
    T_USED,
)
from .memory import code, find, int32s, int64s


@code
def _rise(nodes: Any, context: int, node: int) -> None:
    count = nodes[node * FIELDS + COUNT]
    at = context * FIELDS
    first, second, third = nodes[at + FIRST], nodes[at + SECOND], nodes[at + THIRD]
    if first == 0 or count >= nodes[first * FIELDS + COUNT]:
        nodes[at + FIRST] = node
        if second != node:
            nodes[at + THIRD] = second
        nodes[at + SECOND] = first
    elif node == second:
        return
    elif second == 0 or count >= nodes[second * FIELDS + COUNT]:
        nodes[at + SECOND], nodes[at + THIRD] = node, second
    elif third == 0 or count >= nodes[third * FIELDS + COUNT]:
        nodes[at + THIRD] = node


@code
def feed(reader: int, tokens: int, count: int) -> None:
    """The text goes on; the trie must have room for (order + 1) * count nodes more."""
    r = int64s(reader)
    t = int64s(r[R_TRIE])
    nodes, slots, mask, longest = int32s(t[T_NODES]), int64s(t[T_SLOTS]), t[T_MASK], t[T_ORDER] + 1
    used, text, active = t[T_USED], int64s(tokens), r[R_ACTIVE]
    for i in range(count):
        token = text[i]
        link = 0
        for length in range(1, active + 1):
            context = r[R_FIRST + length - 1]
            # The contexts that follow replace these from the second on, each after it was read.
            if length > 1:
                r[R_FIRST + length - 1] = link
            nodes[context * FIELDS + TOTAL] += 1
            key = context << SHIFT | token
            at = find(slots, mask, 2, key)
            if slots[at] == EMPTY:
                node = used
                used += 1
                slots[at], slots[at + 1] = key + 1, node
                new = node * FIELDS
                nodes[new + COUNT], nodes[new + TOTAL], nodes[new + LINK] = 1, 0, link
                nodes[new + TOKEN], nodes[new + DEPTH], nodes[new + MARK] = token, length, r[R_MARK]
                nodes[new + FIRST], nodes[new + SECOND], nodes[new + THIRD] = 0, 0, 0
            else:
                node = slots[at + 1]
                nodes[node * FIELDS + COUNT] += 1
                nodes[node * FIELDS + MARK] = r[R_MARK]
            if nodes[context * FIELDS + FIRST] != node:
                _rise(nodes, context, node)
            link = node
        if active < longest:
            r[R_FIRST + active] = link
            active += 1
    r[R_ACTIVE] = active
    t[T_USED] = used


@code
def _followed(nodes: Any, state: int) -> int:
    while state != 0 and nodes[state * FIELDS + TOTAL] == 0:
        state = np.int64(nodes[state * FIELDS + LINK])
    return state


@code
def _follow(trie: Any, state: int, token: int) -> int:
    nodes, slots = int32s(trie[T_NODES]), int64s(trie[T_SLOTS])
    while True:
        at = find(slots, trie[T_MASK], 2, state << SHIFT | token)
        if slots[at] != EMPTY:
            return _followed(nodes, slots[at + 1])
        if state == 0:
            return 0
        state = np.int64(nodes[state * FIELDS + LINK])


@code
def _successor(nodes: Any, node: int, total: int, base: int, mark: int, out: Any, at: int) -> None:
    count = nodes[node * FIELDS + COUNT]
    place = 4
    if count != total:
        share = count / total
        place = 0
        for least in SHARES:
            if share > least:
                place += 1
    often = 0 if count == 1 else 2 if count < 4 else 4
    out[at] = nodes[node * FIELDS + TOKEN]
    out[at + 3] = base + place * 6 + often + (1 if nodes[node * FIELDS + MARK] == mark else 0)


@code
def match(g: Any, reader: int, places: Any, node: int, out: Any, at: int) -> int:
    """Successors of the longest suffix that matches at a node: their number; tokens and buckets go out."""
    r = int64s(reader)
    trie = int64s(r[R_TRIE])
    if r[R_GENERATION] != trie[T_GENERATION]:  # another text has filled it since
        return 0
    nodes, tokens, parents = int32s(trie[T_NODES]), int64s(g[G_TOKENS]), int64s(g[G_PARENTS])
    while places[node] < 0:
        n = node
        while n > 0 and places[parents[n]] < 0:
            n = parents[n]
        if n == 0:
            places[0] = _followed(nodes, r[R_FIRST + r[R_ACTIVE] - 1])
        else:
            places[n] = _follow(trie, places[parents[n]], tokens[n])
    state = places[node]
    if state == 0:
        return 0
    here = state * FIELDS
    base = (min(np.int64(nodes[here + DEPTH]), ORDERS) - 1) * 30
    total = nodes[here + TOTAL]
    first = nodes[here + FIRST]
    _successor(nodes, first, total, base, r[R_MARK], out, at)
    if nodes[first * FIELDS + COUNT] == total:
        return 1
    found = 1
    for field in (SECOND, THIRD):
        other = nodes[here + field]
        if other != 0:
            _successor(nodes, other, total, base, r[R_MARK], out, at + found)
            found += 1
    return found
