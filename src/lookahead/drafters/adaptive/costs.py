"""t(k): what steps of k rows cost here, drafting included, and how that changes while text is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

#: Rows that a step may be given; times are kept for these alone.
MENU = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
#: Weight of one measured step in the time of its own number of rows, and in those of all others.
OWN, COMMON = 0.08, 0.04
#: Relative cost of one more row before anything was measured.
GUESS = 0.02
#: A measured step may be off by this factor at most; what is further off was interrupted by something else.
FAR_OFF = 3.0


@dataclass(slots=True)
class Experience:
    """How texts have fared of late; everything in the time of plain steps.

    Attributes:
        stake: what the drafts of a new text may lose.
        look: what it costs to look at candidates where the step stays a plain one.
        study: what it costs besides to learn from a step of one row.
        opening: what it costs to set up drafting for a text, its prompt read.
    """

    stake: float = 0.75
    look: float = 0.1
    study: float = 0.1
    opening: float = 0.2


class StepTimes:
    """t(k) in seconds by number of sequences and length of the context, drafting included.

    Tables are kept by (batch, context) bins, both in powers of two. A bin that was never measured starts as a
    copy of the nearest one. A step's time moves its own entry, and all entries of its bin a little, so that a
    machine that becomes slower as a whole is noticed whatever rows are in use.

    Attributes:
        bins: tables by bin, seconds by place in ``MENU``.
        plain: by bin, a step of plain decoding, without drafting.
        experience: how texts have fared, by whether they were sampled.
        drafts: how many drafts were made by all that share these times; each makes one a round.
    """

    def __init__(
        self,
        bins: dict[tuple[int, int], list[float]] | None = None,
        plain: dict[tuple[int, int], float] | None = None,
    ) -> None:
        self.bins = bins if bins is not None else {}
        self.plain = {key: table[0] for key, table in self.bins.items()} | (plain or {})
        self.experience = {False: Experience(), True: Experience()}
        self.drafts = 0

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

    def learn_plain(self, batch: int, context: int, seconds: float, steps: int = 1) -> None:
        """``steps`` plain steps took ``seconds`` on average. All entries move with the machine a little."""
        table = self.table(batch, context)
        key = self.bin_of(batch, context)
        if table is None:
            self.bins[key] = [seconds * (1 + GUESS * (k - 1)) for k in MENU]
            self.plain[key] = seconds
            return
        error = _bounded(seconds / self.plain_of(batch, context))
        self.plain[key] *= error ** (1 - (1 - OWN) ** steps)
        common = error ** (1 - (1 - COMMON) ** steps)
        for i, old in enumerate(table):
            table[i] = old * common

    def learn(self, batch: int, context: int, rows: int, seconds: float) -> None:
        """One step of ``rows`` rows took ``seconds``."""
        table = self.table(batch, context)
        if table is None:
            self.learn_plain(batch, context, seconds / (1 + GUESS * (rows - 1)))
            return
        place = place_of(rows)
        error = _bounded(seconds / table[place])
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

    def as_dict(self) -> dict[str, list[float]]:
        """Plain values for JSON: by "batch,context" the seconds of a plain step, then those of ``MENU``."""
        return {
            f"{batch},{context}": [self.plain_of_bin((batch, context)), *table]
            for (batch, context), table in self.bins.items()
        }

    def plain_of_bin(self, key: tuple[int, int]) -> float:
        """Seconds of a plain step of a bin that has a table."""
        return self.plain.get(key, self.bins[key][0])

    @classmethod
    def from_dict(cls, saved: dict[str, Sequence[float]]) -> StepTimes:
        """The inverse of ``as_dict``. Raises ValueError where entries are missing or are no times."""
        bins, plain = {}, {}
        for key, seconds in saved.items():
            batch, context = (int(part) for part in key.split(","))
            values = [float(value) for value in seconds]
            if len(values) != len(MENU) + 1 or not all(0 < value < 1e4 for value in values):
                raise ValueError(f"step times must be {len(MENU) + 1} positive numbers, got {seconds!r:.80}")
            plain[batch, context], *bins[batch, context] = values
        return cls(bins, plain)


def _bounded(error: float) -> float:
    return min(FAR_OFF, max(1 / FAR_OFF, error))


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


def slopes(table: Sequence[float], most: int) -> list[float]:
    """By place: the cheapest seconds per further row at which any later entry up to ``most`` rows is reached.

    From one entry of the menu on, rows up to some later entry must pay this much each. The lower hull of the
    points (k, t(k)), from the right.
    """
    last = place_of(most)
    result = [float("inf")] * len(MENU)
    hull = [last]
    for i in range(last - 1, -1, -1):
        while len(hull) > 1:
            one, two = hull[-1], hull[-2]
            if (table[one] - table[i]) * (MENU[two] - MENU[i]) < (table[two] - table[i]) * (
                MENU[one] - MENU[i]
            ):
                break
            hull.pop()
        result[i] = (table[hull[-1]] - table[i]) / (MENU[hull[-1]] - MENU[i])
        hull.append(i)
    return result
