"""Weights in the order in which a gemm reads them: groups of 32 outputs, each one stretch of memory.

    tiles     (group, 2 panels, inner / 32, 16 pairs, 16 outputs, 2)   the processor's own tile order
    pairs     (group, inner / 2, 32 outputs, 2)
    vectors   (group, inner, 32 outputs)

Missing outputs and inner numbers are zeros. All of a model's weights lie in one stretch of memory, in large pages
where the system has them: fewer pages, fewer stalls (about a tenth of a step).
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .architectures import LinearParts
from .microkernel import GROUP
from .numeric_format import Format

LARGE_PAGE = 1 << 21


def round_up(number: int, multiple: int) -> int:
    """To the next multiple."""
    return -(-number // multiple) * multiple


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
        self._used += round_up(size, 64)
        return self._bytes[begin : begin + size]


@dataclass(frozen=True)
class PackedLinear:
    """A linear's weights and bias as a gemm reads them.

    Attributes:
        weights: uint8 (groups, bytes of a group).
        bias: (32 * groups,) fp32.
        steps: of the format, over the inner size.
    """

    weights: torch.Tensor
    bias: torch.Tensor
    steps: int

    def record(self) -> tuple[int, int, int, int, int]:
        """As ``execution_plan.LINEAR`` has it."""
        groups, size = self.weights.shape
        return self.weights.data_ptr(), size, self.bias.data_ptr(), self.steps, groups


def packed_bytes(linear: LinearParts, numbers: Format) -> int:
    """Bytes of a packed weight."""
    out, inner = linear.weight.shape
    return round_up(out, GROUP) * round_up(inner, numbers.step) * numbers.stored.bytes


def pack(linear: LinearParts, numbers: Format, arena: Arena, padding: float = 0.0) -> PackedLinear:
    """Copy weight (out, inner) and bias of a linear.

    Args:
        padding: what outputs that are not there come to.
    """
    weight, step = linear.weight, numbers.step
    out, inner = weight.shape
    groups, steps = -(-out // GROUP), -(-inner // step)
    memory = arena.take(packed_bytes(linear, numbers)).view(groups, -1)
    # Some groups at a time, so that no second copy of a large weight is made.
    some = max(1, (1 << 24) // memory.shape[1])
    for begin in range(0, groups, some):
        end = min(groups, begin + some)
        rows = weight[begin * GROUP : end * GROUP]
        if rows.shape != ((end - begin) * GROUP, steps * step):
            filled = weight.new_zeros((end - begin) * GROUP, steps * step)
            filled[: len(rows), :inner] = rows
            rows = filled
        ordered = _ordered(rows, end - begin, steps, numbers.kind).reshape(end - begin, -1)
        memory[begin:end].view(rows.dtype).copy_(ordered)
    bias = torch.full((groups * GROUP,), padding, dtype=torch.float32)
    bias[:out] = 0.0 if linear.bias is None else linear.bias.float()
    return PackedLinear(memory, bias, steps)


def _ordered(rows: torch.Tensor, groups: int, steps: int, kind: str) -> torch.Tensor:
    if kind == "tiles":
        return rows.view(groups, 2, 16, steps, 16, 2).permute(0, 1, 3, 4, 2, 5)
    if kind == "pairs":
        return rows.view(groups, GROUP, steps, 2).permute(0, 2, 1, 3)
    return rows.view(groups, GROUP, steps).transpose(1, 2)


def joined(*linears: LinearParts) -> LinearParts:
    """Several linears of one input as one."""
    weight = torch.cat([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return LinearParts(weight, None)
    zeros = [weight.new_zeros(len(linear.weight)) for linear in linears]
    biases = [z if linear.bias is None else linear.bias for z, linear in zip(zeros, linears, strict=True)]
    return LinearParts(weight, torch.cat(biases))


def gate_and_up(gate: LinearParts, up: LinearParts) -> LinearParts:
    """Both as one linear whose groups are 16 gates and their 16 ups."""
    half = GROUP // 2
    size = len(gate.weight)
    padded = round_up(size, half)
    both = joined(gate, up)
    order = torch.full((2, padded), -1)
    order[:, :size] = torch.arange(2 * size).view(2, size)
    rows = order.view(2, padded // half, half).transpose(0, 1).reshape(-1)
    missing = rows < 0

    def reorder(tensor: torch.Tensor) -> torch.Tensor:
        taken = tensor[rows.clamp(min=0)]
        taken[missing] = 0
        return taken

    return LinearParts(reorder(both.weight), None if both.bias is None else reorder(both.bias))


def tile_config(rows: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The processor's 64 bytes on tile shapes: palette 1; 16 rows of 64 bytes, fewer for sums and rows below 16."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32].view(np.uint16)[:] = 64
    config[48:56] = 16
    config[[48, 49, 52]] = min(16, max(1, rows))
    return config
