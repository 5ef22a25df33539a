"""Detects out-of-memory errors of allocators, after which the decoding loop retries with fewer rows."""

from __future__ import annotations

from .errors import OutOfMemory

#: Substrings of out-of-memory errors from allocators and CUDA libraries.
NO_MEMORY = ("can't allocate memory", "out of memory", "status_alloc_failed")


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error means that memory ran out, on the host or on a device."""
    text = str(error).lower()
    allocator = isinstance(error, RuntimeError) and any(part in text for part in NO_MEMORY)
    return allocator or isinstance(error, MemoryError)


class memory_errors:
    """``with memory_errors("a pass"):`` an allocation error becomes ``OutOfMemory``, after which the decoding loop
    retries with fewer rows.

    A class rather than a generator for speed, like ``core.stats.timed``.

    Args:
        what: the name of the pass or copy in the message.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, (MemoryError, RuntimeError)):
            return
        if not isinstance(error, OutOfMemory) and out_of_memory(error):
            raise OutOfMemory(
                f"{self._what} did not fit in memory; use a shorter prompt, fewer sequences, "
                "a smaller dtype, or a smaller (W, N, G)"
            ) from error
