"""Packed linears beside plain ones, and the promise that a row does not depend on the rows beside it."""

from __future__ import annotations

import pytest
import torch

from lookahead.targets.lean.forward import RMSNorm
from lookahead.targets.lean.linear import BLOCK, PackedLinear, PlainLinear, best_kind
from lookahead.targets.lean.specs import LinearParts

ROWS = (1, 2, 3, 5, 8, 13, 16, 31, 32, 64, 100, 128)
packed_only = pytest.mark.skipif(best_kind(torch.float32)[0] is PlainLinear, reason="no oneDNN linear here")
bf16_only = pytest.mark.skipif(best_kind(torch.bfloat16)[0] is PlainLinear, reason="no oneDNN bf16 here")


def parts(out: int, inner: int, dtype: torch.dtype, bias: bool) -> LinearParts:
    torch.manual_seed(1)
    weight = (torch.randn(out, inner) * 0.05).to(dtype)
    return LinearParts(weight, torch.randn(out).to(dtype) if bias else None)


@packed_only
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("inner", [24, 96, 1024, 1100, 2500])
@pytest.mark.parametrize("call", ["of", "silu", "times", "plus"])
def test_packed_equals_plain(call: str, inner: int, bias: bool) -> None:
    linear = parts(40, inner, torch.float32, bias)
    x, y = torch.randn(7, inner), torch.randn(7, 40)
    arguments = (x,) if call in ("of", "silu") else (x, y)
    with torch.no_grad():
        a = getattr(PlainLinear(linear), call)(*arguments)
        b = getattr(PackedLinear(linear), call)(*arguments)
    assert torch.allclose(a, b, atol=2e-5)


@bf16_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("inner", [96, BLOCK, BLOCK + 512])
def test_a_row_has_the_same_bits_among_any_number_of_rows(inner: int, dtype: torch.dtype) -> None:
    linear = PackedLinear(parts(200, inner, dtype, False))
    x, y = torch.randn(max(ROWS), inner).to(dtype), torch.randn(max(ROWS), 200).to(dtype)
    with torch.no_grad():
        alone = torch.cat([linear.plus(x[i : i + 1], y[i : i + 1]) for i in range(max(ROWS))])
        for rows in ROWS:
            assert torch.equal(linear.plus(x[:rows], y[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_norm_is_torchs_and_the_same_for_any_number_of_rows(dtype: torch.dtype) -> None:
    weight = torch.randn(70)
    norm = RMSNorm(weight, 1e-3, dtype)
    x = (torch.randn(128, 70) * 0.05).to(dtype)
    reference = torch.nn.functional.rms_norm(x.double(), (70,), weight.double(), 1e-3)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    assert torch.allclose(norm(x).double(), reference, rtol=tolerance, atol=1e-6)
    alone = torch.cat([norm(x[i : i + 1]) for i in range(128)])
    assert all(torch.equal(norm(x[:rows]), alone[:rows]) for rows in ROWS)
