"""The exact-mode check: every row is bit-identical at any index of a pass and alongside any other rows.

It runs the model itself, with its own weights and shapes. ``paths`` acts on the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..core.memory import memory_errors
from .attention_hook import TreeAttention
from .exact_mode import ExactTarget, Row
from .facts import ModelFacts

#: Prefix length of the certificate, in tokens: longer than a page of ``hf.attention.exact``.
PREFIX = 300


def certificate(model: PreTrainedModel, facts: ModelFacts, attention: TreeAttention) -> str | None:
    """The part of the model where a row depends on its index or on other rows; None if there is none.

    R rows at several positions after random keys and values are evaluated in order, rotated by one, reversed, and
    with every other row replaced. Each row's logits, keys and values must be bit-identical.
    """
    # A separate target, whose cache has room for the prefix and one pass.
    target = ExactTarget(model, facts, attention)
    count = target.rows
    generator = torch.Generator().manual_seed(0)
    length = max(1, min(PREFIX, facts.max_positions, facts.rope_boundary) - 1)
    target.cache.reserve(1, length + count)
    # A prefix of random keys and values, and two sets of random tokens.
    for storage in target.cache._storage.values():
        storage.copy_(torch.randn(storage.shape, generator=generator))
    tokens = torch.randint(facts.vocabulary, (2, count), generator=generator).tolist()
    in_order = list(range(count))
    rotated = in_order[1:] + in_order[:1]
    reversed_order = in_order[::-1]
    # Each pass: its rows as (token set, row), and the rows to compare with the first pass.
    passes = [([(0, r) for r in order], order) for order in (in_order, rotated, reversed_order)]
    passes.append(([(r % 2, r) for r in in_order], in_order[::2]))

    def run(rows: Sequence[tuple[int, int]]) -> dict[int, list[torch.Tensor]]:
        """Logits, keys and values, by row."""
        # Token set 1 gets other positions than token set 0.
        inputs: list[Row] = []
        for index, (token_set, r) in enumerate(rows):
            position = max(0, length - (11 + 30 * token_set) * r % length)
            column = length + index
            inputs.append((0, tokens[token_set][r], position, column, [column], position))
        # Row r of the pass wrote column ``length`` + its index.
        logits = target._evaluate(inputs)
        written = [storage[:, 0, :, length : length + count] for storage in target.cache._storage.values()]
        return {
            r: [logits[index].clone(), *(states[:, :, index].clone() for states in written)]
            for index, (_, r) in enumerate(rows)
        }

    def first_difference(hooks: bool) -> str | None:
        """With hooks, name the first module whose outputs differ; without, only report whether any result differs."""
        # The results of the first pass, and the module outputs of the first and of the current pass.
        first: dict[int, list[torch.Tensor]] = {}
        outputs: list[tuple[str, torch.Tensor]] = []
        first_outputs: list[tuple[str, torch.Tensor]] = []
        handles = [
            module.register_forward_hook(partial(_record, outputs, f"{name} ({module})"))
            for name, module in model.named_modules()
            if hooks and not any(module.children())
        ]
        try:
            for rows, same in passes:
                outputs.clear()
                result = run(rows)
                first = first or result
                first_outputs = first_outputs or list(outputs)
                # Compare module by module, in the order in which they ran.
                for (name, before), (_, now) in zip(first_outputs, outputs, strict=False):
                    for index, (token_set, r) in enumerate(rows):
                        comparable = token_set == 0 and before.shape == now.shape
                        if comparable and not torch.equal(before[r], now[index]):
                            return name
                # Compare logits, keys and values.
                if any(not torch.equal(a, b) for r in same for a, b in zip(first[r], result[r], strict=True)):
                    return "its attention, or an operation between its modules"
        finally:
            for handle in handles:
                handle.remove()
        return None

    # Locate a difference only if there is one, because hooks are slow.
    with memory_errors(f"a pass of {count} rows"):
        if first_difference(hooks=False) is None:
            return None
        # A replay calls no modules, so hooks would find nothing.
        return "its captured pass" if attention.captured else first_difference(hooks=True)


def _record(
    outputs: list[tuple[str, torch.Tensor]], name: str, module: nn.Module, inputs: Any, output: Any
) -> None:
    """A forward hook that keeps the module's output if it is a tensor with one entry per row."""
    if torch.is_tensor(output) and output.dim() == 3 and output.shape[0] == 1:
        outputs.append((name, output[0].clone()))
