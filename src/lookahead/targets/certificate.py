"""Whether a model can decode in exact mode: each row has the same bits at any index of a pass, with any other rows.

This is checked on passes of the model itself, with its own weights and shapes; on a GPU, on captured passes if
possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..attention import Attend, exact, has_triton
from ..core import OutOfMemory, SettingsError
from ..core.errors import summary
from .attention_hook import TreeAttention
from .cuda_graphs import uncapturable
from .equivalence import compare
from .exact_mode import CapturedExactTarget, ExactTarget, Row
from .facts import ModelFacts
from .fingerprint import forget, remember
from .limits import memory_errors

#: Tokens of the certificate's prefix: more than a page of ``attention.exact``.
PREFIX = 300


def exact_attention(model: PreTrainedModel, facts: ModelFacts) -> tuple[TreeAttention | None, str]:
    """The attention for exact mode on this model.

    The result is remembered by model and number of threads, because operations may depend on that number.

    Returns:
        the attention, or None if exact mode is refused; and the reason, in one line.
    """
    return remember(model, f"exact {torch.get_num_threads()}", partial(_find_attention, model, facts))


def exact_target_class(attention: TreeAttention) -> type[ExactTarget]:
    """The class of target for an attention returned by ``exact_attention``."""
    return CapturedExactTarget if attention.captured else ExactTarget


def _find_attention(model: PreTrainedModel, facts: ModelFacts) -> tuple[TreeAttention | None, str]:
    if not on_gpu(model):
        return _certified(model, facts, exact.attend, captured=False)
    attention, why = None, uncapturable(model, facts)
    functions: list[Attend] = [exact.attend]
    if model.device.type == "cuda" and has_triton():
        from ..attention import exact_triton

        functions.insert(0, exact_triton.attend)  # it is faster
    for attend in () if why else functions:
        attention, reason = _certified(model, facts, attend, captured=True)
        if attention is not None:
            return attention, reason
        why = why or reason
    attention, reason = _certified(model, facts, exact.attend, captured=False)
    return attention, f"{reason}; passes are not captured: {why}"


def on_gpu(model: PreTrainedModel) -> bool:
    """Whether passes should be captured if they can be."""
    return bool(model.device.type == "cuda")


def _certified(
    model: PreTrainedModel, facts: ModelFacts, attend: Attend, captured: bool
) -> tuple[TreeAttention | None, str]:
    name = type(model).__name__
    try:
        attention = TreeAttention(model, attend)
        attention.captured = captured
        target_class = exact_target_class(attention)
        if (differs := certificate(model, facts, attention)) is not None:
            return None, f"{name}'s rows depend on their index in a pass or on other rows: {differs}"
        result = compare(model, facts, lambda: target_class(model, facts, attention))
    except SettingsError as error:
        return None, str(error).removesuffix("; use sdpa")
    except OutOfMemory:
        raise
    except Exception as error:  # a model may fail in any way on a pass that it was not designed for
        return None, f"{name} cannot be evaluated in exact mode ({summary(error)})"
    forget(model, "trial")
    if not result.ok:
        return None, f"{name}'s logits there differ from those of its own passes ({result.reason})"
    how = f"{'captured ' if captured else ''}passes of {target_class(model, facts, attention).rows} rows"
    how += "" if attend is exact.attend else ", its attention in one kernel"
    return attention, f"{name} in {how}, each row with the same bits at any index ({result.reason})"


def certificate(model: PreTrainedModel, facts: ModelFacts, attention: TreeAttention) -> str | None:
    """The part of the model in which rows depend on their index or on other rows; None if there is none.

    R rows at several positions after random keys and values are evaluated in order, rotated by one, reversed, and
    with every other row replaced. Each row's logits, keys and values must be bit-equal.
    """
    target = exact_target_class(attention)(model, facts, attention)
    count, generator = target.rows, torch.Generator().manual_seed(0)
    length = max(1, min(PREFIX, facts.max_positions, facts.rope_boundary) - 1)
    target.cache.reserve(1, length + count)
    for storage in target.cache._storage.values():
        storage.copy_(torch.randn(storage.shape, generator=generator))
    tokens = torch.randint(facts.vocabulary, (2, count), generator=generator).tolist()
    in_order = list(range(count))
    rotated, reversed_order = in_order[1:] + in_order[:1], in_order[::-1]
    # Rows as (set of tokens, row), and the rows to compare with those of the first pass.
    passes = [([(0, r) for r in order], order) for order in (in_order, rotated, reversed_order)]
    passes.append(([(r % 2, r) for r in in_order], in_order[::2]))

    def run(rows: Sequence[tuple[int, int]]) -> dict[int, list[torch.Tensor]]:
        """By row: its logits, keys and values."""
        inputs: list[Row] = []
        for index, (token_set, r) in enumerate(rows):
            position = max(0, length - (11 + 30 * token_set) * r % length)
            column = length + index
            inputs.append((0, tokens[token_set][r], position, column, [column], position))
        logits = target._evaluate(inputs)
        written = [storage[:, 0, :, length : length + count] for storage in target.cache._storage.values()]
        return {
            r: [logits[index].clone(), *(states[:, :, index].clone() for states in written)]
            for index, (_, r) in enumerate(rows)
        }

    def first_difference(hooks: bool) -> str | None:
        """With hooks, the first module whose outputs differ; without hooks, only whether any result differs."""
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
                first, first_outputs = first or result, first_outputs or list(outputs)
                for (name, before), (_, now) in zip(first_outputs, outputs, strict=False):
                    for index, (token_set, r) in enumerate(rows):
                        comparable = token_set == 0 and before.shape == now.shape
                        if comparable and not torch.equal(before[r], now[index]):
                            return name
                if any(not torch.equal(a, b) for r in same for a, b in zip(first[r], result[r], strict=True)):
                    return "its attention, or an operation between its modules"
        finally:
            for handle in handles:
                handle.remove()
        return None

    with memory_errors(f"a pass of {count} rows"):
        if first_difference(hooks=False) is None:
            return None
        # Replays do not call modules, so hooks could not name any.
        return "its captured pass" if attention.captured else first_difference(hooks=True)


def _record(
    outputs: list[tuple[str, torch.Tensor]], name: str, module: nn.Module, inputs: Any, output: Any
) -> None:
    """A forward hook: keep what the module returns, if it is a tensor with one entry per row."""
    if torch.is_tensor(output) and output.dim() == 3 and output.shape[0] == 1:
        outputs.append((name, output[0].clone()))
