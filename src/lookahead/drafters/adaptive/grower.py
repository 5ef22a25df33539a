"""The tree of one sequence: memory, and one call of compiled code to grow it and one to learn from the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core import Scores, TokenTree
from .arrays import ANSWERS, BESIDE, Calibration, Rules, Sources, Step, Tree, new_tree
from .config import AdaptiveConfig
from .growth import HASTE, grow
from .learning import CREDITED, study
from .sources.suffix import NO_TEXT, Reader
from .state import Tables

#: Positions ahead whose noise is kept, at first.
POSITIONS = 32


class Grower:
    """One sequence's view of the sources.

    Args:
        tables: what is learned. vocabulary: V. config: sources, rows and tokens per row. sampled: whether tokens
            are drawn, with noise that is known.

    Attributes:
        tokens, parents, probabilities: by node of the tree that was grown last, in order of falling probability.
        reader: the end of this text in its own suffix trie; corpus: the same among earlier texts. None for off.
        tail: the last three tokens of the text.
        noise: depth -> noise (V,) of the token chosen under nodes of that depth; None when greedy.
    """

    def __init__(
        self, tables: Tables, vocabulary: int, config: AdaptiveConfig, sampled: bool = False
    ) -> None:
        self.tables, self.vocabulary, self.sources = tables, vocabulary, config.sources
        self.top = config.sampled_top if sampled else config.top
        self.reader: Reader | None = None
        self.corpus: Reader | None = None
        self.tail = [0, 0, 0]
        self.noise: Callable[[int], Any] | None = None
        self.temperature, self.haste = 1.0, HASTE
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.probabilities: list[float] = []
        self._position, rows = 0, config.max_rows
        tables.logits.make_room(0, self.top)
        self._tree = new_tree(rows, tables.logits.width + BESIDE)
        self._answers = np.full((rows, ANSWERS), -1)
        self._noise, self._known = np.zeros((1, 0), np.float32), np.full(1, -1)
        self._path, self._truths, self._own = (np.zeros(rows, np.int64) for _ in range(3))
        self._ids, self._odds = np.zeros((rows, self.top), np.int64), np.zeros((rows, self.top), np.float32)
        self._credit = np.zeros(len(CREDITED), np.int64)
        self._no_stop = np.zeros(rows + 1)

    @property
    def credit(self) -> dict[str, int]:
        """Accepted tokens by the source on whose word they were drafted."""
        return dict(zip(CREDITED, self._credit.tolist(), strict=True))

    @property
    def depths(self) -> list[int]:
        """Of the tree's rows."""
        depths: list[int] = self._tree.nodes["depth"][: len(self.tokens)].tolist()
        return depths

    def take(self, tokens: Sequence[int]) -> None:
        """The text has gone on."""
        text = np.array(tokens, np.int64)
        for reader in (self.reader, self.corpus):
            if reader is not None:
                reader.feed(text)
        self.tail = [*self.tail, *tokens][-3:]
        self._position += len(tokens)

    def forget_answers(self) -> None:
        """The last step's answers say nothing of the next position."""
        self._answers[:] = -1

    def _arguments(self) -> tuple[Tree, Sources, Calibration, Rules]:
        here, earlier = (NO_TEXT if reader is None else reader.text for reader in (self.reader, self.corpus))
        sources = Sources((here, earlier), self.tables.logits.arrays, self._answers, self._noise, self._known)
        rules = Rules(
            self.vocabulary,
            self.noise is not None,
            "logits" in self.sources,
            "jacobi" in self.sources,
            self.temperature,
            self.haste,
            self._position,
            (self.tail[0], self.tail[1], self.tail[2]),
        )
        return self._tree, sources, self.tables.calibration, rules

    def _keep_noise(self, depth: int) -> None:
        """Copy the noise of the token chosen under nodes of this depth to where compiled code finds it."""
        assert self.noise is not None
        noise, position = self.noise(depth), self._position + depth
        if depth >= len(self._known) or noise.shape[0] != self._noise.shape[1]:
            positions = max(POSITIONS, 2 << depth.bit_length())
            old, known = self._noise, self._known
            self._noise = np.empty((positions, noise.shape[0]), np.float32)
            self._known = np.full(positions, -1)
            for row, number in enumerate(known.tolist()):
                if number >= self._position:
                    self._noise[number % positions], self._known[number % positions] = old[row], number
        self._noise[position % len(self._known)] = noise
        self._known[position % len(self._known)] = position

    def grow(self, rows: int, max_depth: int, stop: Sequence[float] | None = None) -> None:
        """Grow to at most ``rows`` nodes. With ``stop``: end when row k's probability is below stop[k]."""
        rows = min(rows, len(self._path))
        limits = self._no_stop if stop is None else np.array(stop, np.float64)
        if self.corpus is not None:
            self.corpus.catch_up()  # another text may have filled the trie
        wanted = grow(*self._arguments(), rows, max_depth, limits, True)
        while wanted >= 0:
            self._keep_noise(int(wanted))
            wanted = grow(*self._arguments(), rows, max_depth, limits, False)
        count = -wanted
        self.tokens, self.parents, self.probabilities = (
            self._tree.nodes[field][:count].tolist() for field in ("token", "parent", "probability")
        )

    def cut(self, rows: int) -> None:
        """Keep the first ``rows`` nodes."""
        if rows < len(self.tokens):
            del self.tokens[rows:], self.parents[rows:], self.probabilities[rows:]
            self._tree.progress["rows"] = rows

    def adopt(self, tree: TokenTree) -> None:
        """Take over the rows that others have added to the tree."""
        nodes, own, count = self._tree.nodes, len(self.tokens), len(tree)
        for field, values in (("token", tree.tokens), ("parent", tree.parents), ("depth", tree.depths)):
            nodes[field][own:count] = values[own:]
        self.tokens, self.parents = tree.tokens, tree.parents

    def study(
        self, scores: Scores, path: Sequence[int], tokens: Sequence[int], window_start: int
    ) -> tuple[list[int], int]:
        """Learn all that a step can teach: accepted rows, emitted tokens, and scores that are readable in every row.

        Returns the target's own token by node, as far as it can be told, and the tokens accepted because of the
        window, whose first row is given.
        """
        count, length = len(self.tokens), len(path)
        ids, odds = scores.top(range(count), self.top)
        columns = min(self.top, len(ids[0]))
        if columns < self._ids.shape[1]:
            self._ids, self._odds = self._ids[:, :columns].copy(), self._odds[:, :columns].copy()
        self._ids[:count], self._odds[:count] = np.asarray(ids)[:, :columns], np.asarray(odds)[:, :columns]
        self._path[:length], self._truths[:length] = path, tokens
        if self.noise is not None:
            for position in range(self._position, self._position + max(self.depths) + 1):
                if self._known[position % len(self._known)] != position:
                    self._keep_noise(position - self._position)
        if self.corpus is not None and self.corpus.catch_up():
            self._tree.places[1] = 0  # another text has filled the trie since: nothing matches
        self.tables.logits.reserve(count + length)
        step = Step(
            self._path[:length], self._truths[:length], self._ids, self._odds, self._own, self._credit
        )
        by_window: int = study(*self._arguments(), step, count, window_start)
        return self._own[:count].tolist(), by_window
