"""The rule that sets the number of rows of a step. It uses the tokens and the cost curve, and reads no clock.

For a step of k rows, F(k) is the expected number of emitted tokens, and c(k) is the cost in plain steps (``cost``). r
is the sequence's recent rate, in tokens per plain step's time, and is at least 1. Each step has the number of rows k
that maximizes

    F(k) + EXPLORATION * (k - 1) - r * c(k)

Maximizing F(k) / c(k) in each step would not give the best rate in the long run. Maximizing this difference, in which
r is the price of a plain step's time, does (renewal reward). An example:

    k                        1     2     4     6     8    12    16
    F(k)                  1.00  1.60  2.30  2.68  2.95  3.29  3.43
    c(k)                  1.00  1.02  1.05  1.12  1.20  1.45  1.70
    F(k) - c(k)           0.00  0.58  1.25  1.56  1.75  1.84  1.73    r = 1: 12 rows
    F(k) - 2 c(k)        -1.00 -0.44  0.20  0.44  0.55  0.39  0.03    r = 2: 8 rows

If many tokens of a sequence are accepted, r is larger: each plain step's time must yield more tokens, so the rule
leaves out the less likely rows.

**F.** F(k) is 1 plus the sum of the probabilities of the k - 1 drafted rows. EXPLORATION is what the logits of one
more row, accepted or not, add to later steps.

**One row.** k = 1 is always possible. The rule chooses after the tree has been grown, so even one row costs a plain
step plus the drafting. To limit this overhead, a tree for which the rule chose one row is followed by 0, 1, 3, 7, ...
steps without growing a tree, until unused trees take at most ``IDLE_SHARE`` of the time.

**Batches.** All sequences of a batch wait for each other's rows, so c is taken at the total number of rows
(``CostCurve.table``).
"""

from __future__ import annotations

from math import ceil

from ...machine_code import compiled
from .memory import Memory

#: The gain of later steps from the logits of one more row, in tokens.
EXPLORATION = 0.01
#: Weight of one step in the moving averages of r.
RECENT = 1 / 64
#: Weight of the assumed history of plain steps.
BEFORE = 5 / 64
#: Largest share of the time spent on growing trees that are not used.
IDLE_SHARE = 0.02
#: Largest number of steps without growing a tree.
LONGEST_PAUSE = 64


class RowRule:
    """The moving averages of one sequence.

    Attributes:
        pause: number of further steps for which no tree is grown.
        drafting: the cost of drafting for all sequences of the pass, in plain steps of the batch.
    """

    def __init__(self) -> None:
        self.pause = 0
        self.drafting = 0.0
        self._next_pause = 0
        self._tokens = self._cost = 0.0

    @property
    def rate(self) -> float:
        """r: tokens per plain step's time in recent steps, at least 1."""
        return max(1.0, (self._tokens + BEFORE) / (self._cost + BEFORE))

    def count(self, tokens: int, cost: float) -> None:
        """Count a step: its emitted tokens and its cost in plain steps."""
        self._tokens += RECENT * (tokens - self._tokens)
        self._cost += RECENT * (cost - self._cost)

    def count_grown(self, rows: int) -> None:
        """Count a step of this many rows for which a tree was grown."""
        if rows > 1:
            self._next_pause = 0
        else:
            self.pause = self._next_pause
            longest = min(max(1, ceil(self.drafting / IDLE_SHARE) - 1), LONGEST_PAUSE)
            self._next_pause = min(2 * self._next_pause + 1, longest)

    def rest(self) -> None:
        """Count a step in which no tree was grown."""
        self.pause = max(0, self.pause - 1)


@compiled
def pays(memory: Memory, rows: int, probability: float) -> bool:
    """Whether rows of this probability or less may pay off in a tree that has ``rows`` rows so far.

    Rows come likeliest first, so growth ends at the first row that cannot pay off. In the example of the module,
    the cheapest of the rows after the eighth costs 0.0625 plain steps; with r = 2, a row is worth adding there once
    its probability reaches 0.115.
    """
    step = memory.step[0]
    return bool(probability + EXPLORATION >= step.rate * memory.slopes[rows])


@compiled
def choose(memory: Memory) -> int:
    """The number of rows that maximizes the rule, for the grown tree."""
    step = memory.step[0]
    nodes = memory.tree.nodes
    best, best_value = 1, 1.0 - step.rate * memory.costs[1]
    expected = 1.0
    for row in range(1, memory.tree.sizes[0].rows):
        expected += nodes[row].probability + EXPLORATION
        value = expected - step.rate * memory.costs[row + 1]
        if value > best_value:
            best, best_value = row + 1, value
    return best


@compiled
def expected_tokens(memory: Memory) -> float:
    """F of the grown tree."""
    nodes = memory.tree.nodes
    expected = 0.0
    for row in range(memory.tree.sizes[0].rows):
        expected += nodes[row].probability
    return expected
