"""How many rows a step may have, from measured step times. Knows numbers only: no tree, no model.

With F(k) the expected tokens of a step of k rows and t(k) its time, the best long-run rate is reached by the
k that maximises F(k) - lambda * t(k), where lambda is that rate itself (renewal reward); maximising F(k) / t(k)
step by step is not. k = 1 is always a candidate, and lambda is at least 1 / t(1).

Never slower than plain decoding: drafting plays with a stake. What a text may lose is one plain step and 1 % of
its time, plus what its drafts have gained before; a step that could lose more is not made.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from .costs import MENU, StepTimes, place_of, slopes

__all__ = ["MENU", "Budget", "StepTimes", "place_of"]

#: Steps over which lambda looks back, roughly.
HORIZON = 64
#: Tokens of agreement that the correction of F begins with.
AGREEMENT = 5.0
#: The breaker: a rate under this many times plain decoding's, over this many steps, trips it.
AHEAD, BLOCK = 1.02, 32
#: What a text may lose: plain steps, and a share of the time that it has taken.
STAKE, SHARE = 1.0, 0.01
#: Plain steps that earlier gains may add to that.
CREDIT = 8.0
#: Plain steps that probes must gain to end a pause.
PROBED = 0.5
MOST_BACKOFF = 6
SHORTEST_INTERVAL, LONGEST_INTERVAL = 8, 256
#: A step that took this many times what its rows could cost at worst was interrupted by something else.
SPIKE = 3.0


class Budget:
    """One sequence's choice of rows, and its circuit breaker.

    The breaker trips when the stake is used up, or when ``BLOCK`` steps together were not ``AHEAD`` of plain
    decoding. Then the sequence decodes plainly for 32, 64, 128, ... steps. Every few of these are drafted all
    the same if the candidates promise a gain and the stake allows it; where such probes gain half a plain step
    together, the pause is over. A sequence that begins where others were paused begins paused.

    Args:
        times: shared by all sequences of a model.
        max_rows: never more than these.
    """

    def __init__(self, times: StepTimes, max_rows: int) -> None:
        self.times = times
        self.max_rows = max_rows
        self.batch = 1
        self.pause = BLOCK << times.backoff - 1 if times.backoff > 1 else 0
        self.trips = 0
        self.paused_steps = 0
        self._tokens = self._seconds = 0.0
        self._accepted = self._expected = AGREEMENT
        #: Seconds gained against plain decoding, negative where lost; seconds in all; gained in this pause.
        self._gained = self._spent = self._probed = 0.0
        #: Steps of this block, what plain decoding would have taken for their tokens, what they took.
        self._block: tuple[int, float, float] = (0, 0.0, 0.0)

    @property
    def plain(self) -> bool:
        """Whether the breaker holds the sequence at plain decoding."""
        return self.pause > 0

    @property
    def bias(self) -> float:
        """Tokens emitted over tokens expected of late, beyond the one that is certain."""
        return self._accepted / self._expected

    def rest(self) -> int:
        """Plain steps to make before the next look at candidates: 0, or enough that looking costs 1 %."""
        interval = min(LONGEST_INTERVAL, max(SHORTEST_INTERVAL, self.times.glance / SHARE))
        return min(self.pause, int(interval))

    def rate(self, plain_seconds: float) -> float:
        """lambda: tokens per second of late, at least plain decoding's."""
        return max(1 / plain_seconds, self._tokens / self._seconds if self._seconds else 0.0)

    def stake(self, plain: float) -> float:
        """Seconds that may be lost in the next step."""
        return STAKE * plain + SHARE * self._spent + self._gained

    def stop(self, context: int, limit: int) -> list[float] | None:
        """stop[k]: the probability under which row k (from 1) and all further ones cannot pay.

        None before anything was measured.
        """
        table = self.times.table(self.batch, context)
        if table is None:
            return None
        plain = self.times.plain_of(self.batch, context)
        rate, stake = self.rate(plain) / self.bias, self.stake(plain)
        stop = [0.0] * (limit + 1)
        ahead = [*table[1:], table[-1]]
        for k, further, slope in zip(MENU, ahead, slopes(table, self.max_rows), strict=True):
            if k > limit:
                break
            if further - plain > stake:  # one token alone would lose more than the step may
                stop[k] = inf
                break
            stop[k] = rate * slope
        return stop

    def choose(self, probabilities: Sequence[float], context: int) -> int:
        """Rows of the step, from the falling probabilities of the nodes (root included)."""
        table = self.times.table(self.batch, context)
        if table is None:
            return 1
        plain = self.times.plain_of(self.batch, context)
        rate, bias, most = self.rate(plain), self.bias, plain + self.stake(plain)
        best, best_value, total, place = 1, -inf, 0.0, 0
        for k, p in enumerate(probabilities, 1):
            total += p if k == 1 else p * bias
            if k > MENU[place]:
                place += 1
                if table[place] > most:
                    break
            if k == MENU[place] or k == len(probabilities):
                value = total - rate * table[place]
                if value > best_value:
                    best, best_value = k, value
        return best

    def learn_plain(self, context: int, steps: int, seconds: float) -> None:
        """``steps`` plain steps took ``seconds`` together."""
        self._spent += seconds
        self._rested(steps)
        self.times.learn_plain(self.batch, context, seconds / steps, steps)

    def _rested(self, steps: int) -> None:
        self.pause = max(0, self.pause - steps)
        self.paused_steps += steps

    def learn(self, context: int, rows: int, expected: float, tokens: int, seconds: float) -> None:
        """A step of ``rows`` rows emitted ``tokens`` where ``expected`` were expected, in ``seconds``."""
        self.times.learn(self.batch, context, rows, seconds)
        plain = self.times.plain_of(self.batch, context)
        fade = 1 - 1 / HORIZON
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + seconds
        self._accepted = (self._accepted - AGREEMENT) * fade + tokens - 1 + AGREEMENT
        self._expected = (self._expected - AGREEMENT) * fade + expected - 1 + AGREEMENT
        seconds = min(seconds, SPIKE * plain * max(rows, 4))
        self._watch(tokens * plain, seconds, plain, context)

    def _watch(self, worth: float, seconds: float, plain: float, context: int) -> None:
        """Count what a step was worth in plain decoding's time against what it took."""
        self._spent += seconds
        self._gained = min(CREDIT * plain, self._gained + worth - seconds)
        if self.pause:
            self._rested(1)
            self._probed += worth - seconds
            self.times.glance += 0.3 * (max(0.0, seconds - worth) / plain - self.times.glance)
            if self._probed >= PROBED * plain:
                self.pause = 0
                self.times.backoff = max(0, self.times.backoff - 1)
            return
        steps, due, took = self._block
        steps, due, took = steps + 1, due + worth, took + seconds
        behind = steps >= BLOCK and due < AHEAD * took
        if behind or self.stake(plain) < self._least(context, plain):
            self.pause = BLOCK << self.times.backoff
            self.times.backoff = min(MOST_BACKOFF, self.times.backoff + 1)
            self.trips += 1
            self._probed = 0.0
        elif steps >= BLOCK:
            self.times.backoff = 0
        self._block = (0, 0.0, 0.0) if self.pause or steps >= BLOCK else (steps, due, took)

    def _least(self, context: int, plain: float) -> float:
        """Seconds that the smallest step with drafts can lose."""
        table = self.times.table(self.batch, context)
        assert table is not None
        return max(0.0, table[1] - plain)
