"""Exact mode: the same bits with and without drafting, in any dtype, on any model whose operations allow it.

What rounding depends on is the shape of an operation and the place of a row in it. So every step, those of plain
decoding too, is evaluated in passes of one number of rows R, whatever trees and sequences its rows come from; and
attention is cut by absolute positions (``lookahead.attention.exact``). What is left is a property of the operations
at hand: that a row's result depends neither on its place among the R nor on what the others hold. A certificate
(``targets.certificate``) checks that when a model is first used so, and exact mode is refused where it fails.

Prompts go the model's own way, each alone and in one pass, with and without drafting alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from transformers import PreTrainedModel

from ..attention.exact import DEPTH, PAGE, WINDOW, boundary
from ..core import Scores, TokenTree
from .attention_hook import TreeAttention, implementation
from .cache import Placement, TreeCache
from .facts import ModelFacts, memory_errors
from .logits import LogitsBatch, LogitsRows
from .transformers import TransformersTarget, run_model

#: R by the device's type. Fixed, and not by measured times, so that one machine gives one text.
ROWS = {"cpu": 16, "cuda": 64}

#: A row of a pass: slot, token, position, own column, columns of its path from the root on, committed tokens.
Row = tuple[int, int, int, int, list[int], int]


class ExactTarget(TransformersTarget):
    """``TransformersTarget`` whose rows have the same bits in any step.

    Args:
        model: a causal language model whose certificate holds.
        facts: what is known of it.
        attention: that calls ``lookahead.attention.exact.attend``.
        capacity: tokens per slot to begin with.
        reason: one line that says why this path was taken.
        cache: to use in place of a new one.

    Attributes:
        rows: R, of every pass.
    """

    path = "exact"

    def __init__(
        self,
        model: PreTrainedModel,
        facts: ModelFacts,
        attention: TreeAttention,
        capacity: int = PAGE,
        reason: str = "",
        cache: TreeCache | None = None,
    ) -> None:
        super().__init__(model, facts, -(-capacity // PAGE) * PAGE, reason, cache)
        self.attention = attention
        self.rows = ROWS.get(model.device.type, ROWS["cuda"])

    def depth_limit(self, slot: int) -> int:
        """``DEPTH`` at most, so that the keys below B(p) are committed ones."""
        return min(DEPTH, super().depth_limit(slot))

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        """Passes of R rows until all rows of all trees are done: a row's ancestors stand before it."""
        self._check_rope(trees)
        rows: list[Row] = []
        for slot, tree in trees:
            length = self.lengths[slot]
            for node, (token, depth, bits) in enumerate(
                zip(tree.tokens, tree.depths, tree.ancestors, strict=True)
            ):
                path = [length + other for other in range(node + 1) if bits >> other & 1]
                rows.append((slot, token, length + depth, length + node, path, length))
        with memory_errors(f"a step of {len(rows)} rows for {len(trees)} sequences"):
            self.cache.reserve(max(row[0] for row in rows) + 1, max(row[3] for row in rows) + 1)
            starts = range(0, len(rows), self.rows)
            logits = torch.cat([self._evaluate(rows[start : start + self.rows]) for start in starts])
        scores: list[Scores] = []
        for _, tree in trees:
            mine, logits = logits[: len(tree)], logits[len(tree) :]
            scores.append(LogitsRows(LogitsBatch(mine[None]), 0))
        return scores

    def _evaluate(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits (n, V) of at most R rows. The others are copies of the first, to the place where they write."""
        numbers = np.zeros((self.rows, 5 + WINDOW), np.int64)
        pages: dict[int, int] = {}
        for r, (slot, token, position, column, path, length) in enumerate(rows):
            begin = boundary(position)
            count = length - begin + len(path)
            numbers[r, :5] = token, position, slot, column, count
            numbers[r, 5 : 5 + length - begin] = np.arange(begin, length)
            numbers[r, 5 + length - begin : 5 + count] = path
            pages[slot] = max(pages.get(slot, 0), -(-begin // PAGE))
        numbers[len(rows) :] = numbers[0]
        return self._run(torch.from_numpy(numbers), sorted(pages.items()))[: len(rows)]

    def _run(self, numbers: torch.Tensor, pages: list[tuple[int, int]]) -> torch.Tensor:
        """Logits (R, V) of a pass."""
        return self.evaluate(numbers.to(self.model.device), pages)

    def evaluate(self, there: torch.Tensor, pages: list[tuple[int, int]]) -> torch.Tensor:
        """Everything that may be captured: from the numbers (R, 5 + WINDOW) on the device to the logits (R, V)."""
        ids, positions, slots, columns, counts = there[:, :5].T.contiguous()
        self.cache.placement = Placement(slots[None], columns[None], slice(None), self.cache.capacity)
        given = (slots, positions, counts, there[:, 5:], pages)
        with self.attention.within(self.model, *given), _experts_row_by_row(self.model):
            logits = run_model(self.model, self.facts, self.cache, ids[None], positions[None])
        return logits[0]


def _experts_row_by_row(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside, a mixture of experts evaluates each row by itself; otherwise rows of one expert share a product."""
    mixture = model._can_set_experts_implementation()
    return implementation(model, "batched_mm", "_experts_implementation") if mixture else nullcontext()
