"""The adaptive drafter's trees and learned state match the recorded ones (with the JIT off: test_cpu_target)."""

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cached import entries
from lookahead.core import Request, TokenTree
from lookahead.drafters.adaptive import SOURCES, Adaptive
from lookahead.drafters.adaptive.draft_state import AdaptiveDraftState
from lookahead.drafters.adaptive.state import AdaptiveState
from lookahead.sampling.noise import SeededNoise
from lookahead.testing import FakeTarget, repetitive_text, run

GOLDEN = Path(__file__).parent / "data" / "adaptive_trees.json.gz"
CONFIGS = {
    "default": {"rows": 64},
    "16 rows": {"rows": 16},
    "200 rows": {"rows": 200},
    "long suffixes": {"rows": 64, "suffix_order": 32},
    "one token a row": {"rows": 64, "top": 1, "sampled_top": 1, "suffix_order": 1},
    "all sources": {"rows": 64, "sources": tuple(SOURCES)},
    "suffix": {"rows": 64, "sources": ("suffix",)},
}
PROMPTS = [[1, 2, 3] * 5, [4], [3, 1, 4, 1, 5, 2, 6, 5, 3, 5]]


class Model(FakeTarget):
    """Half-predictable text, logits whose best token stands out slightly, and batched ``top``."""

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
    """Noise of a token sequence, a function of the index."""

    start, key = 0, None

    def __init__(self, vocabulary, temperature, seed=0):
        self.temperature, self._vocabulary, self._seed = temperature, vocabulary, seed

    def __call__(self, index):
        return np.random.default_rng([self._seed, index]).gumbel(size=self._vocabulary).astype(np.float32)


class Recorded(Adaptive):
    """A drafter whose states record every drafted tree and its probabilities."""

    def start(self, sequence):
        return RecordedState(self, self.state, sequence)


class RecordedState(AdaptiveDraftState):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.trees = []

    def draft(self, *arguments):
        tree = super().draft(*arguments)
        self.trees.append((tree.tokens[:], tree.parents[:], self.estimates))
        return tree


def decode(name, sampled, new=40, vocabulary=32):
    """Trees of the prompts one by one, then of the first two as a batch; and the learned state."""
    settings = Recorded(**CONFIGS[name])
    state = AdaptiveState(settings)
    target = Model(vocabulary)
    trees = []
    for together in [[prompt] for prompt in PROMPTS] + [PROMPTS[:2]]:
        drafter = replace(settings, state=state)
        noise = Noisy(vocabulary, 0.8) if sampled else None
        done = run(target, [Request(prompt, drafter, new, noise=noise) for prompt in together])
        trees += [tree for sequence in done for tree in sequence.drafting.trees]
    tables = state.tables(sampled)
    learned = {}
    for name in ("base", "pairs", "head", "both"):  # for a table and a head, which these sequences lack
        assert not tables.buckets[name]["trials"].any()
    matches = np.stack([tables.buckets["suffix"], tables.buckets["corpus"]])
    for kind, buckets in {**tables.buckets, "matches": matches}.items():
        if kind not in ("matches", "logits", "joint"):
            continue
        learned[kind] = [float(buckets[field].sum()) for field in ("hits", "trials", "probability")]
        learned[kind].append(float((buckets["hits"].ravel() * np.arange(buckets.size)).sum()))
    for order in range(3):
        keys, ids, _, _ = entries(tables.logits, order)
        learned[f"order {order}"] = [len(keys), int(keys.sum()), int(ids[ids >= 0].sum())]
    return trees, learned


def ranked(tokens, parents, probabilities):
    """The nodes by rank, each as its path of tokens, with equally probable nodes in one group.

    The order of equally probable nodes depends on the last bit of their probabilities, and the last bit of
    exp differs between processors with and without AVX-512. Nodes after the last probability are not grouped.
    """
    paths, groups = [], []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        known = 0 < node < len(probabilities)
        if known and probabilities[node] == pytest.approx(probabilities[node - 1], rel=1e-12, abs=0):
            groups[-1].append(paths[node])
        else:
            groups.append([paths[node]])
    return [sorted(group) for group in groups]


def compare(trees, learned, expected):
    """Nodes and order are equal, numbers up to rounding; only the sum and last probability are recorded."""
    assert len(trees) == len(expected["trees"])
    for (tokens, parents, probabilities), (their_tokens, their_parents, total, last) in zip(
        trees, expected["trees"], strict=True
    ):
        assert ranked(tokens, parents, probabilities) == ranked(their_tokens, their_parents, probabilities)
        assert [sum(probabilities), probabilities[-1]] == pytest.approx([total, last], rel=1e-12)
    assert learned.keys() == expected["learned"].keys()
    for kind, numbers in learned.items():
        assert numbers == pytest.approx(expected["learned"][kind], rel=1e-9), kind


@pytest.fixture(scope="module")
def golden():
    return json.loads(gzip.decompress(GOLDEN.read_bytes()))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CONFIGS)
def test_trees_and_state_are_the_recorded_ones(name, sampled, golden):
    """Recorded when priors and growth last changed; before, an independent implementation gave the same."""
    compare(*decode(name, sampled), golden[f"{name}, {'sampled' if sampled else 'greedy'}"])


def test_only_nodes_of_equal_probability_may_change_places():
    tree = [7, 1, 2, 3, 4], [-1, 0, 0, 0, 2], [1.0, 0.5, 0.25, 0.25 * (1 - 1e-15)]
    tied = [7, 1, 3, 2, 4], [-1, 0, 0, 0, 3], tree[2]
    ranks = ranked(*tree)
    assert ranked(*tied) == ranks
    wrong = {
        "two ranks": ([7, 2, 1, 3, 4], [-1, 0, 0, 0, 1]),
        "a parent": ([7, 1, 2, 3, 4], [-1, 0, 0, 0, 3]),
        "a token": ([7, 1, 2, 5, 4], [-1, 0, 0, 0, 2]),
        "a node without probability": ([7, 1, 2, 3, 6], [-1, 0, 0, 0, 2]),
        "a node less": ([7, 1, 2, 3], [-1, 0, 0, 0]),
    }
    for what, (tokens, parents) in wrong.items():
        assert ranked(tokens, parents, tree[2]) != ranks, what


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_full_tables_drop_their_oldest_entries(sampled):
    """Tables so small that the cache evicts and the corpus restarts, also between two sequences' steps."""
    rng = random.Random(1)
    prompts = [[rng.randrange(400) for _ in range(250)] for _ in range(4)]
    state = AdaptiveState(Adaptive(rows=64, max_entries=1000, sources=tuple(SOURCES)))
    target = Model(400)
    plain = [run(target, [Request(p, Adaptive(max_rows=1), 100)])[0].tokens for p in prompts]
    for together in [[0], [1], [2, 3], [0, 1]]:
        drafter = replace(state.settings, state=state)
        noise = Noisy(400, 0.8) if sampled else None
        requests = [Request(prompts[n], drafter, 100, noise=noise) for n in together]
        assert [g.tokens for g in run(target, requests)] == [plain[n] for n in together]
    assert 800 < state.tables(sampled).logits.size(2) <= 1000
    assert state.corpus.generation > 1


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_requests_of_one_state_may_keep_more_or_fewer_tokens(sampled):
    state = AdaptiveState(Adaptive(top=2, sampled_top=1))
    target = Model(100)
    requests = []
    for prompt, top in (([1, 2, 3], 2), ([4, 5, 6], 60), ([1, 2, 3], 5)):
        drafter = Adaptive(rows=64, top=top, sampled_top=top, state=state)
        noise = Noisy(100, 1.0) if sampled else None
        requests.append(Request(prompt, drafter, 60, noise=noise))
    for sequence in run(target, requests):
        text = list(sequence.request.prompt)
        for token in sequence.tokens:
            assert token == target.next_token(text)
            text.append(token)


class Cyclic(Model):
    """1 2 3 1 2 3 ..., so that trees are deep."""

    def __init__(self):
        FakeTarget.__init__(self, 32, lambda prefix: prefix[-1] % 3 + 1)
        self.rows = {}


def test_seeded_noise_through_the_whole_loop():
    """Deep trees keep the noise of many positions, and drafting twice gives the same trees."""
    prompt = [1, 2, 3] * 4
    found = []
    for _ in range(2):
        drafter = Recorded(rows=64)
        noise = SeededNoise(5, len(prompt), 32, 1.0)
        (sequence,) = run(Cyclic(), [Request(prompt, drafter, 200, noise=noise)])
        found.append(sequence.drafting.trees)
    assert found[0] == found[1]
    trees = [TokenTree.of(tokens, parents) for tokens, parents, _ in found[0]]
    assert max(max(tree.depths) for tree in trees) > 32
