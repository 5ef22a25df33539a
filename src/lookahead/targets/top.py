"""The k best tokens of every row of logits in CPU memory, by numba.

Floats are compared as whole numbers of the same order, so that one pass of vector maxima over a row is enough:
strips of ``DEEP`` x ``LANES`` logits leave the maxima of ``LANES`` columns each, the k largest maxima bound the k
best tokens from below, and only columns that reach the bound are looked at again. Of equals the lower token stands
first, as argmax has it; NaN stands above all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

LANES, DEEP = 64, 32
#: Whole numbers that stand for the bits of a dtype.
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def top_of_rows(logits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (R, k) int32 and log-odds (R, k) float32 against the best, best first.

    Args:
        logits: (R, V) on the CPU; V >= k >= 1.
    """
    if logits.dtype not in BITS:
        logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocabulary = logits.shape
    ids, odds = np.empty((rows, k), np.int32), np.empty((rows, k), np.float32)
    if rows:
        width = logits.stride(0)
        flat = logits.view(BITS[logits.dtype]).as_strided(((rows - 1) * width + vocabulary,), (1,)).numpy()
        _search(flat, width, vocabulary, ids, odds)
    return ids, odds


@njit(error_model="numpy", cache=True)
def _search(flat: Any, width: int, vocabulary: int, ids: Any, odds: Any) -> None:
    strip = LANES * DEEP
    strips = (vocabulary + strip - 1) // strip
    lowest, rest, sign = np.iinfo(flat.dtype).min, np.iinfo(flat.dtype).max, flat.itemsize * 8 - 1
    peaks = np.empty(strips * LANES, flat.dtype)
    rows, k = ids.shape
    # A value and a token in one number: larger values first, then lower tokens.
    best, bits = np.empty(k, np.int64), np.empty(1, np.int32)
    for row in range(rows):
        start = row * width
        peaks[:] = lowest
        for s in range(strips):
            column = peaks[s * LANES : (s + 1) * LANES]
            first = start + s * strip
            end = min(first + strip, start + vocabulary)
            while first + LANES <= end:
                line = flat[first : first + LANES]
                for lane in range(LANES):
                    value = line[lane] ^ ((line[lane] >> sign) & rest)
                    column[lane] = max(column[lane], flat.dtype.type(value))
                first += LANES
            for lane in range(end - first):
                value = flat[first + lane] ^ ((flat[first + lane] >> sign) & rest)
                column[lane] = max(column[lane], flat.dtype.type(value))
        # A bound that at least k peaks reach, and not many more, by bisection.
        low, high = np.int64(peaks.min()), np.int64(peaks.max()) + 1
        while high - low > 1:
            middle = flat.dtype.type((low + high) >> 1)
            count = 0
            for peak in peaks:
                count += peak >= middle
            if count < k:
                high = np.int64(middle)
            else:
                low = np.int64(middle)
                if count <= k + k // 4:
                    break
        bound = flat.dtype.type(low if low else -1)  # -1 stands for -0.0, which equals 0.0
        best[:] = np.iinfo(np.int64).min
        for place in range(strips * LANES):
            if peaks[place] < bound:
                continue
            s = place // LANES
            for token in range(s * strip + place % LANES, min((s + 1) * strip, vocabulary), LANES):
                value = flat[start + token]
                value = flat.dtype.type(value ^ ((value >> sign) & rest))
                if value < bound:
                    continue
                if value == -1:
                    value = flat.dtype.type(0)
                key = np.int64(value) << 32 | (0x7FFFFFFF - token)
                if key > best[k - 1]:
                    at = k - 1
                    while at > 0 and key > best[at - 1]:
                        best[at] = best[at - 1]
                        at -= 1
                    best[at] = key
        largest = np.float32(0)
        for place in range(k):
            value = np.int32(best[place] >> 32)
            value ^= (value >> 31) & np.int32(rest)
            bits[0] = value << 16 if sign == 15 else value
            number = bits.view(np.float32)[0]
            if place == 0:
                largest = number
            ids[row, place] = 0x7FFFFFFF - (best[place] & 0x7FFFFFFF)
            odds[row, place] = number - largest
