"""The way into this package: a transformers model, compiled, or why it cannot be."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..facts import ModelFacts
from .architectures import Unsupported, read_parts
from .compiled_model import CompiledModel


def compile_model(model: PreTrainedModel, facts: ModelFacts) -> CompiledModel:
    """Lay a model's weights out for compiled passes and compile these, or load them from disk.

    Nothing is compared with the model's own code here; ``CpuTarget`` runs the result.

    Args:
        model: is read and not changed.
        facts: of its transformers target.

    Raises:
        Unsupported: with one line that says why; the model's own code serves then.
    """
    if model.device.type != "cpu":
        raise Unsupported(f"compiled passes are made for CPUs, the model is on {model.device}")
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise Unsupported(f"compiled passes know float32 and bfloat16, the model is {model.dtype}")
    parts = read_parts(model, facts.config)
    try:
        return CompiledModel(parts)
    except (MemoryError, Unsupported):
        raise
    except Exception as error:  # whatever numba and LLVM do on a processor or a folder that they cannot use
        first_line = (str(error).splitlines() or [""])[0][:160]
        raise Unsupported(
            f"numba cannot compile passes here ({type(error).__name__}: {first_line})"
        ) from error
