"""Whether a model takes the lean path: its spec, its device, and a comparison with the transformers target."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ...core import TokenTree
from ..transformers import ModelFacts, TransformersTarget
from .forward import LeanModel
from .specs import ModelParts, NotLean, read
from .target import LeanTarget

if TYPE_CHECKING:
    from .native import NativeModel

#: Largest tolerated difference of the two paths' logits, in standard deviations of the logits.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found.

    Attributes:
        lean: the weights for the lean path, None where it is not taken.
        reason: one line for people.
        difference: of the two paths' logits, in their standard deviations; NaN where none was taken.
    """

    lean: LeanModel | NativeModel | None
    reason: str
    difference: float = float("nan")


#: The same for weights as int8, which are meant to differ: only nonsense is caught.
TOLERANCE_INT8 = 1.0

_known: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Verdict]]] = weakref.WeakKeyDictionary()


def lean_model(
    model: PreTrainedModel,
    facts: ModelFacts,
    trees: Callable[[int, int], TokenTree],
    weights: str = "same",
) -> Verdict:
    """Lay a model's weights out for the lean path, once, and compare the two paths on one tree.

    Args:
        facts: from the probe that found the transformers target good.
        trees: (token, vocabulary) -> a tree with branches at two depths.
        weights: "same" or "int8".
    """
    key = _fingerprint(model)
    known = _known.setdefault(model, {})
    if weights in known and known[weights][0] == key:
        return known[weights][1]
    verdict = _judge(model, facts, trees, weights)
    known[weights] = (key, verdict)
    return verdict


def _fingerprint(model: PreTrainedModel) -> tuple[Any, ...]:
    """Changes when a weight is replaced or written, so that stale copies are never used."""
    weights = tuple(
        (p.data_ptr(), 0 if p.is_inference() else p._version, p.dtype) for p in model.parameters()
    )
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return weights, hooks, model.training


def _judge(
    model: PreTrainedModel, facts: ModelFacts, trees: Callable[[int, int], TokenTree], weights: str
) -> Verdict:
    if model.device.type != "cpu":
        return Verdict(None, f"the lean path is made for CPUs, the model is on {model.device}")
    if model.dtype not in TOLERANCE:
        return Verdict(None, f"the lean path knows float32 and bfloat16, the model is {model.dtype}")
    if weights == "int8" and not torch.cpu._is_vnni_supported():
        return Verdict(None, "weights as int8 need a processor with VNNI")
    try:
        lean = _build(read(model, facts.config), weights)
    except NotLean as error:
        return Verdict(None, str(error))
    difference = _difference(TransformersTarget(model, facts, 32), LeanTarget(lean, facts, 32), trees)
    allowed = TOLERANCE[model.dtype] if weights == "same" else TOLERANCE_INT8
    if not difference <= allowed:
        return Verdict(
            None,
            f"the lean path's logits differ from the transformers path's by {difference:.3g} standard "
            f"deviations, {allowed} are allowed",
            difference,
        )
    name = type(model).__name__
    return Verdict(
        lean, f"{name} on CPU, {lean.layout} (difference {difference:.1e} standard deviations)", difference
    )


def _build(parts: ModelParts, weights: str) -> LeanModel | NativeModel:
    """The compiled pass where it can be had, else its torch twin with the reason in ``layout``."""
    try:
        from .native import TILES, NativeModel

        if weights == "int8" and TILES and parts.embedding.dtype == torch.bfloat16:
            return NativeModel(parts, "bytes")
    except ImportError:
        lean = LeanModel(parts, weights)
        lean.layout += "; pip install numba for compiled passes"
        return lean
    if weights == "int8":
        return LeanModel(parts, weights)
    try:
        return NativeModel(parts)
    except RuntimeError as error:  # numba found no folder to keep compiled code in, say
        lean = LeanModel(parts)
        lean.layout += f"; no compiled passes ({str(error).splitlines()[0][:80]})"
        return lean


def _difference(naive: TransformersTarget, lean: LeanTarget, trees: Callable[[int, int], TokenTree]) -> float:
    """Largest difference over a prefill, a tree of two sequences, a commit and a single row."""
    vocabulary = naive.vocabulary
    prompts = [[(7 * i + 3) % vocabulary for i in range(9)], [(5 * i + 1) % vocabulary for i in range(6)]]
    steps: list[tuple[Any, list[int]]] = [(list(enumerate(prompts)), [0])]
    two = [trees(13 + b, vocabulary) for b in range(2)]
    last = len(two[0]) - 1
    path = [node for node in range(last + 1) if two[0].ancestors[last] >> node & 1]
    steps.append((list(enumerate(two)), two[0].needs_logits_nodes()))
    steps.append(([(b, TokenTree((17 + b) % vocabulary)) for b in range(2)], [0]))
    worst = 0.0
    for number, (rows, nodes) in enumerate(steps):
        if number == 0:
            both = naive.prefill(rows), lean.prefill(rows)
        else:
            both = naive.forward(rows), lean.forward(rows)
        if number == 1:
            for target in (naive, lean):
                target.commit([(b, path) for b in range(2)])
        for b in range(2):
            for node in nodes:
                worst = max(worst, _spread(both[0][b].row(node), both[1][b].row(node)))
    return worst


def _spread(reference: torch.Tensor, row: torch.Tensor) -> float:
    difference = float((reference - row).double().abs().max()) / (float(reference.double().std()) or 1.0)
    return float("inf") if difference != difference else difference
