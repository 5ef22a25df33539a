"""Parts of the torch twin: packed linears beside plain ones, and what runs between them."""

from __future__ import annotations

import pytest
import torch

from lookahead.targets.cpu.cache import LeanCache
from lookahead.targets.cpu.kernels import Norm, NumbaKernels, TorchKernels, Turns, best_kernels
from lookahead.targets.cpu.linear import Int8Linear, PackedLinear, PlainLinear, best_kind
from lookahead.targets.cpu.specs import LinearParts

ROWS = (1, 2, 3, 5, 8, 13, 16, 31, 32, 64, 100, 128)
packed_only = pytest.mark.skipif(best_kind(torch.float32)[0] is PlainLinear, reason="no oneDNN linear here")


def parts(out: int, inner: int, dtype: torch.dtype, bias: bool) -> LinearParts:
    torch.manual_seed(1)
    weight = (torch.randn(out, inner) * 0.05).to(dtype)
    return LinearParts(weight, torch.randn(out).to(dtype) if bias else None)


@packed_only
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("inner", [24, 96, 1024, 1100, 2500])
@pytest.mark.parametrize("call", ["of", "plus"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_packed_equals_plain(dtype: torch.dtype, call: str, inner: int, bias: bool) -> None:
    if best_kind(dtype)[0] is PlainLinear:
        pytest.skip("no oneDNN for this dtype here")
    linear = parts(40, inner, dtype, bias)
    x, y = torch.randn(7, inner).to(dtype), torch.randn(7, 40).to(dtype)
    arguments = (x,) if call == "of" else (x, y)
    with torch.no_grad():
        a = getattr(PlainLinear(linear), call)(*arguments)
        b = getattr(PackedLinear(linear), call)(*arguments)
    tolerance = 2e-5 if dtype == torch.float32 else 0.04
    assert torch.allclose(a.float(), b.float(), atol=tolerance, rtol=tolerance)


KINDS = [
    TorchKernels,
    pytest.param(
        NumbaKernels, marks=pytest.mark.skipif(best_kernels()[0] is TorchKernels, reason="no numba")
    ),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
H, K, D = 6, 2, 16


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_is_torchs_and_the_same_for_any_number_of_rows(kind: type, dtype: torch.dtype) -> None:
    kernels = kind(H, K, D, dtype)
    norm = Norm(torch.randn(70), 1e-3)
    x = (torch.randn(128, 70) * 0.05).to(dtype)
    reference = torch.nn.functional.rms_norm(x.double(), (70,), norm.weight.double(), 1e-3)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    assert torch.allclose(kernels.norm(x, norm).double(), reference, rtol=tolerance, atol=1e-6)
    alone = torch.cat([kernels.norm(x[i : i + 1], norm) for i in range(128)])
    assert all(torch.equal(kernels.norm(x[:rows], norm), alone[:rows]) for rows in ROWS)


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_the_gate_is_silu_times_up(kind: type, dtype: torch.dtype) -> None:
    kernels = kind(H, K, D, dtype)
    both = torch.cat((torch.linspace(-120, 120, 1001)[:, None].expand(-1, 3), torch.randn(1001, 3)), 1).to(
        dtype
    )
    gate, up = both.double().chunk(2, -1)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6  # torch rounds between silu and the product
    expected = torch.nn.functional.silu(gate) * up
    assert torch.allclose(kernels.gate(both).double(), expected, rtol=tolerance, atol=1e-6)
    alone = torch.cat([kernels.gate(both[i : i + 1]) for i in range(1001)])
    assert torch.equal(kernels.gate(both), alone)


@DTYPES
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "head-norms"])
@pytest.mark.parametrize("turned", [False, True], ids=["still", "turned"])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_turned_and_stored_in_place(
    kind: type, turned: bool, normed: bool, dtype: torch.dtype
) -> None:
    kernels = kind(H, K, D, dtype)
    torch.manual_seed(2)
    y = torch.randn(7, (H + 2 * K) * D).to(dtype)
    pairs = torch.polar(torch.ones(7, D // 2), torch.randn(7, D // 2))
    head_norm = Norm(torch.randn(H + K, D), 1e-3) if normed else None
    cache = LeanCache(2, K, D, 16)
    cache.reserve(3, 16)
    cache.storage.fill_(torch.nan)
    places = [(2, 5, 4), (0, 0, 3)]
    query = kernels.turn(y, Turns(pairs, H, K) if turned else None, head_norm, cache, 1, places)
    expected = y.double().view(7, H + 2 * K, D)
    heads, values = expected[:, : H + K], expected[:, H + K :]
    if head_norm is not None:
        heads = torch.nn.functional.rms_norm(heads, (D,), None, 1e-3) * head_norm.weight
    if turned:
        turns = pairs.to(torch.complex128)[:, None]
        heads = torch.view_as_real(torch.view_as_complex(heads.reshape(7, H + K, D // 2, 2)) * turns).flatten(
            2
        )
    assert torch.allclose(query.double(), heads[:, :H], atol=1e-5)
    stored = torch.cat((heads[:, H:], values), 1).transpose(0, 1).float()
    assert torch.allclose(cache.storage[1, 2, :, 5:9], stored[:, :4], atol=1e-5)
    assert torch.allclose(cache.storage[1, 0, :, :3], stored[:, 4:], atol=1e-5)
    assert int(cache.storage.isfinite().sum()) == 7 * 2 * K * D  # and nothing else was written


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_nan(kind: type) -> None:
    kernels = kind(H, K, D, torch.bfloat16)
    x = torch.full((1, 8), torch.nan, dtype=torch.bfloat16)
    assert kernels.norm(x, Norm(torch.ones(8), 1e-5)).isnan().all()
    assert kernels.gate(x).isnan().all()


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_give_the_rows_back(kind: type, dtype: torch.dtype) -> None:
    kernels = kind(H, K, D, dtype)
    x = torch.cat((torch.randn(5, 40) * 3, torch.zeros(1, 40))).to(dtype)
    bits, scales = kernels.quantise(x)
    assert bits.dtype == torch.uint8
    back = (bits.float() - 128) * scales[:, None]
    assert (back - x.float()).abs().max() <= 0.51 * scales.max()
    assert not back[5].any()
    y, bias = torch.randn(6, 40), torch.randn(40).to(dtype)
    for extra in (None, bias):
        for other in (None, x):
            expected = y.double() * scales[:, None].double()
            for term in (extra, other):
                expected = expected + (0 if term is None else term.double())
            tolerance = 1e-5 if dtype == torch.float32 else 2**-8
            result = kernels.rescale(y, scales, extra, other).double()
            assert torch.allclose(result, expected, rtol=tolerance, atol=1e-5)


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="no VNNI here")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_int8_is_near_plain_and_a_row_stands_alone(bias: bool, kind: type) -> None:
    linear = parts(200, 1500, torch.float32, bias)
    x, y = torch.randn(64, 1500), torch.randn(64, 200)
    x[7] *= 1000  # one loud row must not cost the others their precision
    int8 = Int8Linear(linear, kind(H, K, D, torch.float32))
    expected = PlainLinear(linear).plus(x, y)
    error = (int8.plus(x, y) - expected).norm(dim=1) / (expected - y).norm(dim=1)
    assert error.max() < 0.02
    assert torch.equal(int8.plus(x[3:4], y[3:4])[0], int8.plus(x, y)[3])
    assert torch.allclose(int8.of(x), int8.plus(x, torch.zeros_like(y)), atol=1e-3)
