"""The load-time probe: is a tree's every path scored as a causal pass would score it?

A tree step on the real model is compared with separate causal passes, without a cache. Where they differ,
or where the model cannot take a tree at all, decoding falls back to one row a step and says why; a silent
error is never let through.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..core import OutOfMemory, SettingsError, TokenTree
from .fingerprint import fingerprint
from .plain import PlainTarget
from .transformers import ModelFacts, TransformersTarget

if TYPE_CHECKING:
    from .cpu import CpuTarget

#: Largest tolerated difference, in standard deviations of the logits.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}


@dataclass(frozen=True, slots=True)
class Probe:
    """What the probe found.

    Attributes:
        mode: "tree", or "plain" for one row a step.
        reason: one line for people.
        difference: largest difference of logits, in their standard deviations; NaN where none was taken.
        facts: for a tree target; None in mode "plain".
    """

    mode: str
    reason: str
    difference: float
    facts: ModelFacts | None


_known: weakref.WeakKeyDictionary[Any, tuple[Any, Probe]] = weakref.WeakKeyDictionary()


def probe(model: PreTrainedModel, again: bool = False) -> Probe:
    """Probe a model once; the answer is kept until a change of the model is seen (``fingerprint``).

    Raises:
        SettingsError: not a decoder-only language model.
        OutOfMemory: not even the probe fits.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        raise SettingsError(f"a transformers causal language model is needed, got {type(model).__name__}")
    if config.is_encoder_decoder:
        raise SettingsError(
            f"a decoder-only model is needed, and {type(model).__name__} is an encoder-decoder; "
            "use model.generate without custom_generate"
        )
    key = fingerprint(model)
    known = _known.get(model)
    if known is not None and known[0] == key and not again:
        return known[1]
    result = _probe(model)
    _known[model] = (key, result)
    return result


def forget(model: PreTrainedModel) -> None:
    """Probe and compile anew at the next call, whatever may be kept of the model."""
    from . import graphable
    from .cpu import apply

    for known in (_known, graphable._known, apply._known):
        known.pop(model, None)


def make_target(
    model: PreTrainedModel, capacity: int = 256, path: str = "auto"
) -> TransformersTarget | PlainTarget | CpuTarget:
    """A fresh target of the kind that the probe chose; ``target.path`` and ``target.reason`` say which and why.

    Args:
        path: "cpu", "graphed" or "transformers" to force one of the tree targets, which give the same text.
            "auto" takes cpu on a CPU and graphed on a CUDA device, where the model allows it.

    Raises:
        SettingsError: the forced path is not there for this model.
    """
    from . import graphable
    from .cpu import CpuTarget
    from .cpu.apply import compiled_path
    from .graphed import CAPACITY, GraphedTarget

    if path not in ("auto", "cpu", "graphed", "transformers"):
        raise SettingsError(f"path must be 'auto', 'cpu', 'graphed' or 'transformers', got {path!r}")
    found = probe(model)
    reason = found.reason
    is_tree = found.mode == "tree" and found.facts is not None
    if is_tree and (path == "graphed" or (path == "auto" and graphable.on_gpu(model))):
        captured = graphable.graphable(model, found.facts, _sample_tree, say=path == "auto")
        if captured.attention is not None:
            room = max(capacity, CAPACITY)
            return GraphedTarget(model, found.facts, room, captured.attention, captured.reason)
        reason = captured.reason
    elif is_tree and path != "transformers":
        verdict = compiled_path(model, found.facts, _sample_tree)
        if verdict.compiled is not None:
            return CpuTarget(verdict.compiled, found.facts, capacity, verdict.reason)
        reason = verdict.reason
    if path in ("cpu", "graphed") or (path == "transformers" and found.mode != "tree"):
        raise SettingsError(f"the {path} path is not there for this model: {reason}; use path='auto'")
    target = TransformersTarget(model, found.facts, capacity) if found.mode == "tree" else PlainTarget(model)
    target.reason = reason
    return target


def _probe(model: PreTrainedModel) -> Probe:
    name = type(model).__name__
    try:
        facts = ModelFacts(model)
        difference = _tree_difference(model, facts)
    except OutOfMemory:
        raise
    except Exception as error:  # whatever a model does with a tree that it was not made for
        first_line = (str(error).splitlines() or [""])[0][:160]
        return Probe(
            "plain",
            f"{name} cannot evaluate a token tree ({type(error).__name__}: {first_line}); "
            "decoding one row a step",
            float("nan"),
            None,
        )
    tolerance = TOLERANCE.get(model.dtype, 0.25)
    if not difference <= tolerance:
        return Probe(
            "plain",
            f"{name} scores a token tree differently from causal passes (by {difference:.3g} standard deviations "
            f"of the logits, {tolerance} are allowed for {str(model.dtype).removeprefix('torch.')}); "
            "decoding one row a step",
            difference,
            None,
        )
    return Probe(
        "tree",
        f"{name} scores a token tree like causal passes (difference {difference:.1e} standard deviations)",
        difference,
        facts,
    )


def _sample_tree(token: int, vocabulary: int) -> TokenTree:
    """Branches at two depths, so that order in the cache and position differ."""
    ids = [(token * (i + 3) + 11 * i + 5) % vocabulary for i in range(9)]
    tree = TokenTree(ids[0])
    tree.add_candidate(ids[1:4])
    tree.add_candidate([(ids[1] + 1) % vocabulary, ids[4], ids[5]])
    tree.add_candidate([ids[1], (ids[2] + 1) % vocabulary, ids[6]])
    return tree


def _tree_difference(model: PreTrainedModel, facts: ModelFacts) -> float:
    """Largest difference between two sequences' tree steps and causal passes, before and after a commit."""
    vocabulary = facts.vocabulary
    target = TransformersTarget(model, facts, capacity=32)
    prompts = [[(7 * i + 3) % vocabulary for i in range(9)], [(5 * i + 1) % vocabulary for i in range(6)]]
    target.prefill(list(enumerate(prompts)))
    worst = 0.0
    texts = [list(prompt) for prompt in prompts]
    for turn in range(2):
        trees = [_sample_tree(13 + turn + b, vocabulary) for b in range(2)]
        scores = target.forward(list(enumerate(trees)))
        last = len(trees[0]) - 1
        for b, tree in enumerate(trees):
            for node in (3, last):
                text = texts[b] + tree.path_tokens(node)
                worst = max(worst, _difference(model, text, scores[b].row(node)))
        path = [node for node in range(last + 1) if trees[0].ancestors[last] >> node & 1]
        target.commit([(b, path) for b in range(2)])
        texts = [text + tree.path_tokens(last) for text, tree in zip(texts, trees, strict=True)]
    single = TokenTree(17 % vocabulary)
    scores = target.forward([(0, single)])
    return max(worst, _difference(model, [*texts[0], single.tokens[0]], scores[0].row(0)))


def _difference(model: PreTrainedModel, text: list[int], row: torch.Tensor) -> float:
    with torch.no_grad():
        ids = torch.tensor([text], device=model.device)
        reference = model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -1].double()
    spread = float(reference.std()) or 1.0
    difference = float((reference - row.double()).abs().max()) / spread
    return float("inf") if difference != difference else difference
