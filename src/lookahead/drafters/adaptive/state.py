"""Statistics that the adaptive drafter learns and that may be kept across requests.

They influence the drafts of later requests, never their output. They are kept only if the caller creates a state and
passes it. The caller chooses the state's scope.
"""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from ...core import SettingsError
from ...core.errors import first_line
from ...records import must, replacing
from .calibration import ORDERS, ORIGINS, count_guesses, load, new_calibration
from .settings import AdaptiveSettings
from .sources.base_table import BaseTable
from .sources.light_head import LightHead
from .sources.logit_cache import LogitCache
from .sources.suffix import SHIFT, SuffixTrie

FORMAT = 4
#: Largest unpacked size, in bytes, of a file that ``load`` reads.
LARGEST_FILE = 1 << 30
#: The arrays saved for each table of the logit cache.
PARTS = ("keys", "ids", "odds", "origins")
NAMES = ("greedy", "sampled")
#: The calibrations to save. Those of a light head belong to the head.
SAVED = ("matches", "logits", "base", "pairs", "joint")
#: The largest number of tokens per entry that can be loaded.
MAX_WIDTH = 64
#: What numpy and zipfile raise for malformed .npz files. A header's shape may exceed the memory, its text is parsed
#: as Python, and a member may be encrypted (RuntimeError).
MALFORMED = (
    ValueError,
    KeyError,
    TypeError,
    OSError,
    EOFError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


class Tables:
    """Logit cache and calibration, one pair for greedy and one for sampled decoding, which keeps more tokens."""

    def __init__(self, config: AdaptiveSettings, sampled: bool, table: BaseTable | None = None) -> None:
        self.logits = LogitCache(config.max_entries, config.sampled_top if sampled else config.top)
        self.calibration = new_calibration(sampled)
        self._name = NAMES[sampled]
        self._head: LightHead | None = None
        if table is not None:
            load(self.calibration.base, *table.counts[self._name])

    def use_head(self, head: LightHead) -> None:
        """Load the counts of a light head's guesses, unless this head's are in use already."""
        if self._head is not head:
            self._head = head
            count_guesses(self.calibration, *head.counts[self._name])


class AdaptiveState:
    """Statistics that sequences with the same model and tokenizer may share.

    Args:
        settings: ``max_entries``, ``top``, ``sampled_top`` and ``suffix_order`` determine the sizes of the tables.
        scope: a name for the sequences that may share the state, such as model, tokenizer and tenant. It is saved
            with the state and compared when the state is loaded.

    Attributes:
        lock: held while tables or corpus are read or changed, because threads may share the state.
    """

    def __init__(self, settings: AdaptiveSettings | None = None, scope: str = "") -> None:
        self.settings = settings if settings is not None else AdaptiveSettings()
        self.scope = scope
        self.lock = RLock()
        self._tables: dict[bool, Tables] = {}
        #: The largest token loaded from a file.
        self.largest = -1

    @cached_property
    def corpus(self) -> SuffixTrie:
        """Suffix trie of the sequences of all requests."""
        return SuffixTrie(self.settings.suffix_order, 4 * self.settings.max_entries)

    def __repr__(self) -> str:
        return f"AdaptiveState({self.settings}, scope={self.scope!r})"

    def check(self, vocabulary: int) -> None:
        """Raise SettingsError if the loaded state contains tokens outside this vocabulary."""
        if self.largest >= vocabulary:
            raise SettingsError(
                f"a saved state must belong to this model: it contains token {self.largest}, but the vocabulary has "
                f"{vocabulary} tokens"
            )

    def tables(self, sampled: bool, table: BaseTable | None = None) -> Tables:
        """The tables of greedy or of sampled decoding.

        Args:
            sampled: True for the tables of sampled decoding.
            table: the base table of the first sequence, which provides the initial counts of its buckets.
        """
        if sampled not in self._tables:
            self._tables[sampled] = Tables(self.settings, sampled, table)
        return self._tables[sampled]

    def save(self, path: str | Path) -> None:
        """Write the logit cache and the calibrations, but not the sequences themselves (corpus).

        The file is a numpy archive without pickled objects. It contains statistics of the decoded sequences.
        """
        arrays: dict[str, Any] = {"format": np.array(FORMAT), "scope": np.array(self.scope)}
        with self.lock:
            for sampled, tables in self._tables.items():
                name = NAMES[sampled]
                for order in range(ORDERS):
                    parts = zip(PARTS, tables.logits.entries(order), strict=True)
                    arrays |= {f"{name}.{order}.{part}": array for part, array in parts}
                for kind in SAVED:
                    buckets = getattr(tables.calibration, kind)
                    arrays |= {f"{name}.{kind}.{part}": buckets[part].copy() for part in ("hits", "trials")}

        with replacing(Path(path)) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(
        cls, path: str | Path, settings: AdaptiveSettings | None = None, scope: str = ""
    ) -> AdaptiveState:
        """Read a file that ``save`` wrote.

        Raises:
            SettingsError: the file is too large, has another format or scope, or is not a saved state.
        """
        state = cls(settings, scope)
        try:
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
            if unpacked > LARGEST_FILE:
                raise SettingsError(
                    f"a saved state must have at most {LARGEST_FILE} bytes uncompressed, {path} has {unpacked}"
                )
            with np.load(path, allow_pickle=False) as arrays:
                if int(arrays["format"]) != FORMAT:
                    raise SettingsError(
                        f"{path} has format {int(arrays['format'])}, but this version reads {FORMAT}"
                    )
                saved = str(arrays["scope"]) if "scope" in arrays else ""
                if saved != scope:
                    raise SettingsError(f"the scope of {path} must be {scope!r}, got {saved or 'no scope'!r}")
                for sampled in (False, True):
                    if f"{NAMES[sampled]}.joint.hits" in arrays:
                        state._unpack(arrays, NAMES[sampled], state.tables(sampled))
        except SettingsError:
            raise
        except MALFORMED as error:
            why = first_line(error)
            raise SettingsError(f"{path} is not a saved state of the adaptive drafter: {why}") from error
        return state

    def _unpack(self, arrays: Any, name: str, tables: Tables) -> None:
        for order in range(ORDERS):
            keys, ids, odds, origins = (arrays[f"{name}.{order}.{part}"] for part in PARTS)
            _check(keys, ids, odds, origins)
            self.largest = max(self.largest, int(ids.max(initial=-1)))
            tables.logits.load(order, keys, ids, odds, origins)
        for kind in SAVED:
            buckets = getattr(tables.calibration, kind)
            hits, trials = arrays[f"{name}.{kind}.hits"], arrays[f"{name}.{kind}.trials"]
            must(hits.shape == trials.shape == buckets.shape, "another number of buckets")
            within = np.isfinite(trials) & (hits >= 0) & (hits <= trials)
            must(within.all(), "hits must lie between 0 and trials")
            load(buckets, hits, trials)


def _check(keys: Any, ids: Any, odds: Any, origins: Any) -> None:
    """Raise ValueError unless these are valid entries of one order of the logit cache."""
    arrays = (keys, ids, odds, origins)
    must([part.ndim for part in arrays] == [1, 2, 2, 1], "arrays with wrong dimensions")
    must([part.dtype.kind for part in arrays] == list("iifi"), "arrays of the wrong type")
    must(len({len(part) for part in arrays}) == 1 and ids.shape == odds.shape, "arrays of unequal length")
    must(1 <= ids.shape[1] <= MAX_WIDTH, f"entries of {ids.shape[1]} tokens")
    if len(keys):
        must(keys.min() >= 0 and len(np.unique(keys)) == len(keys), "keys must be distinct and not negative")
        here = ids >= 0
        gapless = here[:, 0].all() and (here[:, 1:] <= here[:, :-1]).all()
        must(gapless and -1 <= ids.min() <= ids.max() < 1 << SHIFT, "token ids out of range")
        must(0 <= origins.min() <= origins.max() < ORIGINS, "an origin is out of range")
        must((odds[here] <= 0).all() and not (odds > 0).any(), "log-odds must not be above 0")
