"""Compiled twin of ``grow``: the likeliest rows first."""

from __future__ import annotations

from typing import Any

from ..calibration import SURE
from ..grow import FLOOR, HASTE, LEAST, MOST
from .layout import (
    DONE,
    F_FLOOR,
    F_LAST,
    G_CELLS,
    G_COUNT,
    G_DEPTH,
    G_DEPTHS,
    G_EDGE_COUNTS,
    G_EDGE_TOKENS,
    G_EDGES,
    G_ESTIMATE,
    G_FLOATS,
    G_HEAP,
    G_HEAP_KEYS,
    G_HEAP_NUMBERS,
    G_JOINT_AT,
    G_META,
    G_NOISE,
    G_PAIRS,
    G_PARENTS,
    G_PLACES,
    G_PROBABILITIES,
    G_PROPOSED,
    G_RECALLS,
    G_ROWS,
    G_SAMPLED,
    G_SIZE,
    G_STOP,
    G_STRIDE,
    G_TAIL,
    G_TOKENS,
    M_ASKED,
    M_COUNT,
    META,
    SHORT,
)
from .memory import code, float64s, int64s
from .proposals import ask


@code
def _expand(g: Any, node: int, probability: float, floor: float) -> int:
    """Edges under a node, the likeliest first; returns their number."""
    ask(g, node)
    estimate, cells, proposed = float64s(g[G_ESTIMATE]), int64s(g[G_CELLS]), int64s(g[G_PROPOSED])
    edges, edge_tokens = float64s(g[G_EDGES]), int64s(g[G_EDGE_TOKENS])
    start, joint = node * g[G_STRIDE], g[G_JOINT_AT]
    count = int64s(g[G_META])[node * META + M_COUNT]
    total = 0.0
    for i in range(count):
        total += estimate[joint + cells[start + i]]
    scale = -probability if total <= SURE else -probability * SURE / total
    least = max(floor / probability, LEAST)
    found = 0
    for i in range(count):
        value = estimate[joint + cells[start + i]]
        if value > least:
            p, token = value * scale, proposed[start + i]
            place = start + found
            while place > start and (
                edges[place - 1] > p or (edges[place - 1] == p and edge_tokens[place - 1] > token)
            ):
                edges[place], edge_tokens[place] = edges[place - 1], edge_tokens[place - 1]
                place -= 1
            edges[place], edge_tokens[place] = p, token
            found += 1
    int64s(g[G_EDGE_COUNTS])[node] = found
    return found


@code
def _sink(keys: Any, numbers: Any, size: int, key: float, number: int) -> None:
    """Put an entry in place of a heap's first."""
    place = 0
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        other = below + 1
        if other < size and (
            keys[other] < keys[below] or (keys[other] == keys[below] and numbers[other] < numbers[below])
        ):
            below = other
        if key < keys[below] or (key == keys[below] and number < numbers[below]):
            break
        keys[place], numbers[place] = keys[below], numbers[below]
        place = below
    keys[place], numbers[place] = key, number


@code
def _push(keys: Any, numbers: Any, size: int, key: float, number: int) -> None:
    place = size
    while place > 0:
        above = (place - 1) // 2
        if keys[above] < key or (keys[above] == key and numbers[above] < number):
            break
        keys[place], numbers[place] = keys[above], numbers[above]
        place = above
    keys[place], numbers[place] = key, number


@code
def _plant_root(g: Any) -> None:
    tokens, parents, depths, pairs = (
        int64s(g[G_TOKENS]),
        int64s(g[G_PARENTS]),
        int64s(g[G_DEPTHS]),
        int64s(g[G_PAIRS]),
    )
    tokens[0], parents[0], depths[0] = g[G_TAIL + 2], -1, 0
    pairs[0] = g[G_TAIL + 1] * g[G_SIZE] + g[G_TAIL + 2]
    float64s(g[G_PROBABILITIES])[0] = 1.0
    float64s(g[G_HEAP_KEYS])[0] = -1.0
    int64s(g[G_HEAP_NUMBERS])[0] = -1
    unseen(g, 0)
    g[G_COUNT], g[G_HEAP] = 1, 1


@code
def unseen(g: Any, node: int) -> None:
    int64s(g[G_META])[node * META + M_ASKED] = 0
    int64s(g[G_PLACES])[node] = -1
    int64s(g[G_RECALLS])[node] = -1


@code
def _run(g: Any, floor: float) -> int:
    """Take nodes from the heap. DONE, SHORT where edges below the floor are needed, or the noise wanted."""
    tokens, parents, depths, pairs = (
        int64s(g[G_TOKENS]),
        int64s(g[G_PARENTS]),
        int64s(g[G_DEPTHS]),
        int64s(g[G_PAIRS]),
    )
    probabilities, keys, numbers = (
        float64s(g[G_PROBABILITIES]),
        float64s(g[G_HEAP_KEYS]),
        int64s(g[G_HEAP_NUMBERS]),
    )
    edges, edge_tokens, edge_counts = float64s(g[G_EDGES]), int64s(g[G_EDGE_TOKENS]), int64s(g[G_EDGE_COUNTS])
    noise, stop, stride, rows = int64s(g[G_NOISE]), float64s(g[G_STOP]), g[G_STRIDE], g[G_ROWS]
    while g[G_HEAP] > 0 and g[G_COUNT] < rows:
        p, number, size, count = keys[0], numbers[0], g[G_HEAP], g[G_COUNT]
        if number < 0:
            node = ~number
            if g[G_SAMPLED] and noise[depths[node]] == 0:
                return depths[node]
            if _expand(g, node, probabilities[node], floor):
                _sink(keys, numbers, size, edges[node * stride], node * MOST)
            else:
                g[G_HEAP] = size - 1
                _sink(keys, numbers, size - 1, keys[size - 1], numbers[size - 1])
            continue
        if g[G_STOP] and -p < stop[count]:
            return DONE
        node, place = number // MOST, number % MOST
        token = edge_tokens[node * stride + place]
        if place + 1 < edge_counts[node]:
            _sink(keys, numbers, size, edges[node * stride + place + 1], number + 1)
        else:
            size -= 1
            _sink(keys, numbers, size, keys[size], numbers[size])
        depth = depths[node] + 1
        pairs[count] = tokens[node] * g[G_SIZE] + token
        tokens[count], parents[count], depths[count], probabilities[count] = token, node, depth, -p
        unseen(g, count)
        if depth < g[G_DEPTH] and -p > floor:
            _push(keys, numbers, size, p * HASTE, ~count)
            size += 1
        g[G_HEAP] = size
        g[G_COUNT] = count + 1
    return DONE if g[G_COUNT] == rows or floor == 0.0 else SHORT


@code
def grow(grower: int, fresh: bool) -> int:
    """Grow a tree, or go on growing it. Returns DONE, or the depth whose noise must be handed in first."""
    g = int64s(grower)
    f = float64s(g[G_FLOATS])
    if fresh:
        f[F_FLOOR] = f[F_LAST]
        _plant_root(g)
    if g[G_DEPTH] >= 1:
        while True:
            code = _run(g, f[F_FLOOR])
            if code >= 0:
                return code
            if code == DONE:
                break
            f[F_FLOOR] = 0.0
            _plant_root(g)
    count, rows = g[G_COUNT], g[G_ROWS]
    f[F_LAST] = float64s(g[G_PROBABILITIES])[count - 1] * FLOOR if count == rows and rows > 1 else 0.0
    return DONE


@code
def adopt(grower: int, own: int, count: int) -> None:
    """Rows from ``own`` on were added by others: tokens, parents and depths are in place already."""
    g = int64s(grower)
    tokens, parents, pairs = int64s(g[G_TOKENS]), int64s(g[G_PARENTS]), int64s(g[G_PAIRS])
    for node in range(own, count):
        pairs[node] = tokens[parents[node]] * g[G_SIZE] + tokens[node]
        unseen(g, node)
    g[G_COUNT] = count
