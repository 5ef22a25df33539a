"""Settings of the adaptive drafter, frozen and validated. None of them changes the output. Does not import numpy."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ...core import SettingsError
from ..checks import check_whole

#: The sources of candidates, with their descriptions.
SOURCES = {
    "suffix": "the tokens after the longest earlier match of the last tokens in this sequence",
    "logits": "the best tokens of the latest row evaluated after the same last tokens",
    "base": "the likeliest tokens after the last tokens in text that the model generated (lookahead learn)",
    "jacobi": "the target's tokens at the same position in the last step",
    "corpus": "suffix matches in the sequences of earlier requests as well, if a state is kept",
}
#: All but the corpus: tokens of one request are proposed in another only if the caller requests it.
DEFAULT_SOURCES = ("suffix", "logits", "base", "jacobi")
#: The fewest rows of a tree from which a chain is selected.
SEARCHED_ROWS = 64
#: Smallest and largest value of each whole number.
LIMITS = {
    "max_rows": (1, 512),
    "rows": (1, 512),
    "suffix_order": (1, 32),
    "top": (1, 64),
    "sampled_top": (1, 64),
    "max_entries": (1000, 1 << 26),
}


@dataclass(frozen=True)
class AdaptiveSettings:
    """The settings that determine the drafts; documented in ``Adaptive``."""

    max_rows: int = 64
    rows: int | None = None
    sources: tuple[str, ...] = DEFAULT_SOURCES
    suffix_order: int = 8
    top: int = 8
    sampled_top: int = 24
    max_entries: int = 400_000
    chain: bool = False
    head: str | None = None
    table: str | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            if name != "rows" or self.rows is not None:
                check_whole(self, name, low, high)
        if self.rows is not None and self.max_rows not in (AdaptiveSettings.max_rows, self.rows):
            raise SettingsError(
                "rows fixes the number of rows and max_rows limits the rule that chooses it, "
                f"got rows={self.rows} and max_rows={self.max_rows}; leave one out"
            )
        if not isinstance(self.chain, bool):
            raise SettingsError(f"chain must be true or false, got {self.chain!r}")
        self._check_path("head", "the path of a light head, 'auto' or none")
        self._check_path("table", "the path of a base table or none")
        if isinstance(self.sources, str):
            raise SettingsError(f"sources must be a list of names, got {self.sources!r}")
        object.__setattr__(self, "sources", tuple(self.sources))
        unknown = sorted(set(self.sources) - set(SOURCES))
        if unknown:
            raise SettingsError(f"unknown sources {', '.join(unknown)}; known are {', '.join(SOURCES)}")
        if self.table is not None and "base" not in self.sources:
            raise SettingsError(
                "table needs the source base, which sources leaves out; give only one of the two"
            )

    def _check_path(self, name: str, what: str) -> None:
        """Raise SettingsError unless a field is a path or None; convert a path to a string."""
        path = getattr(self, name)
        if path is None:
            return
        if not isinstance(path, (str, os.PathLike)) or not str(path):
            raise SettingsError(f"{name} must be {what}, got {path!r}")
        object.__setattr__(self, name, os.fspath(path))

    @property
    def most_rows(self) -> int:
        """The largest number of rows per step."""
        return self.max_rows if self.rows is None else self.rows

    @property
    def table_rows(self) -> int:
        """The largest number of rows of a tree while it grows."""
        return max(self.most_rows, SEARCHED_ROWS) if self.chain else self.most_rows
