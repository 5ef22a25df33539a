"""Weights of transformers models, copied into the order of a gemm. Loads torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from .formats import Arena, Format, round_up
from .packed import GROUP

Numbers = np.ndarray[Any, np.dtype[Any]]


def bits_of(tensor: torch.Tensor) -> Numbers:
    """A contiguous tensor's memory as an array; bf16, which numpy does not know, as int16."""
    whole: Numbers = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return whole


def tensor_of(bits: Numbers) -> torch.Tensor:
    """What ``bits_of`` was made from."""
    tensor = torch.from_numpy(bits)
    return tensor.view(torch.bfloat16) if bits.dtype == np.int16 else tensor


class Linear(NamedTuple):
    """Weight (out, in) and bias (out,)."""

    weight: torch.Tensor
    bias: torch.Tensor


def packed_bytes(linear: Linear, numbers: Format) -> int:
    """Bytes of a packed weight."""
    out, inner = linear.weight.shape
    return round_up(out, GROUP) * round_up(inner, numbers.step) * numbers.stored.bytes


def pack(linear: Linear, numbers: Format, arena: Arena, padding: float = 0.0) -> tuple[Numbers, Numbers, int]:
    """Copy weight (out, inner) and bias of a linear; missing outputs and inner numbers are zeros.

        tiles     (group, 2 panels, inner / 32, 16 pairs, 16 outputs, 2)   the processor's own tile order
        pairs     (group, inner / 2, 32 outputs, 2)
        vectors   (group, inner, 32 outputs)

    Args:
        padding: what outputs that are not there come to.

    Returns:
        Weights, uint8 (groups, bytes of a group); bias (32 * groups,) fp32; steps of the format over the inner size.
    """
    weight, step = linear.weight, numbers.step
    out, inner = weight.shape
    groups, steps = -(-out // GROUP), -(-inner // step)
    memory = torch.from_numpy(arena.take(packed_bytes(linear, numbers))).view(groups, -1)
    # Some groups at a time, so that no second copy of a large weight is made.
    some = max(1, (1 << 24) // memory.shape[1])
    for begin in range(0, groups, some):
        count = min(groups - begin, some)
        rows = weight[begin * GROUP : (begin + count) * GROUP]
        rows = torch.nn.functional.pad(rows, (0, steps * step - inner, 0, count * GROUP - len(rows)))
        if numbers.kind == "tiles":
            rows = rows.reshape(count, 2, 16, steps, 16, 2).permute(0, 1, 3, 4, 2, 5)
        else:
            rows = rows.reshape(count, GROUP, steps, step).permute(0, 2, 1, 3)
        memory[begin : begin + count].view(rows.dtype).copy_(rows.reshape(count, -1))
    bias = torch.full((groups * GROUP,), padding, dtype=torch.float32)
    bias[:out] = linear.bias.float()
    return memory.numpy(), bias.numpy(), steps


def split(linear: Linear, *sizes: int) -> list[Linear]:
    """A linear's outputs as several."""
    parts = (torch.split(tensor, list(sizes)) for tensor in linear)
    return [Linear(*both) for both in zip(*parts, strict=True)]


def joined(*linears: Linear) -> Linear:
    """Several linears of one input as one."""
    return Linear(*(torch.cat(tensors) for tensors in zip(*linears, strict=True)))


def gate_and_up(gate: Linear, up: Linear) -> Linear:
    """Both as one linear whose groups are 16 gates and their 16 ups."""
    half = GROUP // 2

    def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        filled = gate.new_zeros(2, round_up(len(gate), half), *gate.shape[1:])
        filled[0, : len(gate)], filled[1, : len(up)] = gate, up
        groups: torch.Tensor = filled.view(2, -1, half, *gate.shape[1:]).transpose(0, 1)
        return groups.flatten(0, 2)

    return Linear(interleaved(gate.weight, up.weight), interleaved(gate.bias, up.bias))


def reordered(linear: Linear, order: Numbers) -> Linear:
    """A query or key linear with the outputs of each head in that order."""
    rows = torch.from_numpy(np.arange(len(linear.weight)).reshape(-1, len(order))[:, order].reshape(-1))
    return Linear(linear.weight[rows], linear.bias[rows])
