"""The base table: the likeliest next tokens after contexts of one, two and three tokens, learned before any request.

It is read-only, so all sequences of a process share one copy, and nothing is ever evicted.
``lookahead.learning`` builds it from text that models generated. The entry of a context lists the tokens with the
largest probabilities, each the mean of the target's probabilities over all occurrences of the context; where only the
text is known, the next token has probability 1.

The contexts are the nodes of a trie, sorted by level and then by tokens. A node's children are adjacent:

    level 0 (one token)       node 0: 5      node 1: 6      node 2: 7
    level 1 (two tokens)      node 3: 5 6    node 4: 6 7
    level 2 (three tokens)    node 5: 5 6 7

    roots     token -> node     5 -> 0, 6 -> 1, 7 -> 2, others -> -1
    children  [3, 4, 5, 5, 6, 6]: the children of node i are children[i] up to children[i + 1]

After the tokens 5 6 7, the entries of 5 6 7 (node 5), 6 7 (node 4) and 7 (node 2) apply; the longest is used.
Children are found by binary search.

The file is in safetensors format, which cannot contain code; it is validated when opened. Token ids are stored as
their lower 16 bits and the rest, and probabilities as steps of ``STEP`` in the logarithm, so that most bytes of small
vocabularies are zero and the file compresses well.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from ....core import SettingsError
from ....machine_code import compiled, int64
from ....records import not_writable, read_arrays, replacing, require
from ..calibration import (
    BINS,
    DISTANCES,
    HEIGHTS,
    KINDS,
    NO_SECOND,
    NOTHING,
    ORDERS,
    OTHER,
    STATES,
    count,
    interval_of,
    new_buckets,
)
from ..layout import BUCKET, index_of, noise_of
from .source import Setup, Source

FORMAT = "1"
#: Largest file size, in bytes.
LARGEST_FILE = 1 << 30
#: Largest number of tokens per entry.
MAX_WIDTH = 64
MAX_VOCABULARY = 1 << 24
#: Largest number of tokens read from an entry.
BASE_PROPOSALS = 8
#: The base table: upper ends of the intervals of a context's count, and of a negative log-probability (0.9, 0.75,
#: 0.55, 0.4, 0.28, 0.2, 0.12, 0.07, 0.04, 0.02 and 0.01), except the last.
BASE_COUNTS = (1, 3, 15)
BASE_LOGS = (0.105, 0.288, 0.598, 0.916, 1.273, 1.609, 2.12, 2.659, 3.219, 3.912, 4.605)
#: The axes of the buckets of the base table: greedy and sampled.
BASE_AXES = (
    (ORDERS, len(BASE_COUNTS) + 1, 2, len(BASE_LOGS) + 1),
    (ORDERS, len(BASE_COUNTS) + 1, len(HEIGHTS) + 1, KINDS),
)
#: A stored logarithm l means the probability exp(-l * STEP).
STEP = np.float32(1 / 32)
#: The stored logarithm that means no token.
ABSENT = 255
#: The interval of each count.
COUNT_OF = np.searchsorted(BASE_COUNTS, np.arange(256))
#: The interval of each stored logarithm.
LOG_OF = np.searchsorted(BASE_LOGS, np.arange(256) * STEP)
#: The dtype of each array in a file.
ARRAYS = {
    "roots": np.int32,
    "children": np.int32,
    "low": np.uint16,
    "high": np.uint8,
    "counts": np.uint8,
    "ids_low": np.uint16,
    "ids_high": np.uint8,
    "logs": np.uint8,
    "greedy_hits": np.float32,
    "greedy_trials": np.float32,
    "sampled_hits": np.float32,
    "sampled_trials": np.float32,
}


class Trie(NamedTuple):
    """The base table: n contexts, of which n_1 have one token and n_2 have two; see the module."""

    roots: Annotated[Any, "i4", 1]  # (V,): token -> its node, or -1
    # (n_1 + n_2 + 1,): the children of node i are children[i] up to children[i + 1]
    children: Annotated[Any, "i4", 1]
    low: Annotated[Any, "u2", 1]  # (n,): the lower 16 bits of each context's last token
    high: Annotated[Any, "u1", 1]  # (n,): its other bits
    counts: Annotated[Any, "u1", 1]  # (n,): weighted occurrences of the context; 0 if it has no entry
    ids_low: Annotated[Any, "u2", 2]  # (n, width): the tokens of the entry, likeliest first, split likewise
    ids_high: Annotated[Any, "u1", 2]  # (n, width)
    # (n, width): their negative log-probabilities, in steps; ABSENT after the last
    logs: Annotated[Any, "u1", 2]


class Base(NamedTuple):
    """The table, and the buckets of its proposals."""

    trie: Trie
    buckets: Annotated[Any, BUCKET, 1]  # (kinds,)
    pairs: Annotated[Any, BUCKET, 1]  # (kinds,): of the combination of the logit cache and the base table


@compiled
def token_of(trie: Trie, node: int) -> int:
    """The last token of a node's context."""
    return int64(trie.high[node]) << 16 | int64(trie.low[node])


@compiled
def candidate(trie: Trie, node: int, index: int) -> int:
    """The token at an index of a node's entry."""
    return int64(trie.ids_high[node, index]) << 16 | int64(trie.ids_low[node, index])


@compiled
def order_of(trie: Trie, node: int) -> int:
    """The number of tokens in a node's context, minus one."""
    first_pair = trie.children[0]
    if node < first_pair:
        return 0
    return 1 if node < trie.children[first_pair] else 2


@compiled
def _child(trie: Trie, node: int, token: int) -> int:
    """The child of a node with this token; -1 if there is none, or if ``node`` is -1."""
    if node < 0:
        return -1
    low, high = int64(trie.children[node]), int64(trie.children[node + 1])
    while low < high:
        middle = (low + high) >> 1
        found = token_of(trie, middle)
        if found == token:
            return middle
        if found < token:
            low = middle + 1
        else:
            high = middle
    return -1


@compiled
def _root(trie: Trie, token: int) -> int:
    return int64(trie.roots[token]) if 0 <= token < len(trie.roots) else -1


@compiled
def find_entry(trie: Trie, before: int, previous: int, last: int) -> int:
    """The node of the longest context with an entry that is a suffix of these three tokens; -1 for none."""
    node = _child(trie, _child(trie, _root(trie, before), previous), last)
    if node >= 0 and trie.counts[node] > 0:
        return node
    node = _child(trie, _root(trie, previous), last)
    if node >= 0 and trie.counts[node] > 0:
        return node
    node = _root(trie, last)
    return node if node >= 0 and trie.counts[node] > 0 else -1


@compiled
def greedy_kind(trie: Trie, node: int, index: int) -> int:
    """The bucket of an entry's token: length and count of the context, first or later, probability."""
    context = order_of(trie, node) * (len(BASE_COUNTS) + 1) + COUNT_OF[trie.counts[node]]
    return int64(
        (context * 2 + (1 if index > 0 else 0)) * (len(BASE_LOGS) + 1) + LOG_OF[trie.logs[node, index]]
    )


@compiled
def log_odds(trie: Trie, node: int, index: int) -> Any:
    """The log-odds of a candidate against the first of its entry, float32."""
    return np.float32(int64(trie.logs[node, 0]) - int64(trie.logs[node, index])) * STEP


@compiled
def _score(memory: Any, trie: Trie, entry: int, index: int, depth: int) -> float:
    """The log-odds of a candidate under a node of this depth, divided by the temperature, plus its noise."""
    token = candidate(trie, entry, index)
    return np.float64(
        log_odds(trie, entry, index) / memory.step[0].temperature + noise_of(memory, depth, token)
    )


@compiled
def sampled_kind(trie: Trie, node: int, best: float, second: float, score: float, first: bool) -> int:
    """The bucket of a candidate when sampling.

    Args:
        best, second: the two highest scores of the entry; ``second`` is minus infinity if there is only one.
        score: the candidate's score.
        first: whether the candidate is the best. If so, its lead matters, otherwise its distance from the best.
    """
    context = order_of(trie, node) * (len(BASE_COUNTS) + 1) + COUNT_OF[trie.counts[node]]
    base = (context * (len(HEIGHTS) + 1) + interval_of(HEIGHTS, best)) * KINDS
    if not first:
        return int64(base + BINS + interval_of(DISTANCES, best - score))
    return int64(base + (NO_SECOND if second == -np.inf else interval_of(DISTANCES, best - second)))


@compiled
def _propose(memory: Any, own: Base, node: int, number: int) -> None:
    """Add the base table's proposals after those of the logit cache."""
    step = memory.step[0]
    trie = own.trie
    row = memory.tree.nodes[node]
    proposals = memory.tree.proposals[node]

    # The entry, its size and, when sampling, its two highest scores.
    above = memory.tree.nodes[row.parent].pair if node > 0 else step.before * step.vocabulary + step.previous
    entry = find_entry(trie, above // step.vocabulary, above % step.vocabulary, int64(row.token))
    if entry < 0:
        return
    size = 0
    while size < min(trie.logs.shape[1], BASE_PROPOSALS) and trie.logs[entry, size] != ABSENT:
        size += 1
    depth = int64(row.depth)
    best, second = -np.inf, -np.inf
    if step.sampled:
        for i in range(size):
            score = _score(memory, trie, entry, i, depth)
            best, second = max(best, score), max(second, min(best, score))

    # Merge its tokens with those of the logit cache.
    cached = int64(row.recalled)
    known = cached
    for i in range(size):
        token = candidate(trie, entry, i)
        index = index_of(proposals, known, token)
        if index < 0:
            index = known
            proposals[index].token, proposals[index].kind, proposals[index].source = token, -1, number
            known += 1
        if step.sampled:
            score = _score(memory, trie, entry, i, depth)
            proposals[index].base_kind = sampled_kind(trie, entry, best, second, score, score == best)
        else:
            proposals[index].base_kind = greedy_kind(trie, entry, i)
    row.recalled = known
    _pair(own, row, proposals, cached)


@compiled
def _pair(own: Base, row: Any, proposals: Any, cached: int) -> None:
    """Set the bucket of each pair of logit cache and base table, and the confidence in the proposal by it."""
    # The best level of each source, from which follows its state for a token that only the other proposes.
    highest_cached, highest_base = int64(-1), int64(-1)
    for index in range(int64(row.recalled)):
        proposal = proposals[index]
        if index < cached:
            highest_cached = max(highest_cached, int64(proposal.level))
        if proposal.base_kind >= 0:
            highest_base = max(highest_base, own.buckets[proposal.base_kind].level)
    not_cached = OTHER + highest_cached if cached else NOTHING
    not_in_base = OTHER + highest_base

    highest = int64(-1)
    for index in range(int64(row.recalled)):
        proposal = proposals[index]
        first = int64(proposal.level) if index < cached else not_cached
        second = own.buckets[proposal.base_kind].level if proposal.base_kind >= 0 else not_in_base
        proposal.pair = first * STATES + second
        proposal.level = own.pairs[proposal.pair].level
        highest = max(highest, int64(proposal.level))
    row.rest = OTHER + highest


@compiled
def _judge(memory: Any, own: Base, node: int, number: int, right: int, truth: int) -> None:
    for index in range(memory.tree.nodes[node].recalled):
        proposal = memory.tree.proposals[node, index]
        if proposal.pair >= 0:
            count(own.pairs[proposal.pair], index == right)
        if proposal.base_kind >= 0:
            count(own.buckets[proposal.base_kind], index == right)


def _fixed(array: Any) -> Any:
    """The array, made read-only. numba types read-only arrays differently, and code is compiled for one type only."""
    array.flags.writeable = False
    return array


def _no_trie() -> Trie:
    shapes = {"children": (1,), "ids_low": (0, 1), "ids_high": (0, 1), "logs": (0, 1)}
    return Trie(*(_fixed(np.zeros(shapes.get(name, (0,)), ARRAYS[name])) for name in Trie._fields))


#: Stands in for a missing table; contains no contexts.
NO_TRIE = _no_trie()


@dataclass(frozen=True)
class BaseTable:
    """An opened table.

    Attributes:
        path: its file.
        trie: its arrays.
        counts: "greedy" and "sampled" -> (hits, trials) of the buckets of its proposals, from held-out text.
        vocabulary: V, or one more than the largest token.
        tokenizer: the key of its tokenizer; "" if unknown.
        learned: number of tokens of models' own text from which it was built; 0 for a table counted in the corpus.
        corpus: size of that corpus in bytes; 0 for others.
    """

    path: Path
    trie: Trie
    counts: dict[str, tuple[Any, Any]]
    vocabulary: int
    tokenizer: str
    learned: int
    corpus: int

    @property
    def contexts(self) -> list[int]:
        """The number of entries for one, two and three tokens."""
        counts = self.trie.counts
        ends = np.cumsum(self._levels())
        return [int((part > 0).sum()) for part in np.split(counts, ends[:-1])]

    def _levels(self) -> list[int]:
        first = int(self.trie.children[0])
        second = int(self.trie.children[first]) - first
        return [first, second, len(self.trie.low) - first - second]

    def check(self, vocabulary: int, tokenizer: str = "") -> None:
        """Raise SettingsError unless the table is for this vocabulary, and for this tokenizer if both are known."""
        if self.tokenizer and tokenizer and self.tokenizer != tokenizer:
            raise SettingsError(
                f"a base table must be for the model's tokenizer ({tokenizer}), but {self.path} is for another "
                f"({self.tokenizer}); create one with lookahead learn"
            )
        # Models with one tokenizer may have unused tokens at the end, in different numbers.
        if self.vocabulary > vocabulary or (
            self.vocabulary < vocabulary and not (self.tokenizer and tokenizer)
        ):
            raise SettingsError(
                f"a base table must have the model's vocabulary of {vocabulary} tokens, "
                f"{self.path} has {self.vocabulary}; create one with lookahead learn"
            )


def save_table(
    path: Path,
    trie: Trie,
    counts: dict[str, tuple[Any, Any]],
    vocabulary: int,
    tokenizer: str,
    learned: int,
    corpus: int = 0,
) -> None:
    """Write a table atomically: readers of an older file at this path keep reading the older one.

    Args:
        path: the file; its folder is created.
        trie: the contexts and their entries.
        counts: "greedy" and "sampled" -> (hits, trials) of the buckets of its proposals, from held-out text.
        vocabulary: V, or one more than the largest token.
        tokenizer: the key of its tokenizer.
        learned: number of tokens of models' own text from which it was built.
        corpus: size in bytes of the corpus in which it was counted.

    Raises:
        SettingsError: the table is larger than readers accept, the folder cannot be written, or its disk is full. An
            older file is then kept.
    """
    from safetensors.numpy import save

    arrays = trie._asdict()
    for name, (hits, trials) in counts.items():
        arrays |= {f"{name}_hits": hits, f"{name}_trials": trials}
    ready = {name: np.ascontiguousarray(arrays[name], dtype) for name, dtype in ARRAYS.items()}
    about = {
        "format": FORMAT,
        "vocabulary": str(vocabulary),
        "tokenizer": tokenizer,
        "learned": str(learned),
        "corpus": str(corpus),
    }
    content = save(ready, about)
    if len(content) > LARGEST_FILE:
        raise SettingsError(
            f"a base table must have at most {LARGEST_FILE} bytes, but this one has {len(content)}"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise not_writable(path.parent, error) from None


def open_table(path: str | os.PathLike[str]) -> BaseTable:
    """Open a table. A process opens each version of a file once.

    Raises:
        SettingsError: the file does not exist, is not a base table, or is damaged.
    """
    file = Path(path)
    try:
        status = file.stat()
    except OSError as error:
        raise SettingsError(
            f"a base table must be a file, got {file} ({error.strerror}); create one with lookahead learn"
        ) from None
    return _opened(file.absolute(), status.st_mtime_ns, status.st_size, status.st_ino)


@lru_cache(maxsize=16)
def _opened(path: Path, *version: int) -> BaseTable:
    return read_table(path)


def read_table(path: Path) -> BaseTable:
    """Open a table that this process does not keep: each call reads the file. Raises like ``open_table``."""
    try:
        about, arrays = _read(path)
        trie = Trie(*(arrays[name] for name in Trie._fields))
        vocabulary = int(about["vocabulary"])
        learned, corpus = int(about["learned"]), int(about.get("corpus", 0))
        _check(trie, vocabulary)
        counts = {}
        for name, axes in zip(("greedy", "sampled"), BASE_AXES, strict=True):
            hits, trials = arrays[f"{name}_hits"], arrays[f"{name}_trials"]
            require(hits.shape == trials.shape == (math.prod(axes),), "the wrong number of buckets")
            require(bool((np.isfinite(trials) & (hits >= 0) & (hits <= trials)).all()), "hits above trials")
            counts[name] = hits, trials
        return BaseTable(path, trie, counts, vocabulary, about.get("tokenizer", ""), learned, corpus)
    except (ValueError, KeyError, OSError) as error:
        detail = f"{error} is missing" if isinstance(error, KeyError) else error
        raise SettingsError(f"{path} is not a usable base table: {detail}; learn it again") from None


def _read(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """(metadata, arrays) of a file."""
    about, arrays = read_arrays(path, LARGEST_FILE)
    if about.get("format") != FORMAT:
        raise ValueError(f"its format is {about.get('format', 'unknown')}, but this version reads {FORMAT}")
    for name, kind in ARRAYS.items():
        require(arrays[name].dtype == kind, f"{name} has the wrong type")
    return about, {name: _fixed(arrays[name]) for name in ARRAYS}


def _check(trie: Trie, vocabulary: int) -> None:
    """Raise ValueError unless every index in these arrays is in range and everything is in order."""
    nodes = len(trie.low)
    require(0 < vocabulary <= MAX_VOCABULARY, f"a vocabulary of {vocabulary} tokens")
    require(trie.roots.shape == (vocabulary,), "roots for a different vocabulary")
    require(trie.children.ndim == 1 and len(trie.children) >= 1, "no children")
    require(trie.low.shape == trie.high.shape == trie.counts.shape == (nodes,), "arrays of unequal length")
    width = trie.logs.shape[-1] if trie.logs.ndim == 2 else 0
    require(1 <= width <= MAX_WIDTH, f"entries of {width} tokens")
    require(
        trie.ids_low.shape == trie.ids_high.shape == trie.logs.shape == (nodes, width),
        "entries of different shapes",
    )

    # The nodes of each level are contiguous, and so are the children of each node.
    first = int((trie.roots >= 0).sum())
    children = trie.children.astype(np.int64)
    require(np.array_equal(trie.roots[trie.roots >= 0], np.arange(first)), "roots out of order")
    require(children[0] == first and len(children) > first, "children out of range")
    require((np.diff(children) >= 0).all() and children[-1] == nodes, "children out of order")
    require(children[first] == len(children) - 1, "levels out of order")
    tokens = trie.high.astype(np.int64) << 16 | trie.low
    if nodes:
        ends = np.zeros(nodes, bool)
        ends[children[children < nodes]] = True  # the first child of a node
        ends[0] = True
        require(((np.diff(tokens) > 0) | ends[1:]).all() and tokens.max() < vocabulary, "tokens out of order")

    # The candidates of an entry are tokens, likeliest first.
    ids = trie.ids_high.astype(np.int64) << 16 | trie.ids_low
    there = trie.logs != ABSENT
    require((ids[there] < vocabulary).all(), "a token out of range")
    require((trie.logs[:, 1:] >= trie.logs[:, :-1]).all(), "probabilities out of order")
    require((there[:, 0] == (trie.counts > 0)).all(), "an entry without tokens")


class BaseSource(Source):
    """The base table; without one, nothing is proposed."""

    name = "base"
    most = BASE_PROPOSALS
    Arrays = Base
    propose = staticmethod(_propose)
    judge = staticmethod(_judge)

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.on = self.on and setup.table is not None
        trie = NO_TRIE if setup.table is None else setup.table.trie
        self.arrays = Base(trie, setup.tables.buckets["base"], setup.tables.buckets["pairs"])

    @staticmethod
    def buckets(fits: Mapping[str, Any], sampled: bool) -> dict[str, Any]:
        return {"base": new_buckets(fits["base"]), "pairs": new_buckets(fits["pairs"])}

    def proposed(self, memory: Any, node: int) -> list[int]:
        found = memory.tree.proposals[node, : memory.tree.nodes["recalled"][node]]
        tokens: list[int] = found["token"][found["base_kind"] >= 0].tolist()
        return tokens
