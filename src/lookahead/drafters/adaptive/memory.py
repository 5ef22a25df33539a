"""``Memory``: all arrays that the compiled code of one sequence reads and writes.

Compiled functions take the whole ``Memory`` and a row number; those that Python calls get
``machine_code.pack(memory)``. ``sequence`` allocates it; each source allocates and enlarges its own arrays.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from .layout import BUCKET, STEP, Tree
from .sources import SOURCES

ARRAYS: Any = tuple[tuple(source.Arrays for source in SOURCES)]  # type: ignore[misc]


class Memory(NamedTuple):
    """Everything that ``grow_tree`` and ``learn`` read and write."""

    tree: Tree
    sources: ARRAYS  # by number
    on: Annotated[Any, "i8", 1]  # (sources,): whether the sequence uses a source
    joint: Annotated[Any, BUCKET, 1]  # (kinds,): the buckets of the combination of sources
    step: Annotated[Any, STEP, 1]  # (1,) STEP
    # (rows + 1,): c(k), the cost of a step of k rows in plain steps; 1 for every k if the rows are fixed
    costs: Annotated[Any, "f8", 1]
    # (rows + 1,): the smallest cost per additional row, from k to any larger number
    slopes: Annotated[Any, "f8", 1]
    # (positions, V): Gumbel noise by position, stored at position modulo positions; empty unless ``BY_ARRAY``
    noise: Annotated[Any, "f4", 2]
    # (positions,): the position whose noise each entry contains; -1 for none
    noise_positions: Annotated[Any, "i8", 1]
    # (2 + 2 * rows,), set by ``grow_tree``: how many rows pay off, the number of rows, and each token and parent
    drafted: Annotated[Any, "i8", 1]
    path: Annotated[Any, "i8", 1]  # (rows,): the accepted rows of the last step
    tokens: Annotated[Any, "i8", 1]  # (rows,): the target's token under each of them
    # (rows,): the target's token under each row of the last step; filled in by ``learn``
    own: Annotated[Any, "i8", 1]
    credit: Annotated[Any, "i8", 1]  # accepted tokens by source; added to by ``learn``
