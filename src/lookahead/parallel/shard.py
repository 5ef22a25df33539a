"""Which rows each rank evaluates (paper, section 3.4 and figure 3). Knows trees only: no tensor, no process.

A shard is a parent-closed set of rows, so a rank can evaluate it with no word from the others. Shards are balanced
by rows and not by columns of the window: column i hangs under i other nodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ..core import TokenTree


@dataclass(frozen=True, slots=True)
class Shards:
    """One tree's rows by rank.

    Attributes:
        rows: per rank, its rows in row order; the root is in every shard.
        owner: per row, the rank whose logits count; -1 where no logits are needed.
    """

    rows: list[list[int]]
    owner: list[int]

    def part(self, tree: TokenTree, rank: int) -> TokenTree:
        """A rank's rows as a tree in which only its own rows need logits, and the root, for the comparison."""
        part = tree.subtree(self.rows[rank])
        part.needs_logits = [row == 0 or self.owner[node] == rank for row, node in enumerate(self.rows[rank])]
        return part

    @property
    def widest(self) -> int:
        """Rows of the largest shard: what the step waits for."""
        return max(map(len, self.rows))


def shard(tree: TokenTree, ranks: int, extra: Sequence[int] | None = None) -> Shards:
    """Cut a tree into one shard per rank, the widest as narrow as it can be.

    The branches are taken depth first, so that neighbours share their ancestors, and dealt out in that order; a
    bisection over the width of the widest shard finds the best cut of this order. With fewer branches than ranks,
    the ranks left over get the root alone.

    Args:
        tree: the rows of a step.
        ranks: at least 1.
        extra: rows that each rank has to evaluate besides; none by default.
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
    """Rows that need logits and have no such row below them, depth first; the root where it is the only one."""
    below: list[list[int]] = [[] for _ in tree.tokens]
    wanted = list(tree.needs_logits)
    for node in range(len(tree) - 1, 0, -1):
        if wanted[node]:
            wanted[tree.parents[node]] = True
            below[tree.parents[node]].append(node)
    order = []
    stack = [0]
    while stack:
        node = stack.pop()
        if not below[node]:
            order.append(node)
        stack.extend(below[node])  # the last row first, so the first row is popped first
    return order


def _deal(branches: Sequence[int], width: int, extra: Sequence[int]) -> list[int]:
    """Row sets (as bits) of at most ``width`` rows, extra ones included; [] where they do not suffice."""
    result = [1] * len(extra)
    rank = 0
    for branch in branches:
        while (result[rank] | branch).bit_count() + extra[rank] > width:
            rank += 1
            if rank == len(extra):
                return []
        result[rank] |= branch
    return result
