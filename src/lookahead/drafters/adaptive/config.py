"""Settings of the adaptive drafter: frozen, validated. None of them changes the output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ...core import LookaheadConfig, SettingsError

#: Where candidates come from.
SOURCES = {
    "suffix": "what followed the longest earlier match of the last tokens in this text",
    "logits": "the best tokens of the last row that was evaluated behind the same last tokens",
    "jacobi": "what the last step answered at the same position",
    "corpus": "suffix matches over the texts of earlier requests too, where a state is kept",
}
#: All but the corpus: texts of one request are not proposed in another unless somebody asks for it.
DEFAULT_SOURCES = ("suffix", "logits", "jacobi")
LIMITS = {
    "max_rows": (1, 512), "window_size": (0, 512), "ngram_size": (2, 16), "suffix_order": (1, 32), "top": (1, 64),
    "sampled_top": (1, 64), "max_entries": (1000, 1 << 26), "seed": (0, 1 << 62),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdaptiveConfig:
    """What shapes the drafts.

    Attributes:
        max_rows: rows of a step at most, 1 to 512.
        budget: choose the rows of each step by measured step times; off, every step may have ``max_rows``,
            and the drafts depend on nothing but the tokens.
        sources: names in ``SOURCES`` that may propose; leave one out to see what it is worth. Without
            "logits" nothing uses what the window explores.
        window_size, ngram_size: W (0 for no window) and N (at least 2) of the window.
        suffix_order: longest suffix that is matched, at least 1.
        top, sampled_top: tokens kept of each evaluated row when decoding greedily and when sampling, at least 1.
        max_entries: contexts that a warm state keeps per table, oldest out first.
        seed: of the window's own generator.
    """

    max_rows: int = 64
    budget: bool = True
    sources: tuple[str, ...] = DEFAULT_SOURCES
    window_size: int = 5
    ngram_size: int = 3
    suffix_order: int = 8
    top: int = 8
    sampled_top: int = 24
    max_entries: int = 400_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise SettingsError(f"{name} must be a whole number between {low} and {high}, got {value!r}")
        object.__setattr__(self, "sources", tuple(self.sources))
        _check_names("sources", self.sources, SOURCES)

    @classmethod
    def of(cls, value: Any = None, **overrides: Any) -> AdaptiveConfig:
        """Make settings from None, such settings, or a mapping of them.

        Raises:
            SettingsError: an unknown name, a value out of range, or a (W, N, G), which describes a fixed step.
        """
        if isinstance(value, Mapping):
            value, overrides = None, {**value, **overrides}
        if not (value is None or isinstance(value, cls)):
            given = ",".join(map(str, value.triple)) if isinstance(value, LookaheadConfig) else repr(value)
            raise SettingsError(
                f"adaptive chooses the rows of a step itself and takes no (W, N, G), got {given}; "
                "leave it out, or use method lookahead"
            )
        _check_names("settings", overrides, [field.name for field in fields(cls)])
        return replace(value or cls(), **overrides)


def _check_names(kind: str, given: Any, known: Any) -> None:
    unknown = ", ".join(sorted(set(given) - set(known)))
    if unknown:
        raise SettingsError(f"unknown {kind} {unknown}; known are {', '.join(known)}")
