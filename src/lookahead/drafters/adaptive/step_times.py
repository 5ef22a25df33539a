"""t(k): the seconds that a step of k rows takes here, kept up to date by the steps themselves, and kept on disk."""

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

#: Rows that a step may be given; times are kept for these alone.
MENU = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
#: Weight of one measured step in its average, and relative cost of one more row before anything was measured.
WEIGHT, GUESS = 0.08, 0.02
#: What took this many times as long as usual was interrupted by something else, and counts as so many times.
SPIKE = 2.0
FORMAT = 3  # of the file; raised too where compiled passes take other times than before
#: Added to the number of a bin for sampled texts.
SAMPLED = 64


class Average:
    """Exponential moving average: starts at ``value``; what is above ``spike`` times the average is clipped."""

    def __init__(self, value: float = 0.0, weight: float = WEIGHT, spike: float = inf) -> None:
        self.value, self.weight, self.spike = value, weight, spike

    def add(self, value: float) -> float:
        """Take one in; returns it as clipped."""
        if value > self.spike * self.value > 0:
            value = self.spike * self.value
        self.value += self.weight * (value - self.value)
        return value


class StepTimes:
    """t(k) in seconds by number of sequences and length of the context.

    Tables are kept by (batch, context) bins; one that was never measured starts from the nearest, where a pass over
    as many rows in all took as long. Rows are those of each sequence, on average over the pass. A step of one row
    tells how fast the machine is and moves its whole table; a step of more rows moves its own entry, and those beside
    it less and less. So what is known of plain decoding comes from plain steps alone.

    Attributes:
        bins: tables by bin, seconds by place in ``MENU``. The first is a whole plain step, with no drafter's time in
            it; the others are what follows once the tree is grown: the pass, and learning from its rows.
        probe: seconds of a drafter in a step of one row: growing candidates, and learning from that row.
        after: seconds by which the plain step after that is longer, since the model finds cold caches.
        setup: seconds to set up drafting for a text, its prompt read; draw: to draw the noise of one position.
        batch, rows: sequences in the pass, and rows of all their trees.
    """

    def __init__(self, bins: dict[tuple[int, int], list[float]] | None = None) -> None:
        self.bins = bins if bins is not None else {}
        self.probe, self.after = Average(1e-4, 0.25, 2 * SPIKE), Average(weight=0.25)
        self.setup, self.draw = Average(5e-4, 0.2, SPIKE), Average(weight=0.25, spike=2 * SPIKE)
        self.batch, self.rows, self._evaluated = 0, 0, True
        self._taken = 0.0

    def drafted(self, rows: int) -> None:
        """A sequence that shares these times joins the coming pass with so many rows."""
        if self._evaluated:
            self.batch, self.rows, self._evaluated = 0, 0, False
        self.batch += 1
        self.rows += rows

    def evaluated(self) -> float:
        """The pass is over; returns the seconds that all drafters have taken so far."""
        self._evaluated = True
        return self._taken

    def take(self, seconds: float) -> float:
        """A drafter took so long; returns the seconds of all so far."""
        self._taken += seconds
        return self._taken

    @property
    def mean(self) -> float:
        """Rows of each sequence in the pass, on average."""
        return max(1.0, self.rows / max(1, self.batch))

    @staticmethod
    def bin_of(batch: int, context: int, sampled: int = 0) -> tuple[int, int]:
        """Bins by half powers of two, and by powers of two; contexts of up to 256 tokens share one.

        Sampled texts have bins of their own: to draw a token takes longer than to find the largest logit.
        """
        return int(2 * log2(max(1, batch))) + SAMPLED * sampled, max(0, context.bit_length() - 8)

    def table(self, *place: int) -> list[float] | None:
        """Seconds by place in ``MENU``, in the bin of such a place; None before the first measurement."""
        key = self.bin_of(*place)
        if key not in self.bins and self.bins:
            near = min(self.bins, key=lambda other: (abs(other[0] - key[0]), abs(other[1] - key[1])))
            more = 2.0 ** ((key[0] % SAMPLED - near[0] % SAMPLED) / 2)  # sequences to one of the other
            self.bins[key] = [interpolated(MENU, self.bins[near], k * more) for k in MENU]
        return self.bins.get(key)

    def learn(self, place: tuple[int, ...], rows: float, seconds: float, steps: float = 1) -> None:
        """So many steps of ``rows`` rows took ``seconds`` each; ``place`` is what ``bin_of`` takes."""
        table = self.table(*place)
        if table is None:
            guess = seconds / (1 + GUESS * (rows - 1))
            self.bins[self.bin_of(*place)] = [guess * (1 + GUESS * (k - 1)) for k in MENU]
            return
        if 1 < rows < 2:  # of some sequences of a batch only: their rows tell what two of each would cost
            share = rows - 1
            rows, seconds, steps = 2, table[0] + (seconds - table[0]) / share, share * steps
        own = place_of(round(rows))
        change = min(SPIKE, max(1 / SPIKE, seconds / table[own])) ** (1 - (1 - WEIGHT) ** steps)
        for i in range(len(table)):
            if not own or i:
                table[i] *= change ** (0.5 ** abs(i - own) if own else 1.0)
        for i in range(len(table)):  # more rows are never quicker: what says so is noise
            table[i] = max(table[i], table[own]) if i > own else min(table[i], table[own])


def place_of(rows: int) -> int:
    """Place in ``MENU`` of the smallest entry that is not below ``rows``."""
    return min(bisect_left(MENU, rows), len(MENU) - 1)


def from_points(points: dict[int, float]) -> list[float]:
    """A table from measured (rows, seconds): straight lines between, the last slope beyond, never falling."""
    rows = sorted(points)
    seconds = [points[k] for k in rows]
    table: list[float] = []
    for k in MENU:
        table.append(max([interpolated(rows, seconds, k), *table[-1:]]))
    return table


def interpolated(known: Sequence[int], seconds: Sequence[float], rows: float) -> float:
    """Seconds of so many rows by those of known ones; the first of them for fewer, the last slope for more."""
    after = min(bisect_left(known, rows), len(known) - 1)
    before = max(0, after - 1)
    if known[after] == rows or after == before:
        return seconds[after]
    slope = (seconds[after] - seconds[before]) / (known[after] - known[before])
    return seconds[before] + slope * (rows - known[before])


def times_file(model: str) -> Path:
    """Where the step times of one model on this machine are kept: in the user's cache folder.

    Args:
        model: whatever tells models, dtypes, devices and code paths apart.
    """
    machine = [platform.system(), get_host_cpu_name(), f"{os.cpu_count()} cores"]
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        machine.append(f"{torch.get_num_threads()} threads")
        machine += [torch.cuda.get_device_name(0)] if torch.cuda.is_available() else []
    digest = hashlib.sha256(f"{', '.join(machine)}|{model}".encode()).hexdigest()[:24]
    usual = {"win32": os.environ.get("LOCALAPPDATA", "~/AppData/Local"), "darwin": "~/Library/Caches"}
    base = os.environ.get("XDG_CACHE_HOME") or usual.get(sys.platform, "~/.cache")
    return Path(base).expanduser() / "lookahead-decoding" / "times" / f"{digest}.json"


def save_times(model: str, times: StepTimes) -> Path:
    """Keep step times for this machine and model; returns the file."""
    path = times_file(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    seconds = {f"{batch},{context}": table for (batch, context), table in times.bins.items()}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"format": FORMAT, "model": model, "menu": MENU, "seconds": seconds}))
    os.replace(temporary, path)
    return path


def load_times(model: str) -> StepTimes | None:
    """Step times that were kept for this machine and model, or None.

    Raises:
        SettingsError: the file is there and damaged.
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
