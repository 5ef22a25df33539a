"""Token trees on the lean path. Fulfils ``lookahead.core.Target`` beside its twin, ``TransformersTarget``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...core import TokenTree
from ..facts import ModelFacts, memory_errors
from ..logits import LogitsRows
from .forward import LeanModel
from .layout import Block

if TYPE_CHECKING:
    from .native import NativeModel

#: Rows of a prompt that are evaluated together.
CHUNK = 512


class LeanTarget:
    """Many sequences over one lean model.

    Args:
        lean: the weights; several targets may share them.
        facts: what is known of the transformers model.
        capacity: tokens per slot to begin with; storage doubles when it is full.
        reason: one line that says why this path was taken.
    """

    path = "cpu"

    def __init__(
        self, lean: LeanModel | NativeModel, facts: ModelFacts, capacity: int = 256, reason: str = ""
    ) -> None:
        self.lean = lean
        self.facts = facts
        self.reason = reason
        self.cache: Any = lean.new_cache(capacity)
        self.lengths: dict[int, int] = {}
        self._pending: dict[int, TokenTree] = {}

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.facts.vocabulary

    def depth_limit(self, slot: int) -> int:
        """Room up to the model's last position."""
        return max(0, self.facts.max_positions - 1 - self.lengths[slot])

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[LogitsRows]:
        """Prompts one after the other, in chunks of rows."""
        scores = []
        for slot, prompt in prompts:
            with memory_errors(f"a prompt of {len(prompt)} tokens"):
                self.cache.reserve(slot + 1, len(prompt))
                for begin in range(0, len(prompt), CHUNK):
                    tokens = list(prompt[begin : begin + CHUNK])
                    rows = len(tokens)
                    positions = list(range(begin, begin + rows))
                    block = Block(slot, begin, rows, None, positions)
                    read = [rows - 1] if begin + rows == len(prompt) else []
                    scored = self.lean.run(tokens, positions, [block], read, self.cache)
            self.lengths[slot] = len(prompt)
            scores.append(LogitsRows(scored.part(0, 1), 0))
        return scores

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[LogitsRows]:
        """One pass over all trees; their rows lie behind one another, without padding."""
        total = sum(len(tree) for _, tree in trees)
        with memory_errors(f"a step of {total} rows for {len(trees)} sequences"):
            self.cache.reserve(
                max(slot for slot, _ in trees) + 1,
                max(self.lengths[slot] + len(tree) for slot, tree in trees),
            )
            tokens: list[int] = []
            positions: list[int] = []
            read: list[int] = []
            blocks, nodes = [], []
            for slot, tree in trees:
                length = self.lengths[slot]
                mine = [length + depth for depth in tree.depths]
                blocks.append(Block(slot, length, len(tree), tree, mine))
                nodes.append(tree.needs_logits_nodes())
                read += [len(tokens) + node for node in nodes[-1]]
                tokens += tree.tokens
                positions += mine
            scored = self.lean.run(tokens, positions, blocks, read, self.cache)
        self._pending.update(trees)
        scores, start = [], 0
        for (_, tree), rows in zip(trees, nodes, strict=True):
            batch = scored.part(start, len(rows))
            scores.append(LogitsRows(batch, 0, None if len(rows) == len(tree) else rows))
            start += len(rows)
        return scores

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Bring accepted rows in line; the cost does not depend on the context."""
        for slot, path in paths:
            self._pending.pop(slot)
            self.cache.move(slot, self.lengths[slot], path)
            self.lengths[slot] += len(path)

    def release(self, slot: int) -> None:
        """Forget a sequence; its room is used again."""
        self._pending.pop(slot, None)
        self.lengths.pop(slot, None)
