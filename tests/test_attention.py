"""Every attention backend matches the float64 reference. Without a GPU, Triton's interpreter runs the kernel.

Outputs are filled with NaN before each run, as are all cache entries that no row may see; for sdpa, which
multiplies these by 0, they are large numbers.
"""

import functools
import importlib
import random

import pytest
import torch

from lookahead.core import SettingsError
from lookahead.hf import attention

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(params=["sdpa", "triton"])
def attend(request, monkeypatch):
    if request.param != "sdpa":
        if not attention.has_triton():
            pytest.skip("triton is not installed")
        module = importlib.import_module("lookahead.hf.attention.triton")
        monkeypatch.setattr(
            module,
            "_empty",
            lambda shape, **named: torch.full(shape, torch.nan, **named),
        )
        return module.attend
    return sdpa


def sdpa(key, value, **given):
    finite = {"key": key.nan_to_num(1e4), "value": value.nan_to_num(1e4)}
    return attention.get("sdpa")(**given, **finite)


def problem(
    rows=5, lengths=(37,), heads=4, kv_heads=2, size=64, value_size=None, dtype=torch.float32, seed=0, spare=3
):
    """Random tensors and trees; entries that no row may see are NaN."""
    numbers, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, capacity = len(lengths), max(lengths) + rows + spare

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    key = normal(batch, kv_heads, capacity, size)
    value = normal(batch, kv_heads, capacity, value_size or size)
    ancestors, depths = [], []
    for b, length in enumerate(lengths):
        bits, depth = [1], [0]
        for row in range(1, rows):
            parent = numbers.randrange(row)
            bits.append(bits[parent] | 1 << row)
            depth.append(depth[parent] + 1)
        ancestors.append(bits)
        depths.append(depth)
        key[b, :, length + rows :] = torch.nan
        value[b, :, length + rows :] = torch.nan
    tensors = [normal(batch, heads, rows, size), key, value]
    return {
        "query": tensors[0].to(DEVICE, dtype),
        "key": key.to(DEVICE, dtype),
        "value": value.to(DEVICE, dtype),
        "lengths": torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        "words": attention.pack_bits(ancestors, rows).to(DEVICE),
        "depths": torch.tensor(depths, dtype=torch.int32, device=DEVICE),
    }


def assert_matches(attend, given, tolerance=1.0, **options):
    exact = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    expected = attention.get("reference")(**exact, **options)
    out = attend(**given, **options)
    assert out.dtype == given["query"].dtype
    assert not out.isnan().any()
    difference = (out.double() - expected).abs().max().item()
    assert difference < tolerance * TOLERANCE[given["query"].dtype], difference


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("size", [64, 80, 256])
def test_head_sizes_and_dtypes_equal_the_reference(attend, size, dtype):
    assert_matches(attend, problem(size=size, dtype=dtype, seed=size))


@pytest.mark.parametrize("rows", [1, 32, 33, 256])
def test_rows(attend, rows):
    heads = (4, 2) if rows < 64 else (1, 1)
    assert_matches(attend, problem(rows, (70,), *heads, seed=rows))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 4), (14, 2), (9, 3)], ids=str)
def test_grouped_heads_equal_the_reference(attend, heads):
    assert_matches(attend, problem(rows=7, heads=heads[0], kv_heads=heads[1], size=80))


@pytest.mark.parametrize("lengths", [(0,), (1,), (127,), (128,), (129,), (1000,), (5, 300, 41)], ids=str)
def test_contexts_past_the_ends_of_blocks(attend, lengths):
    assert_matches(attend, problem(rows=6, lengths=lengths, seed=sum(lengths)))


def test_a_context_of_32k(attend):
    """Without a GPU a quarter of it, which is in 16 parts too."""
    length = 32_701 if GPU else 8_125
    given = problem(rows=3, lengths=(length,), heads=1, kv_heads=1, dtype=torch.float16)
    given["query"] *= 3  # so that single distant keys matter
    assert_matches(attend, given)


@pytest.mark.parametrize("length", [0, 3, 64, 300])
def test_a_cache_with_far_more_room_than_text(attend, length):
    """A captured graph serves all lengths up to a capacity."""
    assert_matches(attend, problem(rows=5, lengths=(length,), spare=2000 - length))


def test_windows_over_long_contexts(attend):
    given = problem(rows=3, lengths=(9000,), heads=1, kv_heads=1, dtype=torch.bfloat16)
    given["query"] *= 3
    assert_matches(attend, given, window=700)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("size", [80, 256])
def test_backends_equal_the_reference_with_all_options_together(attend, size, dtype):
    given = problem(34, (150,), 2, 1, size, dtype=dtype, seed=size)
    sinks = torch.tensor([-2.0, 3.0], device=DEVICE)
    assert_matches(attend, given, window=90, softcap=20.0, sinks=sinks, scale=0.11)


TUNINGS = [
    {"parts": 1},
    {"parts": 20},
    {"BLOCK_M": 16, "BLOCK_N": 32},
    {"BLOCK_N": 128, "parts": 7},
]


@pytest.mark.skipif(not attention.has_triton(), reason="triton is not installed")
@pytest.mark.parametrize("tuning", TUNINGS, ids=str)
def test_tile_sizes_change_nothing(tuning, monkeypatch):
    module = importlib.import_module("lookahead.hf.attention.triton")
    tuned = functools.partial(module.attend, tuning=tuning)
    given = problem(rows=11, lengths=(333, 4), kv_heads=1, dtype=torch.float16)
    assert_matches(tuned, given)
    if "BLOCK_M" in tuning:
        assert_matches(tuned, given, window=50)


@pytest.mark.parametrize("window", [1, 3, 17, 32, 500])
@pytest.mark.parametrize("lengths", [(3,), (90, 20)], ids=str)
def test_sliding_windows_equal_the_reference(attend, window, lengths):
    assert_matches(attend, problem(rows=9, lengths=lengths, seed=window), window=window)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_soft_capping_equals_the_reference(attend, softcap):
    given = problem(rows=5, lengths=(50,))
    assert_matches(attend, given, softcap=softcap)
    assert_matches(attend, given, softcap=softcap, window=11, scale=0.7)


@pytest.mark.parametrize("window", [0, 9])
def test_sinks_equal_the_reference(attend, window):
    given = problem(rows=5, lengths=(50, 2))
    assert_matches(attend, given, sinks=torch.tensor([-3.0, 0.0, 2.0, 9.0], device=DEVICE), window=window)


def test_other_value_sizes_and_strides(attend):
    given = problem(rows=5, size=96, value_size=64)
    assert_matches(attend, given)
    given["query"] = given["query"].transpose(1, 2).contiguous().transpose(1, 2)  # as models pass it
    wide = torch.full((3, *given["key"].shape), torch.nan, device=DEVICE)
    wide[1] = given["key"]
    given["key"] = wide[1]
    assert_matches(attend, given)


@pytest.mark.parametrize("slots", [(2, 0), (3, 3)], ids=str)
def test_sequences_in_any_slot_of_the_cache(attend, slots):
    given = problem(rows=5, lengths=(50, 9))
    for name in ("key", "value"):
        cache = torch.full((4, *given[name].shape[1:]), torch.nan, device=DEVICE)
        cache[list(slots)] = given[name]
        given[name] = cache
    given["slots"] = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    if slots[0] == slots[1]:  # as in a step padded with copies of a sequence
        for name in ("query", "lengths", "words", "depths"):
            given[name][0] = given[name][1]
    assert_matches(attend, given)


def test_large_scores_do_not_overflow(attend):
    given = problem(rows=4, lengths=(40,))
    given["query"] *= 60  # scores in the hundreds, rounded to about 1e-5
    assert_matches(attend, given, tolerance=10)


def test_the_comparison_finds_a_wrong_mask(attend):
    given = problem(rows=6, lengths=(40,))
    wrong = dict(given, words=given["words"].clone())
    wrong["words"][0, 5, 0] ^= 2  # one row sees one row more or fewer
    out = attend(**wrong)
    expected = attention.get("reference")(**given)
    assert (out[:, :, :5] - expected[:, :, :5]).abs().max() < 1e-4
    assert (out[:, :, 5] - expected[:, :, 5]).abs().max() > 1e-3


def test_the_definition_is_causal_attention_for_a_chain():
    given = problem(rows=6, lengths=(10,), heads=2, kv_heads=2)
    chain = [[(2 << row) - 1 for row in range(6)]]
    given["words"] = attention.pack_bits(chain, 6).to(DEVICE)
    given["depths"] = torch.arange(6, device=DEVICE)[None]
    mask = torch.ones(6, 16, dtype=torch.bool, device=DEVICE).tril(10)
    expected = torch.nn.functional.scaled_dot_product_attention(
        given["query"], given["key"][:, :, :16], given["value"][:, :, :16], attn_mask=mask
    )
    out = attention.get("reference")(**given)
    assert (out - expected).abs().max() < 1e-5


def test_bits_are_packed_as_they_are_read():
    bits = [[1, 3, 5, (1 << 40) | 1] + [1 << row for row in range(4, 40)] + [(1 << 39) | (1 << 31) | 1]]
    unpacked = attention.unpack_bits(attention.pack_bits(bits, 41))
    for row, number in enumerate(bits[0]):
        assert unpacked[0, row].tolist() == [bool(number >> c & 1) for c in range(41)]
    assert attention.unpack_bits(attention.pack_bits([[1, 3], [1]], 2))[1].tolist() == [[1, 0], [1, 0]]


def test_what_cannot_be_computed_is_refused():
    with pytest.raises(SettingsError, match="must be auto or one of"):
        attention.get("flex")
    given = problem(size=300)
    for name in ("sdpa", "triton") if attention.has_triton() else ("sdpa",):
        with pytest.raises(SettingsError, match="head sizes must be 1 to 256"):
            attention.get(name)(**given)
    given = problem(heads=4, kv_heads=2)
    with pytest.raises(SettingsError, match="multiple of key heads"):
        attention.get("sdpa")(**dict(given, query=given["query"][:, :3]))
    with pytest.raises(SettingsError, match="ancestor words"):
        attention.get("sdpa")(**dict(given, words=given["words"][:, :3]))


@pytest.mark.skipif(not attention.has_triton(), reason="triton is not installed")
def test_launches_say_whether_products_are_fused(monkeypatch):
    """Triton warns if this is unspecified, and warnings are errors here."""
    module, launches = importlib.import_module("lookahead.hf.attention.triton"), []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given, **named: launches.append(named)

    for name in ("_parts", "_merge"):
        monkeypatch.setattr(module, name, Kernel())
    module.attend(**problem())
    assert [launch["enable_fp_fusion"] for launch in launches] == [True, True]


@pytest.mark.skipif(attention.has_triton(), reason="triton is installed")
def test_a_missing_triton_is_named():
    with pytest.raises(SettingsError, match="pip install triton"):
        attention.get("triton")
