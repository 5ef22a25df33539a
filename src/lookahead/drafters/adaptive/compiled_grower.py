"""The compiled twin of ``Grower``: the same methods over arrays, and two calls of compiled code per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core import Scores, TokenTree
from .arrays import ArrayReader, ArrayTables, address_of, empty_slots
from .compiled import entries as code
from .compiled import layout
from .observe import KEEP

FIRST_NGRAMS = 2048
#: Sources in the order in which compiled code counts credit.
CREDITED = ("suffix", "logits", "ngrams", "jacobi", "corpus", "window")


class NGramTable:
    """Twin of the dict from two tokens to what the window's n-grams go on with."""

    def __init__(self) -> None:
        self.header = np.zeros(layout.NGRAMS, dtype=np.int64)
        self.address = address_of(self.header)
        self._scratch = np.empty((2, 16), dtype=np.int64)
        self._address = address_of(self._scratch)
        self._allot(FIRST_NGRAMS)

    def keep(self, keys: Sequence[int], tokens: Sequence[int]) -> None:
        """Tokens that followed two others."""
        count = len(keys)
        if self.header[layout.N_USED] + count > self._room:
            self._allot(4 * (int(self.header[layout.N_USED]) + count))
        if count > self._scratch.shape[1]:
            self._scratch = np.empty((2, count), dtype=np.int64)
            self._address = address_of(self._scratch)
        self._scratch[0, :count] = keys
        self._scratch[1, :count] = tokens
        code.keep(self.address, self._address, self._address + 8 * self._scratch.shape[1], count)

    def _allot(self, count: int) -> None:
        count = 1 << (count - 1).bit_length()
        slots = empty_slots(count, 1 + KEEP)
        header = self.header
        if header[layout.N_SLOTS]:
            code.rehash(
                int(header[layout.N_SLOTS]),
                int(header[layout.N_MASK]),
                address_of(slots),
                count - 1,
                1 + KEEP,
            )
        self._slots, self._room = slots, count // 2
        header[layout.N_SLOTS], header[layout.N_MASK] = address_of(slots), count - 1


class CompiledGrower:
    """One sequence's view of the sources.

    Args:
        tables: what is learned. vocabulary: V. use: whether each source may propose.
        rows: of a tree at most. top: tokens kept of each evaluated row.
    """

    def __init__(
        self, tables: ArrayTables, vocabulary: int, use: Mapping[str, bool], rows: int, top: int
    ) -> None:
        self.tables = tables
        self.vocabulary = vocabulary
        self.use = dict(use)
        self.top = top
        self.tail = [0, 0, 0]
        self.noise: Any = None
        self.temperature = 1.0
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.probabilities: list[float] = []
        self._reader: ArrayReader | None = None
        self._corpus: ArrayReader | None = None
        self._ngrams = NGramTable()
        #: By emitted tokens from now on: noise that compiled code holds an address of.
        self._held: dict[int, Any] = {}
        self._taken = 0
        self._lay_out(rows)

    def _lay_out(self, rows: int) -> None:
        """Allot the memory of trees of so many rows, and tell compiled code where everything is."""
        for table in self.tables.logits.tables:
            table.widen(self.top)
        width = max(table.width for table in self.tables.logits.tables)
        stride = width + layout.BESIDE
        self._rows = rows
        self._header = h = np.zeros(layout.GROWER, dtype=np.int64)
        self.address = address_of(h)
        longs = {
            layout.G_TOKENS: rows,
            layout.G_PARENTS: rows,
            layout.G_DEPTHS: rows,
            layout.G_PAIRS: rows,
            layout.G_PLACES: rows,
            layout.G_RECALLS: rows,
            layout.G_META: rows * layout.META,
            layout.G_PROPOSED: rows * stride,
            layout.G_CELLS: rows * stride,
            layout.G_KINDS: rows * stride,
            layout.G_EDGE_TOKENS: rows * stride,
            layout.G_EDGE_COUNTS: rows,
            layout.G_HEAP_NUMBERS: rows + 2,
            layout.G_SAID: 12 + 64,
            layout.G_PATH: rows,
            layout.G_TRUTHS: rows,
            layout.G_IDS: rows * width,
            layout.G_FOUND: rows,
            layout.G_RECORDS: rows,
            layout.G_PROBABILITIES: rows,
            layout.G_EDGES: rows * stride,
            layout.G_HEAP_KEYS: rows + 2,
            layout.G_STOP: rows + 1,
            layout.G_ODDS: rows * width,
            layout.G_FLOATS: layout.FLOATS,
        }
        # One stretch of 8-byte numbers for all of them, whatever their type.
        memory = np.empty(sum(longs.values()), dtype=np.int64)
        start, part = address_of(memory), {}
        at = 0
        for name, count in longs.items():
            part[name] = memory[at : at + count]
            h[name] = start + 8 * at
            at += count
        self._memory, self._stop_address = memory, int(h[layout.G_STOP])
        self._tokens, self._parents, self._depths = (
            part[name] for name in (layout.G_TOKENS, layout.G_PARENTS, layout.G_DEPTHS)
        )
        self._probabilities, self._stop, self._floats = (
            part[name].view(np.float64) for name in (layout.G_PROBABILITIES, layout.G_STOP, layout.G_FLOATS)
        )
        self._ids, self._odds = part[layout.G_IDS], part[layout.G_ODDS].view(np.float32)
        self._path, self._truths, self._found = (
            part[layout.G_PATH],
            part[layout.G_TRUTHS],
            part[layout.G_FOUND],
        )
        self._floats[:] = (1.0, 0.0, 0.0)
        self._answers = np.zeros(4 * layout.DEEPEST, dtype=np.int64)
        self._noise_at = np.zeros(layout.DEEPEST, dtype=np.int64)
        self._credit = np.zeros(layout.CREDITS, dtype=np.int64)
        calibrations, logits = self.tables.calibrations, self.tables.logits
        h[layout.G_STRIDE], h[layout.G_SIZE] = stride, self.vocabulary
        h[layout.G_TABLES], h[layout.G_NGRAMS] = logits.address, self._ngrams.address
        h[layout.G_BUCKETS] = len(calibrations.logits[0].priors)
        for name, array in (
            (layout.G_HITS, calibrations.hits),
            (layout.G_TRIALS, calibrations.trials),
            (layout.G_PRIORS, calibrations.priors),
            (layout.G_ESTIMATE, calibrations.estimate),
            (layout.G_LEVELS, calibrations.levels),
            (layout.G_ANSWERS, self._answers),
            (layout.G_NOISE, self._noise_at),
            (layout.G_CREDIT, self._credit),
        ):
            h[name] = address_of(array)
        h[layout.G_SUFFIX_AT], h[layout.G_CORPUS_AT] = calibrations.suffix.start, calibrations.corpus.start
        h[layout.G_JOINT_AT] = calibrations.joint.start
        h[layout.G_USE_LOGITS], h[layout.G_USE_JACOBI] = self.use["logits"], self.use["jacobi"]

    @property
    def credit(self) -> dict[str, int]:
        """Accepted tokens by the source on whose word they were drafted."""
        return dict(zip(CREDITED, self._credit.tolist(), strict=True))

    @property
    def depths(self) -> list[int]:
        """Of the tree's rows."""
        depths: list[int] = self._depths[: self._header[layout.G_COUNT]].tolist()
        return depths

    @property
    def reader(self) -> ArrayReader | None:
        """The end of this text in its own suffix trie."""
        return self._reader

    @reader.setter
    def reader(self, reader: ArrayReader | None) -> None:
        self._reader = reader
        self._header[layout.G_READER] = reader.address if reader is not None else 0

    @property
    def corpus(self) -> ArrayReader | None:
        """The same in the corpus."""
        return self._corpus

    @corpus.setter
    def corpus(self, corpus: ArrayReader | None) -> None:
        self._corpus = corpus
        self._header[layout.G_CORPUS] = corpus.address if corpus is not None else 0

    def take(self, tokens: Sequence[int]) -> None:
        """The text has gone on."""
        count = len(tokens)
        if count <= self._rows:
            self._truths[:count] = tokens
            address = int(self._header[layout.G_TRUTHS])
        else:
            text = np.array(tokens, dtype=np.int64)
            address = address_of(text)
        for reader in (self._reader, self._corpus):
            if reader is not None:
                reader.feed_from(address, count)
        self.tail = [*self.tail, *tokens][-3:]
        self._header[layout.G_TAIL : layout.G_TAIL + 3] = self.tail
        self._taken += count
        if self._held:
            places = self._noise_at
            places[: max(0, len(places) - count)] = places[count:]
            places[max(0, len(places) - count) :] = 0
            for index in [index for index in self._held if index < self._taken]:
                del self._held[index]

    def forget_answers(self) -> None:
        """The last step's answers say nothing of the next position."""
        self._answers[::4] = 0

    def _hand_in(self, depth: int) -> None:
        """Give compiled code the noise of the token chosen under nodes of this depth."""
        noise = np.ascontiguousarray(self.noise(depth), dtype=np.float32)
        self._held[self._taken + depth] = noise
        self._noise_at[depth] = address_of(noise)
        self._header[layout.G_NOISE_SIZE] = len(noise)

    def grow(self, rows: int, max_depth: int, stop: Sequence[float] | None = None) -> None:
        """Grow to at most ``rows`` nodes. With ``stop``: end when row k's probability is below stop[k]."""
        h = self._header
        rows = min(rows, self._rows)
        h[layout.G_ROWS], h[layout.G_DEPTH], h[layout.G_STOP] = rows, max_depth, 0
        h[layout.G_SAMPLED] = self.noise is not None
        if stop is not None:
            self._stop[: rows + 1] = stop[: rows + 1]
            h[layout.G_STOP] = self._stop_address
        self._floats[layout.F_TEMPERATURE] = self.temperature
        if self._corpus is not None:
            self._corpus.catch_up()  # another text may have filled the trie
        wanted = code.grow(self.address, True)
        while wanted >= 0:
            self._hand_in(wanted)
            wanted = code.grow(self.address, False)
        count = int(h[layout.G_COUNT])
        self.tokens, self.parents = self._tokens[:count].tolist(), self._parents[:count].tolist()
        self.probabilities = self._probabilities[:count].tolist()

    def cut(self, rows: int) -> None:
        """Keep the first ``rows`` nodes."""
        if rows < len(self.tokens):
            del self.tokens[rows:], self.parents[rows:], self.probabilities[rows:]
            self._header[layout.G_COUNT] = rows

    def adopt(self, tree: TokenTree) -> None:
        """Take over the rows that others have added to the tree."""
        own, count = len(self.tokens), len(tree)
        self.tokens += tree.tokens[own:]
        self.parents += tree.parents[own:]
        self._tokens[own:count] = tree.tokens[own:]
        self._parents[own:count] = tree.parents[own:]
        self._depths[own:count] = tree.depths[own:]
        code.adopt(self.address, own, count)

    def study(
        self, scores: Scores, path: Sequence[int], tokens: Sequence[int], window: int
    ) -> tuple[Any, int]:
        """Learn all that a step can teach; see ``Grower.study``."""
        h = self._header
        count, length = len(self.tokens), len(path)
        ids, odds = scores.top(range(count), self.top)
        ids, odds = np.asarray(ids)[:, : self.top], np.asarray(odds)[:, : self.top]
        size = ids.size
        self._ids[:size] = ids.ravel()
        self._odds[:size] = odds.ravel()
        self._path[:length] = path
        self._truths[:length] = tokens
        h[layout.G_LENGTH], h[layout.G_COLUMNS], h[layout.G_WINDOW] = length, size // count, window
        if self.noise is not None:
            for depth in range(int(self._depths[:count].max()) + 1):
                if not self._noise_at[depth]:
                    self._hand_in(depth)
        for table in self.tables.logits.tables:
            table.reserve(count + length)
        code.study(self.address)
        return self._found[:count].tolist(), int(h[layout.G_CREDITED])

    def close(self, ngrams: Sequence[Sequence[int]]) -> None:
        """The window has closed n-grams."""
        if self.use["ngrams"] and ngrams and len(ngrams[0]) > 2:
            size, last = self.vocabulary, range(2, len(ngrams[0]))
            keys = [ngram[i - 2] * size + ngram[i - 1] for ngram in ngrams for i in last]
            self._ngrams.keep(keys, [ngram[i] for ngram in ngrams for i in last])
