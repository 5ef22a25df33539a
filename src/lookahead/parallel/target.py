"""Rank 0's end of lookahead parallelism: a target like any other, evaluated by R ranks.

Rank 0 alone drafts, verifies, samples, streams and prints, so all ranks agree by construction: the others evaluate
the shard they are sent, answer with the argmaxes of the rows they own, and keep the path they are told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from ..core import LookaheadError, NumericalError, OutOfMemory, Scores, TokenTree
from ..core.errors import first_line
from .executor import RankExecutor, as_lists, as_tensor, best_or_nan
from .rank_group import RankGroup
from .shard import Shards, shard
from .wire import DivergenceError, RankError

#: Steps between two comparisons of whole rows of logits; argmaxes are compared in every step.
CHECK_EVERY = 16


@dataclass(slots=True)
class RemoteScores:
    """A pass of another rank. Argmaxes came with the step; what else is asked of a row is fetched then.

    So one row of logits per emitted token travels where tokens are drawn, not the logits of all rows.

    Attributes:
        request: what requests name: ``target``, its number, and ``b``, the sequence in the step.
        argmaxes: of the pass's rows, -1 for NaN.
        like: gives a row of rank 0's pass, which is of the same type.
        expired: set by the target's next step, after which the rank no longer holds these logits.
    """

    rank_group: RankGroup
    rank: int
    request: dict[str, int]
    argmaxes: list[int]
    like: Callable[[], Any]
    expired: bool = False

    def best(self, node: int) -> int:
        if self.argmaxes[node] < 0:
            raise NumericalError(
                f"the logits of rank {self.rank} are NaN, so no token can be chosen; "
                "check the weights and the dtype (float16 overflows in some models)"
            )
        return self.argmaxes[node]

    def row(self, node: int) -> Any:
        like = self.like()
        with self.rank_group.lock:
            self._ask("row", row=node)
            row = self.rank_group.receive_row(self.rank, as_tensor(like))
        return row if isinstance(like, torch.Tensor) else row.tolist()

    def top(self, nodes: Sequence[int], k: int) -> Any:
        with self.rank_group.lock:
            return self._ask("top", rows=nodes, k=k)["top"]

    def _ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        if self.expired:
            raise LookaheadError("logits can be read until the next step only; read them before it")
        self.rank_group.send(self.rank, kind, **self.request, **fields)
        return self.rank_group.receive(self.rank)


class ParallelScores:
    """A whole tree: every row is asked of the rank that owns it.

    Args:
        parts: each rank's pass; its last rows are the rank's shard.
        above: per rank, rows of its pass above the shard.
    """

    def __init__(self, cut: Shards, parts: Sequence[Scores], above: Sequence[int]) -> None:
        self._parts = parts
        #: node -> (the owner's pass, its row there)
        self._at = {
            node: (part, above[rank] + row)
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

    def top(self, nodes: Sequence[int], k: int) -> tuple[list[list[int]], list[list[float]]]:
        found: dict[int, tuple[list[int], list[float]]] = {}
        for part in self._parts:
            owned = [node for node in nodes if self._at[node][0] is part]
            if owned:
                both = as_lists(part.top([self._at[node][1] for node in owned], k))
                found.update(zip(owned, zip(*both, strict=True), strict=True))
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

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> Sequence[Scores]:
        """Every rank evaluates the whole prompts; rank 0's logits count."""
        with self.rank_group.lock:
            packed = [(slot, list(prompt)) for slot, prompt in prompts]
            self.rank_group.broadcast("prefill", target=self.number, prompts=packed)
            for missing in self._missing:
                missing.update((slot, 0) for slot, _ in prompts)
            slots, roots = [slot for slot, _ in prompts], [[1] * len(prompts)] * len(self._missing)
            (own, *_), _ = self._together(lambda: self.executor.prefill(prompts), slots, roots, whole=True)
            return own

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        with self.rank_group.lock:
            ranks = range(self.rank_group.connections.size)
            cuts = [shard(tree, len(ranks), [lacks[slot] for lacks in self._missing]) for slot, tree in trees]
            both = list(zip(trees, cuts, strict=True))
            parts = [[(slot, cut.part(tree, rank)) for (slot, tree), cut in both] for rank in ranks]
            for rank in ranks[1:]:
                packed = [(slot, part.tokens, part.parents, part.needs_logits) for slot, part in parts[rank]]
                self.rank_group.send(rank, "forward", target=self.number, trees=packed)
            whole = self.steps % CHECK_EVERY == 0
            self.steps += 1
            slots, sizes = [slot for slot, _ in trees], [[len(part) for _, part in some] for some in parts]
            by_rank, above = self._together(lambda: self.executor.forward(parts[0]), slots, sizes, whole)
            self.rows_per_rank.append(
                [
                    sum(size) + sum(lacks[s] for s in slots)
                    for size, lacks in zip(sizes, self._missing, strict=True)
                ]
            )
            self._pending.update((slot, (tree, cut)) for (slot, tree), cut in both)
            return [
                ParallelScores(cut, [passes[b] for passes in by_rank], [rows[b] for rows in above])
                for b, cut in enumerate(cuts)
            ]

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

    def _together(
        self,
        evaluate: Callable[[], Sequence[Scores]],
        slots: Sequence[int],
        sizes: list[list[int]],
        whole: bool,
    ) -> tuple[list[Sequence[Scores]], list[list[int]]]:
        """``evaluate`` rank 0's part, take the other ranks' answers, and see that all went well on all.

        Args:
            sizes: per rank and sequence, the rows of the shard.
            whole: compare whole rows of logits.

        Returns:
            per rank and sequence, the pass, and how many missing rows it has above the shard.
        """
        for one in chain.from_iterable(self._remote):
            one.expired = True
        own: Sequence[Scores] = []
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
        above = [[len(self.executor.missing[slot]) for slot in slots]]
        self._remote = []
        for (rank, answer), rows in zip(answers.items(), sizes[1:], strict=True):
            # Fewer than rank 0 knows of where it recomputed some in a pass of their own.
            above.append([len(best) - size for best, size in zip(answer["best"], rows, strict=True)])
            passes = []
            for b, best in enumerate(answer["best"]):
                request = {"target": self.number, "b": b}
                passes.append(
                    RemoteScores(self.rank_group, rank, request, best, partial(own[b].row, above[0][b]))
                )
                self._check_root(own[b], passes[b], above[0][b], above[rank][b], whole)
            self._remote.append(passes)
        return [own, *self._remote], above

    def _check_root(self, own: Scores, remote: RemoteScores, row: int, root: int, whole: bool) -> None:
        """Compare the root, which every rank evaluates; end the group where it differs by more than rounding.

        Where the argmaxes differ, or in any case if ``whole``, the whole rows tell a near tie from damage.
        """
        problem, a, b = "", best_or_nan(own, row), remote.argmaxes[root]
        if (a < 0) != (b < 0):  # NaN on both is an error where the row is read
            problem = "NaN on one of them"
        elif a >= 0 and (whole or a != b):
            problem = self.rank_group.differ(as_tensor(own.row(row)), as_tensor(remote.row(root)))
        if problem:
            raise self._diverged(
                remote.rank,
                f"computes other logits than rank 0 for the same token after {self.steps} steps "
                f"({problem}): its cache or its weights are damaged, or its arithmetic differs",
            )

    def _diverged(self, rank: int, text: str) -> RankError:
        return self.rank_group.fail(DivergenceError(rank, f"rank {rank} {text}"))
