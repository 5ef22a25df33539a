"""The compiled path on CPUs: a forward pass of our own that reads a transformers model's weights.

``architectures`` says which decoder-only models it knows, where each keeps its parts, and how others join. Entered
through ``compile_model``; ``CpuTarget`` evaluates token trees on the result. Rows are batch-invariant: a row has the
same bits in any tree. The user's model is read and never changed. docs/cpu.md has the rest.
"""

from .architectures import REGISTRY, Spec, Unsupported, register
from .compiled_model import CompiledModel, compile_model
from .target import CpuTarget

__all__ = ["REGISTRY", "CompiledModel", "CpuTarget", "Spec", "Unsupported", "compile_model", "register"]
