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

    reference  the definition, sequence by sequence; any dtype, float64 included
    sdpa       one mask over the whole cache, made on the device; every device
    triton     no mask: the prefix in stretches, the tree part by its bits, in one kernel; NVIDIA GPUs
"""

from .backends import BACKENDS, Attend, GuardedKernel, get, has_triton, name_of
from .bits import pack_bits, unpack_bits

__all__ = [
    "BACKENDS", "Attend", "GuardedKernel", "get", "has_triton", "name_of", "pack_bits", "unpack_bits",
]  # fmt: skip
