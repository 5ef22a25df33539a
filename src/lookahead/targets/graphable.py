"""Whether a model takes captured passes: its attention, its device, and a comparison with its twin.

On a CUDA device ``make_target`` asks this by itself. What cannot be captured, or computes other logits than the
ordinary pass, goes the ordinary way, and the reason is said once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ..attention.register import TreeAttention, prepare
from ..core import OutOfMemory, SettingsError, TokenTree
from .graphed import GraphedTarget
from .transformers import ModelFacts, TransformersTarget

#: Largest tolerated difference of the two paths' logits, in standard deviations of the logits.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found.

    Attributes:
        attention: for ``GraphedTarget``; None where the path is not taken.
        reason: one line for people.
        difference: of the two paths' logits, in their standard deviations; NaN where none was taken.
    """

    attention: TreeAttention | None
    reason: str
    difference: float = float("nan")


class HostReads(TorchDispatchMode):
    """Notes what a capture does not allow: values read on the host, or made there, and copies between devices.

    Looked for before anything is captured, because a capture that fails leaves the device's random numbers unusable.
    """

    NAMES = frozenset(
        {"_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "_unique2", "equal", "bincount"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        devices = {
            x.device for x in (*args, result) if torch.is_tensor(x) and (x.dim() or name == "_to_copy")
        }
        if name in self.NAMES or (name in ("_to_copy", "copy_") and len(devices) > 1):
            self.found.append(name)
        return result


_known: weakref.WeakKeyDictionary[Any, tuple[Any, Verdict]] = weakref.WeakKeyDictionary()


def on_gpu(model: PreTrainedModel) -> bool:
    """Whether captured passes are the right thing where nothing else is asked for."""
    return model.device.type == "cuda"


def graphable(
    model: PreTrainedModel,
    facts: ModelFacts,
    trees: Callable[[int, int], TokenTree],
    backend: str = "auto",
    say: bool = False,
) -> Verdict:
    """Prepare a model's tree attention, once, and compare the two paths.

    Args:
        facts: from the probe that found the transformers target good.
        trees: (token, vocabulary) -> a tree with branches at two depths.
        backend: of the attention; "auto" takes triton on an NVIDIA GPU that has it, and sdpa elsewhere.
        say: warn where the path is not taken, once per model.
    """
    key = _fingerprint(model, backend)
    known = _known.get(model)
    if known is not None and known[0] == key:
        return known[1]
    verdict = _judge(model, facts, trees, backend)
    _known[model] = key, verdict
    if verdict.attention is None and say:
        warnings.warn(
            f"steps are not captured: {verdict.reason}; taking the transformers path, with the same result",
            RuntimeWarning,
            stacklevel=3,
        )
    return verdict


def _fingerprint(model: PreTrainedModel, backend: str) -> tuple[Any, ...]:
    """Changes when a weight, a hook or the attention is replaced."""
    weights = tuple((p.data_ptr(), p.dtype) for p in model.parameters())
    return weights, _hooks(model), model.training, model.config._attn_implementation, backend


def _hooks(model: PreTrainedModel) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def _judge(
    model: PreTrainedModel, facts: ModelFacts, trees: Callable[[int, int], TokenTree], backend: str
) -> Verdict:
    name = type(model).__name__
    devices = {str(p.device) for p in model.parameters()}
    if len(devices) > 1:
        return Verdict(
            None, f"{name} is spread over {', '.join(sorted(devices))}, and a graph knows one device"
        )
    if facts.alibi is not None or facts.rope_type:
        what = "a bias by distance (ALiBi)" if facts.alibi is not None else f"{facts.rope_type} positions"
        return Verdict(None, f"{name} has {what}, which change from step to step")
    if _hooks(model):
        return Verdict(None, f"{name} has hooks, which a captured pass would not call again")
    try:
        attention = prepare(model, backend)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "this model's step cannot be captured")
            target = GraphedTarget(model, facts, attention=attention)
            if found := _host_reads(target):
                return Verdict(None, f"{name} reads values on the host in its pass ({', '.join(found)})")
            difference = _difference(TransformersTarget(model, facts, 64), target, trees)
            other = GraphedTarget(model, facts, 64, attention)
            other.arena.sound = False  # not kept: it has room for two
            difference = max(difference, _together(TransformersTarget(model, facts, 64), other, trees))
    except OutOfMemory:
        raise
    except SettingsError as error:
        return Verdict(None, str(error))
    except Exception as error:  # whatever a model does in a pass that it was not made for
        first_line = (str(error).splitlines() or [""])[0][:160]
        return Verdict(None, f"{name} fails in such a pass ({type(error).__name__}: {first_line})")
    if target.refused:
        return Verdict(None, f"{name} cannot be captured ({target.refused})")
    allowed = TOLERANCE.get(model.dtype, 0.25)
    if not difference <= allowed:
        return Verdict(
            None,
            f"{name}'s logits there differ from the transformers path's by {difference:.3g} standard "
            f"deviations, {allowed} are allowed",
            difference,
        )
    how = "captured passes" if model.device.type == "cuda" else "passes in buckets of rows, without capture"
    return Verdict(
        attention,
        f"{name} on {model.device.type}: {how}, attention by {attention.backend} "
        f"(difference {difference:.1e} standard deviations)",
        difference,
    )


def _host_reads(target: GraphedTarget) -> list[str]:
    """What a pass does that no graph can hold; on a CPU, where nothing is captured, it is not looked for."""
    if target.model.device.type == "cpu":
        return []
    target.prefill([(0, [1, 2, 3])])
    target.forward([(0, TokenTree(1))])  # kernels are compiled and libraries set up
    with HostReads() as watch:
        target.passes[0, 1].evaluate(target)
    target.release(0)
    return sorted(set(watch.found))


def _difference(
    naive: TransformersTarget, graphed: GraphedTarget, trees: Callable[[int, int], TokenTree]
) -> float:
    """Largest difference over a prefill, two trees with commits, and two single rows.

    Each size comes twice, because the first pass of a bucket runs uncaptured and the second is captured.
    """
    vocabulary = naive.vocabulary
    prompt = [(7 * i + 3) % vocabulary for i in range(9)]
    worst = _spread(naive.prefill([(0, prompt)])[0].row(0), graphed.prefill([(0, prompt)])[0].row(0))
    for step in range(4):
        tree = trees(13 + step, vocabulary) if step < 2 else TokenTree((17 + step) % vocabulary)
        last = len(tree) - 1
        path = [node for node in range(last + 1) if tree.ancestors[last] >> node & 1]
        (expected,), (scores,) = naive.forward([(0, tree)]), graphed.forward([(0, tree)])
        for node in tree.needs_logits_nodes():
            worst = max(worst, _spread(expected.row(node), scores.row(node)))
        for target in (naive, graphed):
            target.commit([(0, path)])
    return worst


def _together(
    naive: TransformersTarget, graphed: GraphedTarget, trees: Callable[[int, int], TokenTree]
) -> float:
    """The same for two sequences in one pass."""
    prompts = [(slot, [(5 * i + slot) % naive.vocabulary for i in range(6 + 3 * slot)]) for slot in range(2)]
    naive.prefill(prompts)
    graphed.prefill(prompts)
    two = [(slot, trees(19 + slot, naive.vocabulary)) for slot in range(2)]
    both = zip(naive.forward(two), graphed.forward(two), two, strict=True)
    return max(
        _spread(a.row(node), b.row(node)) for a, b, (_, tree) in both for node in tree.needs_logits_nodes()
    )


def _spread(reference: torch.Tensor, row: torch.Tensor) -> float:
    difference = float((reference - row).double().abs().max()) / (float(reference.double().std()) or 1.0)
    return float("inf") if difference != difference else difference
