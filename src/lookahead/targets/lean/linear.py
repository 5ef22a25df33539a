"""Linear maps whose weights are laid out once, with the residual sum fused in.

Each kind offers the same two calls on rows x of shape (Q, in):
    of(x)            W x + b
    plus(x, y)       (W x + b) + y

``PackedLinear`` holds oneDNN's blocked layout. Its results do not depend on how many rows are computed
together as long as the inner size stays within one block of oneDNN's, so larger ones are cut into pieces of
at most ``BLOCK`` that are added up: a row then has the same bits in a step of one row and in a step of 128,
in bf16 too (measured with oneDNN 3.12 on AVX-512; ``tests/test_lean_linear.py`` looks at it).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .specs import LinearParts

#: Largest inner size whose sums oneDNN forms in one order for any number of rows.
BLOCK = 1024


class PlainLinear:
    """The naive twin: torch's own linear on the weight as it is."""

    def __init__(self, parts: LinearParts) -> None:
        self.weight = parts.weight
        self.bias = parts.bias

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def plus(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias).add_(y)

    def nbytes(self) -> int:
        """Bytes held beside the model's own."""
        return 0


class PackedLinear:
    """oneDNN's blocked weights. The weight is copied; the model's own stays as it is."""

    def __init__(self, parts: LinearParts) -> None:
        weight, bias = parts.weight, parts.bias
        out, inner = weight.shape
        pieces = -(-inner // BLOCK)
        # Whole multiples of 64, so that no piece ends inside a vector.
        step = -(-inner // (pieces * 64)) * 64
        self._call = torch.ops.mkldnn._linear_pointwise.default
        self._fused = torch.ops.mkldnn._linear_pointwise.binary
        pack = torch.ops.mkldnn._reorder_linear_weight.default
        self._first = pack(weight[:, :step].contiguous(), None)
        self._bias = None if bias is None else bias.clone()
        self._rest = [
            (at, min(at + step, inner), pack(weight[:, at : at + step].contiguous(), None))
            for at in range(step, inner, step)
        ]
        self._step = step
        self._bytes = out * inner * weight.element_size()

    def of(self, x: torch.Tensor) -> torch.Tensor:
        if self._rest:
            return self._add_rest(x, self._call(x[:, : self._step], self._first, self._bias, "none", [], ""))
        return self._call(x, self._first, self._bias, "none", [], "")

    def plus(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self._rest:
            return self._add_rest(x, self._fused(x[:, : self._step], y, self._first, self._bias, "add"))
        return self._fused(x, y, self._first, self._bias, "add")

    def _add_rest(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        for begin, end, piece in self._rest:
            total = self._fused(x[:, begin:end], total, piece, None, "add")
        return total

    def nbytes(self) -> int:
        """Bytes held beside the model's own."""
        return self._bytes


Linear = PlainLinear | PackedLinear


def best_kind(dtype: torch.dtype) -> tuple[type[PlainLinear] | type[PackedLinear], str]:
    """The kind for this machine, and why in a few words."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return PlainLinear, "plain weights: this torch has no oneDNN linear"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PlainLinear, "plain weights: oneDNN has no bf16 kernels for this processor"
    return PackedLinear, "weights packed for oneDNN"
