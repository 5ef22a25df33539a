"""Read every row of a step: what the target said behind all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import Scores
from .grow import Grower
from .logits import greedy_entries, sampled_entries

#: Answers kept per position.
ANSWERS = 3


def read_rows(grower: Grower, scores: Scores, path: Sequence[int], window: int, top: int) -> list[int]:
    """Take the best tokens of all rows into the logit cache.

    Args:
        grower: has grown the tree.
        scores: its logits; every row must be readable.
        path: accepted rows.
        window: first row of the window.
        top: tokens kept per row.

    Returns:
        By node the target's own token there, as far as it can be told: the argmax, or that under the noise.
    """
    count = len(grower.tokens)
    ids, odds = scores.top(range(count), top)
    ids, odds = np.asarray(ids), np.asarray(odds, dtype=np.float32)
    noise = grower.noise
    if noise is None:
        answers: list[int] = ids[:, 0].tolist()
    else:
        depths = grower.depths
        table = np.stack([noise(depth) for depth in range(max(depths) + 1)])
        scored = odds / grower.temperature + table[np.array(depths)[:, None], ids]
        answers = ids[np.arange(count), scored.argmax(1)].tolist()
    if grower.use["logits"]:
        make: Any = greedy_entries if noise is None else sampled_entries
        entries = make(ids, odds, path, window)
        # Likelier rows are written later, and the path's last.
        entries.reverse()
        own = [entries[count - 1 - node] for node in path]
        keys = [[*reversed(column), *(column[node] for node in path)] for column in grower.row_keys()]
        grower.tables.logits.write(keys, entries + own)
    return answers


def answers_by_position(grower: Grower, answers: Sequence[int], emitted: int) -> dict[int, list[int]]:
    """J: depth below the next root -> what this step's rows answered at that position, likeliest rows first."""
    found: dict[int, list[int]] = {}
    for depth, token in zip(grower.depths, answers, strict=True):
        if depth >= emitted:
            said = found.get(depth - emitted)
            if said is None:
                found[depth - emitted] = [token]
            elif len(said) < ANSWERS and token not in said:
                said.append(token)
    return found
