"""``Adaptive``: the settings, and the state kept across sequences. numpy is imported when a sequence starts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...core import Drafter, SettingsError, Start, Target
from ..checks import text_form
from .settings import AdaptiveSettings

if TYPE_CHECKING:
    from .draft_state import AdaptiveDraftState
    from .for_model import ForModel
    from .state import AdaptiveState


@dataclass(frozen=True)
class Adaptive(AdaptiveSettings, Drafter):
    """One calibrated token tree from every training-free source, with as many rows as pay off on this machine.

    Attributes:
        max_rows: largest number of rows per step, 1 to 512; leave it out if ``rows`` is given.
        rows: a fixed number of rows per step, 1 to 512; steps have fewer only if the sources propose too few. None:
            each step has as many rows as pay off by the cost curve of this model on this machine.
        sources: the names in ``SOURCES`` that may propose candidates.
        suffix_order: length of the longest suffix to match, in tokens, 1 to 32.
        top, sampled_top: tokens kept per evaluated row in greedy and in sampled decoding, 1 to 64.
        max_entries: contexts that a state keeps per table, at least 1000; the oldest are dropped first.
        chain: whether a step has only the best single candidate, for engines that cannot verify trees.
        head: a light head trained for this model: its path, or "auto" for the one trained on this machine, or else
            the one included in this package, if any. None for no head.
        table: the file of a base table for the source "base". None for the one that ``lookahead learn`` made for this
            model on this machine, or else the one included in this package, if any.
        state: statistics that sequences share; None to start every sequence without any.
        for_model: what ``prepare`` measured and loaded; None before that.

    Raises:
        SettingsError: an unknown source, a value out of range, or settings that exclude each other.
    """

    state: AdaptiveState | None = field(default=None, compare=False, repr=False)
    for_model: ForModel | None = field(default=None, compare=False, repr=False)

    name = "adaptive"

    @property
    def uses_prediction(self) -> bool:
        """Whether a prediction is searched for matches."""
        return "suffix" in self.sources

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

    def expect(self, tokenizer: Any) -> None:
        """Start to build the tokenizer's base table if there is none. SettingsError if ``table`` is for another."""
        from .prepare import expect  # imports numpy

        expect(self, tokenizer)

    def prepare(self, model: Any, target: Target) -> Adaptive:
        """The drafter with the model's cost curve, base table and light head, as far as its settings use them."""
        from .prepare import prepare  # imports numpy

        return replace(self, for_model=prepare(self, model, target))

    def start(self, sequence: Start) -> AdaptiveDraftState:
        from .draft_state import AdaptiveDraftState  # imports numpy

        return AdaptiveDraftState(self, self.state, sequence, self.for_model)
