"""The rule: how many rows a step may have. A function of tokens and of the cost curve alone; no clock runs here.

F(k) is the expected number of tokens of a step of k rows. c(k) is the cost of the step in plain steps (``cost``),
read only. r is the number of tokens per plain step that this sequence has reached lately, at least 1. A step gets the
k that maximises

    F(k) + EXPLORATION * (k - 1) - r * c(k)

k = 1 is always a candidate. Maximising F(k) / c(k) in each step does not give the best long-run rate; maximising the
difference, with the long-run rate as the price of a plain step's time, does (renewal reward). An example:

    k                        1     2     4     6     8    12    16
    F(k)                  1.00  1.60  2.30  2.68  2.95  3.29  3.43
    c(k)                  1.00  1.02  1.05  1.12  1.20  1.45  1.70
    F(k) - c(k)           0.00  0.58  1.25  1.56  1.75  1.84  1.73    r = 1: 12 rows
    F(k) - 2 c(k)        -1.00 -0.44  0.20  0.44  0.55  0.39  0.03    r = 2: 8 rows

A sequence whose drafts are accepted often has a larger r: its time is worth more tokens, so it takes fewer unlikely
rows.

F is an estimate, so it is corrected by the ratio of accepted to expected tokens of recent steps. EXPLORATION is what
the logits of one more row, accepted or not, bring to later steps. Growing a tree that is not used takes time too:
after each tree for which the rule chose one row, no tree is grown for 0, 1, 3, 7, ... steps, until such trees cost at
most ``IDLE_SHARE`` of the time.

In a batch, all sequences wait for each other's rows, and the same curve is read at the total number of rows
(``CostCurve.table``).
"""

from __future__ import annotations

from math import ceil
from typing import Any

from ...jit import compiled
from .memory import Memory

#: What the logits of one more row bring to later steps, in tokens.
EXPLORATION = 0.01
#: Weight of one step in the averages of r and of the correction of F, and the weight of the history that both start
#: with: plain steps, and estimates that were right.
RECENT, BEFORE = 1 / 64, 5 / 64
#: The share of the time that growing trees which are not used may take.
IDLE_SHARE = 0.02
#: The most steps without growing a tree.
LONGEST_PAUSE = 64


class RowRule:
    """The averages of one sequence.

    Attributes:
        pause: steps left in which no tree is grown.
        drafting: the cost of drafting for all sequences of the pass, in its plain steps.
    """

    def __init__(self) -> None:
        self.pause, self.drafting = 0, 0.0
        self._next_pause = 0
        self._tokens = self._cost = 0.0
        self._accepted = self._expected = 0.0

    @property
    def rate(self) -> float:
        """r: tokens per plain step of recent steps, at least 1."""
        return max(1.0, (self._tokens + BEFORE) / (self._cost + BEFORE))

    @property
    def bias(self) -> float:
        """The correction of F: accepted over expected tokens of recent steps."""
        return (self._accepted + BEFORE) / (self._expected + BEFORE)

    def count(self, tokens: int, cost: float) -> None:
        """Count a step: its emitted tokens and its cost in plain steps."""
        self._tokens += RECENT * (tokens - self._tokens)
        self._cost += RECENT * (cost - self._cost)

    def count_grown(self, rows: int, expected: float, tokens: int) -> None:
        """Count a step for which a tree was grown.

        Args:
            rows: rows of the step.
            expected: F(rows), the uncorrected estimate.
            tokens: emitted tokens.
        """
        if rows > 1:
            self._accepted += RECENT * (tokens - 1 - self._accepted)
            self._expected += RECENT * (expected - 1 - self._expected)
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
    """Whether a row of this probability, or any likelier row after it, may pay in a tree of ``rows`` rows so far.

    Rows come likeliest first, so growth ends where the answer is no. In the example of the module, the cheapest of
    the rows after the eighth costs 0.0625 plain steps; with r = 2, a row pays there from a probability of 0.115.
    """
    step = memory.step[0]
    return bool(probability * step.bias + EXPLORATION >= step.rate * memory.slopes[rows])


@compiled
def choose(memory: Memory) -> int:
    """The number of rows that maximises the rule, for the grown tree."""
    step, nodes = memory.step[0], memory.tree.nodes
    best, best_value = 1, 1.0 - step.rate * memory.costs[1]
    expected = 1.0
    for row in range(1, memory.tree.sizes[0].rows):
        expected += nodes[row].probability * step.bias + EXPLORATION
        value = expected - step.rate * memory.costs[row + 1]
        if value > best_value:
            best, best_value = row + 1, value
    return best


def window_pays(rate: float, costs: Any, rows: int, wanted: int, credit: float, given_up: float) -> bool:
    """Whether ``wanted`` rows of the window pay in a step of ``rows`` other rows.

    Args:
        rate: r.
        costs: c(k) by k.
        rows: the other rows.
        wanted: rows of the window.
        credit: tokens that one row of the window has brought to later steps.
        given_up: the expected tokens of the rows that the window replaces.
    """
    return bool(credit * wanted > rate * (costs[rows + wanted] - costs[rows]) + given_up)
