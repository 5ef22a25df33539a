"""Learning from a step: compare every proposal with the target's own tokens, and keep every row's logits.

``learn`` is called once per step for which a tree was grown. It updates, in this order, the calibration (which kinds
of proposals were correct), the target's token under each row, the logit cache, the answers for the next step, and the
texts of the suffix tries.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...jit import compiled, entry, int64
from .calibration import count
from .grow import add, ask
from .memory import ANSWERS, CORPUS, MATCHES, SUFFIX, Memory, index_of, noise_of, unpack
from .rows import expected_tokens
from .sources.light_head import guess_level
from .sources.logit_cache import write_rows
from .sources.suffix import feed

#: The sources credited with accepted tokens.
CREDITED = ("suffix", "logits", "base", "jacobi", "corpus", "head")
BY_SUFFIX, BY_LOGITS, BY_BASE, BY_ANSWERS, BY_CORPUS, BY_HEAD = range(6)


@compiled
def _source_of(memory: Memory, node: int, right: int, matched: int, recalled: int) -> int:
    """The source to credit with an accepted token: the most specific one that proposed it; -1 if none did."""
    row = memory.tree.nodes[node]
    if matched == 0:
        return BY_SUFFIX
    if recalled == 0:
        return BY_CORPUS
    if 0 <= right < row.cached:
        return BY_LOGITS
    if 0 <= right < row.recalled:
        return BY_BASE
    if matched > 0:
        return BY_SUFFIX
    if recalled > 0:
        return BY_CORPUS
    if right >= 0 and memory.tree.proposals[node, right].joint < 0:
        return BY_HEAD
    return BY_ANSWERS if right >= 0 else -1


@compiled
def _judge_matches(memory: Memory, source: int, node: int, truth: int) -> int:
    """Count hits and trials of the suffix matches at a node. Returns the index of the correct match, or -1."""
    matches = memory.tree.matches[source, node]
    right = index_of(matches, MATCHES, truth)
    for index in range(MATCHES):
        if matches[index].token < 0:
            break
        count(memory.calibration.matches[source, matches[index].bucket], index == right)
    return right


@compiled
def _judge_guesses(memory: Memory, node: int, right: int) -> None:
    """Count hits and trials of the light head's guesses at a node, alone and together with the other sources."""
    row = memory.tree.nodes[node]
    proposals = memory.tree.proposals[node]
    calibration = memory.calibration
    kinds = memory.guesses.kinds[row.guess]
    level = guess_level(row)
    for index in range(row.proposals):
        count(calibration.both[proposals[index].both], index == right)
        if proposals[index].guess >= 0:
            count(calibration.guesses[level, kinds[proposals[index].guess]], index == right)


@compiled
def _judge(memory: Memory, length: int) -> None:
    """Count hits and trials of every proposal under the accepted rows.

    The target's token is known under each of these rows, so every proposal there is counted, whether or not it became
    a row of the tree.
    """
    calibration = memory.calibration
    for i in range(length):
        node, truth = memory.path[i], memory.tokens[i]
        row = memory.tree.nodes[node]
        proposals = memory.tree.proposals[node]
        if row.asked == 0:
            ask(memory, node)
        # The joint buckets, and those of the light head.
        right = index_of(proposals, row.proposals, truth)
        for index in range(row.proposals):
            if proposals[index].joint >= 0:
                count(calibration.joint[proposals[index].joint], index == right)
        if row.guess >= 0:
            _judge_guesses(memory, node, right)
        # The buckets of the logit cache and of the base table.
        for index in range(row.recalled):
            proposal = proposals[index]
            if proposal.pair >= 0:
                count(calibration.pairs[proposal.pair], index == right)
            if proposal.kind >= 0:
                count(calibration.logits[row.order, proposal.kind], index == right)
            if proposal.base_kind >= 0:
                count(calibration.base[proposal.base_kind], index == right)
        # The suffix matches, and the source to credit with an accepted token.
        matched = _judge_matches(memory, SUFFIX, node, truth)
        recalled = _judge_matches(memory, CORPUS, node, truth)
        if i < length - 1:
            source = _source_of(memory, node, right, matched, recalled)
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
def _keep_answers(memory: Memory, length: int) -> None:
    """Keep the target's tokens under this step's rows, by depth below the next root, in row order."""
    answers = memory.answers
    own = memory.own
    answers[:] = -1
    for node in range(memory.tree.sizes[0].rows):
        depth = memory.tree.nodes[node].depth - length
        if 0 <= depth < len(answers) and own[node] >= 0:
            for index in range(ANSWERS):
                if answers[depth, index] == own[node]:
                    break
                if answers[depth, index] < 0:
                    answers[depth, index] = own[node]
                    break


@compiled
def _append(memory: Memory, length: int) -> None:
    """Append the emitted tokens to the sequence and to both tries."""
    step = memory.step[0]
    for i in range(length):
        step.before, step.previous, step.last = step.previous, step.last, memory.tokens[i]
    step.position += length
    for text in memory.texts:
        if len(text.contexts) > 0:
            feed(text, memory.tokens, length)


@entry
def learn(packed: Any, ids: Any, odds: Any, length: int, rows: int) -> None:
    """Update the calibration, the logit cache, the answers and the texts from the result of a step.

    Fills in ``memory.own``, adds to ``memory.credit`` and sets ``step.expected``.

    Args:
        packed: the memory. Rows from ``sizes.rows`` on were added by others; their token and parent are set.
        ids, odds: (rows, top) int32 and float32: the best tokens under each row, and their log-odds against the best.
            Nothing is learned from rows of NaN (a token that is not the target's own may overflow float16).
        length: number of accepted rows and emitted tokens, at the start of ``memory.path`` and ``memory.tokens``.
        rows: number of rows in the step.
    """
    memory = unpack(packed)
    memory.step[0].expected = expected_tokens(memory)
    for node in range(memory.tree.sizes[0].rows, rows):
        add(memory, int64(memory.tree.nodes[node].parent), int64(memory.tree.nodes[node].token), 0.0)
    _judge(memory, length)
    _find_own(memory, ids, odds)
    if memory.step[0].use_logits:
        write_rows(memory, ids, odds, length)
    if memory.step[0].use_answers:
        _keep_answers(memory, length)
    _append(memory, length)


@entry
def append(packed: Any, length: int) -> None:
    """Append the first ``length`` of ``memory.tokens`` to the sequence without a step."""
    _append(unpack(packed), length)
