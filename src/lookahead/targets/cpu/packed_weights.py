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
from typing import Any

import numpy as np
import torch

from .architectures import Linear
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


def packed_bytes(linear: Linear, numbers: Format) -> int:
    """Bytes of a packed weight."""
    out, inner = linear.weight.shape
    return round_up(out, GROUP) * round_up(inner, numbers.step) * numbers.stored.bytes


def pack(
    linear: Linear, numbers: Format, arena: Arena, padding: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Copy weight (out, inner) and bias of a linear.

    Args:
        padding: what outputs that are not there come to.

    Returns:
        Weights, uint8 (groups, bytes of a group); bias (32 * groups,) fp32; steps of the format over the inner size.
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
        missing = (end - begin) * GROUP - len(rows)
        rows = torch.nn.functional.pad(rows, (0, steps * step - inner, 0, missing)).contiguous()
        ordered = _ordered(rows, end - begin, steps, numbers.kind).reshape(end - begin, -1)
        memory[begin:end].view(rows.dtype).copy_(ordered)
    bias = torch.full((groups * GROUP,), padding, dtype=torch.float32)
    bias[:out] = 0.0 if linear.bias is None else linear.bias.float()
    return memory, bias, steps


def _ordered(rows: torch.Tensor, groups: int, steps: int, kind: str) -> torch.Tensor:
    if kind == "tiles":
        return rows.view(groups, 2, 16, steps, 16, 2).permute(0, 1, 3, 4, 2, 5)
    if kind == "pairs":
        return rows.view(groups, GROUP, steps, 2).permute(0, 2, 1, 3)
    return rows.view(groups, GROUP, steps).transpose(1, 2)


def joined(*linears: Linear) -> Linear:
    """Several linears of one input as one."""
    weight = torch.cat([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return Linear(weight, None)
    zeros = weight.new_zeros(len(weight))
    return Linear(weight, torch.cat([zeros[: len(w)] if bias is None else bias for w, bias in linears]))


def gate_and_up(gate: Linear, up: Linear) -> Linear:
    """Both as one linear whose groups are 16 gates and their 16 ups."""
    half = GROUP // 2

    def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        filled = gate.new_zeros(2, round_up(len(gate), half), *gate.shape[1:])
        filled[0, : len(gate)], filled[1, : len(up)] = gate, up
        groups: torch.Tensor = filled.view(2, -1, half, *gate.shape[1:]).transpose(0, 1)
        return groups.flatten(0, 2)

    weight = interleaved(gate.weight, up.weight)
    if gate.bias is None or up.bias is None:
        return Linear(weight, None)
    return Linear(weight, interleaved(gate.bias, up.bias))


def paired(size: int) -> torch.Tensor:
    """The order of a head's D outputs in which rotary pairs (i, i + D/2) lie side by side."""
    return torch.arange(size).view(2, size // 2).t().reshape(-1)


def paired_heads(linear: Linear, size: int) -> Linear:
    """A query or key linear in that order, head by head."""
    rows = torch.arange(len(linear.weight)).view(-1, size)[:, paired(size)].reshape(-1)
    return Linear(linear.weight[rows], None if linear.bias is None else linear.bias[rows])


def tile_config(rows: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The processor's 64 bytes on tile shapes: palette 1; 16 rows of 64 bytes, fewer for sums and rows below 16."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32].view(np.uint16)[:] = 64
    config[48:56] = 16
    config[[48, 49, 52]] = min(16, max(1, rows))
    return config
