"""Rank 0's end of lookahead parallelism: a target like any other, evaluated by R ranks.

Rank 0 alone drafts, verifies, samples, streams and prints, so all ranks agree by construction: the others evaluate
the shard they are sent, answer with the argmaxes of the rows they own, and keep the path they are told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ..core import LookaheadError, NumericalError, OutOfMemory, Scores, TokenTree
from .executor import RankExecutor, ShardScores, Top
from .rank_group import RankGroup
from .shard import Shards, shard
from .wire import DivergenceError, RankError, first_line

#: Largest relative distance (L2, over one row of logits) that counts as rounding. bfloat16: about three times
#: the largest that 30 layers showed between right evaluations of 1 to 64 rows (0.034); one wrong token in a cache
#: of 40 moved a row by 0.05 to 0.5, the last one by 0.2 or more. float16 rounds eight times finer.
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.0125}


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
            raise NumericalError(
                f"the logits of rank {self.rank} are NaN, so no token can be chosen; "
                "check the weights and the dtype (float16 overflows in some models)"
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

    def __init__(self, cut: Shards, parts: Sequence[ShardScores | RemoteScores]) -> None:
        self._parts = parts
        #: node -> (the owner's scores, its row there)
        self._at = {
            node: (part, row)
            for rank, part in enumerate(parts)
            for row, node in enumerate(cut.rows[rank])
            if cut.owner[node] == rank
        }

    def best(self, node: int) -> int:
        part, row = self._at[node]
        return part.best(row)

    def row(self, node: int) -> Any:
        part, row = self._at[node]
        return part.row(row)

    def top(self, nodes: Sequence[int], k: int) -> Top:
        found: dict[int, tuple[list[int], list[float]]] = {}
        for part in self._parts:
            owned = [node for node in nodes if self._at[node][0] is part]
            if owned:
                ids, log_odds = part.top([self._at[node][1] for node in owned], k)
                found.update(zip(owned, zip(ids, log_odds, strict=True), strict=True))
        return [found[node][0] for node in nodes], [found[node][1] for node in nodes]


class ParallelTarget:
    """A target whose trees are evaluated by all ranks of a group together. Fulfils ``lookahead.core.Target``.

    Attributes:
        path, reason, vocabulary: those of the inner targets.
        executor: rank 0's part.
        steps: forward passes so far.
        rows_per_rank: per step, the rows of each rank: its shards and the missing rows it recomputes.
    """

    def __init__(self, rank_group: RankGroup) -> None:
        self.rank_group = rank_group
        self.number = rank_group.register(self)
        inner = rank_group.make_target()
        self.path, self.reason, self.vocabulary = inner.path, inner.reason, inner.vocabulary
        self.executor = RankExecutor(inner)
        self.steps = 0
        self.rows_per_rank: list[list[int]] = []
        #: Per rank and slot, how many accepted rows it lacks.
        self._missing: list[dict[int, int]] = [{} for _ in range(rank_group.connections.size)]
        self._pending: dict[int, tuple[TokenTree, Shards]] = {}
        self._remote: list[list[RemoteScores]] = []

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Scores]:
        """Every rank evaluates the whole prompts; rank 0's logits count."""
        with self.rank_group.lock:
            packed = [(slot, list(prompt)) for slot, prompt in prompts]
            self.rank_group.broadcast("prefill", target=self.number, prompts=packed)
            scores = self._together(lambda: self.executor.prefill(prompts), whole=True)
            for missing in self._missing:
                missing.update((slot, 0) for slot, _ in prompts)
            return list(scores)

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        with self.rank_group.lock:
            ranks = range(self.rank_group.connections.size)
            cuts = [shard(tree, len(ranks), [lacks[slot] for lacks in self._missing]) for slot, tree in trees]
            both = list(zip(trees, cuts, strict=True))
            parts = [[(slot, cut.part(tree, rank)) for (slot, tree), cut in both] for rank in ranks]
            for rank in ranks[1:]:
                packed = [(slot, part.tokens, part.parents, part.needs_logits) for slot, part in parts[rank]]
                self.rank_group.send(rank, "forward", target=self.number, trees=packed)
            whole = self.steps % self.rank_group.check_every == 0
            self.steps += 1
            own = self._together(lambda: self.executor.forward(parts[0]), whole)
            self.rows_per_rank.append(
                [sum(len(part) + self._missing[rank][slot] for slot, part in parts[rank]) for rank in ranks]
            )
            self._pending.update((slot, (tree, cut)) for (slot, tree), cut in both)
            by_rank: list[Sequence[ShardScores | RemoteScores]] = [own, *self._remote]
            return [ParallelScores(cut, [one[b] for one in by_rank]) for b, cut in enumerate(cuts)]

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        accepted = []
        with self.rank_group.lock:
            for slot, path in paths:
                tree, cut = self._pending.pop(slot)
                accepted.append((slot, [tree.tokens[node] for node in path]))
                for missing, rows in zip(self._missing, cut.rows, strict=True):
                    missing[slot] = len(set(path).difference(rows))
            self.executor.commit(accepted)
            self.rank_group.broadcast("commit", target=self.number, accepted=accepted)

    def release(self, slot: int) -> None:
        with self.rank_group.lock:
            self._pending.pop(slot, None)
            self.executor.release(slot)
            # Where the group has failed this says so too: no caller may take its error for that of one sequence.
            self.rank_group.broadcast("release", target=self.number, slot=slot)

    def depth_limit(self, slot: int) -> int:
        return self.executor.depth_limit(slot)

    def _together(self, evaluate: Callable[[], list[ShardScores]], whole: bool) -> list[ShardScores]:
        """``evaluate`` rank 0's part, take the other ranks' answers, and see that all went well on all."""
        for one in chain.from_iterable(self._remote):
            one.expired = True
        own: list[ShardScores] = []
        problem: OutOfMemory | None = None
        try:
            own = evaluate()
        except OutOfMemory as error:
            problem = error
        except BaseException as error:
            self.rank_group.fail(RankError(0, f"rank 0 failed: {type(error).__name__}: {first_line(error)}"))
            raise
        answers = {rank: self.rank_group.receive(rank) for rank in self.rank_group.connections.links}
        for rank, answer in answers.items():
            if answer["kind"] == "no_memory":
                problem = problem or OutOfMemory(f"on rank {rank}: {answer['text']}")
            elif answer["checksum"] != self.executor.checksum:
                raise self._diverged(
                    rank,
                    f"holds other tokens than rank 0 after {self.steps} steps, so decoding cannot go on; "
                    "what was emitted until the step before is right",
                )
        if problem is not None:
            raise problem
        self._remote = [
            [
                RemoteScores(self.rank_group, rank, {"target": self.number, "b": b}, argmaxes, one)
                for b, (argmaxes, one) in enumerate(zip(answer["best"], own, strict=True))
            ]
            for rank, answer in answers.items()
        ]
        self._check_roots(own, whole)
        return own

    def _check_roots(self, own: list[ShardScores], whole: bool) -> None:
        """Compare the roots, which every rank evaluates; end the group where they differ by more than rounding.

        Where the argmaxes differ, or in any case if ``whole``, the whole rows tell a near tie from damage.
        """
        for scores in self._remote:
            for ours, theirs in zip(own, scores, strict=True):
                problem, a, b = "", ours.best_or_nan(0), theirs.argmaxes[0]
                if (a < 0) != (b < 0):  # NaN on both is an error where the row is read
                    problem = "NaN on one of them"
                elif a >= 0 and (whole or a != b):
                    problem = logits_differ(ours.row_tensor(0), theirs.row_tensor(0))
                if problem:
                    raise self._diverged(
                        theirs.rank,
                        f"computes other logits than rank 0 for the same token after {self.steps} steps "
                        f"({problem}): its cache or its weights are damaged, or its arithmetic differs",
                    )

    def _diverged(self, rank: int, text: str) -> RankError:
        return self.rank_group.fail(DivergenceError(rank, f"rank {rank} {text}"))


def logits_differ(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """What is wrong where two rows of logits, shape (V,), differ by more than rounding; "" where they do not.

    The distance is ``|a - b| / |a|`` over the whole row, each less its mean (a constant changes no probability):
    unlike the largest difference it does not grow with V.
    """
    a, b = ours.double(), theirs.double().to(ours.device)
    a, b = a - a.mean(), b - b.mean()
    distance = float((a - b).norm() / a.norm().clamp_min(1e-30))
    tolerance = TOLERANCE.get(ours.dtype, 0.1)
    if distance <= tolerance:  # not where it is NaN
        return ""
    return f"relative distance {distance:.2g}, {tolerance} is allowed for {str(ours.dtype).removeprefix('torch.')}"
