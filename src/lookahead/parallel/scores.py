"""Logits of one tree: of this rank's shard, of another rank's, and of all shards together.

All three fulfil ``lookahead.core.Scores``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core import LookaheadError, NumericalError, Scores
from .rank_group import RankGroup
from .shard import Shards

Top = tuple[list[list[int]], list[list[float]]]


class ShardScores:
    """This rank's shard: row i of it is row ``offset + i`` of the pass, below missing rows."""

    def __init__(self, scores: Scores, offset: int) -> None:
        self._scores = scores
        self._offset = offset

    def best(self, node: int) -> int:
        return self._scores.best(self._offset + node)

    def best_or_nan(self, node: int) -> int:
        """The argmax, or -1 for NaN."""
        try:
            return self.best(node)
        except NumericalError:
            return -1

    def row(self, node: int) -> Any:
        return self._scores.row(self._offset + node)

    def row_tensor(self, node: int) -> torch.Tensor:
        """The logits under ``node``, shape (V,); float64 where the target gives lists."""
        row = self.row(node)
        return row if isinstance(row, torch.Tensor) else torch.tensor(row, dtype=torch.float64)

    def top(self, nodes: Sequence[int], k: int) -> Top:
        both = self._scores.top([self._offset + node for node in nodes], k)
        ids, log_odds = (rows.tolist() if hasattr(rows, "tolist") else rows for rows in both)
        return ids, log_odds


class RemoteScores:
    """Another rank's shard. Argmaxes came with the step; what else is asked of a row is fetched then.

    So one row of logits per emitted token travels where tokens are drawn, not the logits of all rows.

    Args:
        rank_group, rank: who has it.
        call: what a request names: the target's number, and ``b``, the sequence in the step.
        best: argmaxes by row of the shard, -1 for NaN.
        own: rank 0's shard, whose rows are of the same type.

    Attributes:
        expired: set by the target's next step, after which the rank no longer holds these logits.
    """

    def __init__(
        self, rank_group: RankGroup, rank: int, call: dict[str, int], best: dict[int, int], own: ShardScores
    ) -> None:
        self.rank = rank
        self.expired = False
        self._rank_group = rank_group
        self._call = call
        self._best = best
        self._own = own

    def best(self, node: int) -> int:
        if self._best[node] < 0:
            raise NumericalError(
                f"the logits of rank {self.rank} are NaN, so no token can be chosen; "
                "check the weights and the dtype (float16 overflows in some models)"
            )
        return self._best[node]

    def best_or_nan(self, node: int) -> int:
        return self._best[node]

    def row(self, node: int) -> Any:
        row = self.row_tensor(node)
        return row if isinstance(self._own.row(0), torch.Tensor) else row.tolist()

    def row_tensor(self, node: int) -> torch.Tensor:
        self._check()
        return self._rank_group.request_row(self.rank, self._own.row_tensor(0), row=node, **self._call)

    def top(self, nodes: Sequence[int], k: int) -> Top:
        self._check()
        answer = self._rank_group.request(self.rank, "top", rows=nodes, k=k, **self._call)
        return answer["ids"], answer["log_odds"]

    def _check(self) -> None:
        if self.expired:
            raise LookaheadError("logits can be read until the next step only; read them before it")


class ParallelScores:
    """A whole tree: every row is asked of the rank that owns it."""

    def __init__(self, shards: Shards, parts: Sequence[ShardScores | RemoteScores]) -> None:
        self._owner = shards.owner
        self._row_in = [{node: row for row, node in enumerate(rows)} for rows in shards.rows]
        self._parts = parts

    def best(self, node: int) -> int:
        rank = self._owner[node]
        return self._parts[rank].best(self._row_in[rank][node])

    def row(self, node: int) -> Any:
        rank = self._owner[node]
        return self._parts[rank].row(self._row_in[rank][node])

    def top(self, nodes: Sequence[int], k: int) -> Top:
        found: dict[int, tuple[list[int], list[float]]] = {}
        for rank in {self._owner[node] for node in nodes}:
            owned = [node for node in nodes if self._owner[node] == rank]
            ids, log_odds = self._parts[rank].top([self._row_in[rank][node] for node in owned], k)
            found.update(zip(owned, zip(ids, log_odds, strict=True), strict=True))
        return [found[node][0] for node in nodes], [found[node][1] for node in nodes]
