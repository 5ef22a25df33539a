"""Statistics that the adaptive drafter learns and that requests may share.

They influence the drafts of later requests, never their output. They are kept only if the caller creates a state and
passes it. The caller chooses the state's scope.
"""

from __future__ import annotations

from functools import cached_property
from threading import RLock
from typing import Any

from .calibration import fits_of, load, new_buckets
from .settings import AdaptiveSettings
from .sources import SOURCES
from .sources.base_table import BaseTable
from .sources.light_head import LightHead, count_guesses
from .sources.logit_cache import LogitCache
from .sources.suffix import SuffixTrie

NAMES = ("greedy", "sampled")


class Tables:
    """Logit cache and buckets, one pair for greedy and one for sampled decoding, which keeps more tokens.

    Attributes:
        buckets: the buckets of all sources by name, and those of their combination, "joint".
        logits: the logit cache.
    """

    def __init__(self, config: AdaptiveSettings, sampled: bool, table: BaseTable | None = None) -> None:
        fits = fits_of(sampled)
        self.buckets: dict[str, Any] = {"joint": new_buckets(fits["joint"])}
        for source in SOURCES:
            self.buckets |= source.buckets(fits, sampled)
        width = config.sampled_top if sampled else config.top
        self.logits = LogitCache(config.max_entries, width, self.buckets["logits"])
        self._name = NAMES[sampled]
        self._head: LightHead | None = None
        if table is not None:
            load(self.buckets["base"], *table.counts[self._name])

    def use_head(self, head: LightHead) -> None:
        """Load the counts of a light head's guesses, unless this head's are in use already."""
        if self._head is not head:
            self._head = head
            count_guesses(self.buckets, *head.counts[self._name])


class AdaptiveState:
    """Statistics that sequences with the same model and tokenizer may share.

    Args:
        settings: ``max_entries``, ``top``, ``sampled_top`` and ``suffix_order`` determine the sizes of the tables.

    Attributes:
        lock: held while tables or corpus are read or changed, because threads may share the state.
    """

    def __init__(self, settings: AdaptiveSettings | None = None) -> None:
        self.settings = settings if settings is not None else AdaptiveSettings()
        self.lock = RLock()
        self._tables: dict[bool, Tables] = {}

    @cached_property
    def corpus(self) -> SuffixTrie:
        """Suffix trie of the sequences of all requests."""
        return SuffixTrie(self.settings.suffix_order, 4 * self.settings.max_entries)

    def __repr__(self) -> str:
        return f"AdaptiveState({self.settings})"

    def tables(self, sampled: bool, table: BaseTable | None = None) -> Tables:
        """The tables of greedy or of sampled decoding.

        Args:
            sampled: True for the tables of sampled decoding.
            table: the base table of the first sequence, which provides the initial counts of its buckets.
        """
        if sampled not in self._tables:
            self._tables[sampled] = Tables(self.settings, sampled, table)
        return self._tables[sampled]
