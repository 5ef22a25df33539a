"""A model's RMS norms as one kernel each, for the length of a captured pass.

As transformers writes it, an RMS norm is eight small kernels, and at one row a step of a large model is bound by
the number of its small kernels. torch has one for it. No class is changed: a module's own ``forward`` is set, only
where both were seen to compute the same, and taken away again behind the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from .equivalence import remember

#: Largest tolerated difference, as a share of the largest output: two roundings of the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}

Norms = list[tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]]


def fused_norms(model: PreTrainedModel) -> Norms:
    """(module, the same in one kernel) for every norm that it is the same for; found once per dtype and device."""
    return remember(model, "norms", (model.dtype, model.device), lambda: list(_find(model)))


def _find(model: torch.nn.Module) -> Iterator[Any]:
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        named = type(module).__name__.endswith("RMSNorm") and isinstance(epsilon, float)
        if not named or not torch.is_tensor(weight) or weight.dim() != 1 or weight.dtype not in TOLERANCE:
            continue
        if "forward" in vars(module):  # somebody has set one already
            continue

        def forward(x: torch.Tensor, module: Any = module, epsilon: float | None = epsilon) -> torch.Tensor:
            return functional.rms_norm(x, module.weight.shape, module.weight, epsilon)

        sample = torch.arange(2 * len(weight), device=weight.device).view(2, -1).sin().to(weight.dtype)
        with torch.no_grad():
            expected, one = module(sample), forward(sample)
        largest = float(expected.abs().max()) or 1.0
        if float((expected - one).abs().max()) <= TOLERANCE[weight.dtype] * largest:
            yield module, forward


@contextmanager
def one_kernel_norms(norms: Norms) -> Iterator[None]:
    """The modules compute by one kernel inside, and as they did before and after."""
    try:
        for module, forward in norms:
            module.forward = forward
        yield
    finally:
        for module, _ in norms:
            vars(module).pop("forward", None)
