"""The drafting state of one sequence, which drafts and learns from each step.

``sequence_memory`` owns the memory and grows trees from all sources, ``rows`` chooses the number of rows, ``state``
contains the statistics that sequences may share. No clock is read: equal tokens, logits, statistics and cost curves
give equal drafts.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from ...core import UNLIMITED_ROWS, DraftState, Scores, Start, TokenTree
from .base_files import checked_table
from .calibration import MAX_PROBABILITY
from .cost import CONTEXT_STEP, CostCurve
from .for_model import ForModel
from .rows import EXPLORATION, RowRule
from .sequence_memory import SequenceMemory
from .settings import AdaptiveSettings
from .sources import SOURCES
from .state import AdaptiveState


class AdaptiveDraftState(DraftState):
    """The memory and the row rule of one sequence.

    The memory is allocated when the first tree is grown, so a sequence that never drafts needs none.

    Args:
        settings: the drafter's settings.
        state: the state that sequences share, or None.
        sequence: without a vocabulary, V is assumed to be the largest token seen plus one, and different contexts
            may then have the same key.
        for_model: without a cost curve, ``CostCurve.assumed`` is used.
    """

    def __init__(
        self,
        settings: AdaptiveSettings,
        state: AdaptiveState | None,
        sequence: Start,
        for_model: ForModel | None = None,
    ) -> None:
        # The inputs.
        given = for_model if for_model is not None else ForModel()
        self._settings = settings
        self._state = state
        self._vocabulary = sequence.vocabulary
        self._sampling = sequence.noise
        self._table = given.base_table
        self._remembered = given.remembered
        if settings.table is not None and self._table is None:  # not prepared for a model
            self._table = checked_table(settings.table, sequence.vocabulary, given.tokenizer)
        self._prompt = sequence.prompt
        self._curve = given.cost_curve if given.cost_curve is not None else CostCurve.assumed()

        # The parts, created when the first tree is grown.
        self._rule = RowRule()
        self._memory: SequenceMemory | None = None
        #: Tokens that the sources have not read: all of them before the first tree, later those of plain steps.
        self._unread = sequence.text
        self._last = sequence.first
        self._emitted = 1
        #: The light head, and the hidden state under which the last token was emitted, once a step has provided it.
        self._head = given.head
        self._hidden: Any = None

        # The current step.
        #: The time of the head's calls for the current tree, in plain steps.
        self._guessed = 0.0
        #: The costs and slopes by number of rows, and the (batch, context) that they are for.
        self._costs = [1.0, 1.0]
        self._slopes = [0.0, 0.0]
        self._table_of = (-1, -1)
        #: Whether a tree was grown for the current step.
        self._grown = False

        # Statistics.
        self._plain_steps = 0
        self._offered = 0.0
        self._accepted = 0

    def use_curve(self, curve: CostCurve) -> None:
        """Choose rows by this cost curve from now on."""
        if curve is not self._curve:
            self._curve = curve
            self._table_of = (-1, -1)

    def draft(self, max_depth: int, max_rows: int = UNLIMITED_ROWS, batch: int = 1) -> TokenTree:
        self._choose_table(batch)
        limit = min(max_rows, self._settings.most_rows)
        self._grown = limit > 1 and self._may_pay()
        if not self._grown:
            self._guessed = 0.0
            tree = TokenTree(self._last)
        else:
            tree = self._grow(limit, max_depth)
        tree.needs_hidden = self._head is not None
        return tree

    def _grow(self, limit: int, max_depth: int) -> TokenTree:
        memory = self._ready()
        memory.hidden = self._hidden
        grow = memory.grow_chain if self._settings.chain else memory.grow
        pay = grow(limit, max_depth, self._rule.rate)
        self._guessed = memory.served
        memory.cut(pay)
        return memory.tree()

    def _choose_table(self, batch: int) -> None:
        """Read the costs for this length of the context and this number of sequences."""
        table_of = batch, (len(self._prompt) + self._emitted) // CONTEXT_STEP
        if table_of == self._table_of:
            return
        self._table_of = table_of
        size = self._settings.table_rows
        if self._settings.rows is not None:
            # Every row is free.
            self._costs = [1.0] * (size + 1)
            self._slopes = [0.0] * (size + 1)
        else:
            context = table_of[1] * CONTEXT_STEP
            costs, slopes = self._curve.table(size, context, batch)
            self._costs, self._slopes = costs.tolist(), slopes.tolist()
            self._rule.drafting = self._curve.drafting_of(batch, context)
        if self._memory is not None:
            self._memory.use_costs(self._costs, self._slopes, self._rule.drafting)

    def _may_pay(self) -> bool:
        """Whether to grow a tree: not during a pause, nor if even certain rows would cost more than they gain."""
        if self._settings.rows is not None:
            return True
        return not self._rule.pause and self._slopes[1] < MAX_PROBABILITY + EXPLORATION

    def _ready(self) -> SequenceMemory:
        """The memory, after it has read all tokens of the sequence."""
        config = self._settings
        memory = self._memory
        if memory is None:
            state = self._state if self._state is not None else AdaptiveState(config)
            vocabulary = max(self._vocabulary, max(self._unread) + 1)
            with state.lock:
                memory = self._memory = SequenceMemory(
                    state,
                    vocabulary,
                    config,
                    before=self._prompt[0],
                    noise=self._sampling,
                    keeps=self._state is not None,
                    head=self._head,
                    table=self._table if "base" in config.sources else None,
                )
            memory.use_costs(self._costs, self._slopes, self._rule.drafting)
        if self._unread:
            memory.read(self._unread)
            self._unread = []
        memory.count_emitted(self._emitted)
        return memory

    def observe(self, tree: TokenTree, scores: Scores, path: Sequence[int], tokens: Sequence[int]) -> None:
        # The averages of the rule include steps without a tree.
        rows = min(len(tree), len(self._costs) - 1)
        unused = self._rule.drafting if self._grown and rows == 1 else 0.0
        self._rule.count(len(tokens), self._costs[rows] + unused + self._guessed)
        self._plain_steps += len(tree) == 1
        memory = self._memory
        if not self._grown or memory is None:
            self._rule.rest()
            self._unread.extend(tokens)
        else:
            self._study(memory, tree, scores, path, tokens)
        self._last = tokens[-1]
        self._emitted += len(tokens)
        if self._head is not None:
            self._hidden = scores.hidden(path[-1])
            if self._hidden is None:
                self._head = None
                warnings.warn(
                    "this target does not provide hidden states, so the light head is not used",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _study(
        self,
        memory: SequenceMemory,
        tree: TokenTree,
        scores: Scores,
        path: Sequence[int],
        tokens: Sequence[int],
    ) -> None:
        """Learn from the logits of all rows of a step.

        If the engine evaluated only the first rows of the drafted tree, or has only their logits, ``tree`` has only
        those rows.
        """
        rows = len(tree)
        memory.cut(rows)
        memory.learn(scores, path, tokens, rows)
        self._rule.count_grown(rows)
        self._offered += memory.expected - 1
        self._accepted += len(tokens) - 1

    def pad(self, tree: TokenTree, rows: int) -> None:
        """Add rows with arbitrary tokens to the last tree, to measure the cost of a step."""
        vocabulary = max(2, self._vocabulary)
        deepest = max(tree.depths)
        for number in range(8 * rows):
            if len(tree) >= rows:
                break
            parent = len(tree) - 1 if self._settings.chain else number % len(tree)
            if self._settings.chain or tree.depths[parent] < max(1, deepest):
                tree.add(31 * number % vocabulary, parent, needs_logits=True)
        if self._memory is not None:
            self._memory.adopt(tree)

    @property
    def estimates(self) -> list[float]:
        """The estimated probability of each node of the last tree."""
        return self._memory.probabilities if self._grown and self._memory is not None else []

    def trace(self, tree: TokenTree | None) -> dict[str, Any]:
        """The estimated probability that verification reaches each row, and the sources that proposed it."""
        memory = self._memory
        if tree is None or len(tree) == 1 or memory is None:
            return {}
        return {
            "probabilities": [round(probability, 4) for probability in memory.probabilities],
            "sources": [[], *(memory.sources_of(row) for row in range(1, memory.rows))],
        }

    def stats(self) -> dict[str, float]:
        """Accepted tokens by source, expected and observed acceptance, and plain steps."""
        credit = {source.name: 0 for source in SOURCES} if self._memory is None else self._memory.credit
        figures: dict[str, float] = {f"accepted_by_{name}": count for name, count in credit.items()}
        figures |= {"expected_acceptance": self._offered, "acceptance": self._accepted}
        if self._remembered:
            figures["remembered"] = self._remembered
        if self._head is not None:
            figures["head_calls"] = 0
        if self._memory is not None:
            figures |= self._memory.figures()
        return figures | {"plain_steps": self._plain_steps}
