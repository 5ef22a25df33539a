"""The rows that each rank evaluates (paper, section 3.4 and figure 3). Works on trees, without tensors or processes.

A shard is a parent-closed set of rows, so a rank can evaluate it without the others. Example with 2 ranks: a window
with W = 3 and N = 3 (root r, level 0 a1 a2, level 1 b0 b1 b2) and a candidate c0 c1. Apart from the root, only the
newest level and the candidate need logits:

    r ─┬─ a1 ─┬─ a2 ── b2        branches, depth first:     b2: r a1 a2 b2     b1: r a1 b1
       │      └─ b1                                         b0: r b0           c1: r c0 c1
       ├─ b0
       └─ c0 ── c1               rank 0 (5 rows): r a1 a2 b2 b1     rank 1 (4 rows): r b0 c0 c1

Branches are assigned to ranks in this order, so that neighbours share their ancestors on one rank; every rank has the
root. Shards are balanced by rows, not by window columns, because column i has i more ancestors than column 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ..core import TokenTree


@dataclass(frozen=True, slots=True)
class Shards:
    """The rows of one tree by rank.

    Attributes:
        rows: for each rank, its rows in increasing order; the root is in every shard.
        owner: for each row, the rank whose logits are used; -1 if no logits are needed.
    """

    rows: list[list[int]]
    owner: list[int]

    def part(self, tree: TokenTree, rank: int) -> TokenTree:
        """A rank's rows as a tree. Only its own rows and the root, which rank 0 compares, need logits."""
        part = tree.subtree(self.rows[rank])
        part.needs_logits = [row == 0 or self.owner[node] == rank for row, node in enumerate(self.rows[rank])]
        return part

    @property
    def widest(self) -> int:
        """Number of rows in the largest shard, which takes longest."""
        return max(map(len, self.rows))


def shard(tree: TokenTree, ranks: int, extra: Sequence[int] | None = None) -> Shards:
    """Divide a tree into one shard per rank, so that the largest shard is as small as possible.

    Branches are assigned in depth-first order; bisection finds the smallest width of the largest shard for this
    order. If there are fewer branches than ranks, the remaining ranks get only the root.

    Args:
        tree: the rows of a step.
        ranks: R, at least 1.
        extra: additional rows that each rank must evaluate; 0 by default.
    """
    extra = extra if extra is not None else [0] * ranks
    branches = [tree.ancestors[node] for node in _branches(tree)]
    widths = range(1 + max(extra), len(tree) + max(extra) + 1)
    narrowest = bisect_left(widths, True, key=lambda width: bool(_deal(branches, width, extra)))
    owner = [-1] * len(tree)
    rows: list[list[int]] = []
    for rank, bits in enumerate(_deal(branches, widths[narrowest], extra)):
        rows.append([node for node in range(len(tree)) if bits >> node & 1])
        for node in rows[rank]:
            if tree.needs_logits[node] and owner[node] < 0:
                owner[node] = rank
    return Shards(rows, owner)


def _branches(tree: TokenTree) -> list[int]:
    """The rows that need logits and have no such row below them, in depth-first order; [root] if none."""
    below: list[list[int]] = [[] for _ in tree.tokens]
    needed = list(tree.needs_logits)
    for node in range(len(tree) - 1, 0, -1):
        if needed[node]:
            needed[tree.parents[node]] = True
            below[tree.parents[node]].append(node)
    order = []
    stack = [0]
    while stack:
        node = stack.pop()
        if not below[node]:
            order.append(node)
        stack.extend(below[node])  # in decreasing order, so the smallest row is popped first
    return order


def _deal(branches: Sequence[int], width: int, extra: Sequence[int]) -> list[int]:
    """For each rank, a set of rows as bits, with at most ``width`` rows including extra rows; [] with too few
    ranks."""
    result = [1] * len(extra)
    rank = 0
    for branch in branches:
        while (result[rank] | branch).bit_count() + extra[rank] > width:
            rank += 1
            if rank == len(extra):
                return []
        result[rank] |= branch
    return result
