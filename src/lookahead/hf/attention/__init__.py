"""Attention of a token tree's rows over a KV cache. Tensors in, tensors out; independent of the tree class.

Row i of a step sees the committed prefix, its ancestors among the step's rows, and itself (paper, section 3.3; drawn
in ``lookahead.hf.masks``). Every backend computes the same function:

    attend(query, key, value, lengths, words, depths, slots, *, scale, window, softcap, sinks) -> out

    query    (B, H, Q, D)      rows of the step
    key      (S, Hkv, C, D)    cache; columns T_b .. T_b + Q - 1 of sequence b hold the step's own rows
    value    (S, Hkv, C, Dv)   likewise; H is a multiple of Hkv (grouped heads); later columns hold finite numbers
    lengths  (B,) int32        T_b, the committed tokens
    words    (B, Q, W) int32   ancestor bits: bit c % 32 of word c // 32 is set if the row sees row c
    depths   (B, Q) int32      the row's position is T_b + depth
    slots    (B,) int32        sequence b is entry slots[b] of the cache; None if it is entry b
    scale    factor of the scores; None for 1 / sqrt(D)
    window   keys ``window`` or more positions before the row are not seen; 0 for no limit
    softcap  scores s become softcap * tanh(s / softcap); 0 for none
    sinks    (H,) an extra score per head that counts in the softmax but has no value; None for none
    out      (B, H, Q, Dv)     in the query's dtype

    reference  the definition, sequence by sequence; any dtype, float64 included
    sdpa       one mask over all given columns, computed on the device; any device
    triton     no mask: the prefix in parts, the tree by its ancestor bits, in one kernel; NVIDIA GPUs

Example of ``words``: a tree of 4 rows, root 0 with children 1 and 2, and 3 below 1. Each row has one word, because
4 rows fit into 32 bits; the lowest bit is row 0:

    row 0: 0b0001    row 1: 0b0011    row 2: 0b0101    row 3: 0b1011

``exact`` and ``exact_triton`` compute the same attention for exact mode, from different arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from ...core.errors import SettingsError
from . import reference, sdpa
from .bits import pack_bits, unpack_bits

__all__ = ["BACKENDS", "IN_PLACE", "Attend", "get", "has_triton", "pack_bits", "unpack_bits"]

Attend = Callable[..., torch.Tensor]
BACKENDS = ("reference", "sdpa", "triton")
#: Backends that read a sequence in place and no further than its rows. The others copy the requested slots and read
#: all given columns.
IN_PLACE = frozenset(("triton",))


def get(name: str = "auto", device: torch.device | str = "cpu") -> Attend:
    """A backend by name; "auto" is triton on an NVIDIA GPU if it is installed, and sdpa elsewhere.

    Raises:
        SettingsError: the name is unknown, or triton is not installed.
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

    return attend


def has_triton() -> bool:
    """Whether the package triton is installed."""
    return find_spec("triton") is not None
