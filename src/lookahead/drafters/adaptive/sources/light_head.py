"""The light head as a source: guesses of a small trained network under some rows of the tree.

The network (``head_file``) reads the hidden state of the last accepted row, so the target must provide hidden
states. Under the root it guesses the next tokens; from its own guess of the next hidden state it can guess under
deeper rows, with one more call for each. ``grow_tree`` returns when it needs a guess, ``HeadSource.serve`` calls the
network, and ``grow_tree`` continues.

In greedy decoding, a guess's bucket is given by the level (0 for the root's guesses, then by depth) and the interval
of the head's own probability. When sampling, the guesses are ranked with the noise of their position, and the bucket
is given by the level and the features that ``logit_cache`` uses: the height of the best score, and leads or
distances. The head provides the initial counts of these buckets. The confidence level of its bucket and that of all
other sources together select the bucket in ``Guesses.both``, whose probability is the edge's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np

from ....machine_code import compiled, int64
from ..calibration import (
    BINS,
    DISTANCES,
    HEIGHTS,
    KINDS,
    NO_SECOND,
    NOTHING,
    OTHER,
    STATES,
    buckets_of,
    count,
    interval_of,
    load,
    new_buckets,
)
from ..layout import BUCKET, noise_of, record
from .source import Setup, Source

#: Largest number of tokens that the head proposes under a row.
GUESSES = 8
#: Levels of guesses with their own buckets, and upper ends of its probabilities, except the last.
GUESS_LEVELS = 3
PROBABILITIES = np.array(
    [0.005, 0.015, 0.03, 0.06, 0.1, 0.15, 0.2, 0.28, 0.36, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95]
)
GREEDY_GUESSES, SAMPLED_GUESSES = len(PROBABILITIES) + 1, (len(HEIGHTS) + 1) * KINDS
#: Initial trials of its pairs with other sources, since a sequence sees few of each pair.
HEAD_TRIALS = 24.0

#: Number of guesses read per row; when sampling, ``GUESSES`` of them are proposed.
READ, READ_SAMPLED = GUESSES, 24
#: Largest number of rows of the tree under which the head guesses in one step.
GUESS_ROWS = 16
#: The gain from a call at each level, in tokens, if the row is certain to be reached and the other sources propose
#: nothing. The head is called if the gain exceeds the value of its time.
GAINS = np.array([0.3, 0.15, 0.15])
#: The head guesses only under rows of a smaller depth, 0 for none, and if the gain, in tokens, is at least the price.
LIMIT = record(depth="i8", price="f8")


class Guesses(NamedTuple):
    """The light head's guesses in this step, by row of the tree, in the order of its calls."""

    ids: Annotated[Any, "i4", 2]  # (rows, read): tokens, best first; -1 after the last
    logs: Annotated[Any, "f4", 2]  # (rows, read): logarithms of their probabilities
    tokens: Annotated[Any, "i4", 2]  # (rows, GUESSES): the tokens that are proposed; -1 after the last
    kinds: Annotated[Any, "i4", 2]  # (rows, GUESSES): their buckets
    scores: Annotated[Any, "f4", 1]  # (GUESSES,): scratch space
    limit: Annotated[Any, LIMIT, 1]  # (1,) LIMIT
    buckets: Annotated[Any, BUCKET, 2]  # (levels, kinds)
    both: Annotated[Any, BUCKET, 1]  # (kinds,): of the combination of the head with all others


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
def _rank(memory: Any, guesses: Guesses, node: int) -> None:
    """Choose the guesses to propose under a row, best first, and their buckets."""
    row = memory.tree.nodes[node]
    step = memory.step[0]
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
def _refine(memory: Any, own: Guesses, node: int, number: int) -> None:
    """Add the head's guesses under a row to the other sources' proposals, and select the bucket of each."""
    row = memory.tree.nodes[node]
    if row.guess < 0:
        return
    proposals = memory.tree.proposals[node]
    _rank(memory, own, node)
    tokens, kinds = own.tokens[row.guess], own.kinds[row.guess]
    level = guess_level(row)
    buckets = own.buckets[level]

    # The state of the other sources.
    known = row.proposals
    others = NOTHING
    for index in range(known):
        confidence = memory.joint[proposals[index].joint].level
        proposals[index].both, proposals[index].guess = confidence, -1
        others = OTHER + confidence if others == NOTHING else max(others, OTHER + confidence)

    # The guesses, some of which other sources also propose.
    for guess in range(len(tokens)):
        if tokens[guess] < 0:
            break
        index = 0
        while index < known and proposals[index].token != tokens[guess]:
            index += 1
        if index == known:
            proposals[index].token, proposals[index].source = tokens[guess], number
            proposals[index].joint, proposals[index].both = -1, others
            known += 1
        proposals[index].guess = guess

    # The state of the head.
    missed = OTHER + buckets[kinds[0]].level
    for index in range(known):
        guess = proposals[index].guess
        state = buckets[kinds[guess]].level if guess >= 0 else missed
        proposals[index].both += (level * STATES + state) * STATES
        proposals[index].probability = own.both[proposals[index].both].probability
    row.proposals = known


@compiled
def _wants(memory: Any, own: Guesses, node: int) -> bool:
    """Whether the head should guess under a row, i.e. whether its expected gain is worth its time."""
    limit = own.limit[0]
    row = memory.tree.nodes[node]
    if row.guess >= 0 or row.depth >= limit.depth:
        return False
    if row.parent >= 0 and memory.tree.nodes[row.parent].guess < 0:
        return False
    best = 0.0
    for index in range(row.proposals):
        best = max(best, memory.tree.proposals[node, index].probability)
    return bool(row.probability * (1 - best) * GAINS[guess_level(row)] >= limit.price)


@compiled
def _judge(memory: Any, own: Guesses, node: int, number: int, right: int, truth: int) -> None:
    """Count the guesses at a node, alone and together with the other sources."""
    row = memory.tree.nodes[node]
    if row.guess < 0:
        return
    proposals = memory.tree.proposals[node]
    kinds = own.kinds[row.guess]
    level = guess_level(row)
    for index in range(row.proposals):
        count(own.both[proposals[index].both], index == right)
        if proposals[index].guess >= 0:
            count(own.buckets[level, kinds[proposals[index].guess]], index == right)


def count_guesses(buckets: Mapping[str, Any], hits: Any, trials: Any) -> None:
    """Initialize the buckets of a head.

    The buckets of its guesses start with its own counts; levels beyond its deepest use the deepest. The buckets of
    its pairs with other sources start with ``HEAD_TRIALS`` trials of their priors.

    Args:
        buckets: all buckets by name.
        hits, trials: the head's counts, (levels, kinds).
    """
    level = np.minimum(np.arange(GUESS_LEVELS), len(hits) - 1)
    load(buckets["head"], np.asarray(hits)[level], np.asarray(trials)[level])
    both = buckets["both"]
    load(both, HEAD_TRIALS * both["prior"], np.full(both.shape, HEAD_TRIALS))


class HeadSource(Source):
    """Calls the head for one sequence.

    Attributes:
        used: number of calls for this tree.
        calls: number of all calls.
    """

    name = "head"
    most = GUESSES
    Arrays = Guesses
    refine = staticmethod(_refine)
    wants = staticmethod(_wants)
    judge = staticmethod(_judge)

    def __init__(self, setup: Setup) -> None:
        head = setup.head
        self.on = head is not None
        rows, read = (0, 0) if head is None else (GUESS_ROWS, READ_SAMPLED if setup.sampled else READ)
        self.head = head
        self._hidden: Any = None
        self.used = self.calls = 0
        if head is not None:
            setup.tables.use_head(head)
            self._states = np.empty((GUESS_ROWS, head.hidden), np.float32)
        self.arrays = Guesses(
            np.full((rows, read), -1, np.int32),
            np.zeros((rows, read), np.float32),
            np.full((rows, GUESSES), -1, np.int32),
            np.zeros((rows, GUESSES), np.int32),
            np.zeros(GUESSES, np.float32),
            np.zeros(1, LIMIT),
            setup.tables.buckets["head"],
            setup.tables.buckets["both"],
        )
        self._depth, self._price = self.arrays.limit["depth"], self.arrays.limit["price"]
        self._memory: Any = None
        self._fields: tuple[Any, ...] = ()

    @staticmethod
    def buckets(fits: Mapping[str, Any], sampled: bool) -> dict[str, Any]:
        kinds = SAMPLED_GUESSES if sampled else GREEDY_GUESSES
        return {"head": buckets_of(np.full((GUESS_LEVELS, kinds), 0.05)), "both": new_buckets(fits["both"])}

    def begin(self, rate: float, hidden: Any) -> None:
        assert self.head is not None
        self.used = 0
        self._hidden = hidden
        self._depth[0] = 0 if hidden is None else self.head.levels
        self._price[0] = rate * self.head.cost

    def serve(self, memory: Any) -> float:
        """Guess under the row ``step.wanted``: the root, or a row whose parent has guesses."""
        assert self.head is not None
        if memory is not self._memory:  # looking up fields in each call would take as long as a tenth of it
            self._memory = memory
            nodes = memory.tree.nodes
            self._fields = memory.step["wanted"], nodes["token"], nodes["parent"], nodes["guess"]
        wanted, tokens, parents, guesses = self._fields
        node = wanted.item(0)
        state = self._hidden if node == 0 else self._states[guesses.item(parents.item(node))]
        found = self.arrays
        states, ids, logs = self.head.guess(state[None], (tokens.item(node),), found.ids.shape[1])

        # Store the result, and refer to it from the row.
        row = self.used
        columns = ids.shape[1]
        self._states[row] = states
        found.ids[row, columns:] = -1
        found.ids[row, :columns] = ids
        found.logs[row, :columns] = logs
        guesses[node] = row
        self.used += 1
        self.calls += 1
        if self.used == GUESS_ROWS:
            self._depth[0] = 0
        return float(self.head.cost)

    def figures(self) -> dict[str, float]:
        return {"head_calls": self.calls}

    def proposed(self, memory: Any, node: int) -> list[int]:
        guess = memory.tree.nodes["guess"][node]
        tokens: list[int] = [] if guess < 0 else self.arrays.tokens[guess].tolist()
        return tokens
