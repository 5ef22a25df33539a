"""The argmax of logits plus Gumbel noise, without computing most of the noise. Compiled, without torch.

``sampling`` defines a drawn token as argmax(logits / T + g), where g_i = -log(-log(u_i)) and u_i are the upper 52
bits of output i of SplitMix64. Two logarithms for each of V tokens take as long as a row of a small model's forward
pass. Most of them are irrelevant: g_i increases with u_i, so a token whose logit is far below the best one needs bits
close to the largest possible value. The search processes groups of 32 tokens. The largest logit of a group gives the
smallest bits with which one of its tokens could win, and its tokens are scored only if one of them has such bits.

An example with T = 1. The best score so far is 21.3 (logit 20.1, noise 1.2). A group whose largest logit is 9.3 needs
noise of 12, which one token in 160,000 has, so for nearly all such groups only the 32 integers are computed. Noise is
at most ``MOST``, so a group with the largest logit -16 is skipped entirely.

Scores are float64 here and float32 in the definition. If the two best scores are closer than their rounding errors,
the search is undecided, and the caller evaluates the definition.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np

from ..machine_code import compiled, entry

#: SplitMix64 (Steele, Lea and Flood, 2014): its state increment and the factors of its finalizer.
GOLDEN = 0x9E3779B97F4A7C15
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GROUP = 32
#: The noise of the largest 52 bits is 36.74.
MOST = 36.75
#: Thresholds are tabulated in noise steps of 1 / FINE.
FINE = 8
#: NOISY[i]: the bits of noise i / FINE minus 2, which is more than their rounding error.
NOISY = np.maximum(np.exp(-np.exp(-np.arange(MOST * FINE + 1) / FINE)) * 2.0**52 - 2, 0).astype(np.uint64)
#: Bound of the rounding errors of two scores, relative to their absolute value plus twice the largest noise. One
#: score has the errors of a division, of the noise and of a sum, each at most 2 ** -24 of its result.
ROUNDING = 1e-6

_GOLDEN, _FIRST, _SECOND = np.uint64(GOLDEN), np.uint64(MIX[0]), np.uint64(MIX[1])
_12, _27, _30, _31 = (np.uint64(shift) for shift in (12, 27, 30, 31))


@compiled
def _mixed(x: Any) -> Any:
    """The finalizer of SplitMix64."""
    x = (x ^ (x >> _30)) * _FIRST
    x = (x ^ (x >> _27)) * _SECOND
    return x ^ (x >> _31)


@compiled
def _bits(start: Any, token: int) -> Any:
    """The bits of a token's noise."""
    return _mixed(np.uint64(token + 1) * _GOLDEN + start) >> _12


@compiled
def gumbel_of(key: Any, position: int, token: int) -> Any:
    """The noise of one token at one position: an entry of ``sampling.gumbel``, float32.

    Args:
        key: ``sampling.key_of`` of the seed, uint64.
    """
    bits = _bits(_mixed(key + np.uint64(position) * _GOLDEN), token)
    return np.float32(-math.log(-math.log((bits + 0.5) * 2.0**-52)))


@entry
def _peaks(row: Annotated[Any, "f4", 1], peaks: Annotated[Any, "f4", 1]) -> None:
    """Write the largest logit of each group, NaN if one is NaN."""
    for group in range(len(peaks)):
        peak = np.float32(-np.inf)
        missing = 0
        for i in range(group * GROUP, min((group + 1) * GROUP, len(row))):
            peak = max(peak, row[i])
            missing += row[i] != row[i]
        peaks[group] = np.nan if missing else peak


@entry
def _search(
    row: Annotated[Any, "f4", 1],
    peaks: Annotated[Any, "f4", 1],
    divisor: float,
    first_state: int,
    noisy: Annotated[Any, "u8", 1],
) -> int:
    start = np.uint64(first_state)
    top = 0
    for group in range(len(peaks)):
        if np.isnan(peaks[group]):
            return -1
        if peaks[group] > peaks[top]:
            top = group
    best = second = -np.inf
    token = -1
    margin = 0.0
    # Start with the group of the best logit, because a high score excludes more of the others.
    for turn in range(-1, len(peaks)):
        if turn == top:
            continue
        group = top if turn < 0 else turn
        needed = best - margin - np.float64(peaks[group]) / divisor
        if needed >= MOST:
            continue
        threshold = noisy[int(needed * FINE)] if needed > 0 else np.uint64(0)
        first, end = group * GROUP, min((group + 1) * GROUP, len(row))
        # This loop has no branches, so that it compiles to vector instructions.
        most = np.uint64(0)
        for i in range(first, end):
            most = max(most, _bits(start, i))
        if most < threshold:
            continue
        for i in range(first, end):
            bits = _bits(start, i)
            if bits < threshold:
                continue
            score = np.float64(row[i]) / divisor - math.log(-math.log((bits + 0.5) * 2.0**-52))
            if score > best:
                token, best, second = i, score, best
                margin = ROUNDING * (abs(best) + 2 * MOST)
            else:
                second = max(second, score)
    return token if best - second > margin else -1


def draw(row: Any, peaks: Any, temperature: float, start: int) -> int:
    """The token with the largest logit / temperature + noise.

    Args:
        row: logits (V,) float32.
        peaks: the largest logit of each group of 32 tokens, float32; None if unknown.
        temperature: above 0.
        start: the state of SplitMix64 before the first token's output.

    Returns:
        The token; -1 if this search is undecided, because two scores are almost equal, a logit is NaN, or the best is
        infinite.
    """
    if peaks is None:
        peaks = np.empty(-(-len(row) // GROUP), np.float32)
        _peaks(row, peaks)
    return int(_search(row, peaks, float(np.float32(temperature)), start, NOISY))
