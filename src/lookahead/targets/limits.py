"""Limits of a model, and memory errors of its passes. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..core import OutOfMemory

#: The position limit of a model without one: more than any text has.
NO_LIMIT = 1 << 30


class Limits:
    """Properties of a model that every target needs.

    Attributes:
        config: the text config.
        vocabulary: V, the columns of the logits.
        max_positions: positions that the model was trained for; ``NO_LIMIT`` without a limit.
        rope_type, rope_boundary: the type of rotary positions whose frequencies depend on the length of the text, and
            the position at which they change; ("", ``NO_LIMIT``) if they do not change.
    """

    rope_type: str = ""
    rope_boundary: int = NO_LIMIT

    def __init__(self, config: Any, vocabulary: int, max_positions: int) -> None:
        self.config, self.vocabulary, self.max_positions = config, vocabulary, max_positions


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Turn an allocation error into ``OutOfMemory``, after which the decoding loop tries fewer rows.

    Args:
        what: what did not fit, for the message.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error).lower()
        from_allocator = "can't allocate memory" in text or "out of memory" in text
        if isinstance(error, OutOfMemory) or not (from_allocator or isinstance(error, MemoryError)):
            raise
        raise OutOfMemory(
            f"{what} did not fit in memory; use a shorter prompt, fewer sequences, "
            "a smaller dtype, or a smaller (W, N, G)"
        ) from error
