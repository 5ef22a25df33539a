"""What Python calls, compiled once and kept on disk.

Numba's cache looks at the file of the function that is called, and at what that closes over, but at nothing that
it calls or reads. So every function here closes over a stamp of all files that it is made of.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numba
from numba import njit

from . import learning, memory, trees, tries

#: Twins that constants come from.
TWINS = ("calibration", "grow", "logits", "observe", "suffix")


def _stamp() -> int:
    """Changes with the text of any file of this folder and of the twins."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in (*sorted(here.glob("*.py")), *(here.parent / f"{name}.py" for name in TWINS)):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7], "little")


def _entries(stamp: int) -> tuple[Any, ...]:
    code = njit(error_model="numpy", cache=True)

    @code
    def grow(grower: int, fresh: bool) -> int:
        """Grow a tree, or go on growing it. Returns DONE, or the depth whose noise must be handed in first."""
        if grower == stamp:  # never so, here and below: the stamp is there to name the code on disk
            return 0
        return trees.grow(grower, fresh)

    @code
    def adopt(grower: int, own: int, count: int) -> None:
        """Rows from ``own`` on were added by others: tokens, parents and depths are in place already."""
        if grower != stamp:
            trees.adopt(grower, own, count)

    @code
    def study(grower: int) -> None:
        """Learn all that a step can teach: judge the proposals, keep every row, place the answers."""
        if grower != stamp:
            learning.study(grower)

    @code
    def keep(ngrams: int, keys: int, tokens: int, count: int) -> None:
        """Two tokens (a key) were followed by a token in the window; there must be room for all of them."""
        if ngrams != stamp:
            learning.keep(ngrams, keys, tokens, count)

    @code
    def feed(reader: int, tokens: int, count: int) -> None:
        """The text goes on; the trie must have room for (order + 1) * count nodes more."""
        if reader != stamp:
            tries.feed(reader, tokens, count)

    @code
    def rehash(old: int, old_mask: int, new: int, new_mask: int, width: int) -> None:
        """Move all keys from one array of slots to another, empty one."""
        if old != stamp:
            memory.rehash(old, old_mask, new, new_mask, width)

    @code
    def enlist(table: int, count: int) -> None:
        """Enter the keys of the first ``count`` entries of a table, all different, into its empty slots."""
        if table != stamp:
            memory.enlist(table, count)

    return grow, adopt, study, keep, feed, rehash, enlist


grow, adopt, study, keep, feed, rehash, enlist = _entries(_stamp())

#: For reports.
VERSION = numba.__version__
