"""The smallest target: a function of the true prefix, in plain Python."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable
from itertools import pairwise

from .errors import NumericalError, OutOfMemory
from .target import Target
from .tree import TokenTree


def repetitive_text(vocabulary: int, seed: int = 0, order: int = 2) -> Callable[[abc.Sequence[int]], int]:
    """A deterministic next-token function of the last ``order`` tokens, with patterns that drafters can learn."""

    def next_token(prefix: abc.Sequence[int]) -> int:
        state = seed
        for token in prefix[-order:]:
            state = (state * 1_000_003 + token * 7919 + 12345) & 0x7FFFFFFF
        # In four of five cases, the next token is the last one plus 1, which n-gram methods can learn.
        if state % 5:
            return (prefix[-1] + 1) % vocabulary
        return (state >> 8) % vocabulary

    return next_token


class FakeScores:
    """The logits of one tree, computed row by row when they are read."""

    def __init__(self, target: FakeTarget, prefix: abc.Sequence[int], tree: TokenTree) -> None:
        self._target = target
        self._prefix = list(prefix)
        self._tree = tree

    def _context(self, node: int) -> list[int]:
        if not self._tree.needs_logits[node]:
            raise AssertionError(f"row {node} was read, but not marked as needing logits")
        return self._prefix + self._tree.path_tokens(node)

    def best(self, node: int) -> int:
        token = self._target.next_token(self._context(node))
        if token < 0:
            raise NumericalError("the logits are NaN")
        return token

    def row(self, node: int) -> list[float]:
        """Logits (V,): 2 for the best token, and a fixed pattern between -1 and 1 for the others; or all NaN."""
        best = self._target.next_token(self._context(node))
        if best < 0:
            return [math.nan] * self._target.vocabulary
        return [2.0 if t == best else math.sin(t * 12.9898 + best) for t in range(self._target.vocabulary)]

    def top(self, nodes: abc.Sequence[int], k: int) -> tuple[list[list[int]], list[list[float]]]:
        """The k best tokens of each row, and their logits minus the row's largest."""
        rows = [self.row(node) for node in nodes]
        ids = [sorted(range(len(row)), key=row.__getitem__, reverse=True)[:k] for row in rows]
        odds = [[row[t] - row[best[0]] for t in best] for row, best in zip(rows, ids, strict=True)]
        return ids, odds

    def hidden(self, node: int) -> None:
        """None, since a function of the prefix has no hidden states."""


class FakeTarget(Target):
    """A target in plain Python: the next token is a function of the true prefix.

    It checks that callers follow the protocol: free slots, paths from the root, and trees within the depth limit.

    Args:
        vocabulary: V.
        next_token: prefix -> token; a negative token stands for NaN logits.
        max_positions: length of the longest sequence, which limits the depth of trees.
        max_rows: a step with a larger tree raises OutOfMemory.
    """

    path = "fake"
    guarantee = ""
    reason = "a function of the prefix"

    def __init__(
        self,
        vocabulary: int = 32,
        next_token: Callable[[abc.Sequence[int]], int] | None = None,
        max_positions: int = 1 << 20,
        max_rows: int = 1 << 20,
    ) -> None:
        self.vocabulary = vocabulary
        self.next_token = next_token if next_token is not None else repetitive_text(vocabulary)
        self.max_positions = max_positions
        self.max_rows = max_rows
        self.forwards = 0
        self.committed: dict[int, list[int]] = {}
        self._pending: dict[int, TokenTree] = {}

    def prefill(self, prompts: abc.Sequence[tuple[int, abc.Sequence[int]]]) -> list[FakeScores]:
        scores = []
        for slot, prompt in prompts:
            if slot in self.committed:
                raise AssertionError(f"slot {slot} is taken")
            self.committed[slot] = list(prompt)
            scores.append(FakeScores(self, prompt[:-1], TokenTree(prompt[-1])))
        return scores

    def forward(self, trees: abc.Sequence[tuple[int, TokenTree]]) -> list[FakeScores]:
        if max(len(tree) for _, tree in trees) > self.max_rows:
            raise OutOfMemory(f"{max(len(t) for _, t in trees)} rows do not fit")
        self.forwards += 1
        scores = []
        for slot, tree in trees:
            if max(tree.depths) > self.depth_limit(slot):
                raise AssertionError(f"depth {max(tree.depths)} is over {self.depth_limit(slot)}")
            self._pending[slot] = tree
            scores.append(FakeScores(self, self.committed[slot], tree))
        return scores

    def commit(self, paths: abc.Sequence[tuple[int, abc.Sequence[int]]]) -> None:
        for slot, path in paths:
            tree = self._pending.pop(slot)
            if path[0] != 0 or any(tree.parents[b] != a for a, b in pairwise(path)):
                raise AssertionError(f"not a path from the root: {list(path)}")
            self.committed[slot] += [tree.tokens[node] for node in path]

    def release(self, slot: int) -> None:
        self._pending.pop(slot, None)
        del self.committed[slot]

    def depth_limit(self, slot: int) -> int:
        return max(0, self.max_positions - 1 - len(self.committed[slot]))
