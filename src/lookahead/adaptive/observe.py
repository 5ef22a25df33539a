"""Read every row of a step: what the target said behind all of them, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core import Scores
from .grow import Grower
from .logits import ON_PATH, REJECTED, WINDOW, greedy_entries, sampled_entries

#: Answers kept per position.
ANSWERS = 3
#: What a window row's answer weighs beside those of candidates.
WINDOW_WEIGHT = 0.01


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows in the order in which they are taken over: rejected and window rows first, the path last.

    Attributes:
        nodes: node of each row.
        answers: the target's own token there, as far as it can be told: the argmax, or that under the noise.
        depths: of each row.
    """

    nodes: list[int]
    answers: list[int]
    depths: list[int]


def read_rows(grower: Grower, scores: Scores, path: Sequence[int], planted: int, top: int) -> Rows:
    """Take the best tokens of all rows into the logit cache, and tell what they answer.

    Args:
        grower: has grown the tree.
        scores: its logits; every row must be readable.
        path: accepted rows.
        planted: first row of the window.
        top: tokens kept per row.
    """
    count = len(grower.tokens)
    on_path = set(path)
    nodes = [node for node in range(count - 1, -1, -1) if node not in on_path]
    nodes += path
    ids, odds = scores.top(nodes, top)
    ids, odds = np.asarray(ids), np.asarray(odds, dtype=np.float32)
    order = np.array(nodes)
    depths = [grower.depths[node] for node in nodes]
    noise = grower.noise
    if noise is None:
        answers = ids[:, 0].tolist()
    else:
        table = np.stack([noise(depth) for depth in range(max(depths) + 1)])
        scored = odds / grower.temperature + table[np.array(depths)[:, None], ids]
        answers = ids[np.arange(count), scored.argmax(1)].tolist()
    if grower.use["logits"]:
        origins = np.full(count, REJECTED)
        origins[planted:] = WINDOW
        origins[path] = ON_PATH
        make: Callable[..., Any] = greedy_entries if noise is None else sampled_entries
        grower.tables.logits.write(_keys(grower, order), make(ids, odds, origins[order]))
    return Rows(nodes, answers, depths)


def _keys(grower: Grower, order: Any) -> list[list[int]]:
    """Keys of the last one, two and three tokens of every row."""
    vocabulary = grower.vocabulary
    tokens, pairs = np.array(grower.tokens), np.array(grower.pairs)
    above = pairs[np.array(grower.parents)]
    above[0] = grower.tail[0] * vocabulary + grower.tail[1]
    triples = above * vocabulary + tokens
    return [tokens[order].tolist(), pairs[order].tolist(), triples[order].tolist()]


def answers_by_position(grower: Grower, rows: Rows, emitted: int) -> dict[int, list[int]]:
    """J: depth below the next root -> the likeliest answers of this step's rows at that position."""
    weights = grower.probabilities
    known = len(weights)
    found: dict[int, dict[int, float]] = {}
    for node, depth, token in zip(rows.nodes, rows.depths, rows.answers, strict=True):
        depth -= emitted
        if depth >= 0:
            weight = weights[node] if node < known else WINDOW_WEIGHT
            at = found.get(depth)
            if at is None:
                found[depth] = {token: weight}
            else:
                at[token] = at.get(token, 0.0) + weight
    return {
        depth: sorted(at, key=at.__getitem__, reverse=True)[:ANSWERS] if len(at) > 1 else list(at)
        for depth, at in found.items()
    }
