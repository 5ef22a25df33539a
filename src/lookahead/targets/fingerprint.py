"""What is found out of a model once, and what can be seen cheaply of a change to it: where its weights lie, who wrote
to them, and who is called.

Numbers written behind torch's back, by ``weight.data += delta`` or through another view of the memory, leave no
trace; ``lookahead.refresh`` is for these.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

PLAIN = frozenset((bool, int, float, str, type(None)))
_Found = TypeVar("_Found")
_memo: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def remember(model: nn.Module, name: str, find: Callable[[], _Found]) -> _Found:
    """What ``find`` returns, found once per model and name until a change of the model is seen."""
    known, key = _memo.setdefault(model, {}), fingerprint(model)
    if name not in known or known[name][0] != key:
        known[name] = key, find()
    found: _Found = known[name][1]
    return found


def forget(model: nn.Module, names: str = "") -> None:
    """Drop what is remembered of a model; with ``names`` only what begins so."""
    known = _memo.get(model, {})
    for name in [name for name in known if name.startswith(names)]:
        del known[name]


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """Changes when a weight or buffer is replaced or written, or a module, method, hook, attribute or setting is.

    Setting names that begin with "_" are transformers' own; which attention is taken is looked at apart.
    """
    found: list[Any] = [
        *map(id, _global_forward_hooks.values()),
        *map(id, _global_forward_pre_hooks.values()),
    ]
    config = getattr(model, "config", None)
    if config is not None:
        text = config.get_text_config(decoder=True)
        for settings in {id(config): config, id(text): text}.values():
            found.append(repr([item for item in vars(settings).items() if item[0][:1] != "_"]))
        found.append(getattr(config, "_attn_implementation", None))
    _look_at(model, found, set())
    return tuple(found)


def _look_at(module: nn.Module, found: list[Any], seen: set[int]) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    attributes = vars(module)
    found += (
        id(module),
        type(module).forward,
        id(attributes.get("forward")),  # not itself, which may hold the model
        *map(id, module._forward_hooks.values()),
        None,
        *map(id, module._forward_pre_hooks.values()),
    )
    for tensors in (module._parameters, module._buffers):
        for tensor in tensors.values():
            if tensor is not None:
                version = 0 if tensor.is_inference() else tensor._version
                found += (tensor.data_ptr(), version, tensor.dtype, tensor.device)
    found += [value for value in attributes.values() if type(value) in PLAIN]
    for child in module._modules.values():
        if child is not None:
            _look_at(child, found, seen)
