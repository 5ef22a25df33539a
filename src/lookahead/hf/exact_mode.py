"""Exact mode: bit-identical logits with and without drafting, in any dtype, for any model whose operations allow it.

The rounding of a row depends on the shape of an operation and on the row's index in it. So every step, plain decoding
included, is evaluated in passes of a fixed number of rows R, regardless of the trees and sequences of the rows, and
attention is divided at absolute positions (``attention.exact``). One condition on the operations remains: a
row's result must depend neither on its index among the R rows nor on the other rows. ``depends_on_others`` checks
this when a model is first used in exact mode; if the check fails, exact mode is not available. Example with R = 4 and
two sequences whose trees have 3 and 2 rows:

    pass 1:  a0  a1  a2  b0      plain decoding evaluates the same tokens in passes such as
    pass 2:  b1  (b1 b1 b1)      a0 (a0 a0 a0): rows in parentheses are copies of the first row

Prompts are evaluated by the model's own passes, each alone and in one pass, with and without drafting.

On a GPU the passes are captured, and everything that changes from step to step is in one buffer. With the kernel,
one graph serves every step. With torch operations, the slots and pages that attention reads are part of a graph, so
their numbers are rounded up to powers of two; a page in which a row sees nothing does not change the row's bits.
Only replays produce output; results of the warm-up before a capture are discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from traceback import clear_frames
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..core import Scores, TokenTree
from ..core.memory import memory_errors, out_of_memory
from ..core.target import CHECKED
from ..sampling.scores import LogitsRows
from .attention.exact import DEPTH, PAGE, WINDOW, boundary
from .attention_hook import TreeAttention, implementation
from .cuda import noticed_waits, pinned
from .facts import ModelFacts
from .graph_store import CAPACITY, GraphTarget
from .logits import TensorLogits
from .target import run_model
from .tree_cache import Placement

#: R by device type. A constant, not a measured optimum, so that a machine always produces the same output.
ROWS = {"cpu": 16, "cuda": 64}

#: Prefix length of the check, in tokens: longer than a page of ``attention.exact``.
PREFIX = 300

#: A row of a pass: slot, token, position, column, the columns of its path from the root, committed tokens T.
Row = tuple[int, int, int, int, list[int], int]


class ExactTarget(GraphTarget):
    """``TransformersTarget`` whose rows are bit-identical in any step, and captured if ``attention.captured``.

    Args:
        attention: the attention, with the function ``lookahead.hf.attention.exact.attend`` or its kernel.
        model, facts, capacity, reason: as for ``GraphTarget``; ``depends_on_others`` must be False.

    Attributes:
        rows: R, the rows of every pass.
    """

    path = "exact"
    guarantee = CHECKED
    gives_hidden = False

    def __init__(
        self,
        model: PreTrainedModel,
        facts: ModelFacts,
        attention: TreeAttention,
        capacity: int = PAGE,
        reason: str = "",
    ) -> None:
        capacity = max(capacity, CAPACITY if attention.captured else PAGE)
        super().__init__(model, facts, attention, -(-capacity // PAGE) * PAGE, reason)
        self.rows = ROWS.get(model.device.type, ROWS["cuda"])

    def depth_limit(self, slot: int) -> int:
        """At most ``DEPTH``, so that all keys below B(p) are committed."""
        return min(DEPTH, super().depth_limit(slot))

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        """Evaluate all rows of all trees in passes of R rows. Ancestors precede their descendants, so they are in the
        same pass or an earlier one."""
        if len(trees) > 1 and self._one_at_a_time(trees):
            return [self.forward([pair])[0] for pair in trees]
        rows: list[Row] = []
        for slot, tree in trees:
            length = self.lengths[slot]
            for node, (token, depth, bits) in enumerate(
                zip(tree.tokens, tree.depths, tree.ancestors, strict=True)
            ):
                path = [length + other for other in range(node + 1) if bits >> other & 1]
                rows.append((slot, token, length + depth, length + node, path, length))
        what = f"a step of {len(rows)} rows for {len(trees)} sequences"
        room = [(slot, self.lengths[slot] + len(tree)) for slot, tree in trees]
        with self.with_room(what, room), memory_errors(what):
            for slot, tree in trees:
                self.cache.occupy(slot, self.lengths[slot] + len(tree))
            starts = range(0, len(rows), self.rows)
            logits = torch.cat([self._evaluate(rows[start : start + self.rows]) for start in starts])
        scores: list[Scores] = []
        for _, tree in trees:
            of_tree, logits = logits[: len(tree)], logits[len(tree) :]
            scores.append(LogitsRows(TensorLogits(of_tree[None])))
        return scores

    def _evaluate(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits (n, V) of n <= R rows. The pass is padded with copies of the first row, which write to the same
        column."""
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
        """Logits (R, V) of a pass, from its rows (R, 5 + WINDOW) and the (slot, page count) pairs that they attend
        to."""
        with self.with_room("a pass", ()):
            if not self.attention.captured:
                return self.evaluate(numbers.to(self.model.device), pages)
            if self.attention.backend == "exact_triton":  # the kernel reads positions on the device
                pages = []
            if count := max((number for _, number in pages), default=0):
                count = min(1 << (count - 1).bit_length(), self.cache.capacity // PAGE)
            last = max((slot for slot, number in pages if number), default=0)
            key = (min(1 << last.bit_length(), self.cache.slots), count)
            one = self.graphs.find(key, lambda: _CapturedPass(self, numbers, *key))
            one.numbers.copy_(pinned(numbers, numbers.dtype, self.model.device), non_blocking=True)
            one.graph.replay()
            logits: torch.Tensor = one.logits.clone()  # the next replay overwrites them
            return logits

    def evaluate(self, numbers: torch.Tensor, pages: list[tuple[int, int]]) -> torch.Tensor:
        """The capturable part: from the rows (R, 5 + WINDOW) on the device to the logits (R, V)."""
        ids, positions, slots, columns, counts = numbers[:, :5].T.contiguous()
        self.cache.placement = Placement(slots[None], columns[None], slice(None), self.cache.capacity)
        arguments = (slots, positions, counts, numbers[:, 5:], pages)
        with self.attention.installed(self.model, *arguments), _experts_row_by_row(self.model):
            logits = run_model(self.model, self.facts, self.cache, ids[None], positions[None])
        return logits[0]


def _experts_row_by_row(model: PreTrainedModel) -> AbstractContextManager[None]:
    """A context in which a mixture of experts evaluates each row separately. Otherwise, the rows of an expert share a
    matrix product whose shape depends on the other rows."""
    mixture = model._can_set_experts_implementation()
    return implementation(model, "batched_mm", "_experts_implementation") if mixture else nullcontext()


class _CapturedPass:
    """A captured pass whose attention reads ``count`` pages of each of the first ``slots`` slots."""

    def __init__(self, target: ExactTarget, numbers: torch.Tensor, slots: int, count: int) -> None:
        device = target.model.device
        self.numbers = numbers.to(device, copy=True)
        pages = [(slot, count) for slot in range(slots if count else 0)]
        target.evaluate(self.numbers, pages)  # libraries are set up in the first pass
        # A failed capture would leave the device's random generator unusable, so the first pass is checked before it.
        if not target.graphs.checked_for_host_reads:
            with noticed_waits(device) as found:
                target.evaluate(self.numbers, pages)
            if found:
                raise RuntimeError(f"a pass waits for the device in {found[0]}")
            target.graphs.checked_for_host_reads = True
        captured: Any = None
        try:
            captured = target.graphs.capture(lambda: target.evaluate(self.numbers, pages))
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            clear_frames(error.__traceback__)
        if captured is None:
            # Only a replay may produce output, so this pass must be captured; evict the other graphs.
            target.graphs.drop_passes()
            captured = target.graphs.capture(lambda: target.evaluate(self.numbers, pages))
        self.graph, self.logits, self.bytes = captured


def depends_on_others(target: ExactTarget) -> bool:
    """Whether a row of the model depends on its index in a pass, or on the other rows.

    R rows at several positions after random keys and values are evaluated in order, rotated by one, reversed, and
    with every other row replaced. Each row's logits, keys and values must be bit-identical.

    Args:
        target: a new target, whose cache gets room for the prefix and one pass.
    """
    facts, count = target.facts, target.rows
    generator = torch.Generator().manual_seed(0)
    length = max(1, min(PREFIX, facts.max_positions, facts.rope_boundary) - 1)
    target.cache.reserve(1, length + count)
    # A prefix of random keys and values, and two sets of random tokens.
    for storage in target.cache._storage.values():
        storage.copy_(torch.randn(storage.shape, generator=generator))
    tokens = torch.randint(facts.vocabulary, (2, count), generator=generator).tolist()

    def run(rows: Sequence[tuple[int, int]]) -> list[list[torch.Tensor]]:
        """Logits, keys and values of each (token set, row)."""
        inputs: list[Row] = []
        for index, (token_set, r) in enumerate(rows):
            # Token set 1 gets other positions than token set 0.
            position = max(0, length - (11 + 30 * token_set) * r % length)
            column = length + index
            inputs.append((0, tokens[token_set][r], position, column, [column], position))
        logits = target._evaluate(inputs)
        written = [storage[:, 0, :, length : length + count] for storage in target.cache._storage.values()]
        return [
            [logits[i].clone(), *(states[:, :, i].clone() for states in written)] for i in range(len(rows))
        ]

    in_order = [(0, r) for r in range(count)]
    with memory_errors(f"a pass of {count} rows"):
        first = run(in_order)
        for rows in (
            in_order[1:] + in_order[:1],
            in_order[::-1],
            [(r % 2, r) for r in range(count)],  # whose odd rows are not compared
        ):
            for (token_set, r), found in zip(rows, run(rows), strict=True):
                if not token_set and not all(map(torch.equal, first[r], found)):
                    return True
    return False
