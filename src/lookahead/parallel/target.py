"""Rank 0's end of lookahead parallelism: a target like any other, spread over R ranks.

Rank 0 alone drafts, verifies, samples, streams and prints. So all ranks agree by construction: the others
evaluate the shard that they are sent and keep the path that they are told. A step is

    rank 0 -> rank r   the shard of each tree: token, parent, read flag of every row
    all                one forward pass, with no communication inside
    rank r -> rank 0   the argmax of every row that it owns, and a checksum
    rank 0 -> rank r   the path; what the rank lacks of it comes as tokens (its debt)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..core import OutOfMemory, Scores, TokenTree
from .errors import DivergenceError, RankError
from .scores import ParallelScores
from .shard import Shards, shard
from .share import Share, best_or_nan, sketch
from .team import Team
from .wire import Kind, Status, pack_lists, pack_tree, unpack_floats, unpack_text

#: Largest tolerated difference of the root's logits between ranks, in their standard deviations.
TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}


class ParallelTarget:
    """A target whose trees are evaluated by all ranks together. Fulfils ``lookahead.core.Target``.

    Made by ``Team.target``. What the inner target knows beside the protocol (``vocabulary``, ``facts``, ...)
    can be read here too.

    Attributes:
        steps: forward passes so far.
        rows_per_rank: per step, the rows of each rank: its shards and its debts.
    """

    def __init__(self, team: Team, number: int) -> None:
        self.team = team
        self.number = number
        self.inner = team.make_target()
        self.share = Share(self.inner)
        self.steps = 0
        self.rows_per_rank: list[list[int]] = []
        self._debts: list[dict[int, int]] = [{} for _ in range(team.group.size)]
        self._pending: dict[int, tuple[TokenTree, Shards]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Scores]:
        """Every rank evaluates the whole prompts; rank 0's logits count."""
        with self.team.lock:
            lists = pack_lists([[slot, *prompt] for slot, prompt in prompts])
            self.team.tell_all(Kind.PREFILL, self.number, lists)
            scores, _ = self._together(lambda: (self.share.prefill(prompts), [0] * len(prompts)), check=True)
            for debts in self._debts:
                debts.update((slot, 0) for slot, _ in prompts)
            return scores[0]

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        with self.team.lock:
            team, ranks = self.team, range(self.team.group.size)
            cuts = [shard(tree, len(ranks), [debts[slot] for debts in self._debts]) for slot, tree in trees]
            both = list(zip(trees, cuts, strict=True))
            check = self.steps % team.check_every == 0
            for rank in team.group.links:
                lists = [[slot, *pack_tree(_part(tree, cut, rank))] for (slot, tree), cut in both]
                team.tell(rank, Kind.FORWARD, self.number, [int(check), *pack_lists(lists)])
            self.steps += 1
            own = [(slot, _part(tree, cut, 0)) for (slot, tree), cut in both]
            (scores, offsets), answers = self._together(lambda: self.share.forward(own), check)
            self._pending.update((slot, (tree, cut)) for (slot, tree), cut in both)
            self.rows_per_rank.append(
                [sum(len(cut.rows[r]) + self._debts[r][slot] for (slot, _), cut in both) for r in ranks]
            )
            views = []
            for b, cut in enumerate(cuts):
                counts = {rank: 1 + cut.owner.count(rank) for rank in answers}
                tokens = {rank: answers[rank][: counts[rank]] for rank in answers}
                answers = {rank: answers[rank][counts[rank] :] for rank in answers}
                self._compare_roots(b, scores[b], offsets[b], tokens)
                views.append(ParallelScores(self, b, cut, scores[b], offsets[b], tokens))
            return views

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        with self.team.lock:
            pending = [(slot, path, *self._pending.pop(slot)) for slot, path in paths]
            for rank in range(self.team.group.size):
                orders = []
                for slot, path, tree, cut in pending:
                    row_in = {node: row for row, node in enumerate(cut.rows[rank])}
                    rows = [row_in[node] for node in path if node in row_in]
                    missing = [tree.tokens[node] for node in path[len(rows) :]]
                    self._debts[rank][slot] = len(missing)
                    orders.append((slot, rows, missing))
                if rank == 0:
                    self.share.commit(orders)
                else:
                    lists = [[slot, len(rows), *rows, *missing] for slot, rows, missing in orders]
                    self.team.tell(rank, Kind.COMMIT, self.number, pack_lists(lists))

    def release(self, slot: int) -> None:
        with self.team.lock:
            self._pending.pop(slot, None)
            self.share.release(slot)
            # A team that failed says so here too: no caller shall take its error for that of one sequence.
            self.team.tell_all(Kind.RELEASE, self.number, [slot])

    def depth_limit(self, slot: int) -> int:
        return self.share.depth_limit(slot)

    def hear_row(self, rank: int, like: torch.Tensor) -> torch.Tensor:
        """The row of logits that was asked of a rank."""
        self.team.hear(rank)
        try:
            return self.team.group.links[rank].receive_row(like)
        except RankError as error:
            raise self.team.fail(error) from error

    def _together(
        self, own: Callable[[], tuple[list[Scores], list[int]]], check: bool
    ) -> tuple[tuple[list[Scores], list[int]], dict[int, list[int]]]:
        """Do rank 0's part, take the other ranks' answers, and see that all went well on all."""
        memory: OutOfMemory | None = None
        result: tuple[list[Scores], list[int]] = ([], [])
        try:
            result = own()
        except OutOfMemory as error:
            memory = error
        except BaseException as error:
            first_line = (str(error).splitlines() or [""])[0][:200]
            self.team.fail(RankError(0, f"rank 0 failed: {type(error).__name__}: {first_line}"))
            raise
        answers = {}
        sketches: dict[int, list[float]] = {}
        for rank in self.team.group.links:
            status, checksum, count, *numbers = self.team.hear(rank)
            if status == Status.MEMORY:
                memory = memory or OutOfMemory(f"on rank {rank}: {unpack_text(numbers)}")
                continue
            answers[rank] = numbers[:count]
            sketches[rank] = unpack_floats(numbers[count:])
            if memory is None and checksum != self.share.checksum:
                raise self.team.fail(
                    DivergenceError(
                        rank,
                        f"rank {rank} holds other tokens than rank 0 after {self.steps} steps, so decoding "
                        "cannot go on; what was emitted until the step before is right",
                    )
                )
        if memory is not None:
            self.share.pay_all()
            self.team.tell_all(Kind.SETTLE, self.number, [self.share.checksum])
            for debts in self._debts:
                debts.update(dict.fromkeys(debts, 0))
            raise memory
        if check:
            self._compare(result, sketches)
        return result, answers

    def _compare(self, result: tuple[list[Scores], list[int]], sketches: dict[int, list[float]]) -> None:
        """The ranks' logits at the roots, which every rank evaluates, at a few places of the vocabulary."""
        ours = [value for scores, row in zip(*result, strict=True) for value in sketch(scores, row)]
        for rank, theirs in sketches.items():
            worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            if worst:
                self._judge(rank, worst, torch.as_tensor(result[0][0].row(result[1][0])))

    def _compare_roots(self, b: int, scores: Scores, row: int, tokens: dict[int, list[int]]) -> None:
        """The ranks' argmaxes at one root; where they differ, the whole rows tell a near tie from damage."""
        best = best_or_nan(scores, row)
        for rank, (theirs, *_) in tokens.items():
            if theirs == best:
                continue
            if min(theirs, best) < 0:
                self._judge(rank, float("inf"), torch.ones(2))
            ours = torch.as_tensor(scores.row(row))
            self.team.tell(rank, Kind.ROW, self.number, [b, 0])
            other = self.hear_row(rank, ours if torch.is_tensor(scores.row(row)) else ours.double())
            self._judge(rank, float((ours.double() - other.double()).abs().max()), ours)

    def _judge(self, rank: int, difference: float, row: torch.Tensor) -> None:
        """End the team where a difference of logits is more than rounding."""
        tolerance = TOLERANCE.get(str(row.dtype).removeprefix("torch."), 0.25)
        difference /= float(row.double().nan_to_num().std()) or 1.0
        if difference > tolerance:
            raise self.team.fail(
                DivergenceError(
                    rank,
                    f"rank {rank} computes other logits than rank 0 for the same token after {self.steps} "
                    f"steps (by {difference:.2g} standard deviations, {tolerance} are allowed): "
                    "its cache or its weights are damaged, or its arithmetic differs",
                )
            )


def _part(tree: TokenTree, cut: Shards, rank: int) -> TokenTree:
    """A rank's rows as a tree in which only its own rows are read (and the root, for the comparison)."""
    part = tree.subtree(cut.rows[rank])
    part.needs_logits = [row == 0 or cut.owner[node] == rank for row, node in enumerate(cut.rows[rank])]
    return part
