"""How numbers are kept and multiplied: the dtype of a model, and the kind of its products on this processor.

    tiles     bf16 on matrix tiles (AMX)
    pairs     bf16 in vectors, two products at a time (AVX512-BF16)
    vectors   fp32 in vectors; bf16 weights are widened on the way
    packed    weights of 4 to 8 bits as they lie in a file, times 8-bit activations, summed in integers (``packed``)

Code for each format is made by closures over a ``Format``, so that nothing is decided while it runs. Weights lie in
the order in which a gemm reads them, in groups of 32 outputs, each one stretch of memory (``pack``).
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import register_jitable

from .llvm import LANES, PAIRED_BYTES, PAIRS, TILES, VNNI, address_as, floats_at
from .packed import BLOCK, GROUP, RECORD

LARGE_PAGE = 1 << 21


@register_jitable
def _to_bf16(value: Any) -> Any:
    """From fp32 to the nearest, ties to even; NaN stays NaN."""
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16)
    return np.uint16(rounded) if value == value else np.uint16(0x7FC0)


@register_jitable
def _from_bf16(value: Any) -> Any:
    return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


class Number(NamedTuple):
    """A number in memory: its bytes, (address) -> pointer, from fp32 and to fp32, and whether it is bf16."""

    bytes: int
    pointer: Any
    narrow: Any
    widen: Any
    is_bf16: bool


FP32 = Number(4, floats_at, np.float32, np.float32, False)
BF16 = Number(2, address_as(types.CPointer(types.uint16)), _to_bf16, _from_bf16, True)


@dataclass(frozen=True)
class Format:
    """A kind of product and the numbers around it.

    Attributes:
        kind: "tiles", "pairs", "vectors" or "packed".
        stored: weights, keys, values and logits, in the model's dtype.
        input: what a product reads.
        query: what attention's scores read.
        step: inner numbers that a product takes at once.
        key_pair: neighbours of a key that lie together in the cache.
    """

    kind: str
    stored: Number
    input: Number
    query: Number
    step: int
    key_pair: int

    @property
    def name(self) -> str:
        """Different for every format."""
        return f"{self.kind}_{self.stored.bytes}"

    def row_bytes(self, inner: int) -> int:
        """Bytes of a row that a product reads; rows times packed weights have their quantized blocks behind them."""
        size = round_up(inner, self.step) * self.input.bytes
        return size + (-(-inner // BLOCK) * RECORD if self.kind == "packed" else 0)

    def __str__(self) -> str:
        products = "VNNI" if VNNI else "AVX2" if PAIRED_BYTES else "plain"
        names = {
            "tiles": "AMX tiles",
            "pairs": "AVX512-BF16 pairs",
            "packed": f"packed weights, 8-bit {products} products",
        }
        return names.get(self.kind, f"{LANES}-lane vectors")


FORMATS = {
    ("tiles", torch.bfloat16): Format("tiles", BF16, BF16, BF16, 32, 2),
    ("pairs", torch.bfloat16): Format("pairs", BF16, BF16, FP32, 2, 1),
    ("vectors", torch.bfloat16): Format("vectors", BF16, FP32, FP32, 1, 1),
    ("vectors", torch.float32): Format("vectors", FP32, FP32, FP32, 1, 1),
    ("packed", torch.float32): Format("packed", FP32, FP32, FP32, BLOCK, 1),
}


def format_for(dtype: torch.dtype) -> Format:
    """The quickest format of a dtype on this processor; KeyError where there is none."""
    kind = "tiles" if TILES else "pairs" if PAIRS else "vectors"
    return FORMATS[kind if dtype == torch.bfloat16 else "vectors", dtype]


def round_up(number: int, multiple: int) -> int:
    """To the next multiple."""
    return -(-number // multiple) * multiple


class Arena:
    """One stretch of ``size`` bytes for many tensors, each on a cache line of its own.

    In large pages where the system gives them to shared memory: fewer pages, fewer stalls.
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


class Linear(NamedTuple):
    """Weight (out, in) and bias (out,)."""

    weight: torch.Tensor
    bias: torch.Tensor


def packed_bytes(linear: Linear, numbers: Format) -> int:
    """Bytes of a packed weight."""
    out, inner = linear.weight.shape
    return round_up(out, GROUP) * round_up(inner, numbers.step) * numbers.stored.bytes


def pack(
    linear: Linear, numbers: Format, arena: Arena, padding: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, int]:
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
    memory = arena.take(packed_bytes(linear, numbers)).view(groups, -1)
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
    return memory, bias, steps


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


def paired(size: int, rotary: int) -> torch.Tensor:
    """The order of a head's D outputs in which rotary pairs (i, i + R/2) of the first R lie side by side."""
    return torch.cat([torch.arange(rotary).view(2, -1).t().reshape(-1), torch.arange(rotary, size)])


def reordered(linear: Linear, order: torch.Tensor) -> Linear:
    """A query or key linear with the outputs of each head in that order."""
    rows = torch.arange(len(linear.weight)).view(-1, len(order))[:, order].reshape(-1)
    return Linear(linear.weight[rows], linear.bias[rows])


def tile_config(rows: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The processor's 64 bytes on tile shapes: palette 1; 16 rows of 64 bytes, fewer for sums and rows below 16."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32].view(np.uint16)[:] = 64
    config[48:56] = 16
    config[[48, 49, 52]] = min(16, max(1, rows))
    return config
