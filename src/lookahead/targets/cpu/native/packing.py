"""Weights in the order in which products read them: groups of 32 outputs, each one stretch of memory.

    tiles     (group, 2 panels, inner / 32, 16 pairs, 16 outputs, 2)   bf16, the processor's own tile order
    bytes     32 scales, then as tiles, in int8: weight = scale * byte, for an output of its own    from bf16
    pairs     (group, inner / 2, 32 outputs, 2)                        bf16
    vectors   (group, inner, 32 outputs)                               the model's dtype

Missing outputs and inner numbers are zeros. All of a model's weights lie in one stretch of memory, in large pages
where the system has them: fewer pages, fewer stalls (about a tenth of a step).
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass

import numpy as np
import torch

from ..specs import LinearParts
from .products import GROUP, SCALES

LARGE_PAGE = 1 << 21
#: Inner numbers in a step of each kind.
STEP = {"tiles": 32, "bytes": 32, "pairs": 2, "vectors": 1}


class Arena:
    """One stretch of memory for many tensors, each on a cache line of its own.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        # Kernels read a little ahead of the last weight, never past the end of this.
        self._map = mmap.mmap(-1, size + 2 * LARGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = -self._bytes.data_ptr() % LARGE_PAGE

    def take(self, size: int) -> torch.Tensor:
        """Zeros, uint8 (size,)."""
        begin = self._used
        self._used += -(-size // 64) * 64
        return self._bytes[begin : begin + size]


@dataclass(frozen=True, slots=True)
class Packed:
    """A linear's weights and bias as products read them.

    Attributes:
        weights: bytes.
        bias: (32 * groups,) fp32, zeros where the linear has none.
        groups: of 32 outputs.
        group_bytes: of one group.
        steps: inner tiles, pairs or numbers.
    """

    weights: torch.Tensor
    bias: torch.Tensor
    groups: int
    group_bytes: int
    steps: int

    def fields(self) -> list[int]:
        """As products take them: weights, bytes of a group, bias, steps, groups."""
        return [self.weights.data_ptr(), self.group_bytes, self.bias.data_ptr(), self.steps, self.groups]


def packed_size(out: int, inner: int, kind: str, dtype: torch.dtype) -> int:
    """Bytes of a packed weight (out, inner)."""
    step, groups = STEP[kind], -(-out // GROUP)
    numbers = GROUP * (-(-inner // step) * step)
    return groups * (numbers + SCALES if kind == "bytes" else numbers * dtype.itemsize)


def pack(parts: LinearParts, kind: str, arena: Arena) -> Packed:
    """Weight (out, inner) and bias of a linear."""
    weight = parts.weight
    out, inner = weight.shape
    step = STEP[kind]
    groups, steps = -(-out // GROUP), -(-inner // step)
    size = packed_size(out, inner, kind, weight.dtype)
    memory = arena.take(size).view(groups, -1)
    # Some groups at a time, so that no second copy of a large weight is made.
    some = max(1, (1 << 24) // max(1, size // groups))
    for begin in range(0, groups, some):
        end = min(groups, begin + some)
        rows = weight[begin * GROUP : end * GROUP]
        if rows.shape != ((end - begin) * GROUP, steps * step):
            filled = weight.new_zeros((end - begin) * GROUP, steps * step)
            filled[: len(rows), :inner] = rows
            rows = filled
        if kind == "bytes":
            rows = rows.float()
            scales = rows.abs().amax(1, keepdim=True).clamp_min_(1e-12) / 127
            memory[begin:end, :SCALES].view(torch.float32).copy_(scales.view(-1, GROUP))
            rows = (rows / scales).round_().to(torch.int8)
        lines = memory[begin:end, SCALES if kind == "bytes" else 0 :]
        lines.view(rows.dtype).copy_(_ordered(rows, end - begin, steps, kind).reshape(end - begin, -1))
    bias = torch.zeros(groups * GROUP, dtype=torch.float32)
    if parts.bias is not None:
        bias[:out] = parts.bias.float()
    return Packed(memory, bias, groups, size // groups, steps)


def _ordered(rows: torch.Tensor, groups: int, steps: int, kind: str) -> torch.Tensor:
    if kind in ("tiles", "bytes"):
        return rows.view(groups, 2, 16, steps, 16, 2).permute(0, 1, 3, 4, 2, 5)
    if kind == "pairs":
        return rows.view(groups, GROUP, steps, 2).permute(0, 2, 1, 3)
    return rows.view(groups, GROUP, steps).transpose(1, 2)


def gate_and_up(gate: LinearParts, up: LinearParts) -> LinearParts:
    """Both as one linear whose groups are 16 gates and their 16 ups."""
    half = GROUP // 2
    size, inner = gate.weight.shape
    blocks = -(-size // half)

    def lines(tensor: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
        filled = gate.weight.new_zeros(blocks * half, *shape)
        if tensor is not None:
            filled[:size] = tensor
        return filled.view(blocks, half, *shape)

    def both(a: torch.Tensor | None, b: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.stack((lines(a, shape), lines(b, shape)), 1).view(blocks * GROUP, *shape)

    bias = None if gate.bias is None and up.bias is None else both(gate.bias, up.bias, ())
    return LinearParts(both(gate.weight, up.weight, (inner,)), bias)


def tile_config(rows: int) -> np.ndarray:
    """The processor's 64 bytes on tile shapes: palette 1; 16 rows of 64 bytes, fewer for sums and rows below 16."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32].view(np.uint16)[:] = 64
    config[48:56] = 16
    config[[48, 49, 52]] = min(16, max(1, rows))
    return config
