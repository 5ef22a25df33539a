"""What is known about a transformers module: results of its checks, cached until it changes, and its lock.

``fingerprint`` cheaply detects moved weights, writes to weights, and replaced functions. It does not detect writes
that bypass torch's version counter (``weight.data += delta``, or another view of the memory); call
``lookahead.refresh`` after these.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, TypeVar

from ..core import SettingsError
from ..model import combined_checksum
from ..options import GRAPH_MEMORY

if TYPE_CHECKING:
    import torch

#: Types of module attributes that are compared by value.
PLAIN_TYPES = frozenset((bool, int, float, str, type(None)))
_Result = TypeVar("_Result")


@dataclass(eq=False, slots=True)
class Known:
    """What is known about one module. Nothing in it may reference the module, which would then never be freed.

    Attributes:
        lock: held by the thread that runs the module. Passes of the transformers paths change its attention, its
            hooks and, in the check of a 16-bit model, its weights for their duration.
        results: name -> (fingerprint, result).
        current: the fingerprint, while a thread holds the module by ``unchanged``.
        refreshes: how often all results were dropped because of changes that the fingerprint does not show.
        graph_memory: the share of the device's memory that captured passes may use.
        warned: the warnings that were issued.
        measured: ``Model.state``.
    """

    lock: Any = field(default_factory=RLock)
    results: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    current: tuple[Any, ...] | None = None
    refreshes: int = 0
    graph_memory: float = GRAPH_MEMORY
    warned: set[str] = field(default_factory=set)
    measured: dict[str, dict[Any, Any]] = field(default_factory=dict)


#: The only table in this library that is keyed by somebody else's object: transformers passes a bare module to
#: ``custom_generate`` in every call, and all users of one module share its lock and results.
_known: weakref.WeakKeyDictionary[Any, Known] = weakref.WeakKeyDictionary()
_adding = Lock()


class _Interrupted:
    """Stands for the lock of a module whose pass another thread had begun when this process was forked. Nothing will
    end that pass, so the module keeps the pass's attention and hooks, and the lock would never be released."""

    def __enter__(self) -> None:
        raise SettingsError(
            "a model must not be in use when a process is forked, but another thread was running this one; load it "
            "again in this process, or start the process with multiprocessing's spawn method"
        )

    def __exit__(self, *error: object) -> None:
        pass


def _after_fork() -> None:
    """Replace the locks that threads of the parent held; they do not exist in this process."""
    global _adding
    _adding = Lock()
    for each in list(_known.values()):
        if each.lock.acquire(blocking=False):
            each.lock.release()
        else:
            each.lock = _Interrupted()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def known(module: Any) -> Known:
    """What is known about a module."""
    with _adding:
        found = _known.get(module)
        if found is None:
            found = _known[module] = Known()
        return found


def remember(model: Any, name: str, compute: Callable[[], _Result]) -> _Result:
    """The result of ``compute``, computed once per model and name until the model's fingerprint changes."""
    mine = known(model)
    key = current(model)
    if name not in mine.results or mine.results[name][0] != key:
        # A check may change the model for its duration, and compute results of the changed model.
        mine.current, outer = None, mine.current
        try:
            mine.results[name] = key, compute()
        finally:
            mine.current = outer
    result: _Result = mine.results[name][1]
    return result


def current(model: Any) -> tuple[Any, ...]:
    """The model's fingerprint, computed once in a block of ``unchanged``."""
    found = known(model).current
    return fingerprint(model) if found is None else found


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """A context in which this thread holds the model, and its fingerprint, which takes a while, is computed once."""
    mine = known(model)
    with mine.lock:
        outer = mine.current
        mine.current = current(model)
        try:
            yield
        finally:
            mine.current = outer


def forget(model: Any, prefix: str = "") -> None:
    """Drop the cached results of a model whose names begin with ``prefix``; without one, all of them."""
    mine = known(model)
    if not prefix:
        mine.refreshes += 1
        mine.measured.clear()
    for name in [name for name in mine.results if name.startswith(prefix)]:
        del mine.results[name]


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """A checksum of the tensors' bits, computed on their devices."""
    import torch

    sums = list[tuple[int, int]]()
    for tensor in tensors:
        integers: torch.dtype = getattr(torch, f"int{8 * tensor.element_size()}")
        bits = tensor.detach().contiguous().view(-1).view(integers)
        half = bits[: bits.numel() // 2]
        sums.append((int(bits.sum(dtype=torch.int64)), int(half.sum(dtype=torch.int64))))
    return combined_checksum(sums)


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
    import torch
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
