"""The light head as a source: guesses of a small trained network under some rows of the tree.

The network (``head_file``) reads the hidden state of the last accepted row, so the target must provide hidden
states. Under the root it guesses the next tokens; from its own guess of the next hidden state it can guess under
deeper rows, with one more call for each. ``grow`` returns when it needs a guess, ``GuessSource.guess`` calls the
network, and ``grow`` continues.

In greedy decoding, a guess's bucket is given by the level (0 for the root's guesses, then by depth) and the interval
of the head's own probability. When sampling, the guesses are ranked with the noise of their position, and the bucket
is given by the level and the features that ``logit_cache`` uses: the height of the best score, and leads or
distances. The head provides the initial counts of these buckets. The confidence level of its bucket and that of all
other sources together select the bucket in ``Calibration.both``, whose probability is the edge's.
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

#: Number of guesses read per row; when sampling, ``GUESSES`` of them are proposed.
READ, READ_SAMPLED = GUESSES, 24
#: Largest number of rows of the tree under which the head guesses in one step.
GUESS_ROWS = 16
#: The gain from a call at each level, in tokens, if the row is certain to be reached and the other sources propose
#: nothing. The head is called if the gain exceeds the value of its time.
GAINS = np.array([0.3, 0.15, 0.15])


class LightHead(Protocol):
    """A head for one model.

    Attributes:
        hidden: size of a hidden state.
        levels: number of levels that it was trained for.
        counts: "greedy" and "sampled" -> (hits, trials) of its buckets, each (levels, kinds).
        cost: the cost of a call in plain steps of the model: the weights that a call reads over those of the model.
    """

    hidden: int
    levels: int
    counts: Mapping[str, tuple[Any, Any]]
    cost: float

    def guess(self, states: Any, tokens: Sequence[int], k: int) -> tuple[Any, Any, Any]:
        """The guessed successors of each of n tokens.

        Args:
            states: (n, hidden) fp32, the hidden state under which each token was emitted or guessed.
            tokens: n token ids.
            k: largest number of successors.

        Returns:
            (states, ids, log-probabilities): the guessed states under the tokens (n, hidden) fp32, the best tokens
            (n, <= k) int32, best first, and their log-probabilities (n, <= k) fp32.
        """
        ...


@compiled
def greedy_guess_kind(logarithm: float) -> int:
    """The bucket of a guess within its level, from its log-probability."""
    return interval_of(PROBABILITIES, np.exp(logarithm))


@compiled
def _rank(memory: Memory, node: int) -> None:
    """Choose the guesses to propose under a row, best first, and their buckets."""
    row = memory.tree.nodes[node]
    step = memory.step[0]
    guesses = memory.guesses
    ids, logs = guesses.ids[row.guess], guesses.logs[row.guess]
    tokens, kinds, scores = guesses.tokens[row.guess], guesses.kinds[row.guess], guesses.scores
    tokens[:] = -1
    if step.sampled == 0:
        for index in range(min(len(tokens), len(ids))):
            if np.isnan(logs[index]):  # the head has overflowed
                break
            tokens[index], kinds[index] = ids[index], greedy_guess_kind(logs[index])
        return

    # Sampling: insertion sort by score with noise.
    temperature = np.float32(step.temperature)
    kept = 0
    for i in range(len(ids)):
        if ids[i] < 0 or ids[i] >= step.vocabulary or np.isnan(logs[i]):
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

    # Their buckets.
    base = interval_of(HEIGHTS, scores[0]) * KINDS
    for index in range(1, kept):
        kinds[index] = base + BINS + interval_of(DISTANCES, scores[0] - scores[index])
    kinds[0] = base + (interval_of(DISTANCES, scores[0] - scores[1]) if kept > 1 else NO_SECOND)


def sampled_guess_kinds(scores: Any) -> Any:
    """The buckets of sampled guesses, as in ``_rank``, from their scores (n, k), highest first."""
    best = scores[:, :1]
    height = np.searchsorted(HEIGHTS, scores[:, 0])[:, None]
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
    """Add the head's guesses under a row to the other sources' proposals, and select the bucket of each."""
    row = memory.tree.nodes[node]
    proposals = memory.tree.proposals[node]
    calibration = memory.calibration
    _rank(memory, node)
    tokens, kinds = memory.guesses.tokens[row.guess], memory.guesses.kinds[row.guess]
    level = guess_level(row)
    buckets = calibration.guesses[level]

    # The state of the other sources.
    count = row.proposals
    others = NOTHING
    for index in range(count):
        confidence = calibration.joint[proposals[index].joint].level
        proposals[index].both, proposals[index].guess = confidence, -1
        others = OTHER + confidence if others == NOTHING else max(others, OTHER + confidence)

    # The guesses, some of which other sources also propose.
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
    """Calls the head for one sequence.

    Args:
        head: the head.
        sampled: whether tokens are sampled.

    Attributes:
        used: number of calls for this tree.
        calls: number of all calls.
    """

    def __init__(self, head: LightHead, sampled: bool) -> None:
        self.head = head
        self._k = READ_SAMPLED if sampled else READ
        self.used = self.calls = 0
        self._states = np.empty((GUESS_ROWS, head.hidden), np.float32)
        self._memory: Memory | None = None
        self._fields: tuple[Any, ...] = ()

    def begin(self) -> None:
        """Begin a new tree."""
        self.used = 0

    def guess(self, memory: Memory, hidden: Any) -> None:
        """Guess under the row ``step.wanted``: the root, or a row whose parent has guesses.

        Args:
            hidden: the hidden state under which the root's token was emitted, (hidden,) fp32.
        """
        if memory is not self._memory:  # looking up fields in each call would take as long as a tenth of it
            self._memory = memory
            nodes = memory.tree.nodes
            self._fields = memory.step["wanted"], nodes["token"], nodes["parent"], nodes["guess"]
        wanted, tokens, parents, guesses = self._fields
        node = wanted.item(0)
        state = hidden if node == 0 else self._states[guesses.item(parents.item(node))]
        states, ids, logs = self.head.guess(state[None], (tokens.item(node),), self._k)

        # Store the result, and refer to it from the row.
        row = self.used
        columns = ids.shape[1]
        self._states[row] = states
        memory.guesses.ids[row, columns:] = -1
        memory.guesses.ids[row, :columns] = ids
        memory.guesses.logs[row, :columns] = logs
        guesses[node] = row
        self.used += 1
        self.calls += 1

    @property
    def is_full(self) -> bool:
        """Whether no further row can have guesses in this step."""
        return self.used == GUESS_ROWS
