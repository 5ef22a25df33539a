"""One rank's part: an inner target, and the tokens that it still owes its cache.

A rank that did not evaluate an accepted row has no keys and values for it. The rows of a path that a shard
holds are always its first ones (a shard is parent-closed), so what is missing is a chain at the end. These
tokens are the slot's debt: in the next step they stand as a chain above the root,

    committed prefix | debt ... debt | root | shard below the root

and are committed with it. Nothing but tokens ever travels for this. Where the model allows no such depth
(a rotary base that changes with the length), the debt is paid by passes of its own first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..core import NumericalError, OutOfMemory, Scores, Target, TokenTree

_MODULUS = (1 << 61) - 1


class Share:
    """What every rank does, rank 0 included.

    Args:
        target: the inner target; its slots are used by nobody else.

    Attributes:
        checksum: of all tokens committed or owed, in order; equal on all ranks that agree.
        rows: rows of the last pass, debts included.
        recomputed: debt rows evaluated so far.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.debt: dict[int, list[int]] = {}
        self.checksum = 1
        self.rows = 0
        self.recomputed = 0
        self._trees: dict[int, TokenTree] = {}

    def prefill(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> list[Scores]:
        scores = self.target.prefill(prompts)
        for slot, prompt in prompts:
            self.debt[slot] = []
            self._note(slot, prompt)
        return scores

    def forward(self, trees: Sequence[tuple[int, TokenTree]]) -> tuple[list[Scores], list[int]]:
        """Evaluate shards; row i of shard b is row ``offsets[b] + i`` of ``scores[b]``."""
        for slot, tree in trees:
            while self.debt[slot] and len(self.debt[slot]) + max(tree.depths) > self.target.depth_limit(slot):
                self._pay(slot, len(self.debt[slot]))
        planted = [(slot, _under(self.debt[slot], tree)) for slot, tree in trees]
        scores = self.target.forward(planted)
        self.rows = max(len(tree) for _, tree in planted)
        self._trees = dict(trees)
        return scores, [len(self.debt[slot]) for slot, _ in trees]

    def commit(self, paths: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> None:
        """Keep (slot, rows of its shard on the path, tokens of the path that follow them)."""
        inner = []
        for slot, rows, missing in paths:
            paid = len(self.debt[slot])
            self.recomputed += paid
            inner.append((slot, [*range(paid), *(paid + row for row in rows)]))
            self.debt[slot] = list(missing)
            tokens = self._trees.pop(slot).tokens
            self._note(slot, [*(tokens[row] for row in rows), *missing])
        self.target.commit(inner)

    def release(self, slot: int) -> None:
        self.debt.pop(slot, None)
        self._trees.pop(slot, None)
        self.target.release(slot)

    def depth_limit(self, slot: int) -> int:
        """Room below the true root, whatever this rank owes."""
        return max(0, self.target.depth_limit(slot) - len(self.debt[slot]))

    def pay_all(self) -> None:
        """Settle every debt row by row: where memory is short, the next step shall be as small as it can.

        What does not fit even so stays owed.
        """
        with suppress(OutOfMemory):
            for slot in self.debt:
                while self.debt[slot]:
                    self._pay(slot, 1)

    def _pay(self, slot: int, most: int) -> None:
        """Evaluate and commit the first tokens of a debt."""
        count = min(most, len(self.debt[slot]), self.target.depth_limit(slot) + 1)
        chain = TokenTree(self.debt[slot][0])
        chain.add_candidate(self.debt[slot][1:count])
        self.target.forward([(slot, chain)])
        self.target.commit([(slot, range(count))])
        del self.debt[slot][:count]
        self.recomputed += count

    def _note(self, slot: int, tokens: Sequence[int]) -> None:
        value = self.checksum * 31 + slot + 1
        for token in tokens:
            value = (value * 1_000_003 + token + 1) % _MODULUS
        self.checksum = value % _MODULUS


def _under(debt: Sequence[int], shard: TokenTree) -> TokenTree:
    """The shard hung under a chain of owed tokens; its row i becomes row ``len(debt) + i``."""
    if not debt:
        return shard
    tree = TokenTree(debt[0])
    tree.needs_logits[0] = False
    last = 0
    for token in debt[1:]:
        last = tree.add(token, last)
    for row, token in enumerate(shard.tokens):
        parent = last if row == 0 else len(debt) + shard.parents[row]
        tree.add(token, parent, shard.needs_logits[row])
    return tree


def best_or_nan(scores: Any, row: int) -> int:
    """The argmax, or -1 for NaN."""
    try:
        return scores.best(row)
    except NumericalError:
        return -1


def sketch(scores: Any, row: int) -> list[float]:
    """Eight numbers that tell one row of logits from another: the largest and seven spread over V.

    NaN becomes 0: whether a NaN is an error is decided where the row is read.
    """
    import torch

    try:
        logits = torch.as_tensor(scores.row(row)).double().nan_to_num()
    except NumericalError:
        return [0.0] * 8
    places = torch.linspace(0, len(logits) - 1, 7, device=logits.device).long()
    return [float(logits.max()), *logits[places].tolist()]
