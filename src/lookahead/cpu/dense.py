"""Weights of transformers models, copied into the order in which a gemm reads them. Imports torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from .kernels.formats import ArrayMemory, Format, round_up
from .packed import GROUP

Array = np.ndarray[Any, np.dtype[Any]]


def bits_of(tensor: torch.Tensor) -> Array:
    """A contiguous tensor as an array that shares its memory; bf16, which numpy lacks, becomes int16."""
    array: Array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def tensor_of(bits: Array) -> torch.Tensor:
    """The inverse of ``bits_of``."""
    tensor = torch.from_numpy(bits)
    return tensor.view(torch.bfloat16) if bits.dtype == np.int16 else tensor


class Linear(NamedTuple):
    """Weight (out, in) and bias (out,)."""

    weight: torch.Tensor
    bias: torch.Tensor


def packed_bytes(linear: Linear, fmt: Format) -> int:
    """Bytes of memory that ``pack`` uses for the weight."""
    out, inner = linear.weight.shape
    return round_up(out, GROUP) * round_up(inner, fmt.step) * fmt.stored.bytes


def pack(linear: Linear, fmt: Format, memory: ArrayMemory, padding: float = 0.0) -> tuple[Array, Array, int]:
    """Copy weight (out, inner) and bias of a linear into the order of the format; padding weights are zero.

        tiles     (group, 2 panels, inner / 32, 16 pairs, 16 outputs, 2)   the order that the tile registers load
        pairs     (group, inner / 2, 32 outputs, 2)
        vectors   (group, inner, 32 outputs)

    Args:
        padding: bias, and thus the value, of the outputs that pad the last group.

    Returns:
        Weights, uint8 (groups, bytes of a group); bias (32 * groups,) fp32; the format's steps over the inner size.
    """
    weight = linear.weight
    step = fmt.step
    out, inner = weight.shape
    groups, steps = -(-out // GROUP), -(-inner // step)
    packed = torch.from_numpy(memory.take(packed_bytes(linear, fmt))).view(groups, -1)
    # Copy a few groups at a time, because the reordered rows are a temporary copy.
    groups_at_once = max(1, (1 << 24) // packed.shape[1])
    for begin in range(0, groups, groups_at_once):
        count = min(groups - begin, groups_at_once)
        rows = weight[begin * GROUP : (begin + count) * GROUP]
        rows = torch.nn.functional.pad(rows, (0, steps * step - inner, 0, count * GROUP - len(rows)))
        if fmt.kind == "tiles":
            rows = rows.reshape(count, 2, 16, steps, 16, 2).permute(0, 1, 3, 4, 2, 5)
        else:
            rows = rows.reshape(count, GROUP, steps, step).permute(0, 2, 1, 3)
        packed[begin : begin + count].view(rows.dtype).copy_(rows.reshape(count, -1))
    bias = torch.full((groups * GROUP,), padding, dtype=torch.float32)
    bias[:out] = linear.bias.float()
    return packed.numpy(), bias.numpy(), steps


def split(linear: Linear, *sizes: int) -> list[Linear]:
    """Split a linear by its outputs."""
    parts = (torch.split(tensor, list(sizes)) for tensor in linear)
    return [Linear(*both) for both in zip(*parts, strict=True)]


def joined(*linears: Linear) -> Linear:
    """Join linears that read the same input: the outputs of the first, then those of the second, and so on."""
    return Linear(*(torch.cat(tensors) for tensors in zip(*linears, strict=True)))


def gate_and_up(gate: Linear, up: Linear) -> Linear:
    """Join both into one linear, each of whose groups of 32 outputs has 16 gates followed by their 16 ups."""
    half = GROUP // 2

    def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        filled = gate.new_zeros(2, round_up(len(gate), half), *gate.shape[1:])
        filled[0, : len(gate)], filled[1, : len(up)] = gate, up
        groups: torch.Tensor = filled.view(2, -1, half, *gate.shape[1:]).transpose(0, 1)
        return groups.flatten(0, 2)

    return Linear(interleaved(gate.weight, up.weight), interleaved(gate.bias, up.bias))


def reordered(linear: Linear, order: Array) -> Linear:
    """Reorder the outputs of each head of a query or key linear."""
    rows = torch.from_numpy(np.arange(len(linear.weight)).reshape(-1, len(order))[:, order].reshape(-1))
    return Linear(linear.weight[rows], linear.bias[rows])
