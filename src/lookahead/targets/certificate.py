"""Whether a model may decode in exact mode: its rows depend neither on their place nor on each other, to the bit.

Passes of the model itself are asked, with its own weights and shapes: captured ones on a GPU where they can be had.
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
from .attention_hook import TreeAttention
from .cuda_graphs import uncapturable
from .equivalence import compare, first_line
from .exact import ExactTarget, Row
from .exact_graphs import CapturedExactTarget
from .facts import ModelFacts, memory_errors
from .fingerprint import forget, remember

#: Tokens of the certificate's prefix: more than a page.
PREFIX = 300


def exact_attention(model: PreTrainedModel, facts: ModelFacts) -> tuple[TreeAttention | None, str]:
    """The attention for ``ExactTarget``, None where exact mode is refused; and one line that says why.

    Found once for a model and a number of threads, on which operations depend too.
    """
    return remember(model, f"exact {torch.get_num_threads()}", partial(_judge, model, facts))


def target_kind(attention: TreeAttention) -> type[ExactTarget]:
    """The target for an attention of ``exact_attention``."""
    return CapturedExactTarget if attention.captured else ExactTarget


def _judge(model: PreTrainedModel, facts: ModelFacts) -> tuple[TreeAttention | None, str]:
    if not on_gpu(model):
        return _certified(model, facts, exact.attend, captured=False)
    attention, why = None, uncapturable(model, facts)
    for attend in () if why else functions(model):
        attention, reason = _certified(model, facts, attend, captured=True)
        if attention is not None:
            return attention, reason
        why = why or reason
    attention, reason = _certified(model, facts, exact.attend, captured=False)
    return attention, f"{reason}; passes are not captured: {why}"


def functions(model: PreTrainedModel) -> list[Attend]:
    """Attention of exact mode that may be captured, the quickest first."""
    if model.device.type == "cuda" and has_triton():
        from ..attention import exact_triton

        return [exact_triton.attend, exact.attend]
    return [exact.attend]


def on_gpu(model: PreTrainedModel) -> bool:
    """Whether passes are to be captured where they can be."""
    return model.device.type == "cuda"


def _certified(
    model: PreTrainedModel, facts: ModelFacts, attend: Attend, captured: bool
) -> tuple[TreeAttention | None, str]:
    name = type(model).__name__
    try:
        attention = TreeAttention(model, attend)
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
    how += "" if attend is exact.attend else ", its attention in one kernel"
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
        given: list[Row] = []
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
