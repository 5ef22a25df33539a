"""The fast step on CPU: an own forward pass that reads a transformers model's weights.

It knows decoder-only models of the Llama family; ``specs.py`` says where each architecture keeps its parts
and how others join. Read in this order: ``specs``, ``linear``, ``forward``, ``cache``, ``target``. The
transformers target is its naive twin: at load both evaluate one token tree, and where they differ the lean
path is not taken. The user's model is read and never changed.
"""

from .apply import Verdict, lean_model
from .forward import LeanModel
from .specs import REGISTRY, Spec, register
from .target import LeanTarget

__all__ = ["REGISTRY", "LeanModel", "LeanTarget", "Spec", "Verdict", "lean_model", "register"]
