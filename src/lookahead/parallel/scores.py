"""One tree's logits, wherever they were computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..core import LookaheadError, NumericalError, Scores
from .shard import Shards
from .wire import Kind, unpack_floats

if TYPE_CHECKING:
    from .target import ParallelTarget


class ParallelScores:
    """Fulfils ``lookahead.core.Scores`` on rank 0.

    Argmaxes came with the step. What else is asked of a row that another rank holds is fetched then: one
    row of logits per emitted token where tokens are drawn, not the logits of all rows. It can be asked until
    the target's next step.

    Args:
        target: whose step this is.
        b: which sequence of the step.
        shards: who owns which row.
        own: rank 0's scores of its shard, whose row i is row ``offset + i``.
        answers: per rank, the argmaxes at the root and at the rows that it owns, in row order.
    """

    def __init__(
        self,
        target: ParallelTarget,
        b: int,
        shards: Shards,
        own: Scores,
        offset: int,
        answers: dict[int, list[int]],
    ) -> None:
        self._target = target
        self._step = target.steps
        self._b = b
        self._owner = shards.owner
        self._row_in = [{node: row for row, node in enumerate(rows)} for rows in shards.rows]
        self._own = own
        self._offset = offset
        self._rows: dict[int, Any] = {}
        self._best: dict[int, int] = {}
        for rank, tokens in answers.items():
            owned = [node for node, owner in enumerate(self._owner) if owner == rank]
            self._best.update(zip(owned, tokens[1:], strict=True))

    def best(self, node: int) -> int:
        if self._owner[node] == 0:
            return self._own.best(self._here(node))
        token = self._best[node]
        if token < 0:
            raise NumericalError(
                f"the logits of rank {self._owner[node]} are NaN, so no token can be chosen; "
                "check the weights and the dtype (float16 overflows in some models)"
            )
        return token

    def row(self, node: int) -> Any:
        rank = self._owner[node]
        if rank == 0:
            return self._own.row(self._here(node))
        if node not in self._rows:
            like = self._own.row(self._offset)  # rank 0 always has the root
            template = like if torch.is_tensor(like) else torch.tensor(like, dtype=torch.float64)
            with self._target.team.lock:
                self._ask(rank, Kind.ROW, [self._b, self._row_in[rank][node]])
                values = self._target.hear_row(rank, template)
            self._rows[node] = values if torch.is_tensor(like) else values.tolist()
        return self._rows[node]

    def top(self, nodes: Sequence[int], k: int) -> tuple[Any, Any]:
        by_rank: dict[int, list[int]] = {}
        for node in nodes:
            by_rank.setdefault(self._owner[node], []).append(node)
        ids: dict[int, Sequence[int]] = {}
        odds: dict[int, Sequence[float]] = {}
        with self._target.team.lock:
            for rank, owned in by_rank.items():
                rows = [self._row_in[rank][node] for node in owned]
                if rank == 0:
                    top = self._own.top([self._offset + row for row in rows], k)
                else:
                    top = self._top_of(rank, rows, k)
                ids.update(zip(owned, top[0], strict=True))
                odds.update(zip(owned, top[1], strict=True))
        if 0 in by_rank and not isinstance(ids[by_rank[0][0]], list):
            import numpy as np

            return np.array([ids[node] for node in nodes]), np.array([odds[node] for node in nodes])
        return [list(ids[node]) for node in nodes], [list(odds[node]) for node in nodes]

    def _here(self, node: int) -> int:
        return self._offset + self._row_in[0][node]

    def _top_of(self, rank: int, rows: list[int], k: int) -> tuple[list[list[int]], list[list[float]]]:
        self._ask(rank, Kind.TOP, [self._b, k, *rows])
        numbers = self._target.team.hear(rank)[3:]
        columns = numbers[0]
        half = 1 + columns * len(rows)
        ids, odds = numbers[1:half], unpack_floats(numbers[half:])
        starts = range(0, columns * len(rows), columns)
        return [ids[i : i + columns] for i in starts], [odds[i : i + columns] for i in starts]

    def _ask(self, rank: int, kind: Kind, numbers: list[int]) -> None:
        if self._step != self._target.steps:
            raise LookaheadError("logits can be read until the next step only; read them before it")
        self._target.team.tell(rank, kind, self._target.number, numbers)
