"""Rows times packed weights, group by group, each block of sums handed to an epilogue while it is in the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

from .epilogue import add_sums, gate_sums, keep_logits, store_sums
from .llvm import jit
from .microkernel import GROUP, ROW_BLOCK, microkernel
from .numeric_format import Format


class Gemm(NamedTuple):
    """W x + b of some groups of outputs, by what becomes of it.

    ``store``, ``add`` (to what is there) and ``gate`` take (linear, x, stride, rows, begin, end, scratch, out, out
    stride); ``logits`` takes two more arguments, the address of the peaks and their stride. Strides are bytes from
    row to row; ``linear`` is a record of ``execution_plan.LINEAR``; groups begin..end are computed.
    """

    store: Any
    add: Any
    gate: Any
    logits: Any


def gemm_of(numbers: Format) -> Gemm:
    """The gemms of a format."""
    kernel = microkernel(numbers)
    keep, logit_bytes = keep_logits(numbers.stored.is_bf16), numbers.stored.bytes * GROUP

    def ending_in(name: str, epilogue: Any, group_bytes: int) -> Any:
        def gemm(
            linear: Any, x: int, stride: int, rows: int, begin: int, end: int, scratch: int,
            out: int, out_stride: int,
        ) -> None:  # fmt: skip
            for g in range(begin, end):
                bias, weights = linear.bias + 4 * g * GROUP, linear.weights + g * linear.group_bytes
                for r in range(0, rows, ROW_BLOCK):
                    count = min(ROW_BLOCK, rows - r)
                    kernel(weights, x + r * stride, stride, linear.steps, count, scratch)
                    epilogue(scratch, bias, out + g * group_bytes + r * out_stride, out_stride, count)

        return jit(gemm, name + numbers.name)

    def logits(
        linear: Any, x: int, stride: int, rows: int, begin: int, end: int, scratch: int,
        out: int, out_stride: int, peaks: int, peak_stride: int,
    ) -> None:  # fmt: skip
        for g in range(begin, end):
            bias, weights = linear.bias + 4 * g * GROUP, linear.weights + g * linear.group_bytes
            for r in range(0, rows, ROW_BLOCK):
                count = min(ROW_BLOCK, rows - r)
                kernel(weights, x + r * stride, stride, linear.steps, count, scratch)
                here, peak = out + g * logit_bytes + r * out_stride, peaks + 4 * g + r * peak_stride
                keep(scratch, bias, here, out_stride, peak, peak_stride, count)

    return Gemm(
        ending_in("store", store_sums, 4 * GROUP),
        ending_in("add", add_sums, 4 * GROUP),
        ending_in("gate", gate_sums(numbers.input.is_bf16), numbers.input.bytes * GROUP // 2),
        jit(logits, numbers.name),
    )
