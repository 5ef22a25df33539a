"""Learn from a step: what the proposals were worth, and what the target said behind every row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core import Scores
from .logits import KINDS, WINDOW, greedy_entries, sampled_entries

if TYPE_CHECKING:
    from .grow import Grower, Proposals

#: Answers kept per position.
ANSWERS = 3
#: Continuations kept per two tokens, and contexts of the window's n-grams; beyond these they start afresh.
KEEP, MAX_KEYS = 3, 50_000


def judge(grower: Grower, path: Sequence[int], tokens: Sequence[int]) -> int:
    """Judge every proposal at the visited nodes; returns tokens accepted on the window's word."""
    calibrations = grower.tables.calibrations
    last, credited = path[-1], 0
    for node, truth in zip(path, tokens, strict=True):
        seen = grower.proposals(node)
        proposed, cells, order, kinds, matched, buckets, recalled, marks = seen
        right = proposed.index(truth) if truth in proposed else -1
        calibrations.joint.learn(cells, right)
        if kinds:
            calibrations.logits[order].learn(kinds, right)
        if matched:
            calibrations.suffix.learn(buckets, matched.index(truth) if truth in matched else -1)
        if recalled:
            calibrations.corpus.learn(marks, recalled.index(truth) if truth in recalled else -1)
        if node != last:
            name = _witness(grower, node, truth, seen, right)
            grower.credit[name] += 1
            credited += name in ("window", "ngrams")
    return credited


def _witness(grower: Grower, node: int, truth: int, seen: Proposals, right: int) -> str:
    """The source on whose word an accepted token was drafted; the most telling one of several."""
    _, _, _, kinds, matched, _, recalled, _ = seen
    if matched and matched[0] == truth:
        return "suffix"
    if recalled and recalled[0] == truth:
        return "corpus"
    if 0 <= right < len(kinds):
        return "window" if kinds[right] // KINDS % 3 == WINDOW else "logits"
    if truth in matched:
        return "suffix"
    if truth in recalled:
        return "corpus"
    if truth in grower.ngrams.get(grower.pair(node), ()):
        return "ngrams"
    return "jacobi" if right >= 0 else "window"


def read_rows(grower: Grower, scores: Scores, path: Sequence[int], window: int) -> list[int]:
    """Take the best tokens of all rows into the logit cache.

    Args:
        grower: has grown the tree.
        scores: its logits; every row must be readable.
        path: accepted rows.
        window: first row of the window.

    Returns:
        By node the target's own token there, as far as it can be told: the argmax, or that under the noise.
    """
    count = len(grower.tokens)
    ids, odds = scores.top(range(count), grower.top)
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


def keep_ngram(ngrams: dict[int, list[int]], key: int, token: int) -> None:
    """P: in the window a token followed two others, whose key is given."""
    known = ngrams.get(key)
    if known is None:
        if len(ngrams) >= MAX_KEYS:
            ngrams.clear()
        ngrams[key] = [token]
    elif known[0] != token:
        if token in known:
            known.remove(token)
        known.insert(0, token)
        del known[KEEP:]
