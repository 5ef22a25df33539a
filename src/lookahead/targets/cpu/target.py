"""Token trees on a compiled model. Fulfils ``lookahead.core.Target`` beside ``TransformersTarget``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from ...core import TokenTree
from ..facts import ModelFacts, memory_errors
from .compiled_model import CompiledModel
from .execution_plan import Segment
from .pass_logits import Buffer, PassLogits, SegmentScores

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
                    tokens = prompt[begin : begin + PROMPT_CHUNK]
                    end = begin + len(tokens)
                    segment = Segment(slot, begin, len(tokens), None)
                    reads = [len(tokens) - 1] if end == len(prompt) else []
                    logits = self.compiled.run(tokens, range(begin, end), [segment], reads, self.cache)
                    self.compiled.buffers.release(logits.detach())  # of one row at most
            self.lengths[slot] = len(prompt)
            scores.append(SegmentScores(logits, 0, [0]))
        return scores

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[SegmentScores]:
        """One pass over all trees; their rows lie behind one another, without padding."""
        self._recycle()
        tokens, positions, reads = list[int](), list[int](), list[int]()
        segments, parts = [], []
        for slot, tree in trees:
            length, nodes = self.lengths[slot], tree.needs_logits_nodes()
            segments.append(Segment(slot, length, len(tree), tree))
            parts.append((len(reads), nodes))
            reads += [len(tokens) + node for node in nodes]
            tokens += tree.tokens
            positions += [length + depth for depth in tree.depths]
        with memory_errors(f"a step of {len(tokens)} rows for {len(trees)} sequences"):
            room = max(segment.length + segment.rows for segment in segments)
            self.cache.reserve(max(segment.slot for segment in segments) + 1, room)
            logits = self.compiled.run(tokens, positions, segments, reads, self.cache)
        self._last, self._memory = weakref.ref(logits), logits.memory
        return [SegmentScores(logits, start, nodes) for start, nodes in parts]

    def _recycle(self) -> None:
        """The last step's logits give their buffer back; whoever still holds their scores goes on with a copy."""
        logits = self._last() if self._last is not None else None
        if logits is not None:
            logits.detach()
        if self._memory is not None:
            self.compiled.buffers.release(self._memory)
        self._last = self._memory = None

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Bring accepted rows in line; the cost does not depend on the context."""
        for slot, path in paths:
            self.cache.move(slot, self.lengths[slot], path)
            self.lengths[slot] += len(path)

    def release(self, slot: int) -> None:
        """Forget a sequence; its room is used again."""
        self.lengths.pop(slot, None)
        if not self.lengths:
            self._recycle()
