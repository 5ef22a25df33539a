"""``Adaptive``: the settings, and the state that is kept across sequences. Loads no numpy until a sequence starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...core import Drafter, DraftState, SettingsError, Start
from ..settings import text_form
from .settings import UNTIMED_ROWS, AdaptiveSettings

if TYPE_CHECKING:
    from .state import AdaptiveState


@dataclass(frozen=True)
class Adaptive(AdaptiveSettings, Drafter):
    """One calibrated token tree from every training-free source, with as many rows as pay on this machine.

    Attributes:
        max_rows: rows of a step at most, 1 to 512.
        budget: choose the rows of each step by measured step times; False: every step may have ``max_rows``,
            and the drafts depend on nothing but the tokens. None: by the times where no text can depend on them, else
            at most ``UNTIMED_ROWS`` in every step.
        sources: names in ``SOURCES`` that may propose; leave one out to see what it is worth. Without
            "logits" nothing uses what the window explores.
        window_size: W, columns of the window, 0 to 512; 0 for no window.
        ngram_size: N of the window, 2 to 16.
        suffix_order: longest suffix that is matched, 1 to 32.
        top, sampled_top: tokens kept of each evaluated row when decoding greedily and when sampling, 1 to 64.
        max_entries: contexts that a warm state keeps per table, oldest out first.
        seed: of the window's own generator.
        chain: a step is the best single candidate, without the window: for engines that verify no trees.
        state: what is learned and kept across sequences; None starts each sequence without any.

    Raises:
        SettingsError: an unknown source, or a value out of range.
    """

    state: AdaptiveState | None = field(default=None, compare=False, repr=False)

    name = "adaptive"
    uses_prediction = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state is not None:
            from .state import AdaptiveState

            if not isinstance(self.state, AdaptiveState):
                raise SettingsError(
                    f"state must be an AdaptiveState or None, got {type(self.state).__name__}"
                )

    def __str__(self) -> str:
        return text_form(self.name, self)

    @property
    def needs_step_times(self) -> bool:
        return self.budget is not False

    def untimed(self) -> Drafter:
        if self.budget is not None:
            return self
        return replace(self, budget=False, max_rows=min(self.max_rows, UNTIMED_ROWS))

    def precompile(self) -> None:
        """Compile the drafter's code in another process, where that has not been done on this machine."""
        from . import precompile  # loads numba

        precompile.start()

    def start(self, sequence: Start) -> DraftState:
        from .sequence import AdaptiveDraftState  # loads numpy and numba

        return AdaptiveDraftState(self, self.state, sequence)
