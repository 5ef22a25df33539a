"""How many rows a step may have, from measured step times. Knows numbers only: no tree, no model.

With F(k) the expected tokens of a step of k rows and t(k) its time, the best long-run rate is reached by the
k that maximises F(k) - lambda * t(k), where lambda is that rate itself (renewal reward); maximising F(k) / t(k)
step by step is not. k = 1 is always a candidate, and lambda is at least 1 / t(1).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log2

#: Rows that a step may be given; times are kept for these alone.
MENU = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
#: Weight of one measured step in the time of its own number of rows, and in those of all others.
OWN, COMMON = 0.08, 0.04
#: Relative cost of one more row before anything was measured.
GUESS = 0.02
#: Steps over which lambda looks back, roughly.
HORIZON = 64
#: Tokens of agreement that the correction of F begins with.
AGREEMENT = 5.0
#: The breaker: a rate under this many times plain decoding's, over this many steps, trips it.
AHEAD, BLOCK = 1.02, 32
#: What a text may lose before that: plain steps, and a share of the time that it has taken.
STAKE, SHARE = 1.5, 0.01
#: Plain steps that probes must gain to end a pause, or may lose in it.
PROBED = 1.0
#: Plain steps that earlier gains may stand for.
CREDIT = 8.0
MOST_BACKOFF = 6
SHORTEST_INTERVAL, LONGEST_INTERVAL = 8, 256
#: A step that took this many times what its rows could cost at worst was interrupted by something else.
SPIKE = 3.0


class StepTimes:
    """t(k) in seconds by number of sequences and length of the context, drafting included.

    Tables are kept by (batch, context) bins, both in powers of two. A bin that was never measured starts as a
    copy of the nearest one. A step's time moves its own entry, and all entries of its bin a little, so that a
    machine that becomes slower as a whole is noticed whatever rows are in use.
    """

    def __init__(self, bins: dict[tuple[int, int], list[float]] | None = None) -> None:
        self.bins = bins if bins is not None else {}
        #: By bin: a step of plain decoding, without drafting.
        self.plain = {key: table[0] for key, table in self.bins.items()}
        #: How often in a row the breaker has tripped of late, whatever the sequence.
        self.backoff = 0
        #: What a glance at the candidates of a paused sequence has cost of late, in plain steps.
        self.glance = 0.1
        self._inside: set[int] = set()
        self._together = 1

    @staticmethod
    def bin_of(batch: int, context: int) -> tuple[int, int]:
        """Bins by powers of two; contexts of up to 256 tokens share one."""
        return int(log2(max(1, batch))), max(0, int(log2(max(1, context))) - 7)

    def table(self, batch: int, context: int) -> list[float] | None:
        """Seconds by place in ``MENU``; None before the first measurement."""
        key = self.bin_of(batch, context)
        table = self.bins.get(key)
        if table is None and self.bins:
            near = min(self.bins, key=lambda other: (abs(other[0] - key[0]), abs(other[1] - key[1])))
            table = self.bins[key] = list(self.bins[near])
            self.plain[key] = self.plain[near]
        return table

    def plain_of(self, batch: int, context: int) -> float:
        """Seconds of a plain step; there must be a table."""
        key = self.bin_of(batch, context)
        if key not in self.plain:
            table = self.table(batch, context)
            assert table is not None
            self.plain.setdefault(key, table[0])
        return self.plain[key]

    def learn_plain(self, batch: int, context: int, seconds: float) -> None:
        """A plain step took ``seconds``. Says something about the machine, so all entries move a little."""
        table = self.table(batch, context)
        key = self.bin_of(batch, context)
        if table is None:
            self.bins[key] = [seconds * (1 + GUESS * (k - 1)) for k in MENU]
            self.plain[key] = seconds
            return
        error = min(3.0, max(1 / 3, seconds / self.plain_of(batch, context)))
        self.plain[key] *= error**OWN
        common = error**COMMON
        for i, old in enumerate(table):
            table[i] = old * common

    def learn(self, batch: int, context: int, rows: int, seconds: float) -> None:
        """One step of ``rows`` rows took ``seconds``."""
        table = self.table(batch, context)
        if table is None:
            self.learn_plain(batch, context, seconds / (1 + GUESS * (rows - 1)))
            return
        place = place_of(rows)
        # A step that the operating system interrupted says little about the rows.
        error = min(3.0, max(1 / 3, seconds / table[place]))
        common = error**COMMON
        own = error**OWN
        for i, old in enumerate(table):
            table[i] = old * common
        self.plain[self.bin_of(batch, context)] = self.plain_of(batch, context) * common
        table[place] *= own
        # More rows are never quicker: what says so is noise.
        value = table[place]
        for i in range(place):
            if table[i] > value:
                table[i] = value
        for i in range(place + 1, len(table)):
            if table[i] < value:
                table[i] = value

    def enter(self, drafter: int) -> None:
        """A sequence begins a step. Steps of several sequences in one pass overlap, and so show themselves."""
        if drafter in self._inside:  # a round that was never finished
            self._inside.clear()
        self._inside.add(drafter)
        self._together = max(self._together, len(self._inside)) if len(self._inside) > 1 else 1

    def leave(self, drafter: int) -> int:
        """The sequence has ended its step; how many sequences were in it."""
        self._inside.discard(drafter)
        return self._together

    def as_dict(self) -> dict[str, list[float]]:
        """Plain values for JSON."""
        return {f"{batch},{context}": table for (batch, context), table in self.bins.items()}

    @classmethod
    def from_dict(cls, saved: dict[str, Sequence[float]]) -> StepTimes:
        """The inverse of ``as_dict``. Raises ValueError where entries are missing or are no times."""
        bins = {}
        for key, table in saved.items():
            batch, context = (int(part) for part in key.split(","))
            values = [float(value) for value in table]
            if len(values) != len(MENU) or not all(0 < value < 1e4 for value in values):
                raise ValueError(f"step times must be {len(MENU)} positive numbers, got {table!r:.80}")
            bins[batch, context] = values
        return cls(bins)


def place_of(rows: int) -> int:
    """Place in ``MENU`` of the smallest entry that is not below ``rows``."""
    for place, k in enumerate(MENU):
        if k >= rows:
            return place
    return len(MENU) - 1


def from_points(points: dict[int, float]) -> list[float]:
    """A table from measured (rows, seconds): straight lines between, the last slope beyond, never falling."""
    known = sorted(points.items())
    table = []
    for k in MENU:
        below = [point for point in known if point[0] <= k] or known[:1]
        above = [point for point in known if point[0] >= k]
        (k0, t0) = below[-1]
        if above:
            (k1, t1) = above[0]
        elif len(known) > 1:
            (k0, t0), (k1, t1) = known[-2], known[-1]
        else:
            k1, t1 = k0, t0
        table.append(t0 if k1 == k0 else max(t0, t0 + (t1 - t0) * (k - k0) / (k1 - k0)))
    for i in range(1, len(table)):
        table[i] = max(table[i], table[i - 1])
    return table


class Budget:
    """One sequence's choice of rows, and its circuit breaker.

    The breaker goes by time lost against plain decoding. It trips when a text has lost more than ``STAKE`` plain
    steps and ``SHARE`` of its time so far, or when ``BLOCK`` steps together were not ``AHEAD`` of plain decoding.
    Then the sequence decodes plainly for 32, 64, 128, ... steps. Every few of these are drafted all the same if
    the candidates promise a gain; where such probes gain a plain step together, the pause is over, and where
    they lose one there are no more of them. A sequence that begins where others were paused begins paused.

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
        self._lost = self._spent = self._probed = 0.0
        self._block: list[float] = [
            0,
            0.0,
            0.0,
        ]  # steps, what plain decoding would have taken, what they took

    @property
    def probing(self) -> bool:
        """Whether a step may be drafted although the sequence is paused."""
        return self._probed >= 0

    @property
    def plain(self) -> bool:
        """Whether the breaker holds the sequence at plain decoding."""
        return self.pause > 0

    @property
    def bias(self) -> float:
        """Tokens emitted over tokens expected of late, beyond the one that is certain."""
        return self._accepted / self._expected

    def rate(self, plain_seconds: float) -> float:
        """lambda: tokens per second of late, at least plain decoding's."""
        return max(1 / plain_seconds, self._tokens / self._seconds if self._seconds else 0.0)

    def stop(self, context: int, limit: int) -> list[float] | None:
        """stop[k]: the probability under which row k (from 1) and all further ones cannot pay.

        None before anything was measured.
        """
        table = self.times.table(self.batch, context)
        if table is None:
            return None
        rate = self.rate(self.times.plain_of(self.batch, context)) / self.bias
        stop = [0.0] * (limit + 1)
        for place, k in enumerate(MENU):
            if k > limit:
                break
            # From the last row of one entry of the menu on, rows up to each later entry must pay.
            slope = inf
            for i in range(place + 1, len(MENU)):
                slope = min(slope, (table[i] - table[place]) / (MENU[i] - k))
                if MENU[i] >= self.max_rows:
                    break
            stop[k] = rate * slope
        return stop

    def choose(self, probabilities: Sequence[float], context: int) -> int:
        """Rows of the step, from the falling probabilities of the nodes (root included)."""
        table = self.times.table(self.batch, context)
        if table is None:
            return 1
        rate, bias = self.rate(self.times.plain_of(self.batch, context)), self.bias
        best, best_value, total, place = 1, -inf, 0.0, 0
        for k, p in enumerate(probabilities, 1):
            total += p if k == 1 else p * bias
            if k > MENU[place]:
                place += 1
            if k == MENU[place] or k == len(probabilities):
                value = total - rate * table[place]
                if value > best_value:
                    best, best_value = k, value
        return best

    def learn_plain(self, context: int, seconds: float) -> None:
        """A plain step took ``seconds``."""
        self.times.learn_plain(self.batch, context, seconds)
        self._spent += seconds
        self._rest()

    @property
    def interval(self) -> int:
        """Plain steps between two glances at the candidates of a paused sequence: these may cost 1 % together."""
        return int(min(LONGEST_INTERVAL, max(SHORTEST_INTERVAL, self.times.glance / SHARE)))

    def _rest(self) -> None:
        self.pause = max(0, self.pause - 1)
        self.paused_steps += 1

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
        self._spent += seconds
        if not self.pause:
            self._watch(tokens * plain, seconds, plain)
            return
        self._rest()
        loss = max(0.0, seconds / plain - tokens)
        self.times.glance += 0.3 * (loss - self.times.glance)
        if rows > 1:
            self._probed += tokens - seconds / plain
            if self._probed >= PROBED:
                self.pause = 0
                self._probed = self._lost = 0.0
                self.times.backoff = max(0, self.times.backoff - 1)
            elif self._probed <= -PROBED:
                self._probed = -inf

    def _watch(self, worth: float, seconds: float, plain: float) -> None:
        """Count what a step was worth in plain decoding's time against what it took."""
        self._lost = max(self._lost + seconds - worth, -CREDIT * plain)
        block = self._block
        block[0] += 1
        block[1] += worth
        block[2] += seconds
        full = block[0] >= BLOCK
        behind = full and block[1] < AHEAD * block[2]
        if behind or self._lost > STAKE * plain + SHARE * self._spent:
            self.pause = BLOCK << self.times.backoff
            self.times.backoff = min(MOST_BACKOFF, self.times.backoff + 1)
            self.trips += 1
            self._lost = self._probed = 0.0
        elif full:
            self.times.backoff = 0
        if full or self.pause:
            self._block = [0, 0.0, 0.0]
