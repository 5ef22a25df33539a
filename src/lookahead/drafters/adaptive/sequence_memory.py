"""``SequenceMemory`` owns a sequence's memory, and calls ``grow_tree`` before each step and ``learn`` after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core import Noise, Scores, TokenTree
from ...machine_code import pack
from . import learn as learning
from . import tree_growth
from .layout import BY_ARRAY, BY_KEY, STEP, new_tree
from .memory import Memory
from .rows import choose
from .settings import AdaptiveSettings
from .sources import SOURCES
from .sources.base_table import BaseTable
from .sources.light_head import LightHead
from .sources.source import Setup
from .state import AdaptiveState

#: Initial number of positions whose noise is kept.
FIRST_POSITIONS = 32
#: Smallest capacity for tokens that are appended together; a key of the logit cache has three.
LEAST_TOKENS = 8
#: The types of the best tokens and their log-odds in compiled code.
IDS, ODDS = np.dtype(np.int32), np.dtype(np.float32)
#: Rows and tokens for which room is made at once.
ROOM = 256
#: Rows that are read from compiled code at once.
SMALL_TREE = 16
#: The lowest temperature by which scores are divided.
LEAST_TEMPERATURE = 1e-3


class SequenceMemory:
    """Grows the trees of one sequence and learns from its steps.

    Args:
        state: what sequences may share. Its lock must be held during the construction.
        vocabulary: V.
        config: sources, rows, and tokens kept per row.
        before: a token that stands in for those before the first.
        noise: the noise with which tokens are sampled; None for greedy decoding.
        keeps: whether the state is kept after this sequence.
        head: the light head; None for none.
        table: the base table; None for none.

    Attributes:
        memory: the memory of compiled code; replaced when an array has been enlarged.
        sources: every source, whether or not it is on.
        rows: number of rows in the last tree.
        served: the time that sources took outside of compiled code for the last tree, in plain steps.
        hidden: the hidden state under which the last token was emitted, (hidden,) fp32; None if unknown.
    """

    def __init__(
        self,
        state: AdaptiveState,
        vocabulary: int,
        config: AdaptiveSettings,
        before: int = 0,
        noise: Noise | None = None,
        keeps: bool = False,
        head: LightHead | None = None,
        table: BaseTable | None = None,
    ) -> None:
        # The sources.
        sampled = noise is not None
        self._emitted = 1
        self._shared = keeps
        #: Rows and tokens for which the sources have room, if no other sequence uses them.
        self._room = 0
        self._lock = state.lock
        tables = state.tables(sampled, table)
        self._noise = noise
        self._top = config.sampled_top if sampled else config.top
        self.rows = 1
        self.served = 0.0
        self.hidden: Any = None
        self.size = config.table_rows
        given = config, state, vocabulary, tables, noise, keeps, head, table
        self.sources = [source(Setup(number, *given)) for number, source in enumerate(SOURCES)]
        self._on = [source for source in self.sources if source.on]

        # The scalars of compiled code, and views of those that change between steps.
        step = np.zeros(1, STEP)
        step["vocabulary"] = vocabulary
        step["temperature"] = 1.0
        if noise is not None:
            step["sampled"] = BY_ARRAY if noise.key is None else BY_KEY
            step["noise_key"] = noise.key or 0
            step["temperature"] = max(noise.temperature, LEAST_TEMPERATURE)
        step["expansion_factor"] = tree_growth.EXPANSION_FACTOR
        step["before"] = step["previous"] = step["last"] = before
        self._position = step["position"]
        self._wanted = step["wanted"]
        self._expected = step["expected"]

        # The arrays of compiled code.
        rows = self.size
        self.memory = Memory(
            tree=new_tree(rows, sum(source.most for source in self.sources), tree_growth.TEXTS),
            sources=tuple(source.arrays for source in self.sources),
            on=np.array([source.on for source in self.sources], np.int64),
            joint=tables.buckets["joint"],
            step=step,
            costs=np.zeros(rows + 1),
            slopes=np.zeros(rows + 1),
            noise=np.zeros((1, 0), np.float32),
            noise_positions=np.full(1, -1),
            drafted=np.zeros(2 + 2 * rows, np.int64),
            path=np.zeros(rows, np.int64),
            tokens=np.zeros(max(rows, LEAST_TOKENS), np.int64),
            own=np.zeros(rows, np.int64),
            credit=np.zeros(len(SOURCES), np.int64),
        )

        # Views of the tree's columns; taking one from an array of records takes about as long as growing a row.
        tree = self.memory.tree
        self._token, self._parent, self._probability, self._depth = (
            tree.nodes[name] for name in ("token", "parent", "probability", "depth")
        )
        self._tree_rows = tree.sizes["rows"]
        #: Tokens and parents of the last tree, as lists: after a pass, when caches are cold, numpy calls are slow.
        self._tokens = list[int]()
        self._parents = list[int]()
        self._drafted, self._path, self._new_tokens = (
            array.data for array in (self.memory.drafted, self.memory.path, self.memory.tokens)
        )

    @property
    def memory(self) -> Memory:
        return self._memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self._memory = memory
        self._packed = pack(memory)

    @property
    def credit(self) -> dict[str, int]:
        """Accepted tokens by the source that proposed them."""
        names = (source.name for source in SOURCES)
        return dict(zip(names, self.memory.credit.tolist(), strict=True))

    def figures(self) -> dict[str, float]:
        """Statistics of the sources, by name."""
        return {name: value for source in self._on for name, value in source.figures().items()}

    @property
    def probabilities(self) -> list[float]:
        """The estimated probability that verification reaches each row of the last tree."""
        probabilities: list[float] = self._probability[: self.rows].tolist()
        return probabilities

    @property
    def expected(self) -> float:
        """F of the last tree that was learned from: the expected number of tokens of its step."""
        return float(self._expected[0])

    def sources_of(self, row: int) -> list[str]:
        """The names of the sources that proposed a row of the last tree, which is not the root."""
        nodes = self.memory.tree.nodes
        parent, token = int(nodes["parent"][row]), nodes["token"][row]
        names = [source.name for source in self._on if token in source.proposed(self.memory, parent)]
        return names or ["jacobi"]  # this step's answers have already replaced those that proposed it

    def use_costs(self, costs: Sequence[float], slopes: Sequence[float], drafting: float = 0.0) -> None:
        """Choose rows by these costs (``CostCurve.table``) from now on. Initially, every row is free.

        Args:
            costs: c(k) by k. They include drafting from k = 2 on.
            slopes: the smallest cost per additional row by k.
            drafting: the cost of drafting. When the rule chooses, the tree has been grown, so k = 1 costs it too.
        """
        self.memory.costs[:] = costs
        self.memory.costs[1] = min([costs[1] + drafting, *costs[2:3]])
        self.memory.slopes[:] = slopes

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence without a step."""
        most = len(self.memory.tokens)
        for start in range(0, len(tokens), most):
            piece = tokens[start : start + most]
            self.memory.tokens[: len(piece)] = piece
            with self._lock:
                self._room = 0
                self._make_room(0, len(piece))
                learning.append(self._packed, len(piece))
        for source in self._on:
            source.interrupt()

    def read(self, tokens: Sequence[int]) -> None:
        """Append many tokens, such as the prompt."""
        # Only some sources read all tokens; the last ones suffice for the rest of the memory.
        most = len(self.memory.tokens)
        if len(tokens) > most:
            text = np.array(tokens[:-most], np.int64)
            with self._lock:
                for source in self._on:
                    source.read(text)
            self.memory.step["position"] += len(text)
            tokens = tokens[-most:]
        self.append(tokens)

    def _make_room(self, rows: int, tokens: int) -> None:
        """Make room for the rows of a step and for new tokens, and refer to arrays that were replaced."""
        for source in self._on:
            if source.reserve(rows, tokens):
                source.restart(self.memory)
        self._refer()

    def _refer(self) -> None:
        """Refer to the current arrays of the sources, which another sequence may have enlarged."""
        arrays = tuple(source.arrays for source in self.sources)
        if any(new is not old for new, old in zip(arrays, self.memory.sources, strict=True)):
            self.memory = self.memory._replace(sources=arrays)

    def _catch_up(self) -> None:
        """Let sources that other sequences use notice what these have changed."""
        for source in self._on:
            if source.catch_up():
                source.restart(self.memory)

    def count_emitted(self, tokens: int) -> None:
        """Set the number of emitted tokens, which with the seed determines the noise of the next ones."""
        self._emitted = tokens
        if self._noise is not None and self._noise.key is not None:
            self.memory.step["noise_offset"] = self._noise.start + tokens - self._position

    def _keep_noise(self, depth: int) -> None:
        """Store the noise for tokens under nodes of this depth where compiled code reads it."""
        assert self._noise is not None
        memory = self.memory
        begin = int(self._position[0])
        noise = self._noise(self._emitted + depth)
        position = begin + depth
        if depth >= len(memory.noise_positions) or noise.shape[0] != memory.noise.shape[1]:
            positions = max(FIRST_POSITIONS, 2 << depth.bit_length())
            larger = np.empty((positions, noise.shape[0]), np.float32)
            known = np.full(positions, -1)
            for row, number in enumerate(memory.noise_positions.tolist()):
                if number >= begin:
                    larger[number % positions] = memory.noise[row]
                    known[number % positions] = number
            self.memory = memory = memory._replace(noise=larger, noise_positions=known)
        memory.noise[position % len(memory.noise_positions)] = noise
        memory.noise_positions[position % len(memory.noise_positions)] = position

    def grow(self, limit: int, max_depth: int, rate: float = 1.0) -> int:
        """Grow a tree of at most ``limit`` rows. Returns the number of rows that pay off.

        Args:
            rate: r; see ``rows``.
        """
        limit = min(limit, self.size)
        for source in self._on:
            source.begin(rate, self.hidden)
        self.served = 0.0

        # Compiled code returns whenever it needs noise or a source's service, and continues once it has it.
        with self._lock:
            if self._shared:
                self._catch_up()
                self._refer()
            result = tree_growth.grow_tree(self._packed, limit, max_depth, rate, True)
            while result != tree_growth.COMPLETE:
                if result == tree_growth.NOISE_WANTED:
                    self._keep_noise(int(self._depth[self._wanted[0]]))
                else:
                    self.served += self.sources[result - tree_growth.SERVICE_WANTED].serve(self.memory)
                result = tree_growth.grow_tree(self._packed, limit, max_depth, rate, False)

        # Most trees are small, so one read is enough.
        chosen, self.rows, *nodes = self._drafted[: 2 + 2 * SMALL_TREE].tolist()
        if self.rows > SMALL_TREE:
            nodes = self._drafted[2:].tolist()
        self._tokens, self._parents = nodes[0 : 2 * self.rows : 2], nodes[1 : 2 * self.rows : 2]
        return int(chosen)

    def grow_chain(self, limit: int, max_depth: int, rate: float = 1.0) -> int:
        """Grow the chain with the most expected accepted tokens. Returns the number of rows that pay off."""
        # The searched tree has more rows than the chain, so the slope at its number of rows does not apply.
        slopes = self.memory.slopes.copy()
        self.memory.slopes[:] = slopes[1 : max(2, limit)].min()
        try:
            self.grow(self.size, min(max_depth, limit - 1), rate)
        finally:
            self.memory.slopes[:] = slopes
        self._keep_best_chain()
        return choose(self.memory)

    def _keep_best_chain(self) -> None:
        tree = self.memory.tree
        parents = self._parents
        expected = self.probabilities[:1]
        for parent, probability in zip(parents[1:], self.probabilities[1:], strict=True):
            expected.append(expected[parent] + probability)
        rows = list[int]()
        row = expected.index(max(expected))
        while row >= 0:
            rows.append(row)
            row = parents[row]
        rows.reverse()
        count = len(rows)
        for kept in (tree.nodes, tree.proposals, tree.edges):
            kept[:count] = kept[rows]
        for kept in (tree.matches, tree.contexts):
            kept[:, :count] = kept[:, rows]
        self._tokens, self._parents = [self._tokens[row] for row in rows], list(range(-1, count - 1))
        self._parent[:count] = self._parents
        self.rows = self._tree_rows[0] = count

    def cut(self, rows: int) -> None:
        """Keep the first ``rows`` rows."""
        if rows < self.rows:
            self.rows = self._tree_rows[0] = rows

    def tree(self) -> TokenTree:
        """The last tree."""
        return TokenTree.of(self._tokens[: self.rows], self._parents[: self.rows])

    def adopt(self, tree: TokenTree) -> None:
        """Include the rows that others have added to the tree."""
        own = self.rows
        count = len(tree)
        self._token[own:count] = tree.tokens[own:]
        self._parent[own:count] = tree.parents[own:]
        self._depth[own:count] = tree.depths[own:]

    def learn(self, scores: Scores, path: Sequence[int], tokens: Sequence[int], rows: int) -> None:
        """Learn from a step, and append its tokens to the sequence.

        Args:
            scores: of all rows of the step's tree.
            path, tokens: the accepted rows and the emitted tokens.
            rows: number of rows in the step; those from ``self.rows`` on were added by others.
        """
        # The result of the step, in the arrays of compiled code.
        length = len(path)
        ids, odds = scores.top(range(rows), self._top)
        if not (_is_plain(ids, IDS) and _is_plain(odds, ODDS)):
            ids, odds = np.ascontiguousarray(ids, IDS), np.ascontiguousarray(odds, ODDS)
        for index in range(length):
            self._path[index] = path[index]
            self._new_tokens[index] = tokens[index]
        if self._noise is not None and self._noise.key is None:
            begin = int(self._position[0])
            deepest = int(self._depth[:rows].max())
            for depth in range(deepest + 1):
                known = self.memory.noise_positions
                if known[(begin + depth) % len(known)] != begin + depth:
                    self._keep_noise(depth)
        with self._lock:
            if self._shared:
                self._catch_up()
                self._make_room(rows + length, length)
            elif self._room < rows + length:
                self._room = ROOM + rows + length
                self._make_room(self._room, self._room)
            self._room -= rows + length
            learning.learn(self._packed, ids, odds, length, rows)


def _is_plain(array: Any, dtype: Any) -> bool:
    """Whether this is an array that compiled code takes as it is; converting one that is takes time after a pass."""
    return type(array) is np.ndarray and array.dtype is dtype and array.flags.c_contiguous
