"""What decoding must know of any model, and how errors of a pass are reported. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..core import OutOfMemory
from ..core.errors import first_line

#: Maximum positions of a model without a limit: more than any text has.
NO_LIMIT = 1 << 30


class Limits:
    """What the library must know of any model to decode with it.

    Attributes:
        config: the text config.
        vocabulary: V, columns of the logits.
        max_positions: positions that the model was made for; ``NO_LIMIT`` where it has no limit.
        rope_type, rope_boundary: the rotary type that depends on the length, and the position from which it
            changes; ("", ``NO_LIMIT``) if none.
    """

    config: Any
    vocabulary: int
    max_positions: int
    rope_type: str = ""
    rope_boundary: int = NO_LIMIT


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Raise an allocator's failure as ``OutOfMemory``, to which the decoding loop answers with fewer rows.

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


def summary(error: BaseException) -> str:
    """An error's type and first line, for a reason of one line."""
    return f"{type(error).__name__}: {first_line(error, 160)}"
