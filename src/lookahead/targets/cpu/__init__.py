"""The compiled path on CPUs: this library's own forward pass.

A model comes from transformers (``models.module_families`` maps the classes and explains how to add one) or from a
GGUF file, whose weights stay packed (``packed_model``). ``CpuTarget`` evaluates token trees on the compiled model.
Rows are batch-invariant: a row is bit-identical in any tree. The user's model is never modified. See docs/cpu.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...models.blueprint import Unsupported
    from ...models.module_families import REGISTRY, Spec, register
    from .compiled_model import CompiledModel, compile_model
    from .cpu_target import CpuTarget

__all__ = ["REGISTRY", "CompiledModel", "CpuTarget", "Spec", "Unsupported", "compile_model", "register"]


def __getattr__(name: str) -> Any:
    """Import on first use, because reading a GGUF file needs neither torch nor transformers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("REGISTRY", "Spec", "register"):
        from ...models import module_families

        return getattr(module_families, name)
    from ...models import blueprint
    from . import compiled_model, cpu_target

    return next(
        getattr(part, name) for part in (blueprint, compiled_model, cpu_target) if hasattr(part, name)
    )
