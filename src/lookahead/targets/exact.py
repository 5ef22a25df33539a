"""Exact mode: the same bits with and without drafting, in any dtype, on any model whose operations allow it.

What rounding depends on is the shape of an operation and the place of a row in it. So every step, those of plain
decoding too, is evaluated in passes of one number of rows R, whatever trees and sequences its rows come from; and
attention is cut by absolute positions (``lookahead.attention.exact``). What is left is a property of the operations
at hand: that a row's result depends neither on its place among the R nor on what the others hold. A certificate
checks that when a model is first used so, by passes of the model itself, and exact mode is refused where it fails.

Prompts go the model's own way, each alone and in one pass, with and without drafting alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..attention import exact
from ..attention.exact import DEPTH, PAGE, WINDOW, boundary
from ..core import OutOfMemory, Scores, SettingsError, TokenTree
from .attention_hook import TreeAttention, implementation
from .cache import Placement, TreeCache
from .cuda_graphs import uncapturable
from .equivalence import compare, first_line
from .facts import ModelFacts, memory_errors
from .fingerprint import forget, remember
from .logits import LogitsBatch, LogitsRows
from .transformers import TransformersTarget, run_model

#: R by the device's type. Fixed, and not by measured times, so that one machine gives one text.
ROWS = {"cpu": 16, "cuda": 64}
#: Tokens of the certificate's prefix: more than a page.
PREFIX = 300

#: A row of a pass: slot, token, position, own column, columns of its path from the root on, committed tokens.
_Row = tuple[int, int, int, int, list[int], int]


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
        rows: list[_Row] = []
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

    def _evaluate(self, rows: Sequence[_Row]) -> torch.Tensor:
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


def exact_attention(model: PreTrainedModel, facts: ModelFacts) -> tuple[TreeAttention | None, str]:
    """The attention for ``ExactTarget``, None where exact mode is refused; and one line that says why.

    Found once for a model and a number of threads, on which operations depend too.
    """
    return remember(model, f"exact {torch.get_num_threads()}", partial(_judge, model, facts))


def target_kind(attention: TreeAttention) -> type[ExactTarget]:
    """The target for an attention of ``exact_attention``."""
    if not attention.captured:
        return ExactTarget
    from .exact_graphs import CapturedExactTarget

    return CapturedExactTarget


def _judge(model: PreTrainedModel, facts: ModelFacts) -> tuple[TreeAttention | None, str]:
    if not on_gpu(model):
        return _certified(model, facts, captured=False)
    attention, why = None, uncapturable(model, facts)
    if not why:
        attention, why = _certified(model, facts, captured=True)
    if attention is not None:
        return attention, why
    attention, reason = _certified(model, facts, captured=False)
    return attention, f"{reason}; passes are not captured: {why}"


def on_gpu(model: PreTrainedModel) -> bool:
    """Whether passes are to be captured where they can be."""
    return model.device.type == "cuda"


def _certified(model: PreTrainedModel, facts: ModelFacts, captured: bool) -> tuple[TreeAttention | None, str]:
    name = type(model).__name__
    try:
        attention = TreeAttention(model, exact.attend)
        attention.captured = captured
        kind = target_kind(attention)
        if (differs := certificate(model, facts, attention)) is not None:
            return None, f"{name}'s rows depend on their place in a pass or on other rows: {differs}"
        found = compare(model, facts, lambda: kind(model, facts, attention))
    except SettingsError as error:
        return None, str(error).removesuffix("; use sdpa")
    except OutOfMemory:
        raise
    except Exception as error:  # whatever a model does in a pass that it was not made for
        return None, f"{name} cannot be evaluated so ({first_line(error)})"
    forget(model, "trial")
    if not found.ok:
        return None, f"{name}'s logits there differ from those of its own passes ({found.reason})"
    how = f"{'captured ' if captured else ''}passes of {kind(model, facts, attention).rows} rows"
    return attention, f"{name} in {how}, each with the same bits in any place ({found.reason})"


def certificate(model: PreTrainedModel, facts: ModelFacts, attention: TreeAttention) -> str | None:
    """What it is in which rows are not independent of their place and of other rows; None where they all are.

    R rows at several positions behind a prefix of random numbers are evaluated, then turned by one, in reverse order,
    and with every other row replaced. Logits, keys and values must be equal to the bit.
    """
    target = target_kind(attention)(model, facts, attention)
    count, generator = target.rows, torch.Generator().manual_seed(0)
    length = max(1, min(PREFIX, facts.max_positions, facts.rope_boundary) - 1)
    target.cache.reserve(1, length + count)
    for storage in target.cache._storage.values():
        storage.copy_(torch.randn(storage.shape, generator=generator))
    tokens = torch.randint(facts.vocabulary, (2, count), generator=generator).tolist()
    place = list(range(count))
    turned, reverse = place[1:] + place[:1], place[::-1]
    trials = [([(0, r) for r in order], order) for order in (place, turned, reverse)]
    trials.append(([(r % 2, r) for r in place], place[::2]))

    def run(rows: Sequence[tuple[int, int]]) -> dict[int, list[torch.Tensor]]:
        """By row: its logits, keys and values."""
        given: list[_Row] = []
        for index, (which, r) in enumerate(rows):
            position = max(0, length - (11 + 30 * which) * r % length)
            own = length + index
            given.append((0, tokens[which][r], position, own, [own], position))
        logits = target._evaluate(given)
        kept = [storage[:, 0, :, length : length + count] for storage in target.cache._storage.values()]
        return {
            r: [logits[index].clone(), *(states[:, :, index].clone() for states in kept)]
            for index, (_, r) in enumerate(rows)
        }

    def differing(hooks: bool) -> str | None:
        first: dict[int, list[torch.Tensor]] = {}
        outputs: list[tuple[str, torch.Tensor]] = []
        first_outputs: list[tuple[str, torch.Tensor]] = []
        handles = [
            module.register_forward_hook(partial(_note, outputs, f"{name} ({module})"))
            for name, module in model.named_modules()
            if hooks and not any(module.children())
        ]
        try:
            for rows, same in trials:
                outputs.clear()
                found = run(rows)
                first, first_outputs = first or found, first_outputs or list(outputs)
                for (name, one), (_, other) in zip(first_outputs, outputs, strict=False):
                    for index, (which, r) in enumerate(rows):
                        if not which and one.shape == other.shape and not torch.equal(one[r], other[index]):
                            return name
                if any(not torch.equal(a, b) for r in same for a, b in zip(first[r], found[r], strict=True)):
                    return "its attention, or an operation between its modules"
        finally:
            for handle in handles:
                handle.remove()
        return None

    with memory_errors(f"a pass of {count} rows"):
        if differing(hooks=False) is None:
            return None
        # Modules are not called when a pass is replayed, so no name of one is found there.
        return "its captured pass" if attention.captured else differing(hooks=True)


def _note(
    outputs: list[tuple[str, torch.Tensor]], name: str, module: nn.Module, given: Any, output: Any
) -> None:
    """Keep what a module returns for each row."""
    if torch.is_tensor(output) and output.dim() == 3 and output.shape[0] == 1:
        outputs.append((name, output[0].clone()))
