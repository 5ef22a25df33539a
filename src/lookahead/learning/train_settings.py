"""The settings of training a light head (``train_head``), some of which are options of a command.

This module does not import torch, nor numpy when it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core import SettingsError
from ..option import OptionSet, hidden, option


@dataclass(frozen=True, kw_only=True)
class TrainSettings(OptionSet):
    """Training settings.

    Raises:
        SettingsError: a value is out of range.
    """

    levels: int = option(2, "How many tokens ahead the head learns to guess.", common=True)
    shortlist: int = option(8192, "How many tokens of the vocabulary it can guess.", common=True)
    width: int = option(1024, "Width of its block.", common=True)
    epochs: float = option(2.0, "Passes over the text.", common=True)
    rate: float = option(2e-3, "Peak learning rate.", common=True)
    decay: float = hidden(0.5, "The weight of each level's loss, relative to the level before.")
    deep: float = hidden(
        0.25, "The share of a step's positions on which the levels after the first are trained."
    )
    batch: int = hidden(1024, "Number of positions per step, in runs of consecutive positions.")
    run: int = hidden(16, "Number of positions of such a run.")
    seed: int = hidden(0, "Seed of the order of the positions and of the initial weights.")

    def __post_init__(self) -> None:
        from ..drafters.adaptive.sources.head_file import BLOCK, MAX_LEVELS  # imports numpy

        limits = {"shortlist": (1, 1 << 20), "width": (BLOCK, 1 << 16), "levels": (1, MAX_LEVELS)}
        limits |= {"batch": (1, 1 << 20), "run": (1, 1 << 10), "seed": (0, 1 << 62)}
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise SettingsError(f"{name} must be {low} to {high}, got {getattr(self, name)}")
        for name in ("epochs", "rate", "decay", "deep"):
            if not 0 < getattr(self, name) < 1e4:
                raise SettingsError(f"{name} must be a positive number, got {getattr(self, name)}")
        if self.width % BLOCK:
            raise SettingsError(f"width must be a multiple of {BLOCK}, got {self.width}")
