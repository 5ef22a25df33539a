"""How many rows a step may have, from measured step times. Knows numbers only: no tree, no model.

With F(k) the expected tokens of a step of k rows and t(k) its time, the best long-run rate is reached by the k that
maximises F(k) - lambda * t(k), where lambda is that rate itself (renewal reward); maximising F(k) / t(k) step by step
is not. k = 1 is always a candidate, and lambda is at least 1 / t(1).

Never slower than plain decoding: the regret of a text is the time of its steps, with all that the drafter does in
them, minus that of plain decoding for the tokens that they emitted. It may reach ``MAX_REGRET`` plain steps and a
share of the text's time. What is left of that is the loss budget: a step that could lose more is not made, and where
none can be made any longer, a cooldown of plain steps follows. What one sequence's drafter takes keeps all of the
pass waiting, so it is counted once for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from statistics import fmean

from .step_times import MENU, SPIKE, Average, StepTimes, interpolated, place_of

#: What a text may lose against plain decoding: so many plain steps, and a share of its time; a larger one where a
#: plain step takes less than ``TINY`` seconds and drafting costs much beside it.
MAX_REGRET, SHARE, TINY, TINY_SHARE = 2.0, 0.01, 1e-3, 0.02
#: Plain steps that gains may add to the loss budget.
MOST_GAIN = 8.0
#: Share of the loss budget that one step may lose before any draft of the text was accepted: first estimates may
#: promise too much, and of what they lost each later step wins a hundredth back.
COLD_SHARE = 0.25
#: Exploration bonus: tokens that one more row brings later, accepted or not, because its scores are learnt from.
EXPLORATION = 0.01
#: Probes that take less of a plain step are made at each one; others may take this share of the time in vain.
CHEAP_PROBE, PROBE_SHARE = 0.05, 0.02
#: Of a plain step, what a draft before it is seen to cost at most: much of what one pass takes is the machine's.
NOISE = 0.2
#: Plain steps of a cooldown at least.
COOLDOWN = 8
#: Weight of one step in lambda and in the correction of F. Both begin as if some had gone as expected before.
RECENT, BEFORE = 1 / 64, 5 / 64


class Controller:
    """One sequence's choice of rows, and its bound on regret.

    Args:
        times: shared by all sequences of a model.
        context: tokens of the prompt.
        sampled: whether tokens are drawn.

    Attributes:
        context, batch: tokens so far, and sequences in the pass; kept up to date by the owner.
        regret: seconds lost against plain decoding so far, negative where gained; spent: seconds of all steps.
        cooldowns: how often the loss budget was used up.
    """

    def __init__(self, times: StepTimes, context: int, sampled: bool = False) -> None:
        self.times, self.context, self.batch, self._sampled = times, context, 1, sampled
        self.regret = self.spent = 0.0
        self.cooldowns = 0
        #: None if the last step was a plain one. Else it left cold caches behind: seconds of its pass if it was a
        #: probe that found none, else 0.
        self._probed: float | None = None
        self._tokens, self._seconds, self._accepted, self._expected = (
            Average(weight=RECENT) for _ in range(4)
        )

    @property
    def _place(self) -> tuple[int, int, bool]:
        return self.batch, self.context, self._sampled

    @property
    def table(self) -> Sequence[float]:
        """t(k) by place in the menu, t(1) first; empty before the first step was measured."""
        return self.times.table(*self._place) or ()

    @property
    def rate(self) -> float:
        """lambda: tokens per second of late, at least plain decoding's."""
        plain = self.table[0]
        return max(1 / plain, (self._tokens.value + BEFORE) / (self._seconds.value + BEFORE * plain))

    @property
    def bias(self) -> float:
        """Tokens accepted over tokens expected of late."""
        return (self._accepted.value + BEFORE) / (self._expected.value + BEFORE)

    @property
    def share(self) -> float:
        """Of a text's time, what may be lost."""
        return SHARE if self.table[0] >= TINY else TINY_SHARE

    @property
    def loss_budget(self) -> float:
        """Seconds that may still be lost."""
        return MAX_REGRET * self.table[0] + self.share * self.spent - self.regret

    @property
    def _least(self) -> float:
        """Seconds that probing and the smallest drafted step may lose."""
        after = max(0.0, self.times.after.value) if self.batch == 1 else 0.0
        return self.batch * self.times.probe.value + after + self.table[1] - self.table[0]

    @property
    def can_set_up(self) -> bool:
        """Whether the loss budget pays for setting up drafting, and a first drafted step."""
        if not self.table:
            return False
        return self.loss_budget >= self.batch * self.times.setup.value + self._least

    def prices(self, limit: int) -> list[float]:
        """prices[k]: the probability under which row k (from 1) and all further ones cannot pay.

        There are as many as rows that the loss budget allows, ``limit`` at most, and one more at the front.
        """
        table, rate, bias = self.table, self.rate, self.bias
        most, last = self.loss_budget, place_of(limit)
        if not self._accepted.value:
            most = max(COLD_SHARE * most, min(most, table[1] - table[0]))
        most += table[0]
        while last and table[last] > most:
            last -= 1
        prices = [0.0] * (min(limit, MENU[last]) + 1)
        for i in range(last):  # the cheapest way on to any later entry
            cheapest = min((table[j] - table[i]) / (MENU[j] - MENU[i]) for j in range(i + 1, last + 1))
            prices[MENU[i]] = max(0.0, rate * cheapest - EXPLORATION) / bias
        return prices

    def choose(self, probabilities: Sequence[float]) -> int:
        """Rows of the step, from the falling probabilities of the nodes (root included)."""
        table, rate, bias = self.table, self.rate, self.bias
        best, most, total, place = 1, -inf, 1.0, 0
        for k, p in enumerate(probabilities, 1):
            total += p * bias + EXPLORATION if k > 1 else 0.0
            place += k > MENU[place]
            if k == MENU[place] or k == len(probabilities):
                value = total - rate * table[place]
                if value > most:
                    best, most = k, value
        return best

    def set_up(self, seconds: float) -> None:
        """To set up drafting took ``seconds``."""
        self.regret += self.batch * self.times.setup.add(seconds)

    def learn_plain(self, passes: list[float], own: float, disturbed: bool) -> None:
        """A run of plain steps: the seconds of each pass, and ``own`` of the drafter in all of them.

        Args:
            disturbed: a drafted step or a probe came before; the first pass found cold caches, and that is its price.
        """
        if self.table:
            plain = self.table[0]
            passes = [min(seconds, SPIKE * plain) for seconds in passes]
            self.regret += self.batch * own
            if disturbed and passes and self.batch == 1:  # much larger passes find cold caches anyway
                after, most = self.times.after, NOISE * plain
                # Beside the probe's pass just before, since a machine that has become slower is no price of drafts.
                seen = passes[0] - max(plain, self._probed or 0.0)
                after.add(after.value + max(-most, min(most, seen - after.value)))
                self.regret += after.value
        clean = passes[disturbed:]
        if clean:
            self.times.learn(self._place, 1, fmean(clean), len(clean))
        for seconds in passes:
            self._advance(1, seconds, 0.0)
        self._probed = None

    def learn(self, rows: int, expected: float, tokens: int, passed: float, own: float = 0.0) -> None:
        """A step of ``rows`` rows emitted ``tokens`` where ``expected`` were expected.

        Args:
            passed: seconds of what ``StepTimes.bins`` holds for as many rows.
            own: seconds that the drafter took beside it.
        """
        times, table, more = self.times, self.table, self.times.rows - self.times.batch
        alone, undisturbed = rows == self.batch == 1, self._probed is None
        after = times.after.value if alone and not undisturbed else 0.0
        passed = max(min(passed, table[0]), passed - max(0.0, after))
        if rows == 1 or more:
            times.learn(self._place, times.mean, passed)
        # Of the time of one pass much is the machine's: what such passes take as a rule is charged.
        cost = table[place_of(rows)] + after
        if self.batch > 1 and more:  # all wait for the rows of one: its loss, and the rows of others are not
            passes = interpolated(MENU, table, times.mean)
            cost = table[0] + self.batch * (rows - 1) / more * (passes - table[0])
        cost += self.batch * min(own, SPIKE * times.probe.value)
        self.regret = max(-MOST_GAIN * table[0], self.regret + cost - tokens * table[0])
        self._advance(tokens, cost, expected - 1)
        self._probed = passed if alone and undisturbed else 0.0

    def _advance(self, tokens: int, seconds: float, expected: float) -> None:
        self.spent += seconds
        self._tokens.add(tokens)
        self._seconds.add(seconds)
        self._accepted.add(tokens - 1)
        self._expected.add(expected)

    def cooldown(self, rows: int) -> int:
        """Plain steps to make after a step of ``rows`` rows with candidates probed; mostly 0."""
        plain, missing = self.table[0], self._least - self.loss_budget
        probe = self.batch * self.times.probe.value
        if missing <= 0:
            return 0 if rows > 1 or probe < CHEAP_PROBE * plain else ceil(probe / (PROBE_SHARE * plain)) - 1
        self.cooldowns += 1
        return max(COOLDOWN, ceil(missing / (self.share * plain)))
