"""The k best tokens of every row of logits in CPU memory, by numba.

The vocabulary is divided into groups of ``GROUP`` tokens. The k groups with the largest maxima contain the k best
tokens, so only these groups are searched token by token. Compiled passes already know the maxima.

Logits are compared as integers with the same order: the bits of a non-negative float increase with its value, and the
bits of a negative float are inverted except for the sign. In 16 bits, 1.0 is 0x3f80 and stays; -1.0 is 0xbf80 and
becomes 0xc07f, which is less than 0xffff, the result for -0.0, which is then set to 0. Of equal logits, the lower
token comes first, as in argmax; NaN is above all numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.extending import register_jitable
from numpy.lib.stride_tricks import as_strided

GROUP = 32
#: Groups that are compared as a block first, because most blocks contain none of the best groups.
BLOCK = 16
LAST = 0x7FFFFFFF


def top_of_rows(
    logits: np.ndarray[Any, Any], k: int, peaks: np.ndarray[Any, Any] | None = None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The k best tokens of every row.

    Args:
        logits: (R, V), V >= k >= 1: float32, or int16 for the bits of bf16. Rows need not be adjacent.
        peaks: the largest logit of each group, (R, V / GROUP rounded up) float32, if known.

    Returns:
        tokens (R, k) int32, best first, and their logits minus the row's largest, (R, k) float32.
    """
    bits = logits.view(f"i{logits.itemsize}")
    rows, vocabulary = bits.shape
    ids, odds = np.empty((rows, k), np.int32), np.empty((rows, k), np.float32)
    if rows:
        width = bits.strides[0] // bits.itemsize
        # as_strided takes as long as the search of one row.
        flat = (
            bits[0] if rows == 1 else as_strided(bits, ((rows - 1) * width + vocabulary,), (bits.itemsize,))
        )
        known = np.empty((0, 0), np.int32) if peaks is None else peaks.view(np.int32)
        _search(flat, width, vocabulary, known, ids, odds)
    return ids, odds


@register_jitable(error_model="numpy", no_cfunc_wrapper=True)
def _insert(best: Any, value: int, number: int) -> None:
    """Insert (value, number) into ``best``, which holds the largest values in descending order.

    An entry is a 64-bit word: the value in the upper half and LAST - number in the lower, so that of two entries with
    equal values, the one with the lower number is larger.
    """
    key, i = np.int64(value) << 32 | (LAST - number), len(best) - 1
    if key > best[i]:
        while i > 0 and key > best[i - 1]:
            best[i] = best[i - 1]
            i -= 1
        best[i] = key


@njit(error_model="numpy", cache=True)
def _search(flat: Any, width: int, vocabulary: int, peaks: Any, ids: Any, odds: Any) -> None:
    lowest, rest, sign = np.iinfo(flat.dtype).min, np.iinfo(flat.dtype).max, flat.itemsize * 8 - 1
    rows, k = ids.shape
    groups, best, bits = np.empty(k, np.int64), np.empty(k, np.int64), np.empty(1, np.int32)
    count = (vocabulary + GROUP - 1) // GROUP
    order = np.full((count + BLOCK - 1) // BLOCK * BLOCK, lowest, flat.dtype)
    for row in range(rows):
        groups[:] = best[:] = np.iinfo(np.int64).min
        # Two loops without branches, so that they become vector instructions.
        if peaks.size:
            for group in range(count):
                value = flat.dtype.type(peaks[row, group] >> (31 - sign))
                value = flat.dtype.type(value ^ ((value >> sign) & rest))
                order[group] = 0 if value == -1 else value  # -0.0, which became -1, equals 0.0
        else:
            for group in range(count):
                peak = flat.dtype.type(lowest)
                start = row * width + group * GROUP
                for value in flat[start : start + min(GROUP, vocabulary - group * GROUP)]:
                    peak = max(peak, flat.dtype.type(value ^ ((value >> sign) & rest)))
                order[group] = 0 if peak == -1 else peak
        for start in range(0, count, BLOCK):
            peak = flat.dtype.type(lowest)
            for group in range(start, start + BLOCK):
                peak = max(peak, order[group])
            if peak > groups[k - 1] >> 32:  # of equal peaks, the lower group comes first
                for group in range(start, min(start + BLOCK, count)):
                    _insert(groups, order[group], group)
        bound = groups[k - 1] >> 32
        for chosen in groups:
            group = LAST - (chosen & LAST)
            for token in range(group * GROUP, min((group + 1) * GROUP, vocabulary)):
                value = flat[row * width + token]
                value = flat.dtype.type(value ^ ((value >> sign) & rest))
                value = flat.dtype.type(0) if value == -1 else value
                if value >= bound:
                    _insert(best, value, token)
        largest = np.float32(0)
        for index in range(k):
            value = np.int32(best[index] >> 32)
            value ^= (value >> 31) & np.int32(rest)
            bits[0] = value << 16 if sign == 15 else value
            number = bits.view(np.float32)[0]
            largest = number if index == 0 else largest
            ids[row, index] = LAST - (best[index] & LAST)
            odds[row, index] = number - largest
