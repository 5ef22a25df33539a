"""How many rows a step may have, from measured step times. Knows numbers only: no tree, no model.

With F(k) the expected tokens of a step of k rows and t(k) its time, the best long-run rate is reached by the
k that maximises F(k) - lambda * t(k), where lambda is that rate itself (renewal reward); maximising F(k) / t(k)
step by step is not. k = 1 is always a candidate, and lambda is at least 1 / t(1).

Never slower than plain decoding: drafting plays from two purses, counted in the time of plain steps. One pays for
drafts: a stake of about one plain step, 1 % of the text's time, and what its drafts have gained before; a step that
could lose more is not made. The other pays for looking at candidates where nothing comes of it: half the stake and
1 % of the time. How large the stake is depends on how earlier texts fared, greedy and sampled ones apart.
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
#: What drafts may lose: plain steps at first (more or less by experience), and a share of the time of the text.
STAKE, SHARE = 0.75, 0.005
LEAST_STAKE, MOST_STAKE = 0.125, 1.0
#: What looks may cost: a part of the stake at first, a share of the time, a part of what drafts have gained.
LOOK, LOOK_SHARE, LOOK_GAIN = 0.5, 0.005, 0.25
#: Plain steps that earlier gains may add to that.
CREDIT = 8.0
#: Plain steps that probes must gain to end a pause.
PROBED = 0.5
MOST_BACKOFF = 6
#: A text whose drafting costs more plain steps to set up waits until it repeats itself.
OPENING = 0.25
#: Further repetitions that it waits for, for each plain step of that cost.
PATIENCE = 4
#: Plain steps between two looks: at most, and at least while paused.
LONGEST_REST, PAUSED_REST = 256, 8
#: A step that took this many times what its rows usually take was interrupted by something else.
SPIKE = 2.0


class Budget:
    """One sequence's choice of rows, its purses, and its circuit breaker.

    The breaker trips when the stake is used up, or when ``BLOCK`` steps with drafts together were not ``AHEAD`` of
    plain decoding. For the next 32, 64, 128, ... steps candidates are then looked at less often and not learnt from;
    where they promise a gain that the stake allows, they are tried all the same, and where such probes gain half
    a plain step together, the pause is over.

    Args:
        times: shared by all sequences of a model.
        max_rows: never more than these.
        sampled: whether tokens are drawn.
    """

    def __init__(self, times: StepTimes, max_rows: int, sampled: bool = False) -> None:
        self.times = times
        self.max_rows = max_rows
        self.batch = 1
        self.experience = times.experience[sampled]
        self.pause = 0
        self.backoff = 0
        self.trips = 0
        self.plain_steps = 0
        self._tokens = self._seconds = 0.0
        self._accepted = self._expected = AGREEMENT
        #: Seconds gained against plain decoding by drafts, negative where lost; spent on looks; in all.
        self._gained = self._looked = self._spent = 0.0
        #: Gained in this pause.
        self._probed = 0.0
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

    def rest(self, context: int) -> int:
        """Plain steps to make before the next look at candidates, so that the purse can pay for it; perhaps 0."""
        if self.times.table(self.batch, context) is None:
            return 0
        plain = self.times.plain_of(self.batch, context)
        missing = self.experience.look * plain - self._purse(plain)
        steps = 0 if missing <= 0 else int(missing / (LOOK_SHARE * plain)) + 1
        return min(LONGEST_REST, max(steps, PAUSED_REST if self.pause else 0))

    def opened(self, context: int, seconds: float) -> None:
        """To set up drafting for this text took ``seconds``."""
        if self.times.table(self.batch, context) is not None:
            cost = seconds / self.times.plain_of(self.batch, context)
            self.experience.opening += 0.2 * (min(cost, 10.0) - self.experience.opening)

    @property
    def waits(self) -> bool:
        """Whether drafting is set up only once the text repeats itself."""
        return self.experience.opening > OPENING and bool(self.times.bins)

    @property
    def patience(self) -> int:
        """How often in a row a text must repeat itself before drafting is set up: the dearer, the oftener."""
        return 1 + int(PATIENCE * self.experience.opening)

    def may_look(self, context: int, sure: bool) -> bool:
        """Whether to look at candidates before the time, where they promise something, or surely something."""
        plain = self.times.plain_of(self.batch, context)
        if self.stake(plain) < self._least(context, plain):
            return False
        return sure or self._purse(plain) + LOOK_SHARE * self._spent >= self.experience.look * plain

    def may_study(self, context: int) -> bool:
        """Whether the purse can pay for learning from a step of one row."""
        if self.times.table(self.batch, context) is None:
            return True
        plain = self.times.plain_of(self.batch, context)
        return not self.pause and self._purse(plain) >= self.experience.study * plain

    def _purse(self, plain: float) -> float:
        """Seconds that looks may cost now."""
        first = LOOK * self.experience.stake * plain
        return first + LOOK_SHARE * self._spent + LOOK_GAIN * max(0.0, self._gained) - self._looked

    def rate(self, plain_seconds: float) -> float:
        """lambda: tokens per second of late, at least plain decoding's."""
        return max(1 / plain_seconds, self._tokens / self._seconds if self._seconds else 0.0)

    def stake(self, plain: float) -> float:
        """Seconds that may be lost in the next step."""
        return self.experience.stake * plain + SHARE * self._spent + self._gained

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
        self.plain_steps += steps
        self._rested(steps)
        self.times.learn_plain(self.batch, context, seconds / steps, steps)

    def glanced(self, context: int, seconds: float) -> None:
        """To look at the candidates took ``seconds``, and the step stays a plain one."""
        plain = self.times.plain_of(self.batch, context)
        seconds = min(seconds, SPIKE * plain)
        self._spent += seconds
        self._looked += seconds
        self.experience.look += 0.2 * (seconds / plain - self.experience.look)

    def close(self, context: int) -> None:
        """The text is over: what it was worth decides on the stake of the next."""
        if self.times.table(self.batch, context) is None:
            return
        gained = self._gained / self.times.plain_of(self.batch, context)
        if gained > PROBED:
            self.experience.stake = min(MOST_STAKE, self.experience.stake * 2)
        elif gained < -PROBED * self.experience.stake:
            self.experience.stake = max(LEAST_STAKE, self.experience.stake / 2)

    def _rested(self, steps: int) -> None:
        self.pause = max(0, self.pause - steps)

    def learn(self, context: int, rows: int, expected: float, tokens: int, seconds: float) -> None:
        """A step of ``rows`` rows emitted ``tokens`` where ``expected`` were expected, in ``seconds``."""
        self.times.learn(self.batch, context, rows, seconds)
        plain = self.times.plain_of(self.batch, context)
        fade = 1 - 1 / HORIZON
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + seconds
        self._accepted = (self._accepted - AGREEMENT) * fade + tokens - 1 + AGREEMENT
        self._expected = (self._expected - AGREEMENT) * fade + expected - 1 + AGREEMENT
        table = self.times.table(self.batch, context)
        assert table is not None
        seconds = min(seconds, SPIKE * table[place_of(rows)])
        self._spent += seconds
        if rows > 1:
            self._watch(tokens * plain, seconds, plain, context)
        else:
            extra = max(0.0, seconds - plain)
            self._looked += extra
            self.experience.study += 0.2 * (extra / plain - self.experience.study)
            self._rested(1)

    def _watch(self, worth: float, seconds: float, plain: float, context: int) -> None:
        """Count what a step with drafts was worth in plain decoding's time against what it took."""
        self._gained = min(CREDIT * plain, self._gained + worth - seconds)
        if self.pause:
            self._rested(1)
            self._probed += worth - seconds
            if self._probed >= PROBED * plain:
                self.pause = 0
                self.backoff = max(0, self.backoff - 1)
            return
        steps, due, took = self._block
        steps, due, took = steps + 1, due + worth, took + seconds
        behind = steps >= BLOCK and due < AHEAD * took
        if behind or self.stake(plain) < self._least(context, plain):
            self.pause = BLOCK << self.backoff
            self.backoff = min(MOST_BACKOFF, self.backoff + 1)
            self.trips += 1
            self._probed = 0.0
        elif steps >= BLOCK:
            self.backoff = 0
        self._block = (0, 0.0, 0.0) if self.pause or steps >= BLOCK else (steps, due, took)

    def _least(self, context: int, plain: float) -> float:
        """Seconds that the smallest step with drafts can lose."""
        table = self.times.table(self.batch, context)
        assert table is not None
        return max(0.0, table[1] - plain)
