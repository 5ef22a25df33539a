"""The k best tokens of each row, which adaptive drafting reads in each step."""

import numpy as np
import pytest
import torch

from lookahead.hf.logits import TensorLogits

SHAPES = [
    (1, 1, 1),
    (2, 3, 2),
    (1, 5, 63),
    (1, 2, 64),
    (3, 1, 65),
    (1, 7, 2047),
    (2, 2, 2049),
    (1, 3, 70_000),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sorted_rows(logits, k):
    """A stable sort, with the lower token first in a tie."""
    values, ids = (-logits.float()).sort(dim=-1, stable=True)
    return ids[..., :k], (values[..., :1] - values)[..., :k]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("device", sorted({"cpu", DEVICE}))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_top_is_what_a_sort_finds(shape, device, dtype):
    torch.manual_seed(sum(shape))
    # All differ in every dtype, as torch leaves the order of ties open.
    steps = torch.stack([torch.randperm(shape[-1]) for _ in range(shape[0] * shape[1])]).view(shape)
    logits = ((steps - shape[-1] // 2) / 256).to(dtype) if shape[-1] < 200 else torch.randn(shape).to(dtype)
    for k in (1, 8, 24):
        ids, odds = TensorLogits(logits.to(device)).top(k)
        expected_ids, expected = sorted_rows(logits, k)
        assert ids.shape == odds.shape == (shape[0] * shape[1], min(k, shape[-1]))
        expected_ids, expected = expected_ids.flatten(0, 1), expected.flatten(0, 1)
        np.testing.assert_allclose(
            odds, expected, atol=0.05 if dtype in (torch.bfloat16, torch.float16) else 1e-5
        )
        if dtype in (torch.float32, torch.float64):
            np.testing.assert_array_equal(ids, expected_ids)


def test_of_equals_the_lower_token_as_argmax_has_it():
    torch.manual_seed(0)
    for vocabulary in (50, 3000):
        logits = torch.randint(-3, 3, (1, 9, vocabulary)).to(torch.bfloat16)
        logits[0, 1] = 0.0
        logits[0, 2] = float("-inf")
        logits[0, 2, vocabulary // 2] = 1.0
        batch = TensorLogits(logits)
        ids, odds = batch.top(8)
        np.testing.assert_array_equal(ids, sorted_rows(logits, 8)[0][0])
        assert ids[:, 0].tolist() == logits[0].float().argmax(-1).tolist()
        assert [batch.argmax(row) for row in range(9)] == ids[:, 0].tolist()
        assert odds[2].tolist() == [0.0] + [float("-inf")] * 7


def test_the_two_zeros_are_equal():
    logits = torch.full((1, 1, 100), -1.0)
    logits[0, 0, [7, 30, 31]] = torch.tensor([-0.0, 0.0, -0.0])
    batch = TensorLogits(logits)
    assert batch.argmax(0) == 7
    assert batch.top(3)[0].tolist() == [[7, 30, 31]]
    assert batch.top(3)[1].tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 5])
def test_nan(sign, dtype, k):
    """As an integer, a NaN with its sign bit set, as x86 makes it, is the smallest number."""
    logits = torch.randn(2, 4, 100).to(dtype)
    logits[0, 0, 7] = torch.tensor(float("nan")).copysign(torch.tensor(sign))
    ids, odds = TensorLogits(logits).top(k)
    assert ((ids >= 0) & (ids < 100)).all()
    assert np.isnan(odds[0]).all()
    assert np.isfinite(odds[1:]).all()


def test_rows_that_do_not_lie_together():
    padded = torch.randn(1, 4, 200)[..., :100]
    np.testing.assert_array_equal(TensorLogits(padded).top(5)[0], sorted_rows(padded, 5)[0][0])
    apart = torch.randn(2, 4, 200)[..., ::2]
    np.testing.assert_array_equal(TensorLogits(apart).top(5)[0], sorted_rows(apart, 5)[0].flatten(0, 1))
