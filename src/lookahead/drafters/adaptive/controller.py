"""How many rows a step may have, from measured step times. It knows numbers only: no tree, no model.

**The rule.** F(k) is the expected number of tokens of a step of k rows, t(k) its time, lambda the rate of recent
steps in tokens per second, at least that of plain decoding. A step gets the k that maximises

    F(k) + EXPLORATION * (k - 1) - lambda * t(k)

k = 1 is always a candidate. Maximising F(k) / t(k) in each step does not give the best long-run rate; maximising the
difference, with the long-run rate as the price of a second, does (renewal reward). An example with t(1) = 10 ms:

    k                                  1     2     4     6     8    12    16
    F(k)                            1.00  1.60  2.30  2.68  2.95  3.29  3.43
    t(k) in ms                      10.0  10.2  10.5  11.2  12.0  14.5  17.0
    value at lambda = 100 tokens/s  0.00  0.59  1.28  1.60  1.82  1.95  1.88    choice: 12 rows
    value at lambda = 200 tokens/s -1.00 -0.43  0.23  0.48  0.62  0.50  0.18    choice: 8 rows

Plain decoding emits 100 tokens/s here. A text whose drafts are accepted often has a larger lambda: its seconds are
worth more tokens, so it takes fewer unlikely rows.

**In addition**, because F is an estimate and t is noisy:

- The regret of a text is the time of its steps, with all of the drafter's work, minus the time of plain decoding for
  the same tokens. It may reach ``MAX_REGRET`` plain steps plus a share of the text's time. What is left of that is
  the loss budget. A step that could lose more than the loss budget is not made. This bounds the loss; it does not
  prevent it.
- Before the first accepted draft, a step may lose at most ``COLD_SHARE`` of the loss budget.
- If the loss budget does not cover the smallest drafted step, plain steps follow until it does (cooldown).
- Growing a tree that is not used (a probe) costs time too. If it is not cheap, not every step probes.
- In batches of a size in which drafting has lost time so far, most texts do not try it (``StepTimes.tries``).
- F is corrected by the ratio of accepted to expected tokens in recent steps.

In a batch, every sequence waits for the rows and the drafter of each other, so these costs count once per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from statistics import fmean

from .step_times import MENU, SPIKE, Average, StepTimes, interpolated, menu_index

#: The regret that a text may reach: plain steps, and a share of its time. The share is larger if a plain step takes
#: less than ``TINY`` seconds, because drafting costs a larger part of such a step.
MAX_REGRET, SHARE, TINY, TINY_SHARE = 2.0, 0.01, 1e-3, 0.02
#: The most plain steps that gains can add to the loss budget.
MOST_GAIN = 8.0
#: Share of the loss budget that one step may lose before the text's first draft is accepted. The first estimates may
#: be too high, and a loss is recovered slowly (at ``SHARE`` of the time).
COLD_SHARE = 0.25
#: Exploration bonus in tokens per row: what the scores of one more row, accepted or not, bring to later steps.
EXPLORATION = 0.01
#: A probe that takes less than the first share of a plain step is made in every step. More expensive probes take at
#: most the second share of the time.
CHEAP_PROBE, PROBE_SHARE = 0.05, 0.02
#: The largest change of ``StepTimes.after`` by one observation, in plain steps; larger differences are noise.
NOISE = 0.2
#: The fewest plain steps of a cooldown.
COOLDOWN = 8
#: Weight of one step in the averages of lambda and of the correction of F, and the weight of the assumed history with
#: which both start: steps of plain decoding, and estimates that were right.
RECENT, BEFORE = 1 / 64, 5 / 64


class Controller:
    """Chooses the rows of one sequence's steps and limits its regret.

    Args:
        times: step times, shared by all sequences of a model.
        context: tokens of the prompt.
        sampled: whether tokens are sampled.

    Attributes:
        context: tokens of the text; the owner updates it.
        batch: sequences in the forward pass; the owner updates it.
        regret: seconds lost against plain decoding so far; negative if time was gained.
        spent: seconds of all steps.
        cooldowns: how often the loss budget was used up.
    """

    def __init__(self, times: StepTimes, context: int, sampled: bool = False) -> None:
        self.times, self.context, self.batch, self._sampled = times, context, 1, sampled
        self.regret = self.spent = 0.0
        self.cooldowns = 0
        #: None after a plain step. After a probe that drafted nothing: the seconds of its forward pass. After a
        #: drafted step: 0. Both leave the caches cold, which makes the next plain step slower.
        self._probe_pass: float | None = None
        self._tokens, self._seconds, self._accepted, self._expected = (
            Average(weight=RECENT) for _ in range(4)
        )

    @property
    def _bin(self) -> tuple[int, int, bool]:
        return self.batch, self.context, self._sampled

    @property
    def table(self) -> Sequence[float]:
        """t(k) in seconds by index in ``MENU``, t(1) first; empty before the first measured step."""
        return self.times.table(*self._bin) or ()

    @property
    def rate(self) -> float:
        """lambda: tokens per second of recent steps, at least the rate of plain decoding."""
        plain = self.table[0]
        return max(1 / plain, (self._tokens.value + BEFORE) / (self._seconds.value + BEFORE * plain))

    @property
    def bias(self) -> float:
        """The correction of F: accepted over expected tokens of recent steps."""
        return (self._accepted.value + BEFORE) / (self._expected.value + BEFORE)

    @property
    def share(self) -> float:
        """The share of a text's time that may be lost."""
        return SHARE if self.table[0] >= TINY else TINY_SHARE

    @property
    def loss_budget(self) -> float:
        """Seconds that may still be lost."""
        return MAX_REGRET * self.table[0] + self.share * self.spent - self.regret

    @property
    def _smallest_loss(self) -> float:
        """Seconds that a probe and the smallest drafted step (two rows) may lose together."""
        after = max(0.0, self.times.after.value) if self.batch == 1 else 0.0
        return self.batch * self.times.probe.value + after + self.table[1] - self.table[0]

    @property
    def can_set_up(self) -> bool:
        """Whether the loss budget covers setting up the drafter and one drafted step."""
        if not self.table:
            return False
        return self.loss_budget >= self.batch * self.times.setup.value + self._smallest_loss

    def prices(self, limit: int) -> list[float]:
        """prices[k]: if row k (counted from 0) is less likely than this, neither it nor any further row pays.

        Growth of the tree ends there. The length is 1 + the rows that the loss budget allows, at most ``limit``.

        In the example of the module, t(8) = 12 ms and t(12) = 14.5 ms: a row costs 0.625 ms there. At lambda = 200 it
        pays if its probability is at least 0.125 - EXPLORATION = 0.115, so prices[8] = 0.115.
        """
        table, rate, bias = self.table, self.rate, self.bias
        most, last = self.loss_budget, menu_index(limit)
        if not self._accepted.value:
            most = max(COLD_SHARE * most, min(most, table[1] - table[0]))
        most += table[0]
        while last and table[last] > most:
            last -= 1
        prices = [0.0] * (min(limit, MENU[last]) + 1)
        for i in range(last):  # the lowest slope of t from here to any larger entry
            cheapest = min((table[j] - table[i]) / (MENU[j] - MENU[i]) for j in range(i + 1, last + 1))
            prices[MENU[i]] = max(0.0, rate * cheapest - EXPLORATION) / bias
        return prices

    def choose(self, probabilities: Sequence[float]) -> int:
        """The number of rows of the step, from the probabilities of the grown nodes, root first."""
        table, rate, bias = self.table, self.rate, self.bias
        best, best_value, tokens, entry = 1, -inf, 1.0, 0
        for k, p in enumerate(probabilities, 1):
            tokens += p * bias + EXPLORATION if k > 1 else 0.0
            entry += k > MENU[entry]
            if k == MENU[entry] or k == len(probabilities):
                value = tokens - rate * table[entry]
                if value > best_value:
                    best, best_value = k, value
        return best

    def set_up(self, seconds: float) -> None:
        """Count the seconds that setting up the drafter took."""
        seconds = self.batch * self.times.setup.add(seconds)
        self.regret += seconds
        if self.batch > 1:
            self.times.gained(self.batch, self._sampled, -seconds / self.table[0])

    def learn_plain(self, passes: list[float], own: float, disturbed: bool) -> None:
        """Learn from consecutive plain steps.

        Args:
            passes: seconds of each forward pass.
            own: seconds of the drafter in all of these steps together.
            disturbed: whether a drafted step or a probe came before. Then the caches were cold in the first pass, and
                its extra time is charged to that draft.
        """
        if self.table:
            plain = self.table[0]
            passes = [min(seconds, SPIKE * plain) for seconds in passes]
            self.regret += self.batch * own
            if disturbed and passes and self.batch == 1:  # a batch is too large for the caches anyway
                after, most = self.times.after, NOISE * plain
                # Compare with the probe's own pass: if the machine has become slower, that is not a cost of drafting.
                seen = passes[0] - max(plain, self._probe_pass or 0.0)
                after.add(after.value + max(-most, min(most, seen - after.value)))
                self.regret += after.value
        clean = passes[disturbed:]
        if clean:
            self.times.learn(self._bin, 1, fmean(clean), len(clean))
        for seconds in passes:
            self._advance(1, seconds, 0.0)
        self._probe_pass = None

    def learn(self, rows: int, expected: float, tokens: int, passed: float, own: float = 0.0) -> None:
        """Learn from a step in which candidates were grown, whether or not rows were drafted.

        Args:
            rows: rows of the step.
            expected: F(rows), the expected number of tokens.
            tokens: emitted tokens.
            passed: seconds of the step as ``StepTimes.bins`` counts them.
            own: further seconds of the drafter.
        """
        times, table, more = self.times, self.table, self.times.rows - self.times.batch
        alone, undisturbed = rows == self.batch == 1, self._probe_pass is None
        after = times.after.value if alone and not undisturbed else 0.0
        passed = max(min(passed, table[0]), passed - max(0.0, after))
        if (rows == 1 or more) and not times.mixed:
            times.learn(self._bin, times.mean, passed)
        # A single pass is noisy, so the average time of such passes is charged instead.
        cost = table[menu_index(rows)] + after
        if self.batch > 1 and more:  # charge this sequence for its own rows only
            passes = interpolated(MENU, table, times.mean)
            cost = table[0] + self.batch * (rows - 1) / more * (passes - table[0])
        cost += self.batch * min(own, SPIKE * times.probe.value)
        loss = cost - tokens * table[0]
        self.regret = max(-MOST_GAIN * table[0], self.regret + loss)
        if self.batch > 1:
            times.gained(self.batch, self._sampled, -loss / table[0])
        self._advance(tokens, cost, expected - 1)
        self._probe_pass = passed if alone and undisturbed else 0.0

    def _advance(self, tokens: int, seconds: float, expected: float) -> None:
        self.spent += seconds
        self._tokens.add(tokens)
        self._seconds.add(seconds)
        self._accepted.add(tokens - 1)
        self._expected.add(expected)

    def cooldown(self, rows: int) -> int:
        """The number of plain steps that must follow a step of ``rows`` rows; usually 0."""
        plain, missing = self.table[0], self._smallest_loss - self.loss_budget
        probe = self.batch * self.times.probe.value
        if missing <= 0:
            return 0 if rows > 1 or probe < CHEAP_PROBE * plain else ceil(probe / (PROBE_SHARE * plain)) - 1
        self.cooldowns += 1
        return max(COOLDOWN, ceil(missing / (self.share * plain)))
