"""The light head as a source: guesses of a small trained network under some rows of the tree.

The network (``models.head_file``) reads the hidden state of the last accepted row, so the target must give hidden
states. Under the root it guesses the next tokens; from its own guess of the next hidden state it can guess under
deeper rows, each of which takes another call. ``grow`` stops where a guess is wanted, ``GuessSource.guess`` asks the
network, and ``grow`` goes on.

A guess's bucket when decoding greedily is the level (first for the root's guesses, then by depth) and the interval of
the head's own probability. When sampling, the guesses are ranked with the noise of their position, and the bucket is
the level and what ``logit_cache`` uses too: the height of the best score, and leads or distances. The starting counts
of these buckets come with the head. The confidence level of its bucket, together with that of all other sources,
selects the bucket in ``Calibration.both``, whose probability is that of the edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ....jit import compiled, int64
from ..calibration import (
    BINS,
    DISTANCES,
    GUESS_LEVELS,
    HEIGHTS,
    KINDS,
    NO_SECOND,
    NOTHING,
    OTHER,
    PROBABILITIES,
    STATES,
    interval_of,
)
from ..memory import GUESSES, Memory, noise_of

#: Guesses of a row that are read; when sampling, ``GUESSES`` of them are proposed.
READ, READ_SAMPLED = GUESSES, 24
#: Rows of the tree under which the head guesses in one step.
GUESS_ROWS = 16
#: What the guesses of a level bring, in tokens, where the row is certain to be reached and the other sources propose
#: nothing. A guess is asked for if it brings more than its time is worth.
GAINS = np.array([0.3, 0.15, 0.15])


class LightHead(Protocol):
    """A head for one model.

    Attributes:
        levels: levels that it was trained for.
        counts: "greedy" and "sampled" -> (hits, trials) of its buckets, each (levels, kinds).
        cost: seconds of a call in plain steps of the model.
    """

    levels: int
    counts: Mapping[str, tuple[Any, Any]]
    cost: float

    def guess(self, states: Any, tokens: Sequence[int], k: int) -> tuple[Any, Any, Any]:
        """What follows each of n tokens, given the hidden state under which it was emitted or guessed.

        Returns:
            the guessed states under the tokens (n, hidden) fp32, the best tokens (n, <= k) int32, best first, and the
            logarithms of their probabilities (n, <= k) fp32.
        """
        ...


@compiled
def greedy_guess_kind(logarithm: float) -> int:
    """The bucket of a guess of one level, from the logarithm of its probability."""
    return interval_of(PROBABILITIES, np.exp(logarithm))


@compiled
def _rank(memory: Memory, node: int) -> None:
    """Choose the guesses under a row that are proposed, best first, and their buckets."""
    row, step, guesses = memory.tree.nodes[node], memory.step[0], memory.guesses
    ids, logs = guesses.ids[row.guess], guesses.logs[row.guess]
    tokens, kinds, scores = guesses.tokens[row.guess], guesses.kinds[row.guess], guesses.scores
    tokens[:] = -1
    if step.sampled == 0:
        for index in range(min(len(tokens), len(ids))):
            tokens[index], kinds[index] = ids[index], greedy_guess_kind(logs[index])
        return
    temperature = np.float32(step.temperature)
    kept = 0
    for i in range(len(ids)):
        if ids[i] < 0 or ids[i] >= step.vocabulary:
            continue
        score = (logs[i] - logs[0]) / temperature + noise_of(memory, int64(row.depth), ids[i])
        if kept == len(tokens) and score <= scores[kept - 1]:
            continue
        index = min(kept, len(tokens) - 1)
        while index > 0 and score > scores[index - 1]:
            scores[index], tokens[index] = scores[index - 1], tokens[index - 1]
            index -= 1
        scores[index], tokens[index] = score, ids[i]
        kept = min(kept + 1, len(tokens))
    base = interval_of(HEIGHTS, scores[0]) * KINDS
    for index in range(1, kept):
        kinds[index] = base + BINS + interval_of(DISTANCES, scores[0] - scores[index])
    kinds[0] = base + (interval_of(DISTANCES, scores[0] - scores[1]) if kept > 1 else NO_SECOND)


def sampled_guess_kinds(scores: Any) -> Any:
    """The buckets of sampled guesses, as in ``_rank``, from their scores (n, k), highest first."""
    best, height = scores[:, :1], np.searchsorted(HEIGHTS, scores[:, 0])[:, None]
    kinds = height * KINDS + BINS + np.searchsorted(DISTANCES, best - scores)
    kinds[:, 0] = height[:, 0] * KINDS + NO_SECOND
    if scores.shape[1] > 1:
        kinds[:, 0] = kinds[:, 1] - BINS
    return kinds


@compiled
def guess_level(row: Any) -> int:
    """The level of the guesses under a row, from 0."""
    return min(int64(row.depth), GUESS_LEVELS - 1)


@compiled
def combine(memory: Memory, node: int) -> None:
    """Add the head's guesses under a row to the proposals of the other sources, and select the bucket of each."""
    row, proposals, calibration = memory.tree.nodes[node], memory.tree.proposals[node], memory.calibration
    _rank(memory, node)
    tokens, kinds = memory.guesses.tokens[row.guess], memory.guesses.kinds[row.guess]
    level = guess_level(row)
    buckets = calibration.guesses[level]
    # The state of the other sources.
    count, others = row.proposals, NOTHING
    for index in range(count):
        confidence = calibration.joint[proposals[index].joint].level
        proposals[index].both, proposals[index].guess = confidence, -1
        others = OTHER + confidence if others == NOTHING else max(others, OTHER + confidence)
    # The guesses: some are proposed by others too.
    for guess in range(len(tokens)):
        if tokens[guess] < 0:
            break
        index = 0
        while index < count and proposals[index].token != tokens[guess]:
            index += 1
        if index == count:
            proposals[index].token, proposals[index].joint, proposals[index].both = tokens[guess], -1, others
            count += 1
        proposals[index].guess = guess
    # The state of the head.
    missed = OTHER + buckets[kinds[0]].level
    for index in range(count):
        guess = proposals[index].guess
        state = buckets[kinds[guess]].level if guess >= 0 else missed
        proposals[index].both += (level * STATES + state) * STATES
    row.proposals = count


class GuessSource:
    """Asks the head for one sequence.

    Args:
        head: the head.
        sampled: whether tokens are sampled.

    Attributes:
        used: calls of the head for this tree.
        calls: all calls.
    """

    def __init__(self, head: LightHead, sampled: bool) -> None:
        self.head, self._k = head, READ_SAMPLED if sampled else READ
        self.used = self.calls = 0
        self._states: Any = None

    def begin(self) -> None:
        """Begin a new tree."""
        self.used = 0

    def guess(self, memory: Memory, hidden: Any) -> None:
        """Guess under the row ``step.wanted``: the root, or a row whose parent has guesses.

        Args:
            hidden: the hidden state under which the root's token was emitted, (hidden,) fp32.
        """
        nodes, node = memory.tree.nodes, int(memory.step["wanted"][0])
        state = hidden if node == 0 else self._states[nodes["guess"][nodes["parent"][node]]]
        states, ids, logs = self.head.guess(state[None], [int(nodes["token"][node])], self._k)
        if self._states is None:
            self._states = np.empty((GUESS_ROWS, states.shape[1]), np.float32)
        row, columns, guesses = self.used, ids.shape[1], memory.guesses
        self._states[row] = states[0]
        guesses.ids[row] = -1
        guesses.ids[row, :columns], guesses.logs[row, :columns] = ids[0], logs[0]
        nodes["guess"][node] = row
        self.used += 1
        self.calls += 1

    @property
    def is_full(self) -> bool:
        """Whether no more rows can have guesses in this step."""
        return self.used == GUESS_ROWS
