"""``Grower`` owns the memory of one sequence and calls ``grow`` before each step and ``learn`` after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core import Noise, Scores, TokenTree
from ...jit import pack
from . import grow as growing
from . import learn as learning
from .learn import CREDITED
from .memory import (
    ANSWERS,
    BASE_PROPOSALS,
    BY_ARRAY,
    BY_KEY,
    CORPUS,
    GUESSES,
    OTHER_PROPOSALS,
    STEP,
    SUFFIX,
    Guesses,
    Memory,
    TextEnd,
    new_tree,
)
from .rows import choose
from .settings import AdaptiveSettings
from .sources.base_table import NO_TRIE, BaseTable
from .sources.light_head import GUESS_ROWS, READ, READ_SAMPLED, GuessSource, LightHead
from .sources.suffix import NO_TEXT, Reader, SuffixTrie
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


class Grower:
    """Grows the trees of one sequence and learns from its steps.

    Args:
        state: the logit cache, the calibration and the corpus, which may be shared by sequences. Its lock must be
            held during the construction.
        vocabulary: V.
        config: sources, rows, and tokens kept per row.
        before: a token that stands in for those before the first.
        noise: the noise with which tokens are sampled; None for greedy decoding.
        use_corpus: whether to match the sequence against the state's corpus, and to add it.
        head: the light head; None for none.
        table: the base table; None for none.

    Attributes:
        memory: the memory of compiled code; replaced when an array has been enlarged.
        rows: number of rows in the last tree.
        hidden: the hidden state under which the last token was emitted, (hidden,) fp32; None if unknown.
        guesses: calls the head; None without one.
    """

    def __init__(
        self,
        state: AdaptiveState,
        vocabulary: int,
        config: AdaptiveSettings,
        before: int = 0,
        noise: Noise | None = None,
        use_corpus: bool = False,
        head: LightHead | None = None,
        table: BaseTable | None = None,
    ) -> None:
        # The sources.
        sampled = noise is not None
        self._emitted = 1
        self._shared = use_corpus
        #: Rows and tokens for which the tables have room, if no other sequence uses them.
        self._room = 0
        self._lock = state.lock
        self._tables = state.tables(sampled, table)
        self._noise = noise
        self._top = config.sampled_top if sampled else config.top
        self.rows = 1
        self.hidden: Any = None
        self.guesses = None if head is None else GuessSource(head, sampled)
        if head is not None:
            self._tables.use_head(head)
        self.size = config.table_rows
        own = SuffixTrie(config.suffix_order).begin() if "suffix" in config.sources else None
        earlier = state.corpus.begin() if use_corpus and "corpus" in config.sources else None
        self._readers: tuple[Reader | None, Reader | None] = own, earlier

        # The scalars of compiled code, and views of those that change between steps.
        step = np.zeros(1, STEP)
        step["vocabulary"] = vocabulary
        step["temperature"] = 1.0
        if noise is not None:
            step["sampled"] = BY_ARRAY if noise.key is None else BY_KEY
            step["noise_key"] = noise.key or 0
            step["temperature"] = max(noise.temperature, LEAST_TEMPERATURE)
        step["use_logits"] = "logits" in config.sources
        step["use_answers"] = "jacobi" in config.sources
        step["expansion_factor"] = growing.EXPANSION_FACTOR
        step["before"] = step["previous"] = step["last"] = before
        self._position = step["position"]
        self._guess_depth = step["guess_depth"]
        self._guess_price = step["guess_price"]
        self._wanted = step["wanted"]
        self._expected = step["expected"]

        # The arrays of compiled code.
        logits = self._tables.logits
        logits.make_room(0, self._top)
        rows = self.size
        self.memory = Memory(
            tree=new_tree(rows, logits.width + BASE_PROPOSALS + OTHER_PROPOSALS),
            texts=self._texts(),
            cache=logits.arrays,
            base=NO_TRIE if table is None else table.trie,
            calibration=self._tables.calibration,
            step=step,
            costs=np.zeros(rows + 1),
            slopes=np.zeros(rows + 1),
            answers=np.full((rows, ANSWERS), -1),
            noise=np.zeros((1, 0), np.float32),
            noise_positions=np.full(1, -1),
            drafted=np.zeros(2 + 2 * rows, np.int64),
            path=np.zeros(rows, np.int64),
            tokens=np.zeros(max(rows, LEAST_TOKENS), np.int64),
            own=np.zeros(rows, np.int64),
            guesses=_new_guesses(0 if head is None else GUESS_ROWS, READ_SAMPLED if sampled else READ),
            credit=np.zeros(len(CREDITED), np.int64),
        )

        # Views of the tree's columns; taking one from an array of records takes about as long as growing a row.
        tree = self.memory.tree
        self._token, self._parent, self._probability, self._depth = (
            tree.nodes[name] for name in ("token", "parent", "probability", "depth")
        )
        self._tree_rows = tree.sizes["rows"]
        #: Tokens and parents of the last tree. A numpy call after a pass takes some 10 us, because caches are cold.
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
        return dict(zip(CREDITED, self.memory.credit.tolist(), strict=True))

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
        """The sources that proposed a row of the last tree, which is not the root."""
        tree = self.memory.tree
        parent, token = tree.nodes["parent"][row], tree.nodes["token"][row]
        recalled = tree.proposals[parent, : tree.nodes["recalled"][parent]]
        proposed = {
            name: recalled["token"][recalled[bucket] >= 0].tolist()
            for name, bucket in (("logits", "kind"), ("base", "base_kind"))
        }
        for name, source in (("suffix", SUFFIX), ("corpus", CORPUS)):
            found = tree.matches["token"][source, parent].tolist()
            proposed[name] = found[: found.index(-1)] if -1 in found else found
        guess = tree.nodes["guess"][parent]
        proposed["head"] = [] if guess < 0 else self.memory.guesses.tokens[guess].tolist()
        names = [name for name, tokens in proposed.items() if token in tokens]
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
        """Append tokens to the sequence without a step. The last step's answers become invalid."""
        most = len(self.memory.tokens)
        for start in range(0, len(tokens), most):
            piece = tokens[start : start + most]
            self.memory.tokens[: len(piece)] = piece
            with self._lock:
                self._room = 0
                self._make_room(0, len(piece))
                learning.append(self._packed, len(piece))
        self.memory.answers[:] = -1

    def read(self, tokens: Sequence[int]) -> None:
        """Append many tokens, such as the prompt."""
        # Only the suffix tries need all tokens; the last ones suffice for the rest of the memory.
        most = len(self.memory.tokens)
        if len(tokens) > most:
            text = np.array(tokens[:-most], np.int64)
            for reader in self._readers:
                if reader is not None:
                    with self._lock:
                        reader.feed(text)
            self.memory.step["position"] += len(text)
            tokens = tokens[-most:]
        self.append(tokens)

    def _make_room(self, rows: int, tokens: int) -> bool:
        """Make room for the rows of a step and for new tokens, and refer to arrays that were replaced.

        Returns:
            Whether the corpus was full and has been cleared. The sequence's own trie is never cleared.
        """
        self._tables.logits.reserve(rows)
        cleared = False
        for reader in self._readers:
            if reader is not None:
                cleared |= reader.reserve(tokens)
        self._refer()
        return cleared

    def _refer(self) -> None:
        """Refer to the current arrays of the tables, which another sequence may have enlarged."""
        memory = self.memory
        for reader, text in zip(self._readers, memory.texts, strict=True):
            if reader is not None and reader.trie.nodes is not text.trie:
                self.memory = memory = memory._replace(texts=self._texts())
        if memory.cache is not self._tables.logits.arrays:
            self.memory = memory._replace(cache=self._tables.logits.arrays)

    def _texts(self) -> tuple[TextEnd, TextEnd]:
        own, earlier = (NO_TEXT if reader is None else reader.text for reader in self._readers)
        return own, earlier

    def _catch_up(self) -> bool:
        """Restart in the corpus if another sequence has cleared it. Returns whether it was cleared."""
        corpus = self._readers[CORPUS]
        return corpus is not None and corpus.catch_up()

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

    def grow(self, limit: int, max_depth: int, rate: float = 1.0, bias: float = 1.0) -> int:
        """Grow a tree of at most ``limit`` rows. Returns the number of rows that pay off.

        Args:
            rate, bias: r and the correction of F; see ``rows``.
        """
        limit = min(limit, self.size)
        guesses = self.guesses
        if guesses is not None:
            guesses.begin()
            self._guess_depth[0] = 0 if self.hidden is None else guesses.head.levels
            self._guess_price[0] = rate * guesses.head.cost

        # Compiled code returns whenever it needs a guess or noise, and continues once it has it.
        with self._lock:
            if self._shared:
                self._catch_up()
                self._refer()
            result = growing.grow(self._packed, limit, max_depth, rate, bias, True)
            while result != growing.COMPLETE:
                if result == growing.NOISE_WANTED:
                    self._keep_noise(int(self._depth[self._wanted[0]]))
                else:
                    assert guesses is not None
                    guesses.guess(self.memory, self.hidden)
                    if guesses.is_full:
                        self._guess_depth[0] = 0
                result = growing.grow(self._packed, limit, max_depth, rate, bias, False)

        # Most trees are small, so one read is enough.
        chosen, self.rows, *nodes = self._drafted[: 2 + 2 * SMALL_TREE].tolist()
        if self.rows > SMALL_TREE:
            nodes = self._drafted[2:].tolist()
        self._tokens, self._parents = nodes[0 : 2 * self.rows : 2], nodes[1 : 2 * self.rows : 2]
        return int(chosen)

    def grow_chain(self, limit: int, max_depth: int, rate: float = 1.0, bias: float = 1.0) -> int:
        """Grow the chain with the most expected accepted tokens. Returns the number of rows that pay off."""
        # The searched tree has more rows than the chain, so the slope at its number of rows does not apply.
        slopes = self.memory.slopes.copy()
        self.memory.slopes[:] = slopes[1 : max(2, limit)].min()
        self.grow(self.size, min(max_depth, limit - 1), rate, bias)
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
                cleared = self._catch_up()
                cleared |= self._make_room(rows + length, length)
                if cleared:
                    self.memory.tree.contexts[CORPUS] = 0  # nothing matches in the cleared trie
            elif self._room < rows + length:
                self._room = ROOM + rows + length
                self._make_room(self._room, self._room)
            self._room -= rows + length
            learning.learn(self._packed, ids, odds, length, rows)


def _is_plain(array: Any, dtype: Any) -> bool:
    """Whether this is an array that compiled code takes as it is; converting one that is takes 7 us after a pass."""
    return type(array) is np.ndarray and array.dtype is dtype and array.flags.c_contiguous


def _new_guesses(rows: int, read: int) -> Guesses:
    return Guesses(
        np.full((rows, read), -1, np.int32),
        np.zeros((rows, read), np.float32),
        np.full((rows, GUESSES), -1, np.int32),
        np.zeros((rows, GUESSES), np.int32),
        np.zeros(GUESSES, np.float32),
    )
