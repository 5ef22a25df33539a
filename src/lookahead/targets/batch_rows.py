"""Models with recurrent or convolutional state: the paths of a token tree are the rows of a batch.

Such layers ignore attention masks, so a tree's logits would be silently wrong there; a batch they do take. Every path
from the root to a drafted leaf is a row. All rows begin with a copy of the sequence's state, and shorter ones are
padded at their end, where nothing is read.

After verification the state must be that of the accepted path. Where the path fills its row, the row's state is kept.
Else the state stays where it was and the accepted tokens are pending: every row of the next pass begins with them,
which costs some tokens and no pass. A step of one row takes them into the state, and so does a pass of their own once
they are too many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..core import OutOfMemory, Scores, SettingsError, TokenTree
from .equivalence import HALF, distance, first_line
from .facts import PassFacts, memory_errors
from .logits import LogitsBatch, LogitsRows
from .transformers import PlainTarget, run_model
from .trial import WRONG_ANCESTOR, Trial

#: Tokens that pending ones may add to a pass, over all its rows.
MOST_PENDING = 16
#: Scans pad their tokens to chunks of a power of two, of this many at least.
SHORTEST_CHUNK = 16
#: Median distance of one-row steps from causal passes that rounding explains, in 32 and in 16 bits.
EXPLAINED = (0.03, 0.3)


@dataclass(frozen=True, slots=True)
class _Pass:
    """One sequence's last pass: its tree, the nodes of each row, and the state behind each row's last token."""

    tree: TokenTree
    paths: list[list[int]]
    cache: Any


class BatchRowsTarget(PlainTarget):
    """Token trees as rows of a batch, one pass per sequence. Fulfils ``lookahead.core.Target``.

    Attributes:
        lengths: by slot, the tokens that its state has taken in.
    """

    path = "batch-rows"

    def __init__(self, model: PreTrainedModel, reason: str = "") -> None:
        super().__init__(model, reason)
        #: By slot, the tokens that were accepted behind those.
        self._pending: dict[int, list[int]] = {}
        self._passes: dict[int, _Pass] = {}
        sizes: list[tuple[Any, Any]] = [
            (module, getattr(module, "chunk_size", None)) for module in model.modules()
        ]
        self._scans = [(module, size) for module, size in sizes if isinstance(size, int)]

    def depth_limit(self, slot: int) -> int:
        """Room up to the model's last position."""
        return max(0, self.facts.max_positions - 1 - self.lengths[slot] - len(self._pending[slot]))

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Scores]:
        self._pending.update((slot, []) for slot, _ in prompts)
        return super().prefill(prompts)

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        """Trees one after the other. Where all are of one row, states go on in place, as in plain decoding.

        Such a step must be committed before the next one.
        """
        for slot, _ in trees:
            self._passes.pop(slot, None)
        if all(len(tree) == 1 for _, tree in trees):
            return [self._absorb(slot, tree.tokens) for slot, tree in trees]
        return [self._evaluate(slot, tree) for slot, tree in trees]

    def _absorb(self, slot: int, tokens: Sequence[int] = ()) -> Scores:
        """Take pending and further tokens into the state; scores of the last one."""
        tokens = [*self._pending[slot], *tokens]
        with self._short_chunks(len(tokens)):
            scores = self._run(slot, tokens)
        self._pending[slot] = []
        return scores

    def _evaluate(self, slot: int, tree: TokenTree) -> Scores:
        paths, nodes = leaf_paths(tree), tree.needs_logits_nodes()
        if len(self._pending[slot]) * len(paths) > MOST_PENDING:
            kept = self._caches[slot]
            self._caches[slot] = repeated(kept, 1)
            try:
                self._absorb(slot)
            except OutOfMemory:  # half way through the layers, and the step is tried again
                self._caches[slot] = kept
                raise
        pending, width = self._pending[slot], len(max(paths, key=len))
        padded = [path + path[-1:] * (width - len(path)) for path in paths]
        place = {node: (row, depth) for row, path in enumerate(paths) for depth, node in enumerate(path)}
        device, length = self.model.device, self.lengths[slot]
        ids = torch.tensor(
            [[*pending, *(tree.tokens[node] for node in path)] for path in padded], device=device
        )
        positions = torch.arange(length, length + ids.shape[1], device=device).expand_as(ids)
        named = {"logits_to_keep": width} if self.facts.takes_rows else {}
        with (
            memory_errors(f"a step of {len(paths)} x {ids.shape[1]} tokens"),
            self._short_chunks(ids.shape[1]),
        ):
            cache = repeated(self._caches[slot], len(paths))
            logits = run_model(self.model, self.facts, cache, ids, positions, **named)[:, -width:]
            logits = logits[tuple(zip(*(place[node] for node in nodes), strict=True))]
        self._passes[slot] = _Pass(tree, paths, cache)
        return LogitsRows(LogitsBatch(logits[None]), 0, None if len(nodes) == len(tree) else nodes)

    @contextmanager
    def _short_chunks(self, tokens: int) -> Iterator[None]:
        """Scans of so few tokens are not padded to the chunks of 256 that are right for prompts."""
        short = max(SHORTEST_CHUNK, 1 << (tokens - 1).bit_length())
        scans = self._scans if tokens > 1 else []
        try:
            for module, size in scans:
                module.chunk_size = min(size, short)
            yield
        finally:
            for module, size in scans:
                module.chunk_size = size

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Keep the state of the row that the path fills; where it fills none, its tokens are pending."""
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
    """The nodes from the root to each node that needs logits and has none such below it."""
    needed, inner = tree.needs_logits_nodes(), 0
    for node in needed:
        inner |= tree.ancestors[node] & ~(1 << node)
    leaves = [node for node in needed if not inner >> node & 1]
    return [[row for row in range(leaf + 1) if tree.ancestors[leaf] >> row & 1] for leaf in leaves]


def repeated(cache: Any, rows: int) -> Any:
    """A cache of one sequence as that of so many equal rows; passes through it leave the first as it is."""
    other = copy(cache)
    other.layers = [copy(layer) for layer in cache.layers]
    for layer in other.layers:
        for name, value in vars(layer).items():
            if isinstance(value, dict):  # states by number, which are written in place
                setattr(layer, name, {key: _repeat(state, rows) for key, state in value.items()})
            elif torch.is_tensor(value) and value.dim() > 1:  # keys and values, which grow by concatenation
                setattr(layer, name, value.expand(rows, *value.shape[1:]))
    return other


def _repeat(state: Any, rows: int) -> Any:
    return state.repeat_interleave(rows, 0) if torch.is_tensor(state) else state


class NoSteps(SettingsError):
    """One-row steps do not continue a model's text."""


class StepTrial(Trial):
    """A trial whose right logits are those of plain decoding: the prompt, then one token after the other.

    Causal passes will not do: some models clamp in their scan of many tokens and not in their recurrence, and the
    text of plain decoding is that of the recurrence. Not every model has positions besides the order of its rows, so
    a wrong ancestor alone is the control.
    """

    name = "trial of steps"
    controls = (WRONG_ANCESTOR,)
    strict = 1e-4

    def causal(self, model: PreTrainedModel, halves: bool = False) -> torch.Tensor:
        """The rows by steps of one row; with ``halves`` by causal passes.

        Raises:
            NoSteps: as it says; the model keeps its state somewhere else.
        """
        passes = super().causal(model, halves)
        if halves:
            return passes
        facts, device = PassFacts(model), model.device
        caches: dict[tuple[int, ...], Any] = {(): DynamicCache(config=facts.config)}
        found: dict[tuple[int, ...], torch.Tensor] = {}
        texts = [tuple(text) for text in self.texts()]
        steps = None
        try:
            for text in sorted(set(texts), key=len):
                known = text[:-1] if text[:-1] in caches else ()
                caches[text] = repeated(caches[known], 1)
                ids = torch.tensor([text[len(known) :]], device=device)
                positions = torch.arange(len(known), len(text), device=device)[None]
                found[text] = run_model(model, facts, caches[text], ids, positions)[0, -1].float().cpu()
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            apart, why = torch.inf, first_line(error)
        else:
            steps = torch.stack([found[text] for text in texts])
            apart = float(distance(steps, passes).median())
            why = f"they are {apart:.2g} away from causal passes"
        explained = EXPLAINED[model.dtype in HALF]
        # Passes that are not even like themselves, by dropout or NaN, say nothing of where the state is kept.
        if steps is None or (apart > explained > float(distance(super().causal(model), passes).median())):
            raise NoSteps(
                f"a model must keep its state in transformers' DynamicCache, and steps of {type(model).__name__} "
                f"through one do not continue its text ({why}); use model.generate without custom_generate"
            )
        return steps
