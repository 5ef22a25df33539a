"""Logits of one forward pass, read by node."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.errors import NumericalError


class LogitsBatch:
    """Logits (B, R, V) of the rows that somebody reads; the argmaxes come to the host in one copy."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self._best: list[list[int]] | None = None
        self._finite: list[list[bool]] | None = None

    def best(self, b: int, r: int) -> int:
        """The token with the largest logit. Raises NumericalError on NaN."""
        if self._best is None:
            values, tokens = self.logits.max(dim=-1)
            # NaN wins every max, so one look at the largest value tells.
            packed = torch.where(values.isnan(), -1, tokens).tolist()
            self._best = packed
        token = self._best[b][r]
        if token < 0:
            raise NumericalError(
                "the model's logits are NaN, so no token can be chosen; check the weights and the dtype "
                "(float16 overflows in some models: try bfloat16 or float32)"
            )
        return token


class LogitsRows:
    """One sequence's share of a ``LogitsBatch``; fulfils ``lookahead.core.Scores``.

    Args:
        batch: the pass.
        b: which sequence.
        nodes: node of each logits row, in order; None where row r is node r.
    """

    def __init__(self, batch: LogitsBatch, b: int, nodes: Sequence[int] | None = None) -> None:
        self._batch = batch
        self._b = b
        self._row = None if nodes is None else {node: r for r, node in enumerate(nodes)}

    def best(self, node: int) -> int:
        return self._batch.best(self._b, node if self._row is None else self._row[node])

    def row(self, node: int) -> torch.Tensor:
        """Logits of shape (V,) on the model's device."""
        return self._batch.logits[self._b, node if self._row is None else self._row[node]]
