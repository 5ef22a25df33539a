"""Models with recurrent or convolutional state: the paths of a token tree are the rows of a batch.

Recurrent layers ignore attention masks, so they cannot evaluate a tree within one sequence, but they can evaluate a
batch. Each path from the root to a leaf becomes a row of a batch. All rows start from a copy of the sequence's state.
Shorter rows are padded at the end; padding is never read. Example: the sequence's state has processed "the cat", and
the tree is

    sat ─┬─ on ── the
         └─ down

    batch row 0:   sat  on    the           paths 0-1-2 and 0-3; the logits of "sat" are read from row 0
    batch row 1:   sat  down  (down)        padding in parentheses

After verification the state must be that of the accepted path:

- If the path fills its row (sat on the), the state after row 0 becomes the sequence's state.
- If it does not (sat down, or sat on), the state after that row has processed padding or rejected tokens, and a
  recurrent state cannot be rolled back. So the state before the step is kept, and the accepted tokens are *pending*:
  every row of the next pass begins with them. This costs a few tokens per row, but no extra pass:

    pending: sat down                next tree: root "and"
    batch row 0:   sat  down  and  ...

  A single-row step processes the pending tokens. If there are too many, a separate pass does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from ..core import OutOfMemory, Scores, SettingsError, TokenTree
from ..core.errors import summary
from ..core.memory import memory_errors
from ..core.target import UP_TO_ROUNDING
from ..equivalence import Array, distance, floats
from ..sampling.scores import LogitsRows
from .equivalence import HALF_DTYPES, causal_rows
from .facts import PassFacts
from .logits import TensorLogits
from .target import PlainTarget, repeated, run_model

#: Maximum pending tokens in a pass, summed over its rows.
MAX_PENDING = 16
#: Smallest chunk of a scan; chunks are powers of two.
MIN_CHUNK = 16
#: Largest median distance between single-row steps and causal passes that rounding explains, in 32 and 16 bits.
ROUNDING = (0.03, 0.3)
#: Largest distance in float32 between a path as a batch row and plain decoding.
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class _Pass:
    """One sequence's last pass.

    Attributes:
        tree: the evaluated tree.
        paths: the nodes of each batch row.
        cache: the state after each row's last token.
    """

    tree: TokenTree
    paths: list[list[int]]
    cache: Any


class BatchRowsTarget(PlainTarget):
    """Token trees as rows of a batch, one pass per sequence. Implements ``lookahead.core.Target``.

    Attributes:
        lengths: number of tokens that the state has processed, by slot.
    """

    path = "batch-rows"
    guarantee = UP_TO_ROUNDING

    def __init__(self, model: PreTrainedModel, reason: str = "") -> None:
        super().__init__(model, reason)
        #: Accepted tokens that the state has not processed yet, by slot.
        self._pending: dict[int, list[int]] = {}
        self._passes: dict[int, _Pass] = {}
        sizes: list[tuple[Any, Any]] = [
            (module, getattr(module, "chunk_size", None)) for module in model.modules()
        ]
        #: Modules that scan tokens in chunks, with their chunk sizes.
        self._scans = [(module, size) for module, size in sizes if isinstance(size, int)]

    def depth_limit(self, slot: int) -> int:
        return self.positions_left(slot)

    def positions_left(self, slot: int) -> int:
        """Positions left up to the model's last one."""
        return max(0, super().positions_left(slot) - len(self._pending[slot]))

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Scores]:
        self._pending.update((slot, []) for slot, _ in prompts)
        return super().prefill(prompts)

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        """Evaluate trees sequentially.

        If every tree has one row, the tokens are processed in place, as in plain decoding; such a step must be
        committed before the next one.
        """
        for slot, _ in trees:
            self._passes.pop(slot, None)
        if all(len(tree) == 1 for _, tree in trees):
            pending = {slot: self._pending[slot] for slot, _ in trees}
            try:
                with self._all_or_none(list(pending)):
                    return [self._process(slot, tree.tokens) for slot, tree in trees]
            except OutOfMemory:
                self._pending.update(pending)
                raise
        return [self._evaluate(slot, tree) for slot, tree in trees]

    def _process(self, slot: int, tokens: Sequence[int] = ()) -> Scores:
        """Process the pending tokens and then ``tokens``. Returns the scores of the last token."""
        tokens = [*self._pending[slot], *tokens]
        with self._short_chunks(len(tokens)):
            scores = self._run(slot, tokens)
        self._pending[slot] = []
        return scores

    def _evaluate(self, slot: int, tree: TokenTree) -> Scores:
        paths = leaf_paths(tree)
        nodes = tree.needs_logits_nodes()
        if len(self._pending[slot]) * len(paths) > MAX_PENDING:
            before = self._caches[slot]
            self._caches[slot] = repeated(before, 1)
            try:
                self._process(slot)
            except OutOfMemory:  # some layers may have processed the tokens; the step will be retried
                self._caches[slot] = before
                raise
        # Each batch row: the pending tokens, then a path, padded to the longest.
        pending = self._pending[slot]
        width = len(max(paths, key=len))
        padded = [path + path[-1:] * (width - len(path)) for path in paths]
        location = {node: (row, depth) for row, path in enumerate(paths) for depth, node in enumerate(path)}
        device = self.model.device
        length = self.lengths[slot]
        ids = torch.tensor(
            [[*pending, *(tree.tokens[node] for node in path)] for path in padded], device=device
        )
        positions = torch.arange(length, length + ids.shape[1], device=device).expand_as(ids)
        # Evaluate on copies of the state, and select the logits of each node from one of its rows.
        named = {"logits_to_keep": width} if self.facts.accepts_logits_to_keep else {}
        with (
            memory_errors(f"a step of {len(paths)} x {ids.shape[1]} tokens"),
            self._short_chunks(ids.shape[1]),
        ):
            cache = repeated(self._caches[slot], len(paths))
            logits = run_model(self.model, self.facts, cache, ids, positions, **named)[:, -width:]
            logits = logits[tuple(zip(*(location[node] for node in nodes), strict=True))]
        self._passes[slot] = _Pass(tree, paths, cache)
        return LogitsRows(TensorLogits(logits[None]), nodes=None if len(nodes) == len(tree) else nodes)

    @contextmanager
    def _short_chunks(self, tokens: int) -> Iterator[None]:
        """A context in which scans use chunks that fit ``tokens`` tokens, because they would otherwise pad a step to
        the chunk size for prompts, such as 256."""
        short = max(MIN_CHUNK, 1 << (tokens - 1).bit_length())
        scans = self._scans if tokens > 1 else []
        try:
            for module, size in scans:
                module.chunk_size = min(size, short)
            yield
        finally:
            for module, size in scans:
                module.chunk_size = size

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Keep the state of the row that the path fills. If it fills none, its tokens become pending."""
        for slot, path in paths:
            last = self._passes.pop(slot, None)
            if last is None:  # a step of one row
                continue
            self._pending[slot] += [last.tree.tokens[node] for node in path]
            if len(path) == max(map(len, last.paths)) and list(path) in last.paths:
                if len(last.paths) > 1:
                    row = last.paths.index(list(path))
                    last.cache.reorder_cache(torch.tensor([row], device=self.model.device))
                self._caches[slot] = last.cache
                self.lengths[slot] += len(self._pending[slot])
                self._pending[slot] = []

    def release(self, slot: int) -> None:
        super().release(slot)
        self._pending.pop(slot, None)
        self._passes.pop(slot, None)


def leaf_paths(tree: TokenTree) -> list[list[int]]:
    """The paths from the root to the leaves, as lists of nodes. Each path ends at the last row that needs logits."""
    needed = tree.needs_logits_nodes()
    inner = 0
    for node in needed:
        inner |= tree.ancestors[node] & ~(1 << node)
    leaves = [node for node in needed if not inner >> node & 1]
    return [[row for row in range(leaf + 1) if tree.ancestors[leaf] >> row & 1] for leaf in leaves]


class NoSteps(SettingsError):
    """Single-row steps do not continue the model's sequence."""


def step_rows(model: PreTrainedModel, texts: Sequence[tuple[int, ...]]) -> Array:
    """The logits (rows, V) after each token sequence, computed as in plain decoding: the prompt, then one token per
    step.

    Causal passes cannot be the reference of these models: some clamp values when they scan many tokens but not in
    their recurrence, and plain decoding uses the recurrence.

    Raises:
        NoSteps: the model keeps its state elsewhere, so steps do not continue its sequence.
    """
    passes = causal_rows(model, texts)
    # Evaluate a prompt in one pass, and every later token from a copy of the state before it.
    facts = PassFacts(model)
    device = model.device
    caches: dict[tuple[int, ...], Any] = {(): DynamicCache(config=facts.config)}
    rows: dict[tuple[int, ...], Array] = {}
    steps = None
    try:
        for text in sorted(set(texts), key=len):
            prefix = text[:-1] if text[:-1] in caches else ()
            caches[text] = repeated(caches[prefix], 1)
            ids = torch.tensor([text[len(prefix) :]], device=device)
            positions = torch.arange(len(prefix), len(text), device=device)[None]
            rows[text] = floats(run_model(model, facts, caches[text], ids, positions)[0, -1])
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        median = np.inf
        why = summary(error)
    else:
        # If steps differ from causal passes by more than rounding, the state is not in the cache.
        steps = np.stack([rows[text] for text in texts])
        median = float(np.median(distance(steps, passes)))
        why = f"their distance from causal passes is {median:.2g}"
    rounding = ROUNDING[model.dtype in HALF_DTYPES]
    # If two causal passes already differ (dropout, NaN), the distance reveals nothing about the state.
    if steps is None or (median > rounding > float(np.median(distance(causal_rows(model, texts), passes)))):
        raise NoSteps(
            f"a model must keep its state in transformers' DynamicCache, and steps of {type(model).__name__} "
            f"through one do not continue its sequence ({why}); use model.generate without custom_generate"
        )
    return steps
