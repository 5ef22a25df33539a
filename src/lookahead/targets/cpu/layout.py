"""What both twins of the pass share: rows of one sequence, joined linears, rotary angles, scores of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ...core import TokenTree
from ..logits import LogitsBatch
from .specs import LayerParts, LinearParts, NormParts


@dataclass(frozen=True, slots=True)
class Block:
    """One sequence's share of a pass.

    Attributes:
        slot: its place in the cache.
        length: T, committed tokens.
        rows: how many, behind those of the blocks before.
        tree: who sees whom; None for a piece of a prompt, where each row sees all rows before it.
        positions: of the rows.
    """

    slot: int
    length: int
    rows: int
    tree: TokenTree | None
    positions: Sequence[int]


class Scored(Protocol):
    """What a pass returns: logits (R, V) of the rows that were read."""

    logits: torch.Tensor

    def part(self, start: int, rows: int) -> LogitsBatch:
        """Those of one sequence."""
        ...


class PlainScores:
    """Logits and nothing else."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def part(self, start: int, rows: int) -> LogitsBatch:
        return LogitsBatch(self.logits[None, start : start + rows])


class RotaryTable:
    """Turns of each position from the model's own rotary module: (positions, D / 2) complex, grown on demand."""

    def __init__(self, rotary: nn.Module, head_size: int) -> None:
        self._rotary = rotary
        self._half = head_size // 2
        self._turns = torch.empty(0, self._half, dtype=torch.complex64)

    def up_to(self, position: int) -> torch.Tensor:
        """At least the turns of positions 0..position; cosine and sine lie side by side."""
        if position >= len(self._turns):
            with torch.no_grad():
                probe = torch.empty(1, dtype=torch.float32)
                cos, sin = self._rotary(probe, torch.arange(1 << position.bit_length())[None])
                parts = (x[0, :, : self._half].float().contiguous() for x in (cos, sin))
                self._turns = torch.complex(*parts).contiguous()
        return self._turns


def pair_order(size: int) -> torch.Tensor:
    """The order in which rotary pairs (i, i + D/2) of a head become neighbours (2i, 2i + 1)."""
    return torch.arange(size).view(2, size // 2).t().reshape(-1)


def paired(linear: LinearParts, size: int) -> LinearParts:
    """A query or key linear whose outputs are in that order, head by head."""
    rows = torch.arange(linear.weight.shape[0]).view(-1, size)[:, pair_order(size)].reshape(-1)
    return LinearParts(linear.weight[rows], None if linear.bias is None else linear.bias[rows])


def head_norms(parts: LayerParts, heads: int, key_heads: int) -> NormParts | None:
    """One weight (H + K, D) for the norms over query and key heads, in the same order."""
    query, key = parts.query_norm, parts.key_norm
    if query is None or key is None:
        return None
    order = pair_order(len(query.weight))
    return NormParts(
        torch.stack([query.weight[order]] * heads + [key.weight[order]] * key_heads), query.epsilon
    )


def joined(*linears: LinearParts) -> LinearParts:
    """Several linears of one input as one."""
    weight = torch.cat([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return LinearParts(weight, None)
    biases = [
        linear.bias if linear.bias is not None else weight.new_zeros(len(linear.weight)) for linear in linears
    ]
    return LinearParts(weight, torch.cat(biases))
