"""The compiled drafter against its pure twin: the same trees, probabilities, statistics and learned state."""

import random

import numpy as np
import pytest

from lookahead.core import Request, SettingsError, TokenTree
from lookahead.drafters.adaptive import (
    SOURCES,
    AdaptiveDrafter,
    AdaptiveState,
)
from lookahead.drafters.adaptive.config import DEFAULT_SOURCES
from lookahead.drafters.adaptive.twins import Twins, why_not_compiled
from lookahead.sampling import SeededNoise, make_choose
from lookahead.testing import FakeTarget, repetitive_text, run

pytestmark = pytest.mark.skipif(bool(why_not_compiled()), reason="no numba")

ALL = tuple(SOURCES)
CONFIGS = [
    {},
    {"max_rows": 1},
    {"max_rows": 2},
    {"max_rows": 200, "window_size": 9, "ngram_size": 4},
    {"window_size": 0},
    {"window_size": 9, "ngram_size": 2},
    {"window_size": 15, "ngram_size": 5, "max_rows": 128},
    {"top": 1, "sampled_top": 1, "suffix_order": 1},
    {"top": 64, "sampled_top": 64, "suffix_order": 32},
    {"sources": ()},
    *({"sources": (name,)} for name in SOURCES),
    *({"sources": tuple(other for other in ALL if other != name)} for name in DEFAULT_SOURCES),
]


class Model(FakeTarget):
    """Half predictable text, and logits whose best token stands out a little; many rows at once."""

    def __init__(self, vocabulary, seed=3):
        super().__init__(vocabulary, repetitive_text(vocabulary, seed=seed))
        self.rows = {}

    def forward(self, trees):
        scores = super().forward(trees)
        for score in scores:
            score.top = lambda nodes, k, score=score: self.top(score, nodes, k)
        return scores

    def top(self, score, nodes, k):
        rows = [self.row(score.best(node), k) for node in nodes]
        return np.array([ids for ids, _ in rows]), np.array([odds for _, odds in rows])

    def row(self, best, k):
        if (best, k) not in self.rows:
            logits = np.sin(np.arange(self.vocabulary) * 12.9898 + best) * 3
            logits[best] = 3.5
            ids = (-logits).argsort(kind="stable")[:k]
            self.rows[best, k] = ids.astype(np.int32), (logits[ids] - 3.5).astype(np.float32)
        return self.rows[best, k]


class Noisy:
    """Noise of a text of numbers: a function of the index."""

    def __init__(self, vocabulary, temperature, seed=0):
        self.temperature, self._vocabulary, self._seed = temperature, vocabulary, seed

    def __call__(self, index):
        return np.random.default_rng([self._seed, index]).gumbel(size=self._vocabulary).astype(np.float32)


class Recorded(AdaptiveDrafter):
    """Keeps every tree that was drafted, with its probabilities."""

    def reset(self, *arguments):
        super().reset(*arguments)
        self.trees = []

    def draft(self, *arguments):
        tree = super().draft(*arguments)
        self.trees.append((tree.tokens[:], tree.parents[:], self.estimates))
        return tree


def learned(state, sampled):
    """All that a state holds, as arrays."""
    tables = state.tables(sampled)
    parts = {}
    for number, calibration_ in enumerate(tables.calibrations.all()):
        for name in ("hits", "trials", "estimate", "levels"):
            parts[f"{name}.{number}"] = np.array(getattr(calibration_, name))
    for order, table in enumerate(tables.logits.tables):
        arrays = table.arrays() if state.twins.compiled else _pure_arrays(table)
        for name, array in zip(("keys", "ids", "values", "origins"), arrays, strict=True):
            parts[f"{name}.{order}"] = array
    return parts


def _pure_arrays(table):
    from lookahead.drafters.adaptive.state import _arrays

    return _arrays(table)


def decode(compiled, config, prompts, sampled=False, eos=frozenset(), vocabulary=32, new=60, warm=True):
    """Prompts one after another and the first two again, together."""
    state = AdaptiveState({"budget": False, **config}, keep=warm, compiled=compiled)
    target = Model(vocabulary)
    found = []
    for together in [[p] for p in prompts] + [prompts[:2]]:
        requests, drafters = [], []
        for prompt in together:
            drafter = Recorded(None, vocabulary, state)
            drafter.use_noise(Noisy(vocabulary, 0.8) if sampled else None)
            drafters.append(drafter)
            requests.append(Request(prompt, drafter, new, eos=eos))
        for generation, drafter in zip(run(target, requests), drafters, strict=True):
            found.append((generation.tokens, drafter.trees, generation.stats.drafter))
    return found, learned(state, sampled)


def assert_equal(one, two):
    for (tokens, trees, stats), (their_tokens, their_trees, their_stats) in zip(one[0], two[0], strict=True):
        assert tokens == their_tokens
        assert trees == their_trees
        assert stats == their_stats
    assert one[1].keys() == two[1].keys()
    for name, array in one[1].items():
        np.testing.assert_array_equal(array, two[1][name], err_msg=name)


PROMPTS = [[1, 2, 3] * 5, [4], [3, 1, 4, 1, 5, 2, 6, 5, 3, 5]]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_twins_draft_and_learn_the_same(config, sampled):
    assert_equal(*(decode(compiled, config, PROMPTS, sampled) for compiled in (False, True)))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("vocabulary", [2, 5, 3000])
def test_any_vocabulary_cold_and_with_an_end(vocabulary, sampled):
    prompts = [[0, 1, 1, 0], [1]]
    for options in ({"warm": False}, {"eos": frozenset({1})}, {"new": 300}):
        assert_equal(
            *(
                decode(compiled, {"sources": ALL}, prompts, sampled, vocabulary=vocabulary, **options)
                for compiled in (False, True)
            )
        )


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_full_tables_forget_the_same(sampled):
    """Small enough that the cache evicts and the corpus starts afresh, also between two sequences' steps."""
    rng = random.Random(1)
    prompts = [[rng.randrange(400) for _ in range(250)] for _ in range(4)]
    config = {"max_entries": 1000, "sources": ALL}
    pure, fast = (
        decode(compiled, config, prompts, sampled, vocabulary=400, new=300) for compiled in (False, True)
    )
    assert_equal(pure, fast)
    assert 800 < len(pure[1]["keys.2"]) <= 1000
    assert sum(len(tokens) for _, trees, _ in pure[0] for tokens, _, _ in trees) > 4000


def test_with_a_budget_and_fewer_rows_midway():
    """The stopping rule, limits of depth and rows, and a text that goes on without its drafts being read."""
    drafters = [Recorded({"budget": False, "sources": ALL}, 32, compiled=c) for c in (False, True)]
    stop = [0.0] + [0.004 * k for k in range(64)]
    text = [1, 2, 3, 1, 2, 5] * 6
    for drafter in drafters:
        drafter.reset(text, 1, frozenset())
        drafter.draft(0)
    pure, fast = (drafter._phase.grower for drafter in drafters)
    for rows, depth, bound in (
        (64, 9, stop),
        (64, 9, None),
        (5, 2, None),
        (1, 5, None),
        (40, 0, None),
        (7, 7, stop),
    ):
        for grower in (pure, fast):
            grower.grow(rows, depth, bound)
            grower.cut(6)
        for name in ("tokens", "parents", "depths", "probabilities"):
            assert getattr(pure, name) == getattr(fast, name)


def test_states_travel_between_twins(tmp_path):
    for sampled in (False, True):
        states = {}
        for compiled in (False, True):
            state = AdaptiveState({"budget": False}, compiled=compiled)
            for prompt in PROMPTS:
                drafter = AdaptiveDrafter(None, 32, state)
                drafter.use_noise(Noisy(32, 1.0) if sampled else None)
                run(Model(32), [Request(prompt, drafter, 50)])
            state.save(tmp_path / f"{compiled}")
            states[compiled] = state
        for saved in (False, True):
            for reader in (False, True):
                loaded = AdaptiveState.load(tmp_path / f"{saved}", compiled=reader)
                for name, array in learned(loaded, sampled).items():
                    np.testing.assert_array_equal(array, learned(states[saved], sampled)[name], err_msg=name)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("sampled.0.ids", lambda a: a + (1 << 22), "token ids"),
        ("sampled.0.ids", lambda a: a - 9999, "token ids"),
        ("sampled.0.ids", lambda a: np.tile(a, 10), "unequal|tokens"),
        ("sampled.1.origins", lambda a: a + 3, "origin"),
        ("sampled.1.keys", lambda a: a * 0, "different"),
        ("sampled.1.keys", lambda a: -a - 1, "negative"),
        ("sampled.1.keys", lambda a: a.astype(float), "type"),
        ("sampled.2.keys", lambda a: a[:, None], "dimensions"),
        ("sampled.2.values", lambda a: a + np.nan, "log-odds"),
        ("sampled.2.values", lambda a: a + 99, "log-odds"),
        ("sampled.hits.0", lambda a: a + np.inf, "between 0 and trials"),
    ],
)
def test_hostile_files_are_refused_by_both(tmp_path, compiled, name, change, message):
    state = AdaptiveState({"budget": False}, compiled=compiled)
    drafter = AdaptiveDrafter(None, 32, state)
    drafter.use_noise(Noisy(32, 1.0))
    run(Model(32), [Request(PROMPTS[0], drafter, 50)])
    path = tmp_path / "state"
    state.save(path)
    with np.load(path) as archive:
        arrays = dict(archive)
    with open(path, "wb") as file:
        np.savez(file, **{**arrays, name: change(arrays[name])})
    with pytest.raises(SettingsError, match=message):
        AdaptiveState.load(path, compiled=compiled)


def test_a_state_of_another_vocabulary_is_refused(tmp_path):
    state = AdaptiveState({"budget": False})
    run(Model(500), [Request([499, 3, 499], AdaptiveDrafter(None, 500, state), 50)])
    state.save(tmp_path / "state")
    drafter = AdaptiveDrafter(None, 32, AdaptiveState.load(tmp_path / "state"))
    drafter.reset([1, 2], 3, frozenset())
    with pytest.raises(SettingsError, match="of this model"):
        drafter.draft(5)


def test_requests_of_one_state_may_keep_more_or_fewer_tokens():
    state = AdaptiveState({"budget": False, "top": 2})
    target = Model(100)
    requests = [
        Request(prompt, AdaptiveDrafter({"budget": False, "top": top}, 100, state), 60)
        for prompt, top in (([1, 2, 3], 2), ([4, 5, 6], 60), ([1, 2, 3], 5))
    ]
    for generation in run(target, requests):
        text = list(generation.request.prompt)
        for token in generation.tokens:
            assert token == target.next_token(text)
            text.append(token)


def test_without_numba_the_pure_twin_drafts(monkeypatch):
    from lookahead.drafters.adaptive import twins

    monkeypatch.setattr(twins, "why_not_compiled", lambda: "numba is not installed (pip install numba)")
    assert not AdaptiveState().twins.compiled
    with pytest.raises(SettingsError, match="pip install numba"):
        AdaptiveDrafter(None, 32, AdaptiveState(compiled=True))


def test_real_noise_of_both_kinds(tmp_path):
    """Seeded noise through the whole loop: torch's arrays, drawn once per position."""
    prompt = [1, 2, 3] * 4
    trees = {}
    for compiled in (False, True):
        noise = SeededNoise(5, len(prompt), 32, 1.0)
        drafter = Recorded({"budget": False}, 32, compiled=compiled)
        drafter.use_noise(noise)
        run(Model(32), [Request(prompt, drafter, 60)])
        trees[compiled] = drafter.trees
    assert trees[False] == trees[True]
    assert make_choose(prompt) is not None
    assert all(isinstance(TokenTree.of(tokens, parents), TokenTree) for tokens, parents, _ in trees[True])


def test_both_know_how_long_the_end_of_a_text_has_been_seen_before():
    pure, quick = Twins(False).trie(5).begin(), Twins(True).trie(5).begin()
    rng = random.Random(2)
    text = [rng.randrange(3) for _ in range(300)]
    for token in text:
        assert pure.matched == quick.matched
        pure.feed([token])
        quick.feed([token])
    assert pure.matched >= 3
