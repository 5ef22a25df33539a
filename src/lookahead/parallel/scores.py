"""Logits of a rank's own shard, of another rank's, and of the whole tree. All fulfil ``lookahead.core.Scores``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core import LookaheadError, NumericalError, Scores
from .rank_group import RankGroup
from .shard import Shards

Top = tuple[list[list[int]], list[list[float]]]


@dataclass(slots=True)
class ShardScores:
    """This rank's shard: its row i is row ``offset + i`` of the pass ``scores``, below missing rows."""

    scores: Scores
    offset: int

    def best(self, node: int) -> int:
        return self.scores.best(self.offset + node)

    def best_or_nan(self, node: int) -> int:
        """The argmax, or -1 for NaN."""
        try:
            return self.best(node)
        except NumericalError:
            return -1

    def row(self, node: int) -> Any:
        return self.scores.row(self.offset + node)

    def row_tensor(self, node: int) -> torch.Tensor:
        """The logits under ``node``, shape (V,); float64 where the target gives lists."""
        row = self.row(node)
        return row if isinstance(row, torch.Tensor) else torch.tensor(row, dtype=torch.float64)

    def top(self, nodes: Sequence[int], k: int) -> Top:
        both = self.scores.top([self.offset + node for node in nodes], k)
        ids, log_odds = (rows.tolist() if hasattr(rows, "tolist") else rows for rows in both)
        return ids, log_odds


@dataclass(slots=True)
class RemoteScores:
    """Another rank's shard. Argmaxes came with the step; what else is asked of a row is fetched then.

    So one row of logits per emitted token travels where tokens are drawn, not the logits of all rows.

    Attributes:
        request: what requests name: ``target``, its number, and ``b``, the sequence in the step.
        argmaxes: of the shard's rows, -1 for NaN.
        own: rank 0's shard, whose rows are of the same type.
        expired: set by the target's next step, after which the rank no longer holds these logits.
    """

    rank_group: RankGroup
    rank: int
    request: dict[str, int]
    argmaxes: list[int]
    own: ShardScores
    expired: bool = False

    def best(self, node: int) -> int:
        if self.argmaxes[node] < 0:
            what = f"the logits of rank {self.rank} are NaN, so no token can be chosen"
            raise NumericalError(
                f"{what}; check the weights and the dtype (float16 overflows in some models)"
            )
        return self.argmaxes[node]

    def row(self, node: int) -> Any:
        row = self.row_tensor(node)
        return row if isinstance(self.own.row(0), torch.Tensor) else row.tolist()

    def row_tensor(self, node: int) -> torch.Tensor:
        with self.rank_group.lock:
            self._ask("row", row=node)
            return self.rank_group.receive_row(self.rank, self.own.row_tensor(0))

    def top(self, nodes: Sequence[int], k: int) -> Top:
        with self.rank_group.lock:
            answer = self._ask("top", rows=nodes, k=k)
        return answer["ids"], answer["log_odds"]

    def _ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        if self.expired:
            raise LookaheadError("logits can be read until the next step only; read them before it")
        self.rank_group.send(self.rank, kind, **self.request, **fields)
        return self.rank_group.receive(self.rank)


class ParallelScores:
    """A whole tree: every row is asked of the rank that owns it."""

    def __init__(self, shards: Shards, parts: Sequence[ShardScores | RemoteScores]) -> None:
        self.owner = shards.owner
        self._row_in = [{node: row for row, node in enumerate(rows)} for rows in shards.rows]
        self._parts = parts

    def best(self, node: int) -> int:
        rank = self.owner[node]
        return self._parts[rank].best(self._row_in[rank][node])

    def row(self, node: int) -> Any:
        rank = self.owner[node]
        return self._parts[rank].row(self._row_in[rank][node])

    def top(self, nodes: Sequence[int], k: int) -> Top:
        found: dict[int, tuple[list[int], list[float]]] = {}
        for rank in {self.owner[node] for node in nodes}:
            owned = [node for node in nodes if self.owner[node] == rank]
            ids, log_odds = self._parts[rank].top([self._row_in[rank][node] for node in owned], k)
            found.update(zip(owned, zip(ids, log_odds, strict=True), strict=True))
        return [found[node][0] for node in nodes], [found[node][1] for node in nodes]
