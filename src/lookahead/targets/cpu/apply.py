"""Whether a model takes the compiled path: compiled once, and compared with the transformers target."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ...core import TokenTree
from ..fingerprint import fingerprint
from ..transformers import ModelFacts, TransformersTarget
from .architectures import Unsupported
from .compile import compile_model
from .compiled_model import CompiledModel
from .target import CpuTarget

#: Largest tolerated difference of the two paths' logits, in standard deviations of the logits.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found.

    Attributes:
        compiled: the model for this path, None where it is not taken.
        reason: one line for people.
        difference: of the two paths' logits, in their standard deviations; NaN where none was taken.
    """

    compiled: CompiledModel | None
    reason: str
    difference: float = float("nan")


_known: weakref.WeakKeyDictionary[Any, tuple[Any, Verdict]] = weakref.WeakKeyDictionary()


def compiled_path(
    model: PreTrainedModel, facts: ModelFacts, trees: Callable[[int, int], TokenTree]
) -> Verdict:
    """Compile a model, once, and compare the two paths on one tree.

    Args:
        facts: from the probe that found the transformers target good.
        trees: (token, vocabulary) -> a tree with branches at two depths.
    """
    key = fingerprint(model)
    known = _known.get(model)
    if known is not None and known[0] == key:
        return known[1]
    verdict = _judge(model, facts, trees)
    _known[model] = (key, verdict)
    return verdict


def _judge(model: PreTrainedModel, facts: ModelFacts, trees: Callable[[int, int], TokenTree]) -> Verdict:
    try:
        compiled = compile_model(model, facts)
    except Unsupported as error:
        return Verdict(None, str(error))
    difference = _difference(TransformersTarget(model, facts, 32), CpuTarget(compiled, facts, 32), trees)
    allowed = TOLERANCE[model.dtype]
    if not difference <= allowed:
        return Verdict(
            None,
            f"the compiled path's logits differ from the transformers path's by {difference:.3g} standard "
            f"deviations, {allowed} are allowed",
            difference,
        )
    name = type(model).__name__
    layout = f"{name} on CPU, {compiled.layout} (difference {difference:.1e} standard deviations)"
    return Verdict(compiled, layout, difference)


def _difference(
    reference: TransformersTarget, compiled: CpuTarget, trees: Callable[[int, int], TokenTree]
) -> float:
    """Largest difference over a prefill, a tree of two sequences, a commit and a single row."""
    vocabulary = reference.vocabulary
    prompts = [[(7 * i + 3) % vocabulary for i in range(9)], [(5 * i + 1) % vocabulary for i in range(6)]]
    steps: list[tuple[Any, list[int]]] = [(list(enumerate(prompts)), [0])]
    two = [trees(13 + b, vocabulary) for b in range(2)]
    last = len(two[0]) - 1
    path = [node for node in range(last + 1) if two[0].ancestors[last] >> node & 1]
    steps.append((list(enumerate(two)), two[0].needs_logits_nodes()))
    steps.append(([(b, TokenTree((17 + b) % vocabulary)) for b in range(2)], [0]))
    worst = 0.0
    targets = (reference, compiled)
    for number, (rows, nodes) in enumerate(steps):
        expected, found = (t.prefill(rows) if number == 0 else t.forward(rows) for t in targets)
        if number == 1:
            for target in targets:
                target.commit([(b, path) for b in range(2)])
        for b in range(2):
            for node in nodes:
                worst = max(worst, _spread(expected[b].row(node), found[b].row(node)))
    return worst


def _spread(reference: torch.Tensor, row: torch.Tensor) -> float:
    difference = float((reference - row).double().abs().max()) / (float(reference.double().std()) or 1.0)
    return float("inf") if difference != difference else difference
