"""Token trees on a compiled model. Fulfils ``lookahead.core.Target`` beside ``TransformersTarget``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from ...core import TokenTree
from ..facts import ModelFacts, memory_errors
from .buffer_pool import Buffer
from .compiled_model import CompiledModel
from .execution_plan import Segment
from .pass_logits import PassLogits, SegmentScores

#: Rows of a prompt that are evaluated together.
PROMPT_CHUNK = 512


class CpuTarget:
    """Many sequences over one compiled model; one thread at a time may use it.

    Args:
        compiled: the model; several targets, each in a thread of its own, may share it.
        facts: what is known of the transformers model.
        capacity: tokens per slot to begin with; storage doubles when it is full.
        reason: one line that says why this path was taken.
    """

    path = "cpu"

    def __init__(
        self, compiled: CompiledModel, facts: ModelFacts, capacity: int = 256, reason: str = ""
    ) -> None:
        self.compiled = compiled
        self.facts = facts
        self.reason = reason
        self.vocabulary: int = facts.vocabulary
        self.cache = compiled.new_cache(capacity)
        self.lengths: dict[int, int] = {}
        self._pending: dict[int, TokenTree] = {}
        self._last: weakref.ref[PassLogits] | None = None
        self._memory: Buffer | None = None

    def depth_limit(self, slot: int) -> int:
        """Room up to the model's last position."""
        return max(0, self.facts.max_positions - 1 - self.lengths[slot])

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[SegmentScores]:
        """Prompts one after the other, in chunks of rows."""
        scores = []
        for slot, prompt in prompts:
            with memory_errors(f"a prompt of {len(prompt)} tokens"):
                self.cache.reserve(slot + 1, len(prompt))
                for begin in range(0, len(prompt), PROMPT_CHUNK):
                    tokens = list(prompt[begin : begin + PROMPT_CHUNK])
                    rows = len(tokens)
                    positions = range(begin, begin + rows)
                    segment = Segment(slot, begin, rows, None)
                    reads = [rows - 1] if begin + rows == len(prompt) else []
                    logits = self.compiled.run(tokens, positions, [segment], reads, self.cache)
                    self.compiled.buffers.release(logits.detach())  # of one row at most
            self.lengths[slot] = len(prompt)
            scores.append(SegmentScores(logits, 0, [0]))
        return scores

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[SegmentScores]:
        """One pass over all trees; their rows lie behind one another, without padding."""
        self._recycle()
        total = sum(len(tree) for _, tree in trees)
        with memory_errors(f"a step of {total} rows for {len(trees)} sequences"):
            self.cache.reserve(
                max(slot for slot, _ in trees) + 1,
                max(self.lengths[slot] + len(tree) for slot, tree in trees),
            )
            tokens: list[int] = []
            positions: list[int] = []
            reads: list[int] = []
            segments, nodes = [], []
            for slot, tree in trees:
                length = self.lengths[slot]
                segments.append(Segment(slot, length, len(tree), tree))
                nodes.append(tree.needs_logits_nodes())
                reads += [len(tokens) + node for node in nodes[-1]]
                tokens += tree.tokens
                positions += [length + depth for depth in tree.depths]
            logits = self.compiled.run(tokens, positions, segments, reads, self.cache)
        self._pending.update(trees)
        self._last, self._memory = weakref.ref(logits), logits.memory
        scores, start = [], 0
        for rows in nodes:
            scores.append(SegmentScores(logits, start, rows))
            start += len(rows)
        return scores

    def _recycle(self) -> None:
        """The last step's logits give their buffer back; whoever still holds their scores goes on with a copy."""
        if self._last is None or self._memory is None:
            return
        logits = self._last()
        if logits is not None:
            logits.detach()
        self.compiled.buffers.release(self._memory)
        self._last = self._memory = None

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
        if not self.lengths:
            self._recycle()
