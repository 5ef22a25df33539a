"""Results of model checks, cached until the model changes.

``fingerprint`` cheaply detects moved weights, writes to weights, and replaced functions. It does not detect writes
that bypass torch's version counter (``weight.data += delta``, or another view of the memory); call
``lookahead.refresh`` after these.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

#: Types of module attributes that are compared by value.
PLAIN_TYPES = frozenset((bool, int, float, str, type(None)))
_Result = TypeVar("_Result")
#: model -> name -> (fingerprint, result)
_remembered: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


#: model -> the number of times that all of its results were dropped
_refreshes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def remember(model: Any, name: str, compute: Callable[[], _Result]) -> _Result:
    """The result of ``compute``, computed once per model and name until the model's fingerprint changes."""
    results = _remembered.setdefault(model, {})
    key = fingerprint(model)
    if name not in results or results[name][0] != key:
        results[name] = key, compute()
    result: _Result = results[name][1]
    return result


def forget(model: Any, prefix: str = "") -> None:
    """Drop the cached results of a model whose names begin with ``prefix``; without one, all of them."""
    if not prefix:
        _refreshes[model] = refreshes(model) + 1
    results = _remembered.get(model, {})
    for name in [name for name in results if name.startswith(prefix)]:
        del results[name]


def refreshes(model: Any) -> int:
    """How often all results of a model were dropped because of changes that its fingerprint does not show."""
    return _refreshes.get(model, 0)


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """A checksum of the tensors' bits, computed on their devices."""
    import torch

    total = 0
    for number, tensor in enumerate(tensors, 1):
        integers: torch.dtype = getattr(torch, f"int{8 * tensor.element_size()}")
        bits = tensor.detach().contiguous().view(-1).view(integers)
        # Count the first half once more, so that the order of the weights matters.
        both = int(bits.sum(dtype=torch.int64)) * 3 + int(bits[: bits.numel() // 2].sum(dtype=torch.int64))
        total = (total * 31 + both * number) % ((1 << 61) - 1)
    return total


#: The module of transformers' hooks that capture hidden states and attentions. They stay on a model after a call with
#: ``output_hidden_states`` or ``output_attentions``, and are no-ops in other calls.
CAPTURING = "transformers.utils.output_capturing"


def active_hooks(hooks: Mapping[int, Any]) -> list[Any]:
    """Hooks that may change what a module computes: all except those that transformers leaves behind and those
    with which this library collects hidden states in another thread."""
    passive = CAPTURING, f"{__package__}.target"
    return [hook for hook in hooks.values() if getattr(hook, "__module__", None) not in passive]


def fingerprint(model: Any) -> tuple[Any, ...]:
    """A value that changes when a weight, buffer, module, method, hook, attribute or setting of the model changes.

    It also changes when torch.autocast is switched on or off. Settings and attributes whose names begin with "_"
    belong to transformers, which writes some of them in every call; of these, only the attention implementation is
    included. Buffers that rotary positions recompute for every length are not included either.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):  # nothing else can change its weights
        return (id(model),)
    from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

    # State of the process and settings of the model.
    parts: list[Any] = [
        *map(id, _global_forward_hooks.values()),
        *map(id, _global_forward_pre_hooks.values()),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    ]
    config = getattr(model, "config", None)
    if config is not None:
        text_config = config.get_text_config(decoder=True)
        for settings in {id(config): config, id(text_config): text_config}.values():
            parts.append(repr([item for item in vars(settings).items() if item[0][:1] != "_"]))
        parts.append(getattr(config, "_attn_implementation", None))
    # For each module: its code and hooks, its weights and buffers, and its plain attributes.
    for module in model.modules():
        attributes = vars(module)
        parts += (
            id(module),
            type(module).forward,
            id(attributes.get("forward")),  # its id: a bound method would keep the model alive
            *map(id, active_hooks(module._forward_hooks)),
            None,
            *map(id, active_hooks(module._forward_pre_hooks)),
        )
        recomputed = _recomputed(module)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in recomputed:
                version = 0 if tensor.is_inference() else tensor._version
                parts += (tensor.data_ptr(), version, tensor.dtype, tensor.device)
        parts += [
            value for name, value in attributes.items() if type(value) in PLAIN_TYPES and name[:1] != "_"
        ]
    return tuple(parts)


def _recomputed(module: Any) -> Container[str]:
    """The names of buffers that the module itself writes in every pass: frequencies that depend on the length."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    if any(kind in ("longrope", "dynamic") for kind in kinds):
        return [name for name in module._buffers if name.endswith("inv_freq")]
    return ()
