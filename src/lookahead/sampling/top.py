"""The k best tokens of every row of logits in CPU memory.

The vocabulary is divided into groups of ``GROUP`` tokens. The k groups with the largest maxima contain the k best
tokens, so only these groups are searched token by token. Compiled passes compute the maxima and end with this search,
while the logits are still in the CPU cache; ``top_of_rows`` searches the logits of other passes.

Logits are compared as integers with the same order: the bits of a non-negative float increase with its value, and the
bits of a negative float are inverted except for the sign. In 16 bits, 1.0 is 0x3f80 and stays; -1.0 is 0xbf80 and
becomes 0xc07f, which is less than 0xffff, the result for -0.0, which is then set to 0. Ties go to the lower token, as
in argmax. The log-odds of a row that contains NaN are NaN.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..machine_code import compiled, entry, int64

GROUP = 32
#: Groups that are first compared as a block, because most blocks contain none of the best groups.
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
        # A single row needs no as_strided, which takes as long as the search of one row.
        flat = (
            bits[0] if rows == 1 else as_strided(bits, ((rows - 1) * width + vocabulary,), (bits.itemsize,))
        )
        known = np.empty(0, np.int32) if peaks is None else peaks.view(np.int32).reshape(-1)
        scratch = np.empty(scratch_words(vocabulary, k), np.int64)
        search = _search_16 if bits.itemsize == 2 else _search_32
        groups = 0 if peaks is None else peaks.shape[1]
        search(flat, width, vocabulary, known, groups, scratch, ids.reshape(-1), odds.reshape(-1), k)
    return ids, odds


def scratch_words(vocabulary: int, k: int) -> int:
    """Integers that a search needs, for the best groups, the best tokens, and the peaks of all groups."""
    return 2 * k + -(-vocabulary // GROUP) + BLOCK


@compiled
def _insert(best: Any, first: int, k: int, value: int, number: int) -> None:
    """Insert (value, number) into ``best[first : first + k]``, the largest entries in descending order.

    An entry is a 64-bit word: the value in the upper half and LAST - number in the lower, so that of two entries with
    equal values, the one with the lower number is larger.
    """
    entry = value << 32 | (LAST - number)
    i = first + k - 1
    if entry > best[i]:
        while i > first and entry > best[i - 1]:
            best[i] = best[i - 1]
            i -= 1
        best[i] = entry


@compiled
def _ordered(value: Any, sign: int, rest: int) -> Any:
    """The bits of a float as an integer with the same order; -0.0 becomes -1."""
    return value ^ ((value >> sign) & rest)


def search_row_of(kind: Any) -> Any:
    """Make the search of one row, for logits whose bits are ``kind``, np.int32 or np.int16.

    The search is (values, start, vocabulary, peaks, first, has_peaks, scratch, k, ids, odds, out). Everything that it
    reads or writes by index is an array of one dimension or a pointer:

        values      the bits of all logits; the row's are values[start : start + vocabulary]
        peaks       the bits of the largest logit of each group, from ``first`` on, if ``has_peaks``
        scratch     ``scratch_words`` integers
        ids, odds   receive the k best tokens, and their logits minus the row's largest, from ``out`` on
    """
    sign = 8 * np.dtype(kind).itemsize - 1
    lowest, rest = -(1 << sign), (1 << sign) - 1
    infinity = 0x7F800000 >> (31 - sign)

    def search_row(
        values: Any,
        start: int,
        vocabulary: int,
        peaks: Any,
        first: int,
        has_peaks: bool,
        scratch: Any,
        k: int,
        ids: Any,
        odds: Any,
        out: int,
    ) -> None:
        count = (vocabulary + GROUP - 1) // GROUP
        order = 2 * k
        for i in range(order):
            scratch[i] = -(1 << 63)
        # 1. The largest number of each group. The loops have no branches, so that they become vector instructions.
        if has_peaks:
            for group in range(count):
                peak = kind(_ordered(kind(peaks[first + group] >> (31 - sign)), sign, rest))
                scratch[order + group] = 0 if peak == -1 else peak  # -0.0, which became -1, equals 0.0
        else:
            for group in range(count):
                peak, least = kind(lowest), kind(0)
                begin = start + group * GROUP
                for i in range(begin, begin + min(GROUP, vocabulary - group * GROUP)):
                    number = kind(_ordered(values[i], sign, rest))
                    peak, least = max(peak, number), min(least, number)
                peak = (
                    kind(rest) if least < ~infinity else peak
                )  # less than -inf: a NaN whose sign bit is set
                scratch[order + group] = 0 if peak == -1 else peak
        for group in range(count, count + BLOCK):
            scratch[order + group] = lowest
        # 2. The k groups with the largest numbers. Most blocks of groups have none of them.
        for block in range(0, count, BLOCK):
            peak = scratch[order + block]
            for group in range(block + 1, block + BLOCK):
                peak = max(peak, scratch[order + group])
            if peak > scratch[k - 1] >> 32:  # ties go to the lower group
                for group in range(block, min(block + BLOCK, count)):
                    _insert(scratch, 0, k, scratch[order + group], group)
        # 3. The k best tokens of these groups. No token may reach the bound of a NaN whose sign bit is set.
        has_nan = scratch[0] >> 32 > infinity
        bound = lowest if has_nan else scratch[k - 1] >> 32
        for i in range(k):
            group = LAST - (scratch[i] & LAST)
            for token in range(group * GROUP, min((group + 1) * GROUP, vocabulary)):
                value = kind(_ordered(values[start + token], sign, rest))
                value = kind(0) if value == -1 else value
                if value >= bound:
                    _insert(scratch, k, k, int64(value), token)
        # 4. Back to floats. The largest of a row with a NaN is NaN.
        largest = np.float32(np.nan)
        for i in range(k):
            best = scratch[k + i]
            bits = np.int32(_ordered(best >> 32, 63, rest))
            number = np.int32(bits << 16 if sign == 15 else bits).view(np.float32)
            largest = number if i == 0 and not has_nan else largest
            ids[out + i] = LAST - (best & LAST)
            odds[out + i] = number - largest

    return compiled(search_row, f"_{sign + 1}")


def _search_of(kind: Any) -> Any:
    search_row = search_row_of(kind)

    def search(
        values: Any,
        width: int,
        vocabulary: int,
        peaks: Annotated[Any, "i4", 1],
        groups: int,
        scratch: Annotated[Any, "i8", 1],
        ids: Annotated[Any, "i4", 1],
        odds: Annotated[Any, "f4", 1],
        k: int,
    ) -> None:
        """Search all rows, which begin ``width`` numbers apart; their peaks begin ``groups`` apart."""
        for row in range(len(ids) // k):
            search_row(
                values,
                row * width,
                vocabulary,
                peaks,
                row * groups,
                len(peaks) > 0,
                scratch,
                k,
                ids,
                odds,
                row * k,
            )

    return entry(search, f"top_{8 * np.dtype(kind).itemsize}", values=Annotated[Any, kind, 1])


_search_32, _search_16 = _search_of(np.int32), _search_of(np.int16)
