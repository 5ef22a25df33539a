"""The fast step on CPU: an own forward pass that reads a transformers model's weights.

It knows decoder-only models of the Llama family; ``specs.py`` says where each architecture keeps its parts
and how others join. The pass is there twice: compiled (``native/``, where numba is there) and in torch calls
(``forward.py``). Read in this order: ``specs``, ``layout``, ``forward``, ``native``, ``target``. The
transformers target is the naive twin of both: at load the two evaluate one token tree, and where they differ
the lean path is not taken. The user's model is read and never changed.
"""

from .apply import Verdict, lean_model
from .forward import LeanModel
from .specs import REGISTRY, Spec, register
from .target import LeanTarget

__all__ = ["REGISTRY", "LeanModel", "LeanTarget", "Spec", "Verdict", "lean_model", "register"]
