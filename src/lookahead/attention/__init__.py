"""Attention of a token tree's rows over a cache: tensors in, tensors out; knows no tree class.

Row i of a step sees the committed prefix, its ancestors among the step's rows, and itself (paper, section
3.3). Every backend computes the same function:

    attend(query, key, value, lengths, words, depths, *, scale, window, softcap, sinks) -> out

    query    (B, H, Q, D)      rows of the step
    key      (B, Hkv, C, D)    cache; columns T_b .. T_b + Q - 1 of sequence b hold the step's own rows
    value    (B, Hkv, C, Dv)   likewise; H is a multiple of Hkv (grouped heads)
    lengths  (B,) int32        T_b, the committed tokens
    words    (B, Q, W) int32   ancestor bits: bit c % 32 of word c // 32 says whether the row sees row c
    depths   (B, Q) int32      the row's position is T_b + depth
    scale    of the scores; None for 1 / sqrt(D)
    window   keys at a distance of ``window`` or more are not seen; 0 for no limit
    softcap  scores s become softcap * tanh(s / softcap); 0 for none
    sinks    (H,) one more score per head that takes weight and gives no value; None for none
    out      (B, H, Q, Dv)     in the query's dtype

    naive    the definition, with a mask; any dtype, float64 included
    sdpa     prefix without a mask, tree part by its bits, merged by log-sum-exp; every device
    triton   the same split over the context in one kernel; NVIDIA GPUs
    flash    the prefix by torch's stock flash kernel, the tree part by ours; NVIDIA GPUs
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch

from ..core.errors import SettingsError

__all__ = ["BACKENDS", "KERNELS", "Attend", "Guarded", "get", "name_of", "on", "pack_bits", "unpack_bits"]

Attend = Callable[..., torch.Tensor]
BACKENDS = ("naive", "sdpa", "triton", "flash")
#: Those that read lengths on the device and make no mask.
KERNELS = ("triton", "flash")
#: Largest head size of any backend.
LARGEST_HEAD = 256
_told: set[str] = set()


def get(name: str = "auto", device: torch.device | str = "cpu") -> Attend:
    """A backend by name; "auto" takes triton on an NVIDIA GPU that has it, and sdpa elsewhere.

    A kernel that does not compile on a card falls back to sdpa and says so once.

    Raises:
        SettingsError: an unknown name, or triton where it is not installed.
    """
    if name == "auto":
        name = "triton" if torch.device(device).type == "cuda" and _has_triton() else "sdpa"
    if name not in BACKENDS:
        raise SettingsError(
            f"the attention backend must be auto or one of {', '.join(BACKENDS)}, got {name!r}"
        )
    if name in KERNELS and not _has_triton():
        raise SettingsError(
            f"the attention backend {name} needs the package triton; pip install triton, or use sdpa"
        )
    attend: Attend = import_module(f".{name}", __package__).attend
    return Guarded(name, attend) if name in KERNELS else attend


def name_of(attend: Attend) -> str:
    """Which backend computes: "triton", or "sdpa" where that has taken a kernel's place."""
    if isinstance(attend, Guarded):
        return attend.name if not attend.broken else "sdpa"
    return attend.__module__.rsplit(".", 1)[-1]


def _has_triton() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one, which is where kernels of triton are launched and graphs are captured."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Guarded:
    """A kernel, with sdpa for the shapes that this card cannot compile.

    Attributes:
        broken: the shapes (dtype, head sizes, key heads) that sdpa computes.
    """

    def __init__(self, name: str, attend: Attend) -> None:
        self.name = name
        self.broken: set[tuple[Any, ...]] = set()
        self._attend = attend

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
    ) -> Any:
        shape = (query.dtype, query.shape[-1], value.shape[-1], key.shape[1])
        if shape not in self.broken:
            try:
                with on(query.device):
                    return self._attend(query, key, value, *rest, **named)
            except SettingsError:
                raise
            except Exception as error:  # a compiler fails in many ways; the reason is told
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                self.broken.add(shape)
                self._tell(query, error)
        from .sdpa import attend as fallback

        return fallback(query, key, value, *rest, **named)

    def _tell(self, query: torch.Tensor, error: Exception) -> None:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        if reason in _told:
            return
        _told.add(reason)
        warnings.warn(
            f"the attention kernel does not run here for head size {query.shape[-1]} in "
            f"{str(query.dtype).removeprefix('torch.')} ({type(error).__name__}: {reason}); "
            "using sdpa, with the same result",
            RuntimeWarning,
            stacklevel=3,
        )


def pack_bits(ancestors: Sequence[Sequence[int]], rows: int) -> torch.Tensor:
    """Ancestor bits as words (B, Q, ceil(Q / 32)) int32, on the CPU.

    Args:
        ancestors: per sequence and row, a number whose bit c says whether the row sees row c.
        rows: Q; rows that a sequence lacks see its root alone.
    """
    width = (rows + 31) // 32
    data = bytearray()
    for sequence in ancestors:
        for bits in sequence:
            data += bits.to_bytes(4 * width, "little")
        data += (1).to_bytes(4 * width, "little") * (rows - len(sequence))
    return torch.frombuffer(data, dtype=torch.int32).view(len(ancestors), rows, width)


def unpack_bits(words: torch.Tensor) -> torch.Tensor:
    """(B, Q, Q) bool from the words: entry [b, i, c] says whether row i sees row c."""
    rows = words.shape[1]
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 1).flatten(2)[..., :rows].bool()


def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, words: torch.Tensor) -> None:
    """Raises SettingsError where shapes cannot go together."""
    heads, kv_heads, size = query.shape[1], key.shape[1], query.shape[-1]
    if heads % kv_heads:
        raise SettingsError(f"query heads must be a multiple of key heads, got {heads} and {kv_heads}")
    if not 1 <= max(size, value.shape[-1]) <= LARGEST_HEAD:
        raise SettingsError(
            f"head sizes must be 1 to {LARGEST_HEAD}, got {size} and {value.shape[-1]}; use naive or eager"
        )
    rows = query.shape[2]
    if tuple(words.shape) != (query.shape[0], rows, (rows + 31) // 32):
        raise SettingsError(
            f"ancestor words must have shape {(query.shape[0], rows, (rows + 31) // 32)}, "
            f"got {tuple(words.shape)}"
        )
