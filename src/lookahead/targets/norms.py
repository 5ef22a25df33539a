"""A model's RMS norms as one kernel each, for the length of a captured pass.

As transformers writes it, an RMS norm is eight small kernels, and at one row a step of a large model is bound by
the number of its small kernels. torch has one for it. No class is changed: a module's own ``forward`` is set, only
where both were seen to compute the same, and taken away again behind the pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

#: Largest tolerated difference, as a share of the largest output: two roundings of the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}

Norms = list[tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]]
_known: weakref.WeakKeyDictionary[Any, tuple[Any, Norms]] = weakref.WeakKeyDictionary()


def norms_of(model: PreTrainedModel) -> Norms:
    """(module, the same in one kernel) for every norm that it is the same for; found once per dtype and device."""
    key = model.dtype, model.device
    known = _known.get(model)
    if known is None or known[0] != key:
        known = key, [pair for module in model.modules() if (pair := _one_kernel(module)) is not None]
        _known[model] = known
    return known[1]


def _one_kernel(module: torch.nn.Module) -> Any:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    named = type(module).__name__.endswith("RMSNorm") and isinstance(epsilon, float)
    if not named or not torch.is_tensor(weight) or weight.dim() != 1 or weight.dtype not in TOLERANCE:
        return None
    if "forward" in vars(module):  # somebody has set one already
        return None

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        weight: Any = module.weight
        return functional.rms_norm(hidden_states, weight.shape, weight, epsilon)

    size = weight.shape[0]
    sample = torch.arange(2 * size, device=weight.device).view(2, size).sin().to(weight.dtype)
    with torch.no_grad():
        expected, one = module(sample), forward(sample)
    largest = float(expected.abs().max()) or 1.0
    if not float((expected - one).abs().max()) <= TOLERANCE[weight.dtype] * largest:
        return None
    return module, forward


@contextmanager
def in_force(norms: Sequence[Any]) -> Iterator[None]:
    """The modules compute by one kernel inside, and as they did before and after."""
    try:
        for module, forward in norms:
            module.forward = forward
        yield
    finally:
        for module, _ in norms:
            vars(module).pop("forward", None)
