"""One rank's part of a step: an inner target, and the accepted tokens whose KV rows it lacks.

A shard is parent-closed, so it has the first rows of an accepted path, and the rank lacks only the end of the path.
In the next step, the missing tokens are evaluated again, as a chain before the root, and committed with it. Example:
the path r c0 c1 was accepted, c0 and c1 are only in the shard of rank 1, and x is the next root:

    rank 0:   committed prefix, r          | c0 c1 | x | its shard below x        c0 and c1 are recomputed
    rank 1:   committed prefix, r, c0, c1  |         x | its shard below x

If the model does not allow this depth (its rotary frequencies change with the length), the missing tokens are
evaluated in separate passes first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..core import OutOfMemory, Scores, Target, TokenTree
from ..core.errors import first_line, summary
from ..core.target import best_or_nan
from .wire import Link, Message, RankError

_MODULUS = (1 << 61) - 1


@dataclass(slots=True)
class RankExecutor:
    """Evaluates one rank's shards. Every rank, rank 0 included, has one executor per target.

    Attributes:
        target: the inner target, which only this executor uses.
        missing: accepted tokens without KV rows, by slot.
        scores: scores of the last pass, one per sequence; the rows of missing tokens come first.
        checksum: checksum of all accepted tokens in order; equal on all ranks that agree.
    """

    target: Target
    missing: dict[int, list[int]] = field(default_factory=dict)
    scores: Sequence[Scores] = ()
    checksum: int = 1
    _trees: dict[int, TokenTree] = field(default_factory=dict)

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> Sequence[Scores]:
        # Recorded before the pass, which may run out of memory on one rank only: all ranks must agree on the tokens.
        for slot, prompt in prompts:
            self.missing[slot] = []
            self._update_checksum(slot, prompt)
        self.scores = self.target.prefill(prompts)
        return self.scores

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> Sequence[Scores]:
        """Evaluate one shard per slot, together with the slot's missing rows."""
        for slot, tree in trees:
            missing = self.missing[slot]
            while missing and len(missing) + max(tree.depths) > self.target.depth_limit(slot):
                self._recompute(slot)
        self.scores = self.target.forward([(slot, below(self.missing[slot], tree)) for slot, tree in trees])
        self._trees = dict(trees)
        return self.scores

    def commit(self, accepted: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Commit each slot's accepted tokens, root first, as far as the shard has their rows."""
        paths = []
        for slot, tokens in accepted:
            tree = self._trees.pop(slot)
            path = [0, *tree.chain(tokens[1:])]
            above = len(self.missing[slot])
            paths.append((slot, [*range(above), *(above + row for row in path)]))
            self.missing[slot] = list(tokens[len(path) :])
            self._update_checksum(slot, tokens)
        self.target.commit(paths)

    def release(self, slot: int) -> None:
        self.missing.pop(slot, None)
        self._trees.pop(slot, None)
        self.target.release(slot)

    def depth_limit(self, slot: int) -> int:
        """The remaining depth below the root, after the missing rows."""
        return max(0, self.target.depth_limit(slot) - len(self.missing[slot]))

    def positions_left(self, slot: int) -> int:
        """The remaining positions below the root, after the missing rows."""
        return max(0, self.target.positions_left(slot) - len(self.missing[slot]))

    def _recompute(self, slot: int) -> None:
        """Evaluate and commit as many missing tokens as one pass can hold."""
        missing = self.missing[slot]
        count = min(len(missing), self.target.depth_limit(slot) + 1)
        chain = TokenTree(missing[0])
        chain.add_candidate(missing[1:count])
        self.target.forward([(slot, chain)])
        self.target.commit([(slot, range(count))])
        del missing[:count]

    def _update_checksum(self, slot: int, tokens: Sequence[int]) -> None:
        value = self.checksum * 31 + slot + 1
        for token in tokens:
            # int(), because numpy's integers overflow
            value = (value * 1_000_003 + int(token) + 1) % _MODULUS
        self.checksum = value % _MODULUS


def below(missing: Sequence[int], shard: TokenTree) -> TokenTree:
    """The shard under a chain of missing tokens; its row i becomes row ``len(missing) + i``."""
    count = len(missing)
    if not count:
        return shard
    chain = range(-1, count)  # parents of the missing tokens and of the shard's root
    tree = TokenTree.of(
        [*missing, *shard.tokens], [*chain, *(count + parent for parent in shard.parents[1:])]
    )
    tree.needs_logits = [*[False] * count, *shard.needs_logits]
    return tree


def as_tensor(row: Any) -> torch.Tensor:
    """A row of logits as a tensor (V,); float64 if the target returns lists."""
    if isinstance(row, np.ndarray):
        return torch.from_numpy(row)
    return row if isinstance(row, torch.Tensor) else torch.tensor(row, dtype=torch.float64)


def as_lists(top: tuple[Any, Any], k: int) -> tuple[list[list[int]], list[list[float]]]:
    """The result of ``Scores.top`` as lists of at most ``k`` numbers per row."""
    ids, log_odds = (rows.tolist() if hasattr(rows, "tolist") else rows for rows in top)
    return [row[:k] for row in ids], [row[:k] for row in log_odds]


def serve(link: Link, make_target: Callable[[], Target]) -> None:
    """Execute rank 0's messages until it sends "stop".

    Raises:
        RankError: a rank failed, as reported by rank 0, or rank 0 died or hangs.
    """
    executors: dict[int, RankExecutor] = defaultdict(lambda: RankExecutor(make_target()))
    while (message := link.receive())["kind"] != "stop":
        if message["kind"] == "failed":
            raise RankError(message["rank"], message["text"])
        try:
            _execute(link, executors, message)
        except RankError:
            raise
        except BaseException as error:
            # Without an executor, which could not be made, the rank would have other tokens than rank 0 from here on.
            passes = message["kind"] in ("prefill", "forward") and message["target"] in executors
            if isinstance(error, OutOfMemory) and passes:
                link.send("no_memory", text=first_line(error))
                continue
            link.send("failed", text=summary(error))
            link.flush()
            raise


def _execute(link: Link, executors: dict[int, RankExecutor], message: Message) -> None:
    if message["kind"] == "heartbeat":
        return
    if message["kind"] == "retire":
        executors.pop(message["target"], None)
        return
    executor = executors[message["target"]]
    answer: dict[str, Any] = {}
    row = None
    match message["kind"]:
        case "commit":
            return executor.commit(message["accepted"])
        case "release":
            return executor.release(message["slot"])
        case "prefill":
            answer["best"] = [[best_or_nan(scores, 0)] for scores in executor.prefill(message["prompts"])]
        case "forward":
            trees = []
            for slot, tokens, parents, needs_logits in message["trees"]:
                trees.append((slot, TokenTree.of(tokens, parents)))
                trees[-1][1].needs_logits = needs_logits
            answer["best"] = []
            for scores, (slot, tree) in zip(executor.forward(trees), trees, strict=True):
                needed = [*[False] * len(executor.missing[slot]), *tree.needs_logits]
                answer["best"].append(
                    [best_or_nan(scores, node) if need else -1 for node, need in enumerate(needed)]
                )
        case "row":
            row = as_tensor(executor.scores[message["b"]].row(message["row"]))
        case "top":
            answer["top"] = as_lists(
                executor.scores[message["b"]].top(message["rows"], message["k"]), message["k"]
            )
        case kind:
            raise AssertionError(f"rank 0 sent {kind!r}, which is unknown")
    link.send("done", checksum=executor.checksum, **answer)
    if row is not None:
        link.send_row(row)
