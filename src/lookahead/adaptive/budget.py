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
LONGEST_PAUSE = 32 * 2**8


class StepTimes:
    """t(k) in seconds by number of sequences and length of the context, drafting included.

    Tables are kept by (batch, context) bins, both in powers of two. A bin that was never measured starts as a
    copy of the nearest one. A step's time moves its own entry, and all entries of its bin a little, so that a
    machine that becomes slower as a whole is noticed whatever rows are in use.
    """

    def __init__(self, bins: dict[tuple[int, int], list[float]] | None = None) -> None:
        self.bins = bins if bins is not None else {}
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
        return table

    def learn(self, batch: int, context: int, rows: int, seconds: float) -> None:
        """One step of ``rows`` rows took ``seconds``."""
        table = self.table(batch, context)
        if table is None:
            unit = seconds / (1 + GUESS * (rows - 1))
            self.bins[self.bin_of(batch, context)] = [unit * (1 + GUESS * (k - 1)) for k in MENU]
            return
        place = place_of(rows)
        # A step that the operating system interrupted says little about the rows.
        error = min(3.0, max(1 / 3, seconds / table[place]))
        common = error**COMMON
        own = error**OWN
        for i, old in enumerate(table):
            table[i] = old * common
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
    """One sequence's choice of rows.

    Args:
        times: shared by all sequences of a model.
        max_rows: never more than these.
    """

    def __init__(self, times: StepTimes, max_rows: int) -> None:
        self.times = times
        self.max_rows = max_rows
        self.batch = 1
        #: Tokens emitted over tokens expected, beyond the one that is certain.
        self.bias = 1.0
        self.pause = 0
        self.trips = 0
        self.paused_steps = 0
        self._backoff = 0
        self._tokens = self._seconds = 0.0
        self._accepted = self._expected = AGREEMENT
        self._block: list[float] = [0, 0.0, 0.0]  # steps, tokens, what plain decoding would have taken

    @property
    def plain(self) -> bool:
        """Whether the breaker holds the sequence at plain decoding."""
        return self.pause > 0

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
        rate = self.rate(table[0]) / self.bias
        stop = [0.0] * (limit + 1)
        for k in range(1, limit + 1):
            place = place_of(k + 1)
            slope, now = inf, table[place_of(k)]
            for i in range(place, len(MENU)):
                slope = min(slope, (table[i] - now) / (MENU[i] - k))
                if MENU[i] >= self.max_rows:
                    break
            stop[k] = rate * slope
        return stop

    def choose(self, probabilities: Sequence[float], context: int) -> int:
        """Rows of the step, from the falling probabilities of the nodes (root included)."""
        table = self.times.table(self.batch, context)
        if table is None:
            return len(probabilities)
        rate = self.rate(table[0])
        best, best_value, total, place = 1, -inf, 0.0, 0
        for k, p in enumerate(probabilities, 1):
            total += p if k == 1 else p * self.bias
            if k > MENU[place]:
                place += 1
            if k == MENU[place] or k == len(probabilities):
                value = total - rate * table[place]
                if value > best_value:
                    best, best_value = k, value
        return best

    def learn(self, context: int, rows: int, expected: float, tokens: int, seconds: float) -> None:
        """A step of ``rows`` rows emitted ``tokens`` where ``expected`` were expected, in ``seconds``."""
        table = self.times.table(self.batch, context)
        plain = table[0] if table is not None else seconds
        self.times.learn(self.batch, context, rows, seconds)
        fade = 1 - 1 / HORIZON
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + seconds
        self._accepted = (self._accepted - AGREEMENT) * fade + tokens - 1 + AGREEMENT
        self._expected = (self._expected - AGREEMENT) * fade + expected - 1 + AGREEMENT
        self.bias = self._accepted / self._expected
        if self.pause:
            self.pause -= 1
            self.paused_steps += 1
            return
        self._watch(tokens, plain, seconds)

    def _watch(self, tokens: int, plain: float, seconds: float) -> None:
        block = self._block
        block[0] += 1
        block[1] += tokens * plain
        block[2] += seconds
        if block[0] < BLOCK:
            return
        if block[1] < AHEAD * block[2]:
            self.pause = min(LONGEST_PAUSE, BLOCK << self._backoff)
            self._backoff += 1
            self.trips += 1
        else:
            self._backoff = 0
        self._block = [0, 0.0, 0.0]
