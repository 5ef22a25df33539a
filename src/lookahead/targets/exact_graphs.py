"""Exact mode on a GPU: its passes are captured, and one graph serves every step.

All that changes from step to step lies in one buffer. With the kernel one graph serves all; with torch's operations
the slots and pages that attention goes through are part of a graph, so both are rounded up to a power of two: a
page of which a row sees nothing leaves its numbers as they are, to the bit. Whatever a text is made of comes from
replays; what the warm-up before a capture gives is thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.exact import PAGE
from ..core import Scores, TokenTree
from .attention_hook import TreeAttention
from .cuda_graphs import CAPACITY, InArena
from .exact import ExactTarget
from .facts import ModelFacts


class CapturedExactTarget(InArena, ExactTarget):
    """``ExactTarget`` whose passes are captured and replayed; its arguments."""

    def __init__(
        self,
        model: PreTrainedModel,
        facts: ModelFacts,
        attention: TreeAttention,
        capacity: int = CAPACITY,
        reason: str = "",
    ) -> None:
        capacity = -(-max(capacity, CAPACITY) // PAGE) * PAGE
        cache = self.take_arena(model, facts, attention, capacity)
        ExactTarget.__init__(self, model, facts, attention, capacity, reason, cache)

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        room = [(slot, self.lengths[slot] + len(tree)) for slot, tree in trees]
        with self.in_arena(f"a step for {len(trees)} sequences", room):
            return super().forward(trees)

    def _run(self, numbers: torch.Tensor, pages: list[tuple[int, int]]) -> torch.Tensor:
        if self.attention.backend == "exact_triton":  # which reads on the device how far to go
            pages = []
        if count := max((number for _, number in pages), default=0):
            count = min(1 << (count - 1).bit_length(), self.cache.capacity // PAGE)
        last = max((slot for slot, number in pages if number), default=0)
        key = (min(1 << last.bit_length(), self.cache.slots), count)
        with self.in_arena("a pass", ()):
            if key not in self.arena.passes:
                self.arena.passes[key] = _Pass(self, numbers, *key)
            one: _Pass = self.arena.passes[key]
            one.numbers.copy_(numbers)
            one.graph.replay()
            logits: torch.Tensor = one.logits.clone()  # the next replay writes to the same place
            return logits


class _Pass:
    """A captured pass over so many slots and pages of each."""

    def __init__(self, target: CapturedExactTarget, numbers: torch.Tensor, slots: int, count: int) -> None:
        self.numbers = numbers.to(target.model.device, copy=True)
        pages = [(slot, count) for slot in range(slots if count else 0)]
        target.evaluate(self.numbers, pages)  # sets libraries up
        if not target.attention.watched:  # a capture that fails leaves the device's random numbers unusable
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                target.evaluate(self.numbers, pages)
            finally:
                torch.cuda.set_sync_debug_mode(before)
            target.attention.watched = True
        found: Any = target.arena.capture(lambda: target.evaluate(self.numbers, pages))
        self.graph, self.logits = found
