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

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..core import Scores, SettingsError, TokenTree
from .equivalence import HALF, distance, first_line
from .facts import _rope_boundary, max_positions, memory_errors
from .logits import LogitsBatch, LogitsRows
from .masks import LayerKinds
from .trial import WRONG_ANCESTOR, Trial

#: Tokens that pending ones may add to a pass, over all its rows.
MOST_PENDING = 16
#: Smallest length that scans are given to work in: they pad what is shorter.
SHORTEST_CHUNK = 16
#: Median distance of one-row steps from causal passes that rounding and clamping explain, in 32 and in 16 bits.
EXPLAINED = (0.03, 0.3)


class RowsFacts:
    """What passes over rows of one batch need to know of a model; attributes as in ``ModelFacts``.

    Attributes:
        cache_name: of the cache among the arguments of ``forward``.
        scans: modules that scan tokens in chunks, and the sizes of these.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.config: Any = model.config.get_text_config(decoder=True)
        self.kinds = LayerKinds.of(self.config)
        self.vocabulary = int(self.config.vocab_size)
        self.max_positions = max_positions(self.config)
        self.rope_type, self.rope_boundary = _rope_boundary(self.config)
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self.takes_positions = "position_ids" in parameters
        self.takes_rows = "logits_to_keep" in parameters
        sizes: list[tuple[Any, Any]] = [(m, getattr(m, "chunk_size", None)) for m in model.modules()]
        self.scans = [(module, size) for module, size in sizes if isinstance(size, int)]

    @contextmanager
    def short_chunks(self, tokens: int) -> Iterator[None]:
        """For a pass of so many tokens, chunks that are not much longer: 256 of them are what a model is made for."""
        fitting = max(SHORTEST_CHUNK, 1 << (tokens - 1).bit_length())
        try:
            for module, size in self.scans:
                module.chunk_size = min(size, fitting)
            yield
        finally:
            for module, size in self.scans:
                module.chunk_size = size


@dataclass(frozen=True, slots=True)
class _Pass:
    """One sequence's last pass: its tree, the nodes of each row, and the state behind each row's last token."""

    tree: TokenTree
    paths: list[list[int]]
    cache: Any


class BatchRowsTarget:
    """Token trees as rows of a batch, one pass per sequence. Fulfils ``lookahead.core.Target``."""

    path = "batch-rows"

    def __init__(self, model: PreTrainedModel, facts: RowsFacts, reason: str = "") -> None:
        self.model = model
        self.facts = facts
        self.reason = reason
        self.vocabulary = facts.vocabulary
        self._caches: dict[int, Any] = {}
        #: Tokens in the state, and those accepted behind them.
        self._absorbed: dict[int, int] = {}
        self._pending: dict[int, list[int]] = {}
        self._passes: dict[int, _Pass] = {}

    def depth_limit(self, slot: int) -> int:
        """Room up to the model's last position."""
        return max(0, self.facts.max_positions - 1 - self._absorbed[slot] - len(self._pending[slot]))

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Scores]:
        for slot, _ in prompts:
            self._caches[slot] = DynamicCache(config=self.facts.config)
            self._absorbed[slot], self._pending[slot] = 0, []
        return [self._absorb(slot, prompt) for slot, prompt in prompts]

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
        new = [*self._pending[slot], *tokens]
        with memory_errors(f"a pass of {len(new)} tokens"):
            logits = run_rows(self.model, self.facts, self._caches[slot], [new], self._absorbed[slot], 1)
        self._absorbed[slot] += len(new)
        self._pending[slot] = []
        return LogitsRows(LogitsBatch(logits), 0)

    def _evaluate(self, slot: int, tree: TokenTree) -> Scores:
        paths, nodes = leaf_paths(tree), tree.needs_logits_nodes()
        if len(self._pending[slot]) * len(paths) > MOST_PENDING:
            self._absorb(slot)
        width = len(max(paths, key=len))
        rows = [
            [*self._pending[slot], *(tree.tokens[node] for node in path + path[-1:] * (width - len(path)))]
            for path in paths
        ]
        place = {node: (row, depth) for row, path in enumerate(paths) for depth, node in enumerate(path)}
        with memory_errors(f"a step of {len(rows)} rows of {len(rows[0])} tokens"):
            cache = repeated(self._caches[slot], len(rows))
            logits = run_rows(self.model, self.facts, cache, rows, self._absorbed[slot], width)
            read = logits[tuple(zip(*(place[node] for node in nodes), strict=True))]
        self._passes[slot] = _Pass(tree, paths, cache)
        return LogitsRows(LogitsBatch(read[None]), 0, None if len(nodes) == len(tree) else nodes)

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
                self._absorbed[slot] += len(self._pending[slot])
                self._pending[slot] = []

    def release(self, slot: int) -> None:
        """Forget a sequence."""
        for kept in (self._caches, self._absorbed, self._pending, self._passes):
            kept.pop(slot, None)


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
    other.layers = []
    for layer in map(copy, cache.layers):
        other.layers.append(layer)
        for name, value in vars(layer).items():
            if isinstance(value, dict):  # states by number, which are written in place
                setattr(layer, name, {key: _repeat(state, rows) for key, state in value.items()})
            elif torch.is_tensor(value) and value.dim() > 1:  # keys and values, which grow by concatenation
                setattr(layer, name, value.expand(rows, *value.shape[1:]))
    return other


def _repeat(state: Any, rows: int) -> Any:
    return state.repeat_interleave(rows, 0) if torch.is_tensor(state) else state


def run_rows(
    model: PreTrainedModel,
    facts: RowsFacts,
    cache: Any,
    rows: Sequence[Sequence[int]],
    length: int,
    last: int,
) -> torch.Tensor:
    """Logits (B, last, V) of the last tokens of rows of equal length that stand behind ``length`` tokens."""
    ids = torch.tensor([list(row) for row in rows], device=model.device)
    keywords: dict[str, Any] = {facts.cache_name: cache, "use_cache": True}
    if facts.takes_positions:
        positions = torch.arange(length, length + ids.shape[1], device=ids.device)
        keywords["position_ids"] = positions.expand_as(ids)
    if facts.takes_rows:
        keywords["logits_to_keep"] = last
    short = facts.short_chunks(ids.shape[1]) if length and ids.shape[1] > 1 else nullcontext()
    with torch.no_grad(), short:
        logits: torch.Tensor = model(input_ids=ids, return_dict=True, **keywords).logits
    return logits[:, -last:]


class StepTrial(Trial):
    """A trial whose right logits are those of plain decoding, the prompt and then single tokens.

    Causal passes will not do: some models round or clamp otherwise in their recurrence than in their scan of many
    tokens, and the text of plain decoding is that of the recurrence. Without positions among a layer's inputs a
    wrong one cannot show, so that only a wrong ancestor is the control.
    """

    name = "trial of steps"
    controls = (WRONG_ANCESTOR,)
    strict = 1e-4

    def causal(self, model: PreTrainedModel, halves: bool = False) -> torch.Tensor:
        """The rows by steps of one row; with ``halves`` by causal passes.

        Raises:
            SettingsError: steps do not continue the text, because the model keeps its state somewhere else.
        """
        passes = super().causal(model, halves)
        if halves:
            return passes
        name, facts = type(model).__name__, RowsFacts(model)
        caches: dict[tuple[int, ...], Any] = {}
        found: dict[tuple[int, ...], torch.Tensor] = {}
        texts = [tuple(text) for text in self.texts()]
        try:
            for text in sorted(set(texts), key=len):
                known = text[:-1] in caches
                cache = repeated(caches[text[:-1]], 1) if known else DynamicCache(config=facts.config)
                new, length = (text[-1:], len(text) - 1) if known else (text, 0)
                found[text] = run_rows(model, facts, cache, [new], length, 1)[0, 0].float().cpu()
                caches[text] = cache
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            apart, why = torch.inf, first_line(error)
        else:
            steps = torch.stack([found[text] for text in texts])
            apart = float(distance(steps, passes).median())
            why = f"they are {apart:.2g} away from causal passes"
        if apart > EXPLAINED[model.dtype in HALF]:
            raise SettingsError(
                f"a model must keep its state in transformers' DynamicCache, and steps of {name} through one do not "
                f"continue its text ({why}); use model.generate without custom_generate"
            )
        return steps
