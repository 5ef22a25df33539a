"""Model -> target: the load-time probe, and the fastest path that computes what the model computes.

The probe compares a token tree on the real model with the model's own causal passes. Where they differ, or where the
model cannot evaluate a tree at all, the tree's paths as rows of a batch are compared with plain decoding's own steps.
Where these differ too, decoding takes one row a step and says why; a silent error is never let through.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core import OutOfMemory, SettingsError, Target
from .attention_hook import with_masks
from .batch_rows import BatchRowsTarget, NoSteps, StepTrial
from .certificate import exact_attention, on_gpu, target_kind
from .cpu.architectures import Unsupported
from .cpu.compiled_model import CompiledModel, compile_model
from .cpu.target import CpuTarget
from .equivalence import HALF, Equivalence, compare, first_line, in_float32
from .facts import NO_LIMIT, ModelFacts, PassFacts
from .fingerprint import forget, remember
from .transformers import PlainTarget, TransformersTarget

PATHS = ("auto", "cpu", "cuda-graph", "transformers", "batch-rows", "plain")


@dataclass(frozen=True, slots=True)
class Probe:
    """What the probe found.

    Attributes:
        mode: "tree", "batch-rows" for a tree's paths as rows of a batch, or "plain" for one row a step.
        reason: one line for people, with the figures.
        equivalence: of the path's steps; None where the model can take neither.
        facts: for a tree target; None in the other modes.
    """

    mode: str
    reason: str
    equivalence: Equivalence | None
    facts: ModelFacts | None

    @property
    def difference(self) -> float:
        """``Equivalence.difference``; NaN where nothing was compared."""
        return self.equivalence.difference if self.equivalence is not None else float("nan")


def probe(model: PreTrainedModel, again: bool = False) -> Probe:
    """Probe a model once; the answer is kept until a change of the model is seen (``fingerprint``).

    Raises:
        SettingsError: not a decoder-only language model.
        OutOfMemory: not even the probe fits.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        raise SettingsError(f"a transformers causal language model is needed, got {type(model).__name__}")
    if config.is_encoder_decoder:
        raise SettingsError(
            f"a decoder-only model is needed, and {type(model).__name__} is an encoder-decoder; "
            "use model.generate without custom_generate"
        )
    if again:
        forget(model)
    return remember(model, "probe", lambda: _probe(model))


def _probe(model: PreTrainedModel) -> Probe:
    name = type(model).__name__
    try:
        with with_masks(model):
            facts = ModelFacts(model)
        found = compare(model, facts, lambda: TransformersTarget(model, facts, 32))
        if not found.ok and found.difference <= found.limit and model.dtype in HALF:
            # Rounding hides the control in 16 bits: masks, positions and commits are judged in float32 besides.
            wide = copy(facts)
            wide.dtype = torch.float32
            with in_float32(model):
                structure = compare(model, wide, lambda: TransformersTarget(model, wide, 32), widened=True)
            reason = f"{found.reason}; widened to float32: {structure.reason}"
            found = replace(found, ok=structure.ok, reason=reason)
    except OutOfMemory:
        raise
    except Exception as error:  # whatever a model does with a tree that it was not made for
        return _without_trees(model, f"{name} cannot evaluate a token tree ({first_line(error)})")
    if not found.ok:
        reason = f"{name} scores a token tree differently from causal passes ({found.reason})"
        return _without_trees(model, reason)
    return Probe("tree", f"{name} scores a token tree like causal passes ({found.reason})", found, facts)


def _without_trees(model: PreTrainedModel, reason: str) -> Probe:
    """Whether the paths of a tree as rows of a batch are scored as plain decoding scores them."""
    facts, found = PassFacts(model), None
    try:
        if facts.rope_boundary < NO_LIMIT:
            raise SettingsError(f"its rotary positions ({facts.rope_type}) change with the length")
        found = compare(model, facts, lambda: BatchRowsTarget(model), kind=StepTrial)
        why = found.reason
    except (OutOfMemory, NoSteps):
        raise
    except Exception as error:  # as above
        why = first_line(error)
    if found is not None and found.ok:
        return Probe(
            "batch-rows", f"{reason}; paths as batch rows agree with plain steps ({why})", found, None
        )
    reason += f", nor can it take its paths as batch rows ({why}); decoding one row a step"
    return Probe("plain", reason, found, None)


def make_target(
    model: PreTrainedModel, capacity: int = 256, path: str = "auto", exact: bool = False
) -> Target:
    """A fresh target of the kind that the probe chose; ``target.path`` and ``target.reason`` say which and why.

    Args:
        capacity: tokens per sequence to begin with; storage doubles when it is full.
        path: "cpu", "cuda-graph", "transformers", "batch-rows" or "plain" to force one. "auto" takes "cpu" on a CPU
            and "cuda-graph" on a CUDA device where the model allows it, else "transformers", "batch-rows", "plain".
        exact: only a path on which drafting changes no bit: "cpu", "plain", for "batch-rows" too, or else
            ``ExactTarget``, which then serves for "transformers" too.

    Raises:
        SettingsError: the forced path is not there for this model, or none that is exact.
    """
    if path not in PATHS:
        raise SettingsError(f"path must be one of {', '.join(map(repr, PATHS))}, got {path!r}")
    found = probe(model)
    facts, reason = found.facts, found.reason
    if found.mode == "batch-rows" and path in ("auto", "batch-rows") and not exact:
        return BatchRowsTarget(model, reason)
    if path == "plain" or (facts is None and path == "auto"):
        return PlainTarget(model, reason)
    if exact and path in ("cuda-graph", "batch-rows"):
        raise SettingsError(f"exact=True is not there on the path {path!r}; use path='auto'")
    if facts is not None and not exact and (path == "cuda-graph" or (path == "auto" and on_gpu(model))):
        from .captures import captured_attention
        from .cuda_graphs import CAPACITY, CudaGraphTarget

        attention, reason = captured_attention(model, facts, say=path == "auto")
        if attention is not None:
            return CudaGraphTarget(model, facts, attention, max(capacity, CAPACITY), reason)
    elif facts is not None and path not in ("transformers", "batch-rows"):
        compiled, reason = remember(model, "cpu", lambda: _compiled(model, facts))
        if compiled is not None:
            return CpuTarget(compiled, facts, capacity, reason)
    if facts is None or path in ("cpu", "cuda-graph", "batch-rows"):
        raise SettingsError(f"the {path} path is not there for this model: {reason}; use path='auto'")
    if exact:
        by_position, reason = exact_attention(model, facts)
        if by_position is None:
            raise SettingsError(f"exact=True is not there for this model: {reason}; leave exact out")
        return target_kind(by_position)(model, facts, by_position, capacity, reason)
    return TransformersTarget(model, facts, capacity, reason)


def _compiled(model: PreTrainedModel, facts: ModelFacts) -> tuple[CompiledModel | None, str]:
    """The compiled model, compared with the model's own passes; None where it cannot be used, and why."""
    name = type(model).__name__
    try:
        compiled = compile_model(model, facts)
    except Unsupported as error:
        return None, str(error)
    found = compare(model, facts, lambda: CpuTarget(compiled, facts, 32))
    forget(model, "trial")
    if not found.ok:
        return None, f"{name}'s compiled passes differ from its own ({found.reason})"
    return compiled, f"{name} on CPU, {compiled.layout} ({found.reason})"
