"""A model evaluated in float32 without a second copy of it.

Each module's weights are widened for the length of its own call and then dropped, so what is needed beside the
model is its largest module once in float32. Embeddings look up in their own dtype, and the rows are widened after.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

#: What is widened, and what is judged by the model's own rounding error.
HALF = (torch.bfloat16, torch.float16)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes with its own weights in float32. One thread at a time."""
    narrow: list[tuple[nn.Module, dict[str, nn.Parameter | None]]] = []

    def widen(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        narrow.append((module, dict(module._parameters)))
        for name, weight in narrow[-1][1].items():
            if weight is not None and weight.dtype in HALF:
                module._parameters[name] = nn.Parameter(weight.float(), requires_grad=False)
        return tuple(map(_float, args)), {name: _float(value) for name, value in named.items()}

    def restore(module: nn.Module, args: Any, output: Any) -> None:
        # Modules return in the reverse order of their calls.
        module._parameters.update(narrow.pop()[1])

    hooks = []
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            hooks.append(module.register_forward_hook(lambda module, args, output: _float(output)))
        elif any(weight is not None for weight in module._parameters.values()):
            hooks.append(module.register_forward_pre_hook(widen, with_kwargs=True))
            hooks.append(module.register_forward_hook(restore))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, weights in reversed(narrow):  # a call that raised
            module._parameters.update(weights)


def _float(value: Any) -> Any:
    return value.float() if torch.is_tensor(value) and value.dtype in HALF else value
