"""What a drafter learns, and what of it may be kept from one request to the next.

Text statistics of one request show in the drafts of the next one (never in its output). So nothing is kept
unless a caller makes a state and hands it in, and states are scoped by a key of the caller's choice.
"""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from ..core import SettingsError
from .budget import StepTimes
from .calibration import Calibration
from .config import AdaptiveConfig
from .logits import ORDERS, LogitCache
from .priors import joint_priors, logit_priors, suffix_priors
from .suffix import SuffixTrie

FORMAT = 1
#: Largest file that ``load`` reads, and most scopes that ``warm_state`` keeps.
LARGEST_FILE = 1 << 30
MOST_SCOPES = 64


class Calibrations:
    """The buckets of one way of decoding, greedy or sampled."""

    def __init__(self, sampled: bool) -> None:
        self.logits = [Calibration(logit_priors(order, sampled)) for order in range(ORDERS)]
        self.suffix = Calibration(suffix_priors(sampled))
        self.corpus = Calibration(suffix_priors(sampled))
        self.joint = Calibration(joint_priors(sampled))

    def all(self) -> list[Calibration]:
        """In the order in which they are saved."""
        return [*self.logits, self.suffix, self.corpus, self.joint]


class Tables:
    """Logits and calibrations of one way of decoding: greedy and sampled rows are kept differently."""

    def __init__(self, config: AdaptiveConfig, sampled: bool) -> None:
        self.logits = LogitCache(config.max_entries)
        self.calibrations = Calibrations(sampled)


class AdaptiveState:
    """What drafters of one model and tokenizer may share.

    Args:
        config: anything that ``AdaptiveConfig.of`` takes.
        keep: keep text and calibrations from request to request; otherwise only step times are shared.
        times: step times to begin with.
    """

    def __init__(self, config: Any = None, keep: bool = True, times: StepTimes | None = None) -> None:
        self.config = AdaptiveConfig.of(config)
        self.keep = keep
        self.times = times if times is not None else StepTimes()
        self.corpus = SuffixTrie(self.config.suffix_order, 4 * self.config.max_entries)
        self._tables: dict[bool, Tables] = {}

    def tables(self, sampled: bool) -> Tables:
        """Those of greedy or of sampled decoding."""
        if sampled not in self._tables:
            self._tables[sampled] = Tables(self.config, sampled)
        return self._tables[sampled]

    def save(self, path: str | Path) -> None:
        """Write the logit cache and the calibrations; the texts themselves (corpus) are not written.

        The file is a numpy archive without pickled objects. It holds statistics of the texts decoded.
        """
        arrays: dict[str, Any] = {"format": np.array(FORMAT)}
        for sampled, tables in self._tables.items():
            name = "sampled" if sampled else "greedy"
            for order, table in enumerate(tables.logits.tables):
                arrays |= _pack(f"{name}.{order}", table)
            for number, calibration in enumerate(tables.calibrations.all()):
                arrays[f"{name}.hits.{number}"] = np.array(calibration.hits)
                arrays[f"{name}.trials.{number}"] = np.array(calibration.trials)
        with open(path, "wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, path: str | Path, config: Any = None, times: StepTimes | None = None) -> AdaptiveState:
        """Read what ``save`` wrote.

        Raises:
            SettingsError: the file is too large, of another format, or not such a file.
        """
        state = cls(config, times=times)
        size = Path(path).stat().st_size
        if size > LARGEST_FILE:
            raise SettingsError(f"a saved state may have {LARGEST_FILE} bytes at most, {path} has {size}")
        try:
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
            if unpacked > LARGEST_FILE:
                raise SettingsError(
                    f"a saved state may unpack to {LARGEST_FILE} bytes at most, {path} would to {unpacked}"
                )
            with np.load(path, allow_pickle=False) as arrays:
                if int(arrays["format"]) != FORMAT:
                    raise SettingsError(
                        f"{path} has format {int(arrays['format'])}, this version reads {FORMAT}"
                    )
                for name, sampled in (("greedy", False), ("sampled", True)):
                    if f"{name}.hits.0" in arrays:
                        _unpack(arrays, name, state.tables(sampled), sampled)
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(f"{path} is no saved state of the adaptive drafter: {error}") from error
        return state


def _pack(name: str, table: dict[int, Any]) -> dict[str, Any]:
    """One table of the logit cache as arrays; rows of unequal length are padded with -1."""
    keys = np.array(list(table), dtype=np.int64)
    width = max((len(entry[0]) for entry in table.values()), default=1)
    ids = np.full((len(table), width), -1, dtype=np.int32)
    values = np.zeros((len(table), width), dtype=np.float32)
    origins = np.zeros(len(table), dtype=np.int8)
    for row, entry in enumerate(table.values()):
        ids[row, : len(entry[0])] = entry[0]
        values[row, : len(entry[1])] = list(entry[1])
        if len(entry) > 2:
            origins[row] = entry[2]
    return {
        f"{name}.keys": keys,
        f"{name}.ids": ids,
        f"{name}.values": values,
        f"{name}.origins": origins,
    }


def _unpack(arrays: Any, name: str, tables: Tables, sampled: bool) -> None:
    for order, table in enumerate(tables.logits.tables):
        keys, ids, values, origins = (
            arrays[f"{name}.{order}.{part}"] for part in ("keys", "ids", "values", "origins")
        )
        if not len(keys) == len(ids) == len(values) == len(origins) or ids.shape != values.shape:
            raise ValueError("arrays of unequal length")
        entries: Any
        if sampled:
            entries = zip(ids, values, origins.tolist(), strict=True)
        else:
            size = len(tables.calibrations.logits[order].priors)
            kinds = values.astype(np.int64)
            if kinds.size and not 0 <= kinds.min() <= kinds.max() < size:
                raise ValueError("a bucket is out of range")
            entries = _trim(ids, kinds)
        table.update(zip(keys.tolist(), entries, strict=True))
    for number, calibration in enumerate(tables.calibrations.all()):
        hits, trials = arrays[f"{name}.hits.{number}"], arrays[f"{name}.trials.{number}"]
        if hits.shape != (len(calibration.priors),) or trials.shape != hits.shape:
            raise ValueError("another number of buckets")
        if not (np.isfinite(hits).all() and (hits >= 0).all() and (hits <= trials).all()):
            raise ValueError("hits must lie between 0 and trials")
        calibration.load(hits.tolist(), trials.tolist())


def _trim(ids: Any, kinds: Any) -> list[Any]:
    """Entries without the padding."""
    counts = (ids >= 0).sum(axis=1).tolist()
    rows = zip(ids.tolist(), kinds.astype(np.uint8), counts, strict=True)
    return [(tuple(tokens[:count]), row[:count].tobytes()) for tokens, row, count in rows]


_states: OrderedDict[str, AdaptiveState] = OrderedDict()


def warm_state(key: str, config: Any = None) -> AdaptiveState:
    """The state of this process for ``key``, made if need be; the least recently used scope goes first.

    Args:
        key: what may share text statistics; put model, tokenizer and tenant into it.
        config: of a new state.
    """
    state = _states.pop(key, None)
    if state is None:
        state = AdaptiveState(config)
    _states[key] = state
    while len(_states) > MOST_SCOPES:
        _states.popitem(last=False)
    return state
