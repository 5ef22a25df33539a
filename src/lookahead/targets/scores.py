"""Logits of one forward pass, read by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from ..core.errors import NumericalError

#: Below this many logits one call over all of them is quicker than a search by blocks.
SMALL = 1 << 16
BLOCK = 64


@cache
def _search() -> Callable[[torch.Tensor, int], tuple[np.ndarray, np.ndarray]] | None:
    """The compiled search for the best tokens; None without numba."""
    try:
        from .top import best_of_rows
    except (ImportError, RuntimeError):  # the latter where numba finds no folder for compiled code
        return None
    return best_of_rows


class LogitsBatch:
    """Logits (B, R, V) of the rows that somebody reads; what is asked of them comes to the host in one copy.

    Large batches are searched by blocks of the vocabulary: the k best tokens lie in the k blocks with the
    largest maxima, so one streaming pass over the logits is enough for ``best`` and for ``top``.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self._best: list[list[int]] | None = None
        self._blocks: tuple[torch.Tensor, torch.Tensor] | None = None
        self._top: tuple[np.ndarray, np.ndarray] | None = None

    def best(self, b: int, r: int) -> int:
        """The token with the largest logit, the first of equals. Raises NumericalError on NaN."""
        if self._best is None:
            self._best = self._all_best().tolist()
        token = self._best[b][r]
        if token < 0:
            raise NumericalError(
                "the model's logits are NaN, so no token can be chosen; check the weights and the dtype "
                "(float16 overflows in some models: try bfloat16 or float32)"
            )
        return token

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best tokens of every row and their log-odds against the best, both (B, R, k)."""
        if self._top is None or self._top[0].shape[-1] < k:
            self._top = self._compiled_top(k)
        if self._top is None:
            values, ids = self._all_top(min(k, self.logits.shape[-1]))
            odds = values.float() - values[..., :1].float()
            # Token ids are below 2 ** 24 only up to that vocabulary, so they travel as bits, not as floats.
            packed = torch.stack((ids.int().view(torch.float32), odds)).cpu().numpy()
            self._top = packed[0].view(np.int32), packed[1]
        ids, odds = self._top
        return ids[..., :k], odds[..., :k]

    def _compiled_top(self, k: int) -> tuple[np.ndarray, np.ndarray] | None:
        """``top`` by numba; None where the logits are not for it."""
        logits = self.logits
        if logits.device.type != "cpu" or logits.dtype not in (torch.float32, torch.bfloat16):
            return None
        search = _search()
        batch, rows, vocabulary = logits.shape
        apart = logits.stride(2) != 1 or (batch > 1 and logits.stride(0) != rows * logits.stride(1))
        if search is None or apart or not logits.numel():
            return None
        shape = batch, rows, min(k, vocabulary)
        ids, odds = search(logits.detach().flatten(0, 1), shape[-1])
        return ids.reshape(shape), odds.reshape(shape)

    def _all_best(self) -> torch.Tensor:
        logits = self.logits
        if logits.numel() < SMALL or logits.shape[-1] < 4 * BLOCK:
            values, tokens = logits.max(dim=-1)
        else:
            padded, maxima = self._by_blocks()
            values, block = maxima.max(dim=-1)
            inside = padded.gather(2, block[..., None, None].expand(*block.shape, 1, BLOCK)).squeeze(2)
            tokens = block * BLOCK + inside.argmax(dim=-1)
        # NaN wins every max, so one look at the largest value tells.
        return torch.where(values.isnan(), -1, tokens)

    def _all_top(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.logits
        if logits.numel() < SMALL or logits.shape[-1] < 4 * BLOCK * k:
            values, ids = logits.topk(k, dim=-1)
            return values, ids
        padded, maxima = self._by_blocks()
        blocks = maxima.topk(k, dim=-1, sorted=False).indices
        inside = padded.gather(2, blocks[..., None].expand(*blocks.shape, BLOCK)).flatten(2)
        values, places = inside.topk(k, dim=-1)
        return values, blocks.gather(2, places // BLOCK) * BLOCK + places % BLOCK

    def _by_blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits (B, R, V / BLOCK, BLOCK) in fp32, and each block's maximum."""
        if self._blocks is None:
            logits = self.logits.float()
            rest = -logits.shape[-1] % BLOCK
            if rest:
                logits = torch.nn.functional.pad(logits, (0, rest), value=float("-inf"))
            padded = logits.unflatten(-1, (-1, BLOCK))
            self._blocks = padded, padded.amax(dim=-1)
        return self._blocks


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

    def top(self, nodes: Sequence[int], k: int) -> tuple[Any, Any]:
        """Tokens and log-odds of the k best, both (n, k), as numpy arrays; one host copy for the pass."""
        ids, odds = self._batch.top(k)
        if self._row is None and nodes == range(len(nodes)):
            return ids[self._b, : len(nodes)], odds[self._b, : len(nodes)]
        rows = list(nodes) if self._row is None else [self._row[node] for node in nodes]
        return ids[self._b, rows], odds[self._b, rows]
