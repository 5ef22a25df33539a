"""Memory for logits that is used again: fresh pages cost more than filling them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

Buffer = np.ndarray[Any, np.dtype[np.uint8]]


class BufferPool:
    """Owns the buffers that nobody uses; whoever acquires one owns it until it is released.

    Args:
        most: free buffers that are kept; the smallest goes where there are more.
    """

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._free: list[Buffer] = []
        self._lock = threading.Lock()

    def acquire(self, size: int) -> Buffer:
        """At least ``size`` bytes, uint8, of any contents: the smallest free buffer that fits, or a new one."""
        with self._lock:
            fitting = [i for i, buffer in enumerate(self._free) if len(buffer) >= size]
            if fitting:
                return self._free.pop(min(fitting, key=lambda i: len(self._free[i])))
        return np.empty(1 << max(0, size - 1).bit_length(), np.uint8)

    def release(self, buffer: Buffer) -> None:
        """Give a buffer back; its owner must not touch it any more."""
        with self._lock:
            self._free.append(buffer)
            if len(self._free) > self._most:
                self._free.sort(key=len, reverse=True)
                self._free.pop()
