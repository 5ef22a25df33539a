"""Lookahead parallelism as seen from rank 0: a target like any other, evaluated by R ranks.

Only rank 0 drafts, verifies, samples, streams and prints. The other ranks evaluate the shards that they receive,
return the argmaxes of the rows that they own, and commit the paths that they receive, so all ranks agree by
construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from ..core import LookaheadError, NumericalError, OutOfMemory, Scores, Target, TokenTree
from ..core.target import adopt_properties, best_or_nan
from .executor import RankExecutor, as_lists, as_tensor
from .rank_group import RankGroup
from .shard import Shards, shard
from .wire import DivergenceError, RankError

#: Steps between comparisons of whole rows of logits; argmaxes are compared in every step.
CHECK_EVERY = 16


@dataclass(slots=True)
class RemoteScores:
    """The logits of another rank's pass.

    Argmaxes arrive with the step; a row of logits is fetched when it is read. So sampling transfers one row per
    emitted token instead of the logits of all rows.

    Attributes:
        rank_group, rank: where the logits are.
        request: fields of a request: ``target``, its number, and ``b``, the index of the sequence in the step.
        argmaxes: argmaxes of the pass's rows; -1 for NaN.
        like: returns a row of rank 0's pass, which has the same type and shape.
        expired: set by the target's next step, after which the rank no longer has these logits.
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
        with self._exchange():
            self._ask("row", row=node)
            row = self.rank_group.receive_row(self.rank, as_tensor(like))
        if isinstance(like, np.ndarray):
            return row.numpy()
        return row if isinstance(like, torch.Tensor) else row.tolist()

    def top(self, nodes: Sequence[int], k: int) -> Any:
        with self._exchange():
            return self._ask("top", rows=nodes, k=k)["top"]

    def hidden(self, node: int) -> None:
        """None, because hidden states stay on their rank."""

    def _exchange(self) -> AbstractContextManager[None]:
        if self.expired:
            raise LookaheadError("logits can only be read until the next step; read them earlier")
        return self.rank_group.exchange()

    def _ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        self.rank_group.send(self.rank, kind, **self.request, **fields)
        return self.rank_group.receive(self.rank)


class ParallelScores:
    """The scores of a whole tree, each row read from the rank that owns it. Implements ``lookahead.core.Scores``.

    Args:
        shards: the tree's shards.
        parts: each rank's pass; its last rows are the rank's shard.
        above: number of rows of each rank's pass before the shard.
    """

    def __init__(self, shards: Shards, parts: Sequence[Scores], above: Sequence[int]) -> None:
        self._parts = parts
        #: node -> (the owner's pass, its row in it)
        self._location = {
            node: (part, above[rank] + row)
            for rank, part in enumerate(parts)
            for row, node in enumerate(shards.rows[rank])
            if shards.owner[node] == rank
        }

    def best(self, node: int) -> int:
        part, row = self._location[node]
        return part.best(row)

    def row(self, node: int) -> Any:
        part, row = self._location[node]
        return part.row(row)

    def top(self, nodes: Sequence[int], k: int) -> tuple[list[list[int]], list[list[float]]]:
        by_node: dict[int, tuple[list[int], list[float]]] = {}
        for part in self._parts:
            owned = [node for node in nodes if self._location[node][0] is part]
            if owned:
                ids_and_odds = as_lists(part.top([self._location[node][1] for node in owned], k), k)
                by_node.update(zip(owned, zip(*ids_and_odds, strict=True), strict=True))
        return [by_node[node][0] for node in nodes], [by_node[node][1] for node in nodes]

    def hidden(self, node: int) -> None:
        """None: hidden states stay on their rank."""


class ParallelTarget(Target):
    """A target whose trees are evaluated by all ranks of a group. Its hidden states stay on their ranks.

    Args:
        rank_group: from ``join``.

    Attributes:
        path, reason, vocabulary, ...: those of the inner targets.
        attention: that of rank 0's inner target; None if it has none.
        ranks: number of ranks.
        executor: evaluates rank 0's shards.
        steps: number of forward passes so far.
    """

    path: str
    guarantee: str
    reason: str
    vocabulary: int

    def __init__(self, rank_group: RankGroup) -> None:
        self.rank_group = rank_group
        self.number = rank_group.register(self)
        inner = rank_group.make_target()
        adopt_properties(self, inner)
        self.gives_hidden = False
        self.attention = getattr(inner, "attention", None)
        self.ranks = rank_group.connections.size
        self.executor = RankExecutor(inner)
        self.steps = 0
        #: Number of accepted tokens whose KV rows the rank lacks, by rank and slot.
        self._missing: list[dict[int, int]] = [{} for _ in range(rank_group.connections.size)]
        self._pending: dict[int, tuple[TokenTree, Shards]] = {}
        self._remote: list[list[RemoteScores]] = []

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> Sequence[Scores]:
        """Every rank evaluates all prompts in full; rank 0's logits are used."""
        with self.rank_group.exchange():
            packed = [(slot, list(prompt)) for slot, prompt in prompts]
            self.rank_group.broadcast("prefill", target=self.number, prompts=packed)
            for missing in self._missing:
                missing.update((slot, 0) for slot, _ in prompts)
            slots = [slot for slot, _ in prompts]
            roots = [[1] * len(prompts)] * len(self._missing)
            (own, *_), _ = self._together(lambda: self.executor.prefill(prompts), slots, roots, whole=True)
            return own

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> list[Scores]:
        with self.rank_group.exchange():
            # Divide every tree, and send each rank its shards.
            ranks = range(self.rank_group.connections.size)
            shards = [
                shard(tree, len(ranks), [missing[slot] for missing in self._missing]) for slot, tree in trees
            ]
            pairs = list(zip(trees, shards, strict=True))
            parts = [[(slot, own.part(tree, rank)) for (slot, tree), own in pairs] for rank in ranks]
            for rank in ranks[1:]:
                packed = [(slot, part.tokens, part.parents, part.needs_logits) for slot, part in parts[rank]]
                self.rank_group.send(rank, "forward", target=self.number, trees=packed)
            # Evaluate, and compare whole rows of logits from time to time.
            whole = self.steps % CHECK_EVERY == 0
            self.steps += 1
            slots = [slot for slot, _ in trees]
            sizes = [[len(part) for _, part in some] for some in parts]
            by_rank, above = self._together(lambda: self.executor.forward(parts[0]), slots, sizes, whole)
            self._pending.update((slot, (tree, own)) for (slot, tree), own in pairs)
            return [
                ParallelScores(own, [passes[b] for passes in by_rank], [rows[b] for rows in above])
                for b, own in enumerate(shards)
            ]

    def commit(self, paths: Sequence[tuple[int, Sequence[int]]]) -> None:
        accepted = []
        with self.rank_group.exchange():
            for slot, path in paths:
                tree, shards = self._pending.pop(slot)
                accepted.append((slot, [tree.tokens[node] for node in path]))
                for missing, rows in zip(self._missing, shards.rows, strict=True):
                    missing[slot] = len(set(path).difference(rows))
            self.executor.commit(accepted)
            self.rank_group.broadcast("commit", target=self.number, accepted=accepted)

    def release(self, slot: int) -> None:
        with self.rank_group.exchange():
            self._pending.pop(slot, None)
            self.executor.release(slot)
            # If the group has failed, this raises too, so that its error is not mistaken for one sequence's.
            self.rank_group.broadcast("release", target=self.number, slot=slot)

    def depth_limit(self, slot: int) -> int:
        return self.executor.depth_limit(slot)

    def positions_left(self, slot: int) -> int:
        return self.executor.positions_left(slot)

    def _together(
        self,
        evaluate: Callable[[], Sequence[Scores]],
        slots: Sequence[int],
        sizes: list[list[int]],
        whole: bool,
    ) -> tuple[list[Sequence[Scores]], list[list[int]]]:
        """Evaluate rank 0's part, receive the other ranks' answers, and check that all ranks agree.

        Args:
            evaluate: rank 0's part.
            slots: the slots of the sequences.
            sizes: for each rank and sequence, the number of rows in the shard.
            whole: whether to compare whole rows of logits, not just argmaxes.

        Returns:
            for each rank and sequence, the pass, and the number of missing rows before the shard.
        """
        # Evaluate rank 0's part while the other ranks evaluate theirs. If memory runs out here, their answers must
        # still be received.
        for scores in chain.from_iterable(self._remote):
            scores.expired = True
        own: Sequence[Scores] = []
        problem: OutOfMemory | None = None
        try:
            own = evaluate()
        except OutOfMemory as error:
            problem = error
        # All ranks must have the same tokens.
        answers = {rank: self.rank_group.receive(rank) for rank in self.rank_group.connections.links}
        for rank, answer in answers.items():
            if answer["kind"] == "no_memory":
                problem = problem or OutOfMemory(f"on rank {rank}: {answer['text']}")
            elif answer["checksum"] != self.executor.checksum:
                raise self._diverged(
                    rank,
                    f"has other tokens than rank 0 after {self.steps} steps, so decoding cannot continue; "
                    "the output up to the previous step is correct",
                )
        if problem is not None:
            raise problem
        # Their passes, whose logits are fetched on request, and the comparison of the roots.
        above = [[len(self.executor.missing[slot]) for slot in slots]]
        self._remote = []
        for (rank, answer), rows in zip(answers.items(), sizes[1:], strict=True):
            # A rank that recomputed missing rows in a separate pass has fewer of them here.
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
        """Compare the root, which every rank evaluates. End the group if it differs by more than rounding.

        If the argmaxes differ, and always with ``whole``, whole rows are compared, which distinguishes a near tie
        from damage.
        """
        problem = ""
        a = best_or_nan(own, row)
        b = remote.argmaxes[root]
        if (a < 0) != (b < 0):  # NaN on both ranks raises an error when the row is read
            problem = "NaN on one of them"
        elif a >= 0 and (whole or a != b):
            problem = self.rank_group.differ(as_tensor(own.row(row)), as_tensor(remote.row(root)))
        if problem:
            raise self._diverged(
                remote.rank,
                f"computes different logits from rank 0 for the same token after {self.steps} steps "
                f"({problem}): its cache or its weights are damaged, or its arithmetic differs",
            )

    def _diverged(self, rank: int, text: str) -> RankError:
        return self.rank_group.fail(DivergenceError(rank, f"rank {rank} {text}"))
