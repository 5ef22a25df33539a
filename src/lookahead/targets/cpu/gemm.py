"""Rows times packed weights, group by group, each block of sums handed to an epilogue while it is in the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

from .barrier import share
from .epilogue import add_sums, gate_sums, keep_logits, store_sums
from .llvm import jit
from .microkernel import GROUP, ROW_BLOCK, microkernel
from .numeric_format import Format


class Gemm(NamedTuple):
    """W x + b of some groups of outputs: stored, added to what is there, gated, or kept as logits with their peaks.

    Each takes (linear, x, stride, rows, out, out stride, peaks, peak stride, scratch, rank, size) and does this
    thread's share; strides are bytes from row to row; ``linear`` is a record of ``execution_plan.LINEAR``.
    """

    store: Any
    add: Any
    gate: Any
    logits: Any


def gemm_of(numbers: Format) -> Gemm:
    """The gemms of a format."""
    kernel = microkernel(numbers)

    def ending_in(name: str, epilogue: Any, group_bytes: int) -> Any:
        def gemm(
            linear: Any, x: int, stride: int, rows: int, out: int, out_stride: int, peaks: int, peak_stride: int,
            scratch: int, rank: int, size: int,
        ) -> None:  # fmt: skip
            begin, end = share(linear.groups, rank, size)
            for g in range(begin, end):
                bias, weights = linear.bias + 4 * g * GROUP, linear.weights + g * linear.group_bytes
                for r in range(0, rows, ROW_BLOCK):
                    count = min(ROW_BLOCK, rows - r)
                    kernel(weights, x + r * stride, stride, linear.steps, count, scratch)
                    here, peak = out + g * group_bytes + r * out_stride, peaks + 4 * g + r * peak_stride
                    epilogue(scratch, bias, here, out_stride, peak, peak_stride, count)

        return jit(gemm, name + numbers.name)

    return Gemm(
        ending_in("store", store_sums, 4 * GROUP),
        ending_in("add", add_sums, 4 * GROUP),
        ending_in("gate", gate_sums(numbers.input.is_bf16), numbers.input.bytes * GROUP // 2),
        ending_in("logits", keep_logits(numbers.stored.is_bf16), numbers.stored.bytes * GROUP),
    )
