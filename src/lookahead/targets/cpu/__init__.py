"""The compiled path on CPUs: this library's own forward pass.

A model comes from transformers (``architectures`` lists the classes, says where each keeps its parts, and explains
how to add another) or from a GGUF file, whose weights stay packed (``packed_model``). ``CpuTarget`` evaluates token
trees on the compiled model. Rows are batch-invariant: a row has the same bits in any tree. The user's model is never
changed. See docs/cpu.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .blueprint import Unsupported
from .compiled_model import CompiledModel, compile_model
from .target import CpuTarget

if TYPE_CHECKING:
    from .architectures import REGISTRY, Spec, register

__all__ = ["REGISTRY", "CompiledModel", "CpuTarget", "Spec", "Unsupported", "compile_model", "register"]


def __getattr__(name: str) -> Any:
    """Import ``architectures`` on first use: reading a GGUF file needs no transformers."""
    if name not in ("REGISTRY", "Spec", "register"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import architectures

    return getattr(architectures, name)
