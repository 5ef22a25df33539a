"""Transformers models: the comparison at load, and the fastest path that computes what the model computes.

The comparison evaluates a token tree on the real model and compares it with the model's own causal passes. If they
differ, or the model cannot evaluate a tree, the tree's paths as batch rows are compared with plain decoding. If these
differ too, decoding uses one row per step, and the reason says why.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..core import OutOfMemory, SettingsError, Target
from ..core.errors import summary
from ..models.blueprint import Unsupported
from . import certificate
from .attention_hook import mask_compatible_attention
from .batch_rows import BatchRowsTarget, NoSteps, StepTrial
from .certificate import exact_attention, exact_target_class
from .cpu.compiled_model import CompiledModel, compile_model
from .cpu.cpu_target import CpuTarget
from .equivalence import HALF_DTYPES, compare, in_float32
from .facts import ModelFacts, PassFacts
from .fingerprint import forget, remember
from .limits import NO_LIMIT
from .probe import Probe
from .transformers import PlainTarget, TransformersTarget

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The module of the layers that torch's ``quantize_dynamic`` makes. They use one scale for all rows of their input.
DYNAMIC = "torch.ao.nn.quantized.dynamic"


def probe_module(model: PreTrainedModel) -> Probe:
    """``factory.probe`` for a transformers model."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        raise SettingsError(f"a transformers causal language model is needed, got {type(model).__name__}")
    if config.is_encoder_decoder:
        raise SettingsError(
            f"a decoder-only model is needed, and {type(model).__name__} is an encoder-decoder; "
            "use model.generate without custom_generate"
        )
    if torch.is_autocast_enabled(model.device.type):
        raise SettingsError(
            "torch.autocast must be off, because no path here rounds as it does; load the model in the dtype "
            'wanted (dtype="bfloat16"), or use model.generate without custom_generate'
        )
    return remember(model, "probe", lambda: _probe(model))


def _probe(model: PreTrainedModel) -> Probe:
    name = type(model).__name__
    for path, module in model.named_modules():
        if type(module).__module__.startswith(DYNAMIC):
            raise SettingsError(
                f"{name} must not be quantized dynamically, and {path} is: it rounds each row by all rows of a pass, "
                "so that drafts would change the text; quantize its weights alone, or use model.generate without "
                "custom_generate"
            )
    try:
        with mask_compatible_attention(model):
            facts = ModelFacts(model)
        result = compare(model, facts, lambda: TransformersTarget(model, facts, 32))
        if not result.ok and result.difference <= result.limit and model.dtype in HALF_DTYPES:
            # In 16 bits rounding may hide the negative control; then masks, positions and commits are also compared
            # in float32.
            wide = copy(facts)
            wide.dtype = torch.float32
            with in_float32(model):
                structure = compare(model, wide, lambda: TransformersTarget(model, wide, 32), widened=True)
            reason = f"{result.reason}; widened to float32: {structure.reason}"
            result = replace(result, ok=structure.ok, reason=reason)
    except OutOfMemory:
        raise
    except Exception as error:  # a model may fail in any way on inputs that it was not designed for
        return _probe_batch_rows(model, f"{name} cannot evaluate a token tree ({summary(error)})")
    if not result.ok:
        reason = f"{name} scores a token tree differently from causal passes ({result.reason})"
        return _probe_batch_rows(model, reason)
    return Probe("tree", f"{name} scores a token tree like causal passes ({result.reason})", result, facts)


def _probe_batch_rows(model: PreTrainedModel, reason: str) -> Probe:
    """Probe whether a tree's paths, as rows of a batch, are scored as in plain decoding.

    Args:
        reason: why the model does not evaluate trees.
    """
    facts, result = PassFacts(model), None
    try:
        if facts.rope_boundary < NO_LIMIT:
            raise SettingsError(f"its rotary positions ({facts.rope_type}) change with the length")
        result = compare(model, facts, lambda: BatchRowsTarget(model), kind=StepTrial)
        why = result.reason
    except (OutOfMemory, NoSteps):
        raise
    except Exception as error:  # as above
        why = summary(error)
    if result is not None and result.ok:
        reason += f"; paths as batch rows agree with plain steps ({why})"
        return Probe("batch-rows", reason, result, None)
    reason += f", nor can it evaluate its paths as batch rows ({why}); decoding one row per step"
    return Probe("plain", reason, result, None)


def make_module_target(model: PreTrainedModel, capacity: int, path: str, exact: bool) -> Target:
    """``factory.make_target`` for a transformers model."""
    probed = probe_module(model)
    facts = probed.facts if isinstance(probed.facts, ModelFacts) else None
    reason = probed.reason
    if probed.mode == "batch-rows" and path in ("auto", "batch-rows") and not exact:
        return BatchRowsTarget(model, reason)
    if path == "plain" or (facts is None and path == "auto"):
        return PlainTarget(model, reason)
    if exact and path in ("cuda-graph", "batch-rows"):
        raise SettingsError(f"exact=True is not available on the path {path!r}; use path='auto'")
    if (
        facts is not None
        and not exact
        and (path == "cuda-graph" or (path == "auto" and certificate.on_gpu(model)))
    ):
        from .cuda_graphs import CAPACITY, CudaGraphTarget, captured_attention

        attention, reason = captured_attention(model, facts, warn=path == "auto")
        if attention is not None:
            return CudaGraphTarget(model, facts, attention, max(capacity, CAPACITY), reason)
    elif facts is not None and path not in ("transformers", "batch-rows"):
        compiled, reason = remember(model, "cpu", lambda: _compiled(model, facts))
        if compiled is not None:
            return CpuTarget(compiled, facts, capacity, reason)
    if facts is None or path in ("cpu", "cuda-graph", "batch-rows"):
        raise SettingsError(f"the {path} path is not available for this model: {reason}; use path='auto'")
    if exact:
        attention, reason = exact_attention(model, facts)
        if attention is None:
            raise SettingsError(f"exact=True is not available for this model: {reason}; leave exact out")
        return exact_target_class(attention)(model, facts, attention, capacity, reason)
    return TransformersTarget(model, facts, capacity, reason)


def _compiled(model: PreTrainedModel, facts: ModelFacts) -> tuple[CompiledModel | None, str]:
    """The compiled model and its comparison with the model's own passes; (None, why) if it cannot be used."""
    name = type(model).__name__
    configured = (
        getattr(model.config, "quantization_config", None) is not None
    )  # ``compile_model`` gives its reason
    for path, weight in model.named_parameters():
        if type(weight.data) is not torch.Tensor and not configured:
            kind = type(weight.data).__name__
            return None, f"compiled passes need weights as they are, and {path} is of type {kind}"
    try:
        compiled = compile_model(model, facts)
    except Unsupported as error:
        return None, str(error)
    result = compare(model, facts, lambda: CpuTarget(compiled, facts, 32))
    forget(model, "trial")
    if not result.ok:
        return None, f"{name}'s compiled passes differ from its own ({result.reason})"
    return compiled, f"{name} on CPU, {compiled.layout} ({result.reason})"
