"""Linear maps whose weights are laid out once, with the residual sum fused in.

Each kind offers the same two calls on rows x of shape (Q, in):
    of(x)            W x + b
    plus(x, y)       (W x + b) + y

``PackedLinear`` holds oneDNN's blocked layout. Its results do not depend on how many rows are computed
together as long as the inner size stays within one block of oneDNN's. In bf16, where another rounding flips
near ties, larger ones are cut into pieces of at most ``BLOCK`` that are added up: a row then has the same bits
in a step of one row and in a step of 128 (measured with oneDNN 3.12 on AVX-512; ``tests/test_lean_linear.py``
looks at it). That costs 3 to 6 % of a step; in fp32 there is nothing to gain, and weights stay whole.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .kernels import TorchKernels
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
        pieces = -(-inner // BLOCK) if weight.dtype == torch.bfloat16 else 1
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


class Int8Linear:
    """Weights as signed bytes with a scale for each output, inputs as bytes with a scale for each row.

    Half the bytes of bf16 and integer products, so about twice as fast from one row to many where the
    processor has VNNI. Its outputs are not the model's own: an option, never the default. A scale for each
    row, and not one for all rows as in torch's dynamic quantisation, because a row's logits must not depend
    on what was drafted beside it. Integer sums are exact, so a row has the same bits among any others.
    """

    def __init__(self, parts: LinearParts, kernels: TorchKernels) -> None:
        weight = parts.weight.float()
        scales = weight.abs().amax(1).clamp_min_(1e-12) / 127
        quantised = (weight / scales[:, None]).round_().to(torch.int8)
        self._weight = torch.ops.onednn.qlinear_prepack(quantised, None)
        self._scales = scales
        self._zeros = torch.zeros(len(scales), dtype=torch.int32)
        self._bias = None if parts.bias is None else parts.bias.clone()
        self._kernels = kernels
        self._call = torch.ops.onednn.qlinear_pointwise.default

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, None)

    def plus(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self._run(x, y)

    def _run(self, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        bits, scales = self._kernels.quantise(x)
        product = self._call(
            bits,
            1.0,
            128,
            self._weight,
            self._scales,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return self._kernels.rescale(product, scales, self._bias, y)

    def nbytes(self) -> int:
        """Bytes held beside the model's own."""
        return self._weight.numel() + 8 * self._scales.numel()


Linear = PlainLinear | PackedLinear | Int8Linear


def best_kind(dtype: torch.dtype) -> tuple[type[PlainLinear] | type[PackedLinear], str]:
    """The kind for this machine, and why in a few words."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return PlainLinear, "plain weights: this torch has no oneDNN linear"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PlainLinear, "plain weights: oneDNN has no bf16 kernels for this processor"
    return PackedLinear, "weights packed for oneDNN"
