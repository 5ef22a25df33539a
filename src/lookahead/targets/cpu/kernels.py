"""What happens between the linears, fused: norms, rotation with the cache write, the gate.

Two twins with the same calls. ``TorchKernels`` is plain torch. ``NumbaKernels`` does each in one pass over
memory and one call: with weights streaming through the caches a torch call costs 3 to 5 microseconds however
little it does, and a small model's step has hundreds of them. Both treat every row alone and in one order,
so a row has the same bits in a step of one row and in a step of 128.

Arrays pass by address, because wrapping a tensor costs more than the work; all of them are contiguous, which
the callers here see to.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from .cache import LeanCache


class Norm:
    """Weights of an RMS norm over the last axis, in the form the kernels want: fp32, with epsilon."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self.weight = weight.float().contiguous()
        self.epsilon = epsilon
        size = weight.shape[-1]
        self.scaled = self.weight * math.sqrt(size)
        self.floor = torch.tensor(math.sqrt(size * epsilon), dtype=torch.float32)
        self.size = size
        self.address = self.weight.data_ptr()


class Turns:
    """Angles of one step's rows: (Q, D/2) complex, the turn of each pair of every query and key head."""

    def __init__(self, pairs: torch.Tensor, heads: int, key_heads: int) -> None:
        self.pairs = pairs.contiguous()
        self.address = self.pairs.data_ptr()
        self._lanes = (heads, key_heads)
        self._all: torch.Tensor | None = None

    @property
    def all(self) -> torch.Tensor:
        """(Q, H + 2K, D/2) complex: 1 for values."""
        if self._all is None:
            heads, key_heads = self._lanes
            rows, half = self.pairs.shape
            self._all = torch.ones(rows, heads + 2 * key_heads, half, dtype=torch.complex64)
            self._all[:, : heads + key_heads] = self.pairs[:, None]
        return self._all


class TorchKernels:
    """The naive twin.

    Args:
        heads, key_heads, size: H, K and D.
        dtype: of the rows between the linears.
    """

    name = "torch"

    def __init__(self, heads: int, key_heads: int, size: int, dtype: torch.dtype) -> None:
        self.heads, self.key_heads, self.size, self.dtype = heads, key_heads, size, dtype

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """x / sqrt(mean(x^2) + epsilon) * weight, rounded once.

        With n entries that is x / hypot(|x|, sqrt(n epsilon)) * (sqrt(n) weight): two calls fewer.
        """
        x = x.float()
        length = torch.linalg.vector_norm(x, 2, -1, True)
        return torch.div(x, length.hypot_(norm.floor)).mul_(norm.scaled).to(self.dtype)

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half of rows (Q, 2F)."""
        gate, up = both.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows (Q, n) as bytes around 128, and a scale (Q,) for each row: x = (bytes - 128) * scale."""
        x = x.float()
        largest = torch.linalg.vector_norm(x, torch.inf, -1, True)
        inverse = torch.where(largest > 0, 127 / largest, 0)
        return (x * inverse).add_(128.5).to(torch.uint8), largest[:, 0] / 127

    def rescale(
        self, y: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor | None
    ) -> torch.Tensor:
        """fp32 rows y (Q, n) times their scales, plus bias (n,), plus other (Q, n), rounded once."""
        y = y * scales[:, None]
        if bias is not None:
            y += bias
        if other is not None:
            y += other
        return y.to(self.dtype)

    def turn(
        self,
        y: torch.Tensor,
        turns: Turns | None,
        head_norm: Norm | None,
        cache: LeanCache,
        layer: int,
        places: list[tuple[int, int, int]],
    ) -> torch.Tensor:
        """Norm and rotate the heads of rows y (Q, (H + 2K) * D); keys and values go to the cache.

        Args:
            places: (slot, committed tokens, rows) of each sequence, in the order of the rows.

        Returns:
            Queries (Q, H, D) in fp32.
        """
        rows, lanes = y.shape[0], self.heads + 2 * self.key_heads
        y = y.float().view(rows, lanes, self.size)
        if head_norm is not None:
            normed = self.heads + self.key_heads
            part = y[:, :normed]
            length = torch.linalg.vector_norm(part, 2, -1, True)
            part = torch.div(part, length.hypot_(head_norm.floor)).mul_(head_norm.scaled)
            y = torch.cat((part, y[:, normed:]), 1)
        if turns is not None:
            pairs = torch.view_as_complex(y.view(rows, lanes, self.size // 2, 2))
            y = torch.view_as_real(pairs * turns.all).view(rows, lanes, self.size)
        start = 0
        for slot, length, count in places:
            fresh = y[start : start + count, self.heads :].transpose(0, 1)
            cache.storage[layer, slot, :, length : length + count] = fresh
            start += count
        return y[:, : self.heads]


class NumbaKernels(TorchKernels):
    """The compiled twin; see ``TorchKernels`` for what each call means."""

    name = "numba"

    def __init__(self, heads: int, key_heads: int, size: int, dtype: torch.dtype) -> None:
        super().__init__(heads, key_heads, size, dtype)
        from . import compiled
        from .native.intrinsics import TAGS

        self._code: Any = compiled
        self._tag = TAGS[dtype]

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        out = torch.empty_like(x)
        rows = x.numel() // norm.size
        self._code.norm(x.data_ptr(), norm.address, out.data_ptr(), rows, norm.size, norm.epsilon, self._tag)
        return out

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        rows, width = both.shape
        out = both.new_empty(rows, width // 2)
        self._code.gate(both.data_ptr(), out.data_ptr(), rows, width // 2, self._tag)
        return out

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, size = x.shape
        out = x.new_empty(rows, size, dtype=torch.uint8)
        scales = x.new_empty(rows, dtype=torch.float32)
        self._code.quantise(x.data_ptr(), out.data_ptr(), scales.data_ptr(), rows, size, self._tag)
        return out, scales

    def rescale(
        self, y: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor | None
    ) -> torch.Tensor:
        rows, size = y.shape
        out = y.new_empty(rows, size, dtype=self.dtype)
        self._code.rescale(
            y.data_ptr(),
            scales.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if other is None else other.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            self._tag,
        )
        return out

    def turn(
        self,
        y: torch.Tensor,
        turns: Turns | None,
        head_norm: Norm | None,
        cache: LeanCache,
        layer: int,
        places: list[tuple[int, int, int]],
    ) -> torch.Tensor:
        query = y.new_empty(y.shape[0], self.heads, self.size, dtype=torch.float32)
        start = 0
        for slot, length, count in places:
            self._code.turn(
                y.data_ptr(),
                0 if turns is None else turns.address,
                0 if head_norm is None else head_norm.address,
                0.0 if head_norm is None else head_norm.epsilon,
                query.data_ptr(),
                cache.address(layer, slot, length),
                cache.capacity,
                start,
                count,
                self.heads,
                self.key_heads,
                self.size,
                self._tag,
            )
            start += count
        return query


def best_kernels() -> tuple[type[TorchKernels], str]:
    """The kind for this machine, and a word for the reason."""
    try:
        from . import compiled  # noqa: F401
    except ImportError:
        return TorchKernels, "torch between them (pip install numba for a faster step)"
    except RuntimeError as error:  # numba found no folder to keep compiled code in
        return TorchKernels, f"torch between them (numba: {str(error).splitlines()[0][:80]})"
    return NumbaKernels, "numba between them"
