"""The exact-mode kernel matches its reference in torch, and a row's bits do not depend on other rows.

It runs in Triton's interpreter without a GPU; ``test_attention_compile`` compiles it for real GPUs.
"""

import importlib
import random

import pytest
import torch

from families import tiny_model
from lookahead.hf import attention as package
from lookahead.hf import exact_mode
from lookahead.hf.attention import exact
from lookahead.hf.attention_hook import TreeAttention
from lookahead.hf.exact_mode import ROWS, ExactTarget
from lookahead.hf.facts import ModelFacts
from lookahead.testing import assert_same_as_autoregressive
from test_attention import DEVICE, TOLERANCE

pytestmark = pytest.mark.skipif(not package.has_triton(), reason="triton is not installed")
POSITIONS = (0, 1, 30, 31, 32, 63, 64, 94, 95, 96, 127, 128, 200, 287, 288, 330)


@pytest.fixture
def kernel():
    return importlib.import_module("lookahead.hf.attention.exact_triton").attend


def problem(dtype=torch.float32, heads=4, kv_heads=2, size=32, value_size=None, seed=0):
    """One row at each position, after its slot's committed rows; entries that no row may see are NaN."""
    numbers, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    key = torch.randn(2, kv_heads, 2 * exact.PAGE, size, generator=generator).to(dtype)
    value = torch.randn(2, kv_heads, 2 * exact.PAGE, value_size or size, generator=generator).to(dtype)
    key[:, :, 400:], value[:, :, 400:] = torch.nan, torch.nan
    rows = len(POSITIONS)
    columns = torch.full((rows, exact.WINDOW), 511)
    slots, counts = torch.tensor([numbers.randrange(2) for _ in range(rows)]), torch.zeros(rows).long()
    for r, position in enumerate(POSITIONS):
        begin = exact.boundary(position)
        depth = numbers.randrange(min(position, exact.DEPTH) + 1)
        seen = list(range(begin, position - depth))
        seen += sorted(numbers.sample(range(position - depth, position - depth + 50), depth + 1))
        counts[r], columns[r, : len(seen)] = len(seen), torch.tensor(seen)
    query = torch.randn(1, heads, rows, size, generator=generator).to(dtype)
    return [part.to(DEVICE) for part in (query, key, value, slots, torch.tensor(POSITIONS), counts, columns)]


def expected(given, **options):
    query, key, value, slots, positions, counts, columns = given
    wide = (query.double(), key.nan_to_num().double(), value.nan_to_num().double())
    rows = (slots, positions, counts, columns.clamp(max=399))
    return exact.attend(*wide, *rows, [(slot, 2) for slot in set(slots.tolist())], **options)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {}),
        ({"heads": 6, "kv_heads": 1, "size": 80, "value_size": 48}, {"scale": 0.3}),
        ({}, {"window": 40, "softcap": 2.0}),
        ({}, {"window": 8, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
    ],
    ids=["grouped", "sizes", "window-softcap", "sinks"],
)
def test_it_computes_what_the_definition_does(kernel, dtype, shape, options):
    given = problem(dtype, **shape)
    options = {name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in options.items()}
    wide = {name: x.double() if torch.is_tensor(x) else x for name, x in options.items()}
    found = kernel(*given, [], **options)
    torch.testing.assert_close(
        found.double(), expected(given, **wide), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_a_wrong_column_is_seen(kernel):
    given = problem()
    before = expected(given)
    given[6][9, 3] += 1
    assert not torch.allclose(kernel(*given, []).double(), before, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_has_the_same_bits_in_any_place_and_company(kernel, dtype):
    query, key, value, *rows = problem(dtype)
    first = kernel(query, key, value, *rows, [])
    order = torch.randperm(len(POSITIONS), generator=torch.Generator().manual_seed(1))
    turned = kernel(query[:, :, order], key, value, *(part[order] for part in rows), [])
    assert torch.equal(turned, first[:, :, order])
    alone = [kernel(query[:, :, r : r + 1], key, value, *(p[r : r + 1] for p in rows), []) for r in range(16)]
    assert torch.equal(torch.cat(alone, 2), first)


def test_texts_are_those_of_plain_decoding(kernel, monkeypatch):
    """A model's rows do not depend on each other with the kernel, and drafting changes no token."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # a program for each key head
    model = tiny_model("llama", initializer_range=0.1, max_position_embeddings=512, **heads)
    model.to(DEVICE, torch.bfloat16)
    facts, hook = ModelFacts(model), TreeAttention(model, kernel)
    monkeypatch.setattr(exact_mode, "PREFIX", 100)  # the interpreter is slow
    monkeypatch.setitem(ROWS, "cpu", 4)
    assert not exact_mode.depends_on_others(ExactTarget(model, facts, hook))
    found = assert_same_as_autoregressive(
        ExactTarget(model, facts, hook), [[5, 9, 14, 5, 9, 14, 5, 9]], "4,3,4", 10
    )
    assert found[0].stats.accepted > 0
