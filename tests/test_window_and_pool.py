"""How the window advances, and what the n-gram pool keeps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead import NGramPool
from lookahead.core import SettingsError, TokenTree
from lookahead.drafters import Window


def counting_window(width, ngram_size):
    fresh = iter(range(100, 10_000))
    return Window(width, ngram_size, lambda: next(fresh))


def test_one_step_closes_the_ngrams_that_the_paper_draws():
    window = counting_window(3, 3)
    assert window.levels == [[100, 101, 102]]  # one longer than W - 1, as the warm-up uses one
    window.add_to(TokenTree(1))
    assert window.advance(1, [10, 11, 12, 13], frozenset()) == [(1, 10), (100, 11), (101, 12), (102, 13)]
    assert window.levels == [[101, 102], [11, 12, 13]]
    tree = TokenTree(10)
    window.add_to(tree)
    assert [tree.path_tokens(n) for n in window.newest_nodes()] == [
        [10, 11],
        [10, 101, 12],
        [10, 101, 102, 13],
    ]
    assert window.advance(10, [20, 21, 22], frozenset()) == [(10, 11, 20), (101, 12, 21), (102, 13, 22)]
    assert window.levels == [[12, 13], [20, 21, 22]]


def test_an_end_token_is_harvested_and_replaced():
    window = counting_window(2, 2)
    window.add_to(TokenTree(1))
    assert window.advance(1, [5, 2], frozenset({2})) == [(1, 5), (100, 2)]
    assert 2 not in window.levels[0]


def test_a_column_without_a_token_closes_no_ngram_and_is_refilled():
    window = counting_window(3, 2)
    window.add_to(TokenTree(1))
    assert window.advance(1, [5, -1, 7], frozenset()) == [(1, 5), (101, 7)]
    assert window.levels == [[102, 7]]


@given(st.integers(1, 6), st.integers(2, 6), st.lists(st.integers(0, 9), min_size=12, max_size=24))
def test_the_window_narrows_and_reopens(width, ngram_size, limits):
    """Its shape is right at any width limit per step; without a limit, it is full after N - 1 steps."""
    window = counting_window(width, ngram_size)
    for columns in [*limits, *[99] * ngram_size]:
        window.narrow(columns)
        window.widen(columns)
        assert window.columns <= columns
        tree = TokenTree(1)
        window.add_to(tree)
        new = [50 + i for i, _ in enumerate(window.newest_nodes())]
        assert len(new) == window.columns
        for ngram in window.advance(1, new, frozenset()):
            assert 2 <= len(ngram) <= ngram_size
    assert window.full
    window.widen(99)
    assert [len(level) for level in window.levels] == [width - 1] + [width] * (ngram_size - 2)


@given(st.integers(1, 6), st.integers(2, 6), st.lists(st.integers(0, 7), min_size=1, max_size=12))
def test_the_window_survives_any_narrowing(width, ngram_size, limits):
    window = counting_window(width, ngram_size)
    for limit in sorted(limits, reverse=True):
        tree = TokenTree(1)
        window.narrow(limit - len(window.levels) + 2)
        window.add_to(tree)
        assert max(tree.depths) <= limit
        new = [50 + i for i, _ in enumerate(window.newest_nodes())]
        for ngram in window.advance(1, new, frozenset()):
            assert 2 <= len(ngram) <= ngram_size


def test_the_least_recently_used_continuation_goes_first():
    pool = NGramPool(2)
    for continuation in [(1,), (2,), (1,), (3,)]:
        pool.add(0, continuation)
    assert pool.get(0) == [(3,), (1,)]


def test_the_first_key_goes_when_keys_are_capped():
    pool = NGramPool(3, max_keys=2)
    assert repr(pool) == "NGramPool(guess_set_size=3, keys=0)"
    for key in (5, 6, 7):
        pool.add(key, (1, 2))
    assert pool.get(5) == []
    assert pool.get(7) == [(1, 2)]


def test_statistics_by_hand():
    pool = NGramPool(4)
    pool.add_text([1, 2, 1, 3, 1, 4, 2], 2)
    pool.get(1), pool.get(99)
    assert pool.stats() == {
        "keys": 4,
        "continuations": 6,
        "mean_fan_out": 1.5,
        "median_fan_out": 1.0,
        "largest_fan_out": 3,
        "hits": 1,
        "misses": 1,
    }


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=60), st.integers(0, 3))
def test_the_pool_never_holds_more_than_it_may(entries, size):
    pool = NGramPool(size, max_keys=3)
    for key, token in entries:
        pool.add(key, (token,))
    assert len(pool) <= 3
    assert pool.stats()["largest_fan_out"] <= size


def test_bad_sizes_are_refused():
    with pytest.raises(SettingsError, match="guess_set_size"):
        NGramPool(-1)
    with pytest.raises(SettingsError, match="max_pool_keys"):
        NGramPool(1, max_keys=0)
