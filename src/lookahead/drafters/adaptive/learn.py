"""Learning from a step: compare every proposal with the target's own tokens, and keep what the logits show.

``learn`` is called once per step for which a tree was grown. It updates, in this order, the buckets (which kinds of
proposals were correct), the target's token under each row, and the memories of the sources.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from ...machine_code import compiled, entry, int64
from .calibration import count
from .layout import index_of, noise_of
from .memory import Memory
from .rows import expected_tokens
from .sources import SOURCES
from .sources.source import chain
from .tree_growth import TEXTS, add, ask

_judge_all, _learn_all, _feed_all = (chain(SOURCES, name) for name in ("judge", "learn", "feed"))


@compiled
def _source_of(memory: Memory, node: int, right: int, truth: int) -> int:
    """The number of the source to credit with an accepted token: a text source that ranks it first, or else the first
    one that proposed it; -1 if none did."""
    for number in range(TEXTS):
        if memory.tree.matches[number, node, 0].token == truth:
            return number
    return int64(memory.tree.proposals[node, right].source) if right >= 0 else -1


@compiled
def _judge(memory: Memory, length: int) -> None:
    """Count hits and trials of every proposal under the accepted rows.

    The target's token is known under each of these rows, so every proposal there is counted, whether or not it became
    a row of the tree.
    """
    for i in range(length):
        node, truth = memory.path[i], memory.tokens[i]
        row = memory.tree.nodes[node]
        proposals = memory.tree.proposals[node]
        if row.asked == 0:
            ask(memory, node)
        right = index_of(proposals, row.proposals, truth)
        for index in range(row.proposals):
            if proposals[index].joint >= 0:
                count(memory.joint[proposals[index].joint], index == right)
        _judge_all(memory, node, right, truth)
        if i < length - 1:
            source = _source_of(memory, node, right, truth)
            if source >= 0:
                memory.credit[source] += 1


@compiled
def _find_own(memory: Memory, ids: Any, odds: Any) -> None:
    """The target's token under each row: the argmax of its logits, with the noise added when sampling; -1 for NaN.

    Only the best tokens of a row are known, so sampling may miss a token with large noise.
    """
    step = memory.step[0]
    temperature = np.float32(step.temperature)
    for node in range(memory.tree.sizes[0].rows):
        best = 0
        if step.sampled:
            depth = int64(memory.tree.nodes[node].depth)
            highest = np.float32(-np.inf)
            for i in range(ids.shape[1]):
                token = ids[node, i]
                if 0 <= token < step.vocabulary:
                    score = odds[node, i] / temperature + noise_of(memory, depth, token)
                    if score > highest:
                        highest = score
                        best = i
        memory.own[node] = -1 if np.isnan(odds[node, 0]) else ids[node, best]


@compiled
def _append(memory: Memory, length: int) -> None:
    """Append the emitted tokens to the sequence."""
    step = memory.step[0]
    for i in range(length):
        step.before, step.previous, step.last = step.previous, step.last, memory.tokens[i]
    step.position += length
    _feed_all(memory, length)


@entry
def learn(
    memory: Memory,
    ids: Annotated[Any, "i4", 2],
    odds: Annotated[Any, "f4", 2],
    length: int,
    rows: int,
) -> None:
    """Learn from the result of a step.

    Fills in ``memory.own``, adds to ``memory.credit`` and sets ``step.expected``.

    Args:
        memory: the memory. Rows from ``sizes.rows`` on were added by others; their token and parent are set.
        ids, odds: (rows, top) int32 and float32: the best tokens under each row, and their log-odds against the best.
            Nothing is learned from rows of NaN (a token that is not the target's own may overflow float16).
        length: number of accepted rows and emitted tokens, at the start of ``memory.path`` and ``memory.tokens``.
        rows: number of rows in the step.
    """
    memory.step[0].expected = expected_tokens(memory)
    for node in range(memory.tree.sizes[0].rows, rows):
        add(memory, int64(memory.tree.nodes[node].parent), int64(memory.tree.nodes[node].token), 0.0)
    _judge(memory, length)
    _find_own(memory, ids, odds)
    _learn_all(memory, ids, odds, length)
    _append(memory, length)


@entry
def append(memory: Memory, length: int) -> None:
    """Append the first ``length`` of ``memory.tokens`` to the sequence without a step."""
    _append(memory, length)
