"""Backends by name, and what stands in for a kernel that a card cannot compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch

from ..core.errors import SettingsError
from . import reference, sdpa

Attend = Callable[..., torch.Tensor]
BACKENDS = ("reference", "sdpa", "triton")


def get(name: str = "auto", device: torch.device | str = "cpu") -> Attend:
    """A backend by name; "auto" takes triton on an NVIDIA GPU that has it, and sdpa elsewhere.

    A kernel that does not compile on a card falls back to sdpa and says so once.

    Raises:
        SettingsError: an unknown name, or triton where it is not installed.
    """
    if name == "auto":
        name = "triton" if torch.device(device).type == "cuda" and has_triton() else "sdpa"
    if name not in BACKENDS:
        raise SettingsError(
            f"the attention backend must be auto or one of {', '.join(BACKENDS)}, got {name!r}"
        )
    if name != "triton":
        return sdpa.attend if name == "sdpa" else reference.attend
    if not has_triton():
        raise SettingsError(
            "the attention backend triton needs the package triton; pip install triton, or use sdpa"
        )
    from .triton import attend

    return GuardedKernel(attend)


def name_of(attend: Attend) -> str:
    """Which backend computes: "triton", or "sdpa" where that has taken a kernel's place."""
    if isinstance(attend, GuardedKernel):
        return "sdpa" if attend.broken else "triton"
    return attend.__module__.rsplit(".", 1)[-1]


def has_triton() -> bool:
    """Whether the package triton is installed."""
    return find_spec("triton") is not None


class GuardedKernel:
    """A kernel, with sdpa for the shapes that this card cannot compile.

    Attributes:
        broken: the shapes (dtype, head sizes, key heads) that sdpa computes.
    """

    def __init__(self, attend: Attend) -> None:
        self.broken: set[tuple[Any, ...]] = set()
        self._attend = attend

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> torch.Tensor:
        shape = (query.dtype, query.shape[-1], value.shape[-1], key.shape[1])
        if shape not in self.broken:
            try:
                # Kernels of triton are launched on the current device.
                with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
                    return self._attend(query, key, value, *rest, **named)
            except (SettingsError, torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as error:  # a compiler fails in many ways; the reason is told
                self.broken.add(shape)
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
                warnings.warn(
                    f"the attention kernel does not run here for head size {query.shape[-1]} in "
                    f"{str(query.dtype).removeprefix('torch.')} ({type(error).__name__}: {reason}); "
                    "using sdpa, with the same result",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return sdpa.attend(query, key, value, *rest, **named)
