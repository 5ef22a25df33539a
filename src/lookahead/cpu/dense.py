"""Weights that are not quantized, copied into the order in which a gemm reads them.

Numbers are fp32, or bf16 as int16 (its bits), because numpy has no bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from ..threads import thread_count
from .formats import ArrayMemory, Format, round_up
from .packed import GROUP

Array = np.ndarray[Any, np.dtype[Any]]
#: Bytes that a thread copies at once.
CHUNK = 1 << 22


def floats(numbers: Array) -> Array:
    """The numbers as fp32."""
    if numbers.dtype == np.int16:
        return (numbers.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)


def bf16_bits(numbers: Array) -> Array:
    """fp32 numbers rounded to the nearest bf16, ties to even."""
    bits = numbers.view(np.uint32)
    nearest = bits + (0x7FFF + (bits >> 16 & 1)).astype(np.uint32)
    return (nearest >> 16).astype(np.uint16).view(np.int16)


class Linear(NamedTuple):
    """Weight (out, in) and bias (out,) fp32."""

    weight: Array
    bias: Array


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
    packed = memory.take(packed_bytes(linear, fmt)).reshape(groups, -1)
    at_once = max(1, CHUNK // packed.shape[1])

    def copy(begin: int) -> None:
        count = min(groups - begin, at_once)
        rows = weight[begin * GROUP : (begin + count) * GROUP]
        if rows.shape != (count * GROUP, steps * step):
            whole = np.zeros((count * GROUP, steps * step), weight.dtype)
            whole[: len(rows), :inner] = rows
            rows = whole
        if fmt.product == "tiles":
            rows = rows.reshape(count, 2, 16, steps, 16, 2).transpose(0, 1, 3, 4, 2, 5)
        else:
            rows = rows.reshape(count, GROUP, steps, step).transpose(0, 2, 1, 3)
        packed[begin : begin + count].view(weight.dtype).reshape(rows.shape)[...] = rows

    with ThreadPoolExecutor(thread_count(), "lookahead-pack") as pool:
        list(pool.map(copy, range(0, groups, at_once)))
    bias = np.full(groups * GROUP, padding, np.float32)
    bias[:out] = linear.bias
    return packed, bias, steps


def split(linear: Linear, *sizes: int) -> list[Linear]:
    """Split a linear by its outputs."""
    ends = np.cumsum(sizes)[:-1]
    return [Linear(*both) for both in zip(*(np.split(part, ends) for part in linear), strict=True)]


def joined(*linears: Linear) -> Linear:
    """Join linears that read the same input: the outputs of the first, then those of the second, and so on."""
    return Linear(*(np.concatenate(parts) for parts in zip(*linears, strict=True)))


def gate_and_up(gate: Linear, up: Linear) -> Linear:
    """Join both into one linear, each of whose groups of 32 outputs has 16 gates followed by their 16 ups."""
    half = GROUP // 2

    def interleaved(both: Sequence[Array]) -> Array:
        rows, shape = len(both[0]), both[0].shape[1:]
        filled = np.zeros((round_up(rows, half) // half, 2, half, *shape), both[0].dtype)
        for which, part in enumerate(both):
            whole = filled[:, which]
            full = rows // half
            whole[:full] = part[: full * half].reshape(full, half, *shape)
            if rows % half:
                whole[full, : rows % half] = part[full * half :]
        return filled.reshape(-1, *shape)

    return Linear(interleaved((gate.weight, up.weight)), interleaved((gate.bias, up.bias)))


def reordered(linear: Linear, order: Array) -> Linear:
    """Reorder the outputs of each head of a query or key linear."""
    rows = np.arange(len(linear.weight)).reshape(-1, len(order))[:, order].reshape(-1)
    return Linear(linear.weight[rows], linear.bias[rows])
