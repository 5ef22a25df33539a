"""Transformers modules with their own weights on the compiled CPU path.

``module_families`` describes a module as a ``cpu`` blueprint; nothing of ``cpu`` knows transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.errors import Unsupported
from ..cpu.compiled_model import CompiledModel, checked
from .facts import ModelFacts
from .module_families import blueprint_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def compile_model(model: PreTrainedModel, facts: ModelFacts) -> CompiledModel:
    """Copy a model's weights, and compile its pass or load it from disk. The caller checks the result.

    Raises:
        Unsupported: the model's own code must evaluate it; the message is the reason, in one line.
    """
    if model.device.type != "cpu":
        raise Unsupported(f"compiled passes run on CPUs, the model is on {model.device}")
    if str(model.dtype) not in ("torch.float32", "torch.bfloat16"):
        raise Unsupported(f"compiled passes support float32 and bfloat16, the model is {model.dtype}")
    settings: Any = getattr(model.config, "quantization_config", None)
    method = (
        settings.get("quant_method")
        if isinstance(settings, dict)
        else getattr(settings, "quant_method", None)
    )
    if method is not None and method != "gguf":  # weights from GGUF files are already dequantized
        name = getattr(method, "value", method)  # an enum member or a string
        raise Unsupported(
            f"compiled passes need weights that are not quantized, the model is quantized by {name}"
        )
    if any(weight.device.type != "cpu" for weight in model.parameters()):
        raise Unsupported("compiled passes need every layer on the CPU")
    blueprint = blueprint_of(model, facts)
    return checked(lambda: CompiledModel(blueprint))
