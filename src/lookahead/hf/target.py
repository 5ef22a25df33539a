"""Targets for decoder-only transformers models, using public interfaces only.

One forward pass evaluates the trees of any number of sequences: positions are T + depth, a row sees the committed
prefix and its ancestors (drawn in ``masks``), keys and values are written to this library's cache, and the LM head
runs only on rows whose logits are needed. A single row of a single sequence needs no mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from threading import get_ident
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..core import OutOfMemory, Scores, Target, TokenTree
from ..core.kv_storage import StoredTarget
from ..core.memory import memory_errors
from ..core.target import BIT_EQUAL, UP_TO_ROUNDING
from ..sampling.scores import LogitsRows
from .attention_hook import mask_compatible_attention
from .cuda import to_device
from .facts import ModelFacts, PassFacts
from .logits import TensorLogits
from .masks import attention_masks, stack_rows
from .tree_cache import TreeCache


def run_model(
    model: PreTrainedModel,
    facts: PassFacts,
    cache: Any,
    ids: torch.Tensor,
    positions: torch.Tensor,
    **named: Any,
) -> torch.Tensor:
    """One pass of the model over token ids (B, Q) at positions (B, Q), through a cache.

    Args:
        named: further arguments of the model.

    Returns:
        logits (B, Q, V); fewer rows with ``logits_to_keep``.
    """
    keywords: dict[str, Any] = {facts.cache_name: cache, "use_cache": True, **named}
    if facts.accepts_position_ids:
        keywords["position_ids"] = positions
    facts.rotary.before(positions)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, return_dict=True, **keywords).logits
    return logits


@contextmanager
def head_inputs(model: PreTrainedModel, wanted: bool) -> Iterator[list[torch.Tensor]]:
    """A context that collects the inputs of the output matrix in this thread's passes, one tensor (B, R, hidden)
    each.

    Args:
        wanted: whether to collect them; a model without an output matrix has none.
    """
    kept = list[torch.Tensor]()
    thread = get_ident()
    head = model.get_output_embeddings() if wanted else None
    if head is None:
        yield kept
        return

    def keep(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if get_ident() == thread:  # another thread may run a pass on the same model
            kept.append(inputs[0].detach())

    handle = head.register_forward_pre_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()


class TransformersTarget(StoredTarget):
    """Token trees on a transformers model. Implements ``lookahead.core.Target``.

    Args:
        model: a causal language model for which the probe found the mode "tree".
        facts: the model's facts.
        capacity: initial capacity of a slot, in tokens; storage grows by doubling.
        reason: why this path was chosen, in one line.
        cache: the cache to use; None for a new one.
    """

    path = "transformers"
    guarantee = UP_TO_ROUNDING
    gives_hidden = True
    shares_module = True
    cache: TreeCache

    def __init__(
        self,
        model: PreTrainedModel,
        facts: ModelFacts,
        capacity: int = 256,
        reason: str = "",
        cache: TreeCache | None = None,
    ) -> None:
        self.model = model
        self.reason = reason
        self.facts = facts
        self.vocabulary = facts.vocabulary
        self.cache = TreeCache(facts.shapes, facts.dtype, model.device, capacity) if cache is None else cache
        self.lengths = self.cache.lengths
        # Where rotary frequencies change with the length, kept keys may have those of another length.
        changes = bool(facts.rope_type) and facts.rope_boundary <= facts.max_positions
        self.keeps_prefixes = type(self) is TransformersTarget and not changes

    def depth_limit(self, slot: int) -> int:
        """The positions left, except where a tree would need one set of rotary frequencies per depth."""
        facts = self.facts
        changing = facts.rope_type == "dynamic" and self.lengths[slot] >= facts.rope_boundary
        return 0 if changing else self.positions_left(slot)

    def positions_left(self, slot: int) -> int:
        """Positions left up to the model's last one, or up to where its rotary frequencies change."""
        length = self.lengths[slot]
        facts = self.facts
        end = facts.max_positions
        if length < facts.rope_boundary:
            end = min(end, facts.rope_boundary)
        return max(0, end - 1 - length)

    def read(self, slot: int) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Copies of the slot's keys and values, per layer, each (1, heads, T, size); None for a layer without any."""
        return self.cache.read(slot, self.lengths[slot])

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Scores]:
        """Evaluate prompts sequentially and unpadded, so that their logits equal those of plain decoding.

        If ``reuse`` has filled the beginning of a slot, the rest of the prompt is evaluated as an unbranched tree.
        """
        scores: list[Scores] = []
        for slot, prompt in prompts:
            start = self.lengths.get(slot, 0)
            rest = list(prompt[start:])
            positions = torch.arange(start, len(prompt))[None]
            with memory_errors(f"a prompt of {len(prompt)} tokens"):
                self.cache.place([slot], [start], len(rest))
                visible: AbstractContextManager[Any] = nullcontext()
                if start:
                    chain = TokenTree.of(rest, range(-1, len(rest) - 1))
                    visible = self._visibility([chain], [start], positions)
                with visible as mask:
                    logits = self._call(torch.tensor([rest]), positions, mask, [len(rest) - 1])
            self.lengths[slot] = len(prompt)
            scores.append(LogitsRows(logits))
        return scores

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        """Evaluate all trees in one pass, or each in a separate pass if they cannot share one."""
        rows = max(len(tree) for _, tree in trees)
        with memory_errors(f"a step of {rows} rows for {len(trees)} sequences"):
            if self._one_at_a_time(trees):
                return [self._pass([pair])[0] for pair in trees]
            return self._pass(trees)

    def _one_at_a_time(self, trees: Sequence[tuple[int, TokenTree]]) -> bool:
        """Whether these sequences need separate passes, because a pass uses one set of rotary frequencies and some of
        the sequences may be past a change of them."""
        return max(self.lengths[slot] for slot, _ in trees) + 1 >= self.facts.rope_boundary

    def _pass(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        slots = [slot for slot, _ in trees]
        lengths = [self.lengths[slot] for slot in slots]
        only_trees = [tree for _, tree in trees]
        rows = max(map(len, only_trees))
        self.cache.place(slots, lengths, rows)
        ids, positions = stack_rows(only_trees, lengths, rows)
        nodes = sorted(set().union(*(tree.needs_logits_nodes() for tree in only_trees)))
        hidden = any(tree.needs_hidden for tree in only_trees)
        with self._visibility(only_trees, lengths, positions) as mask:
            batch = self._call(ids, positions, mask, nodes, hidden)
        row_of = None if len(nodes) == rows else nodes
        return [LogitsRows(batch, b * len(nodes), row_of) for b in range(len(trees))]

    @contextmanager
    def _visibility(
        self, trees: Sequence[TokenTree], lengths: Sequence[int], positions: torch.Tensor
    ) -> Iterator[Any]:
        """A context in which the rows of a pass see the right keys. Yields the mask to pass to the model, or None."""
        if positions.numel() == 1:
            yield None
            return
        facts = self.facts
        device = self.model.device
        yield attention_masks(facts.layer_types, trees, lengths, positions, facts.dtype, device)

    def _call(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: Any, nodes: list[int], hidden: bool = False
    ) -> TensorLogits:
        """Logits (B, len(nodes), V) of these rows of the pass, with their hidden states if ``hidden``."""
        device = self.model.device
        named = {} if mask is None else {"attention_mask": mask}
        keep = None
        if len(nodes) < ids.shape[1]:
            keep = to_device(nodes, torch.long, device)
            if self.facts.accepts_logits_to_keep:
                named["logits_to_keep"] = keep
        with mask_compatible_attention(self.model), head_inputs(self.model, hidden) as states:
            ids, positions = (to_device(numbers, torch.long, device) for numbers in (ids, positions))
            logits = run_model(self.model, self.facts, self.cache, ids, positions, **named)
        results = [logits, *states]
        if keep is not None and not self.facts.accepts_logits_to_keep:
            results = [result[:, keep] for result in results]
        return TensorLogits(results[0], hidden=results[1] if states else None)


class PlainTarget(Target):
    """The fallback: one row per step, with a transformers cache for each sequence.

    It is for models that cannot evaluate a tree; recurrent and convolutional layers, for example, ignore attention
    masks.

    Args:
        model: a causal language model.
        reason: why this path was chosen, in one line.
    """

    path = "plain"
    guarantee = BIT_EQUAL
    shares_module = True

    def __init__(self, model: PreTrainedModel, reason: str = "") -> None:
        self.model = model
        self.reason = reason
        self.facts = PassFacts(model)
        self.vocabulary = self.facts.vocabulary
        self.lengths: dict[int, int] = {}
        self._caches: dict[int, DynamicCache] = {}

    def depth_limit(self, slot: int) -> int:
        """Always 0: only the root fits."""
        return 0

    def positions_left(self, slot: int) -> int:
        """Positions left up to the model's last one."""
        return max(0, self.facts.max_positions - 1 - self.lengths[slot])

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Scores]:
        for slot, _ in prompts:
            self.lengths[slot] = 0
            self._caches[slot] = DynamicCache(config=self.facts.config)
        return [self._run(slot, prompt) for slot, prompt in prompts]

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        with self._all_or_none([slot for slot, _ in trees]):
            return [self._run(slot, tree.tokens) for slot, tree in trees]

    @contextmanager
    def _all_or_none(self, slots: Sequence[int]) -> Iterator[None]:
        """If memory runs out in the block, restore all slots. A single slot is not restored: its sequence ends."""
        before = [(slot, self._caches[slot], self.lengths[slot]) for slot in slots]
        try:
            if len(slots) > 1:
                with memory_errors(f"copies of {len(slots)} states"):
                    self._caches.update((slot, repeated(cache, 1)) for slot, cache, _ in before)
            yield
        except OutOfMemory:
            for slot, cache, length in before:
                self._caches[slot] = cache
                self.lengths[slot] = length
            raise

    def _run(self, slot: int, tokens: Sequence[int]) -> LogitsRows:
        device = self.model.device
        length = self.lengths[slot]
        ids = torch.tensor([list(tokens)], device=device)
        positions = torch.arange(length, length + len(tokens), device=device)[None]
        named = {"logits_to_keep": 1} if self.facts.accepts_logits_to_keep else {}
        with memory_errors(f"a pass of {len(tokens)} tokens"):
            logits = run_model(self.model, self.facts, self._caches[slot], ids, positions, **named)
        self.lengths[slot] = length + len(tokens)
        return LogitsRows(TensorLogits(logits[:, -1:]))

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        """No-op: a step has one row, which is always kept."""

    def release(self, slot: int) -> None:
        self._caches.pop(slot, None)
        self.lengths.pop(slot, None)


def repeated(cache: Any, rows: int) -> Any:
    """A copy of the cache of one sequence, repeated ``rows`` times; passes with the copy leave the original
    unchanged."""
    other = copy(cache)
    other.layers = [copy(layer) for layer in cache.layers]
    for layer in other.layers:
        for name, value in vars(layer).items():
            if isinstance(value, dict):  # recurrent states by index, which layers write in place
                setattr(layer, name, {key: _repeat(state, rows) for key, state in value.items()})
            elif torch.is_tensor(value) and value.dim() > 1:  # keys and values, which grow by concatenation
                setattr(layer, name, value.expand(rows, *value.shape[1:]))
    return other


def _repeat(state: Any, rows: int) -> Any:
    return state.repeat_interleave(rows, 0) if torch.is_tensor(state) else state
