"""Finds the strings of a header. Compiled, because a vocabulary and its merges are 300,000 strings."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from ..machine_code import entry, int64


@entry
def find_strings(data: Annotated[Any, np.uint8, 1], at: int, begins: Annotated[Any, np.int64, 1]) -> int:
    """Find consecutive strings, each with its length before it, in 8 bytes.

    Args:
        data: the beginning of a file.
        at: the position of the first length.
        begins: receives the positions of all lengths.

    Returns:
        the position after the last string; -1 if a string does not end within the data.
    """
    for index in range(len(begins)):
        begins[index] = at
        if len(data) - at < 8:
            return -1
        length = 0
        for n in range(8):
            length |= int64(data[at + n]) << (8 * n)
        at += 8
        if length < 0 or length > len(data) - at:
            return -1
        at += length
    return at
