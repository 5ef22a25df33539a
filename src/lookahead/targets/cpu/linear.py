"""Linear maps of the torch twin, with the residual sum fused in.

Each kind offers the same two calls on rows x of shape (Q, in):
    of(x)            W x + b
    plus(x, y)       (W x + b) + y
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .kernels import TorchKernels
from .specs import LinearParts


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
        self._call = torch.ops.mkldnn._linear_pointwise.default
        self._fused = torch.ops.mkldnn._linear_pointwise.binary
        self._weight = torch.ops.mkldnn._reorder_linear_weight.default(parts.weight.contiguous(), None)
        self._bias = None if parts.bias is None else parts.bias.clone()
        self._bytes = parts.weight.numel() * parts.weight.element_size()

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return self._call(x, self._weight, self._bias, "none", [], "")

    def plus(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self._fused(x, y, self._weight, self._bias, "add")

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
