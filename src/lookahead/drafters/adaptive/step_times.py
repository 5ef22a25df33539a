"""t(k): the time of a step of k rows on this machine. Every step updates it; measured times are kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from bisect import bisect_left
from collections.abc import Sequence
from math import inf, log2
from pathlib import Path
from typing import Any

from llvmlite.binding import get_host_cpu_name

from ...core import SettingsError
from ...threads import thread_count

#: Numbers of rows with a separate time; other numbers use the time of the next larger one.
MENU = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
#: Weight of one step in its average, and the assumed relative cost of one more row before any measurement.
WEIGHT, GUESS = 0.08, 0.02
#: A time is clipped at this multiple of the usual one, because other work has interrupted the step.
SPIKE = 2.0
FORMAT = 4  # of the file; also incremented when a change makes compiled passes faster or slower
#: Added to the first number of a bin for sampled texts.
SAMPLED = 64
#: In batches: what is left of the gain of earlier steps after one more drafted step; the loss, in plain steps, which
#: shows that drafting does not pay; and the number of texts of which one tries it then.
REMEMBERED, EVIDENCE, TRIALS = 1 - 1 / 256, 16.0, 8


class Average:
    """An exponential moving average that starts at ``value`` and clips values above ``spike`` times the average."""

    def __init__(self, value: float = 0.0, weight: float = WEIGHT, spike: float = inf) -> None:
        self.value, self.weight, self.spike = value, weight, spike

    def add(self, value: float) -> float:
        """Add a value. Returns the clipped value."""
        if value > self.spike * self.value > 0:
            value = self.spike * self.value
        self.value += self.weight * (value - self.value)
        return value


class StepTimes:
    """t(k) in seconds, by number of sequences and length of the context.

    There is one table for each (batch, context) bin. A bin without measurements starts from the nearest bin, read at
    the same total number of rows; below that bin's smallest total, the assumed cost of a row scales the time. Rows
    are counted per sequence, as the mean over the pass. A step of one row shows how fast the machine is now, so it
    scales the whole table; a step of more rows changes its own entry, and other entries less the further away they
    are. So t(1) follows from plain steps alone.

    Attributes:
        bins: tables by bin, seconds by index in ``MENU``. The first entry is a whole plain step without the drafter's
            time; the others are the forward pass and learning from its rows, without growing the tree.
        probe: seconds of the drafter in a step of one row: growing candidates, and learning from that row.
        after: seconds by which the next plain step is longer, because the drafter left the caches cold.
        setup: seconds to set up drafting for a text, including reading its prompt.
        draw: seconds to draw the noise of one position.
        batch, rows: sequences in the pass, and rows of all their trees.
        mixed: whether the pass did other work too, such as evaluating prompts; its time is not learned. The caller
            sets it between drafting and observing.
        gains: for each number of sequences (the first number of ``bin_of``), the plain steps that drafting has gained
            in such batches; negative if it lost time.
        waiting: for each number of sequences, the texts without drafts since the last text that set up drafting.

    Args:
        guess: the assumed cost of one more row before any measurement, in plain steps of one sequence.
    """

    def __init__(self, bins: dict[tuple[int, int], list[float]] | None = None, guess: float = GUESS) -> None:
        self.bins = bins if bins is not None else {}
        self._guess = guess
        self.probe, self.after = Average(1e-4, 0.25, 2 * SPIKE), Average(weight=0.25)
        self.setup, self.draw = Average(5e-4, 0.2, SPIKE), Average(weight=0.25, spike=2 * SPIKE)
        self.batch, self.rows, self._evaluated, self.mixed = 0, 0, True, False
        self._taken = 0.0
        self.gains, self.waiting = dict[int, float](), dict[int, int]()

    def gained(self, batch: int, sampled: int, steps: float) -> None:
        """A drafted step, or setting up drafting, gained so many plain steps."""
        where = self.bin_of(batch, 0, sampled)[0]
        self.gains[where] = REMEMBERED * self.gains.get(where, 0.0) + steps

    def tries(self, batch: int, sampled: int) -> bool:
        """Whether one more text in a batch of this size should set up drafting. Counts the texts that should not.

        Every text may lose its loss budget before it is known that drafting does not pay, and in a batch all other
        texts wait for that. So where drafting has lost time in such batches, only one text in ``TRIALS`` tries it.
        """
        where = self.bin_of(batch, 0, sampled)[0]
        waiting = self.waiting.get(where, 0) + 1
        tries = self.gains.get(where, 0.0) > -EVIDENCE or waiting >= TRIALS
        self.waiting[where] = 0 if tries else waiting
        return tries

    def drafted(self, rows: int) -> None:
        """A sequence joins the next pass with this many rows."""
        if self._evaluated:
            self.batch, self.rows, self._evaluated, self.mixed = 0, 0, False, False
        self.batch += 1
        self.rows += rows

    def evaluated(self) -> float:
        """The pass is over. Returns the seconds of all drafters so far."""
        self._evaluated = True
        return self._taken

    def take(self, seconds: float) -> float:
        """Add the seconds of one drafter. Returns those of all drafters so far."""
        self._taken += seconds
        return self._taken

    @property
    def mean(self) -> float:
        """Mean rows per sequence in the pass."""
        return max(1.0, self.rows / max(1, self.batch))

    @staticmethod
    def bin_of(batch: int, context: int, sampled: int = 0) -> tuple[int, int]:
        """The bin: half powers of two for the batch, powers of two for the context; up to 255 tokens share a bin.

        Sampled texts have separate bins, because sampling a token takes longer than finding the largest logit.
        """
        return int(2 * log2(max(1, batch))) + SAMPLED * sampled, max(0, context.bit_length() - 8)

    def table(self, batch: int, context: int, sampled: int = 0) -> list[float] | None:
        """Seconds by index in ``MENU``; None before the first measurement. Arguments as in ``bin_of``."""
        key = self.bin_of(batch, context, sampled)
        if key not in self.bins and self.bins:
            near = min(self.bins, key=lambda other: (abs(other[0] - key[0]), abs(other[1] - key[1])))
            known, wanted = (2.0 ** (each[0] % SAMPLED / 2) for each in (near, key))  # sequences
            # For fewer rows in total than any known pass, use the guess. Otherwise, after one plain step of 16
            # sequences, plain steps of two would seem just as slow, and drafting free.
            self.bins[key] = [
                interpolated(MENU, self.bins[near], k * wanted / known)
                * min(1.0, self._guessed(wanted * k) / self._guessed(known))
                for k in MENU
            ]
        return self.bins.get(key)

    def _guessed(self, rows: float) -> float:
        """The assumed time of a pass, in passes of one row."""
        return 1 + self._guess * (rows - 1)

    def learn(self, where: Sequence[int], rows: float, seconds: float, steps: float = 1) -> None:
        """Learn that ``steps`` steps of ``rows`` rows took ``seconds`` each; ``where``: arguments of ``bin_of``."""
        table = self.table(*where)
        if table is None:
            # ``rows`` are per sequence, so a pass has ``where[0]`` times as many.
            one_row = seconds / self._guessed(where[0] * rows)
            self.bins[self.bin_of(*where)] = [one_row * self._guessed(where[0] * k) for k in MENU]
            return
        if 1 < rows < 2:  # only some sequences drafted: extrapolate to two rows for each
            share = rows - 1
            rows, seconds, steps = 2, table[0] + (seconds - table[0]) / share, share * steps
        own = menu_index(round(rows))
        change = min(SPIKE, max(1 / SPIKE, seconds / table[own])) ** (1 - (1 - WEIGHT) ** steps)
        for i in range(len(table)):
            if not own or i:
                table[i] *= change ** (0.5 ** abs(i - own) if own else 1.0)
        for i in range(len(table)):  # more rows are never faster; a measurement that says so is noise
            table[i] = max(table[i], table[own]) if i > own else min(table[i], table[own])


def menu_index(rows: int) -> int:
    """The index in ``MENU`` of the smallest number of at least ``rows``."""
    return min(bisect_left(MENU, rows), len(MENU) - 1)


def from_points(points: dict[int, float]) -> list[float]:
    """A table from measured {rows: seconds}: linear between the points, the last slope beyond, never falling."""
    rows = sorted(points)
    seconds = [points[k] for k in rows]
    table: list[float] = []
    for k in MENU:
        table.append(max([interpolated(rows, seconds, k), *table[-1:]]))
    return table


def interpolated(known: Sequence[int], seconds: Sequence[float], rows: float) -> float:
    """Seconds of ``rows`` rows, linear between known points; constant before the first, the last slope beyond."""
    after = min(bisect_left(known, rows), len(known) - 1)
    before = max(0, after - 1)
    if known[after] == rows or after == before:
        return seconds[after]
    slope = (seconds[after] - seconds[before]) / (known[after] - known[before])
    return seconds[before] + slope * (rows - known[before])


def times_file(model: str) -> Path:
    """The file with the step times of a model on this machine, in the user's cache folder.

    Args:
        model: a key that differs between models, dtypes, devices and code paths (``measure.model_key``).
    """
    machine = [platform.system(), get_host_cpu_name(), f"{os.cpu_count()} cores", f"{thread_count()} threads"]
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        machine.append(torch.cuda.get_device_name(0))
    digest = hashlib.sha256(f"{', '.join(machine)}|{model}".encode()).hexdigest()[:24]
    usual = {"win32": os.environ.get("LOCALAPPDATA", "~/AppData/Local"), "darwin": "~/Library/Caches"}
    base = os.environ.get("XDG_CACHE_HOME") or usual.get(sys.platform, "~/.cache")
    return Path(base).expanduser() / "lookahead-decoding" / "times" / f"{digest}.json"


def save_times(model: str, times: StepTimes) -> Path:
    """Save step times for this machine and model. Returns the file."""
    path = times_file(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    seconds = {f"{batch},{context}": table for (batch, context), table in times.bins.items()}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"format": FORMAT, "model": model, "menu": MENU, "seconds": seconds}))
    os.replace(temporary, path)
    return path


def load_times(model: str) -> StepTimes | None:
    """The saved step times of this machine and model, or None.

    Raises:
        SettingsError: the file is damaged.
    """
    path = times_file(model)
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        if (content.get("format"), tuple(content["menu"])) != (FORMAT, MENU):  # of another version
            return None
        bins = {}
        for key, seconds in content["seconds"].items():
            batch, context = map(int, key.split(","))
            bins[batch, context] = [float(value) for value in seconds]
            if len(seconds) != len(MENU) or not all(0 < value < 1e4 for value in bins[batch, context]):
                raise ValueError(f"step times must be {len(MENU)} positive numbers, got {seconds!r:.80}")
        return StepTimes(bins)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(
            f"{path} holds no step times ({error}); delete it or run lookahead tune"
        ) from error
