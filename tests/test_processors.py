"""The logits processors on arrays keep the same tokens as those of transformers."""

import numpy as np
import pytest
import torch

import lookahead
from lookahead.core import SettingsError
from lookahead.hf.sampling import TENSORS, as_torch
from lookahead.options import Options
from lookahead.sampling import processors
from lookahead.sampling.processors import ARRAYS, make_process

IDS = np.array([[5, 9, 7, 5, 9, 3, 5, 9]])
#: Arguments of each processor. The values reach from a single token to nearly all of them.
ARGUMENTS = {
    "repetition_penalty": [(1.3,), (0.8,)],
    "no_repeat_ngram_size": [(1,), (2,), (3,), (9,)],
    "bad_words": [([[7], [9, 4], [5, 9, 8], [1, 9, 6]],)],
    "min_new_tokens": [(6, 3, [2, 7]), (6, 2, [2, 7])],
    "temperature": [(0.7,), (1e-6,)],
    "top_k": [(1,), (7,), (40,), (5000,)],
    "top_p": [(0.01,), (0.5,), (0.9,), (0.95,), (0.999,)],
    "min_p": [(0.001,), (0.05,), (0.5,), (1.0,)],
    "typical_p": [(0.05,), (0.5,), (0.9,), (0.99,)],
}


def rows(vocabulary, count, random):
    """Scores (V,) float32: peaked and flat, with ties, with excluded tokens, with extremes."""
    for number in range(count):
        row = (random.standard_normal(vocabulary) * random.choice([0.3, 1, 3, 8])).astype(np.float32)
        form = number % 8
        if form == 1:
            row = np.round(row)  # ties
        elif form == 2:
            row[:] = 0.25 * (number % 3 - 1)
        elif form == 3:
            row[random.random(vocabulary) < 0.7] = -np.inf
        elif form == 4:
            row = np.round(row)
            row[random.random(vocabulary) < 0.99] = -np.inf
        elif form == 5:
            row[random.integers(vocabulary, size=3)] = (3e38, -3e38, 3e38)
        elif form == 6:
            row[random.integers(vocabulary)] = np.inf
        elif form == 7:
            row = np.float32(random.choice([1e-30, 1e4])) * row
        yield row


def difference(name, arguments, row):
    """The probability of the tokens that only one of our processor and transformers' keeps; infinite if the scores
    that they keep differ."""
    with np.errstate(over="ignore", invalid="ignore"):
        ours = ARRAYS[name](*arguments)(IDS, row[None].copy())[0]
    theirs = TENSORS[name](*arguments)(torch.from_numpy(IDS), torch.from_numpy(row)[None].clone())[0].numpy()
    if name == "bad_words":  # transformers adds minus infinity, which makes NaN of plus infinity
        theirs[np.isnan(theirs)] = -np.inf
    if name == "top_p":
        # transformers' sort keeps any of the tokens with the lowest score; ours keeps those with the highest ids.
        kept = np.flatnonzero(ours > -np.inf)
        last = kept[ours[kept] == ours[kept].min(initial=np.inf)]
        equals = np.flatnonzero(row == row[last[0]]) if len(last) else last
        if not np.array_equal(last, equals[len(equals) - len(last) :]):
            return np.inf
        row, ours, theirs = np.sort(row), np.sort(ours), np.sort(theirs)
    if np.array_equal(ours, theirs):
        return 0.0
    both = (ours > -np.inf) & (theirs > -np.inf)
    if name not in ("top_p", "typical_p", "min_p") or not np.array_equal(ours[both], theirs[both]):
        return np.inf
    odds = np.exp(row.astype(np.float64) - row.max())
    return odds[(ours > -np.inf) != (theirs > -np.inf)].sum() / odds.sum()


def differences(name, vocabulary, count, seed=0):
    """``difference`` of rows with one of the processor's arguments each."""
    random = np.random.default_rng([seed, vocabulary])
    choices = ARGUMENTS[name]
    return np.array(
        [
            difference(name, choices[random.integers(len(choices))], row)
            for row in rows(vocabulary, count, random)
        ]
    )


#: In large vocabularies, torch's float32 sum of a softmax is off by up to 7e-5 (sums of many equal numbers round in
#: one direction), so transformers keeps a few tokens more or fewer than the definition.
ROUNDING = 1e-4
#: The probability of a single token at the border, whose cumulative sum is within ``ROUNDING`` of p.
BORDER = 1e-3


@pytest.mark.parametrize("name", ARGUMENTS)
def test_they_keep_the_tokens_that_transformers_keeps(name):
    for vocabulary, count in {20: 400, 1000: 160}.items():
        assert not differences(name, vocabulary, count).any(), vocabulary
    assert differences(name, 49_152, 8).max() < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocabulary", "count", "most"),
    [
        (100, 6000, 6),
        (1000, 2500, 3),
        (32_000, 1000, 20),
        (49_152, 300, 12),
        (128_256, 140, 14),
        (260_000, 60, 12),
    ],
)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_they_keep_them_in_ten_thousand_rows(name, vocabulary, count, most):
    found = differences(name, vocabulary, count, seed=1)
    assert found.max() < BORDER
    assert np.count_nonzero(found) <= (most if name in ("top_p", "typical_p") else 0)


@pytest.mark.parametrize("few", [1, 2, 300])
def test_the_few_best_scores_decide_or_all_are_sorted(few, monkeypatch):
    monkeypatch.setattr(processors, "FEW", few)
    for name in ("top_p", "typical_p"):
        assert not differences(name, 500, 80).any()


def test_the_comparison_can_fail(monkeypatch):
    honest = processors.softmax
    monkeypatch.setattr(
        processors, "softmax", lambda row: None if honest(row) is None else honest(row) * 1.01
    )
    for name in ("top_p", "typical_p"):
        assert np.count_nonzero(differences(name, 1000, 160)) > 5


def test_every_option_is_applied_in_the_order_of_transformers():
    options = Options(
        temperature=0.7,
        top_k=30,
        top_p=0.8,
        min_p=0.02,
        typical_p=0.9,
        repetition_penalty=1.2,
        no_repeat_ngram_size=2,
        bad_words=[[7]],
        min_new_tokens=5,
        logits_processor=lambda ids, scores: scores * 2,
    )
    random = np.random.default_rng(3)
    for row in rows(300, 80, random):
        ours, theirs = (
            make_process(kind, options, 8, frozenset([2]), None, 300) for kind in (ARRAYS, TENSORS)
        )
        expected = theirs(torch.from_numpy(IDS), torch.from_numpy(row)[None].clone()).numpy()
        # Sorted, because transformers keeps any of the tokens with equal scores.
        assert np.array_equal(np.sort(ours(IDS, row[None].copy())), np.sort(expected), equal_nan=True)


@pytest.fixture(scope="module")
def packed(tiny_gguf):
    return lookahead.load(tiny_gguf("llama"))


def test_on_the_cpu_engine_a_callers_processor_gets_arrays(packed):
    seen = []

    def process(ids, scores):
        seen.append((ids.dtype, ids.shape, scores.dtype, scores.shape))
        scores[0, 5] = 100
        return scores

    result = packed.generate([4, 5, 6], max_new_tokens=2, logits_processor=process, ignore_eos=True)
    assert result.tokens == [5, 5]
    assert seen == [(np.int64, (1, length), np.float32, (1, packed.vocabulary)) for length in (3, 4)]


def test_as_torch_adapts_a_processor_for_tensors(packed):
    def exclude(ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[1]) % 3 == int(ids[0, -1]) % 3, float("-inf"))

    given = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.8, "seed": 2}
    tokens = packed.generate([4, 5, 6], **given, logits_processor=lookahead.as_torch(exclude)).tokens
    assert all((a - b) % 3 for a, b in zip([6, *tokens], tokens, strict=False))
    with pytest.raises(
        SettingsError, match=r"has no attribute 'masked_fill'.*lookahead\.as_torch\(processor\)"
    ):
        packed.generate([4, 5, 6], **given, logits_processor=exclude)
    # On a model whose processors get tensors, it changes nothing.
    scores = torch.zeros(1, 6)
    assert torch.equal(as_torch(exclude)(torch.tensor([[1]]), scores), exclude(torch.tensor([[1]]), scores))


def test_a_callers_processor_must_keep_the_shape(packed):
    with pytest.raises(SettingsError, match=r"must return scores of shape \(1, \d+\), got \(\d+,\)"):
        packed.generate([4, 5, 6], logits_processor=lambda ids, scores: scores[0], temperature=0.7, top_k=4)
