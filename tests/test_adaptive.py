"""The adaptive drafter: exact on every path, with correct sources and scoped state."""

import random
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cached import entries, fill
from lookahead.core import Request, SettingsError, Start, TokenTree
from lookahead.drafters import Adaptive, Plain, as_drafter
from lookahead.drafters.adaptive import SOURCES
from lookahead.drafters.adaptive.calibration import MAX_PROBABILITY, count, load
from lookahead.drafters.adaptive.layout import BUCKET
from lookahead.drafters.adaptive.sequence_memory import SequenceMemory, learning, tree_growth
from lookahead.drafters.adaptive.sources import SOURCES as ALL
from lookahead.drafters.adaptive.sources.suffix import Corpus, SuffixTrie, child, end_of, follow, match
from lookahead.drafters.adaptive.state import AdaptiveState
from lookahead.hf.paths import make_target
from lookahead.hf.testing import tiny_model
from lookahead.sampling.choose import Chooser
from lookahead.sampling.noise import SeededNoise
from lookahead.testing import FakeTarget, repetitive_text, run

PROMPTS = [[1, 2, 3] * 5, [4], [3, 1, 4, 1, 5, 2, 6, 5, 3, 5]]
CONFIGS = [
    {},
    {"rows": 64},
    {"rows": 5},
    {"rows": 1},
    {"rows": 128},
    {"rows": 64, "top": 1, "suffix_order": 1},
    {"rows": 64, "chain": True},
    {"chain": True},
    {"rows": 1, "chain": True},
    {"rows": 6, "chain": True},
    {"rows": 64, "sources": ()},
    *({"rows": 64, "sources": (name,)} for name in SOURCES),
]


def plain(target, prompts=PROMPTS, new=60, eos=frozenset()):
    return [run(target, [Request(p, Plain(), new, eos=eos)])[0].tokens for p in prompts]


def adaptive(target, config=None, prompts=PROMPTS, new=60, eos=frozenset(), vocabulary=32, state=None):
    drafter = replace(adaptive_of(config), state=state)
    return run(target, [Request(p, drafter, new, eos=eos) for p in prompts])


def adaptive_of(config):
    return as_drafter({"drafter": "adaptive", **(config or {})})


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_equal_to_plain_decoding(config):
    target = FakeTarget(32)
    sequences = adaptive(target, config)
    assert [g.tokens for g in sequences] == plain(target)
    assert not target.committed
    assert max(max(g.stats.rows_per_step) for g in sequences) <= adaptive_of(config).most_rows


def test_a_chain_is_the_path_of_most_expected_tokens(monkeypatch):
    seen, keep = [], SequenceMemory._keep_best_chain

    def watched(memory):
        tree = memory.tree()
        expected = dict(zip(range(len(tree)), memory.probabilities, strict=True))
        values = []
        for row in range(len(tree)):
            path = [other for other in range(len(tree)) if tree.ancestors[row] >> other & 1]
            values.append((sum(expected[other] for other in path), -row, tree.path_tokens(row)))
        keep(memory)
        assert memory.tree().tokens == max(values)[2]
        assert sum(memory.probabilities) == pytest.approx(max(values)[0])
        seen.append((tree.parents != list(range(-1, len(tree) - 1)), memory.rows))

    monkeypatch.setattr(SequenceMemory, "_keep_best_chain", watched)
    (sequence,) = adaptive(FakeTarget(32), {"rows": 64, "chain": True}, [PROMPTS[2]], 200)
    branched, lengths = zip(*seen, strict=True)
    assert any(branched)
    assert max(lengths) > 4
    assert sequence.stats.compression_ratio > 2


def test_a_wrong_walk_would_be_noticed(accept_a_wrong_node):
    target = FakeTarget(32)
    assert [g.tokens for g in adaptive(target, {"rows": 64})] != plain(target)


def test_drafts_are_accepted_on_repetitive_text():
    target = FakeTarget(32)
    for sequence in adaptive(target, {"rows": 64}, new=100):
        assert sequence.stats.compression_ratio > 1.5


@pytest.mark.parametrize("vocabulary", [2, 3, 8, 1000])
def test_texts_equal_plain_decoding_for_any_vocabulary(vocabulary):
    target = FakeTarget(vocabulary)
    prompts = [[0, 1, 1, 0], [1]]
    sequences = adaptive(target, {"rows": 64}, prompts, vocabulary=vocabulary)
    assert [g.tokens for g in sequences] == plain(target, prompts)


def test_end_tokens_inside_a_draft():
    def counting(prefix):
        return (prefix[-1] + 1) % 10

    target = FakeTarget(10, counting)
    prompts = [[*range(10)] * 3]
    (sequence,) = adaptive(target, {"rows": 64}, prompts, 40, frozenset({6}), 10)
    assert [sequence.tokens] == plain(target, prompts, 40, frozenset({6}))
    assert sequence.finish_reason == "stop"


def test_depth_and_memory_limits():
    target = FakeTarget(32, max_positions=40)
    prompts = [[1, 2, 3] * 5]
    assert [g.tokens for g in adaptive(target, {"rows": 64}, prompts)] == plain(target, prompts)
    target = FakeTarget(32, max_rows=9)
    with pytest.warns(RuntimeWarning, match="did not fit"):
        sequences = adaptive(target, {"rows": 64})
    assert [g.tokens for g in sequences] == plain(FakeTarget(32))


def test_a_second_draft_is_the_same():
    state = Adaptive(rows=64).start(Start([1, 2, 3] * 9, 1, vocabulary=32))
    first, second = state.draft(20), state.draft(20)
    assert (first.tokens, first.parents) == (second.tokens, second.parents)
    assert len(state.draft(20, 4)) <= 4
    assert max(state.draft(2).depths) <= 2
    assert len(state.draft(0)) == 1


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return tiny_model("llama")


def test_a_real_model_greedy(model):
    target = make_target(model)
    prompts = [[5, 6, 7, 8] * 6, [9, 3, 17]]
    vocabulary = target.vocabulary
    sequences = adaptive(target, {"rows": 64}, prompts, 80, vocabulary=vocabulary)
    assert [g.tokens for g in sequences] == plain(target, prompts, 80)
    assert sequences[0].stats.compression_ratio > 1.2


def sampled(target, drafter, prompt, seed, temperature, noise=True, new=60):
    vocabulary = target.vocabulary
    seeded = SeededNoise(seed, len(prompt), vocabulary, temperature)

    def process(ids, scores):
        return scores / temperature

    choose = Chooser(prompt, process, seeded)
    request = Request(prompt, drafter, new, choose, noise=seeded if noise else None)
    return run(target, [request])[0]


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_sampling_is_equal_and_noise_helps(model, temperature):
    target = make_target(model)
    accepted = {True: 0, False: 0}
    states = {noise: AdaptiveState() for noise in accepted}
    for seed in range(4):
        prompt = [5, 6, 7, 8] * 3 + [seed]
        reference = sampled(target, Plain(), prompt, seed, temperature)
        for noise, state in states.items():
            drafter = Adaptive(rows=64, state=state)
            ours = sampled(target, drafter, prompt, seed, temperature, noise)
            assert ours.tokens == reference.tokens
            accepted[noise] += ours.stats.accepted
    assert accepted[True] > accepted[False]


def test_settings_out_of_range_are_refused():
    with pytest.raises(SettingsError, match="unknown sources magic"):
        Adaptive(sources=("magic",))
    with pytest.raises(SettingsError, match="max_rows must be"):
        Adaptive(max_rows=0)
    with pytest.raises(SettingsError, match="adaptive has no setting 'budget'"):
        adaptive_of({"budget": False})
    with pytest.raises(SettingsError, match="rows must be"):
        Adaptive(rows=0)


def test_a_fixed_number_of_rows_with_another_limit_is_refused():
    with pytest.raises(SettingsError, match="rows=8 and max_rows=4; leave one out"):
        Adaptive(rows=8, max_rows=4)
    assert Adaptive(rows=8, max_rows=8).most_rows == 8


# -- sources ------------------------------------------------------------------------------------------------


def context_of(reader, tokens):
    """The trie node of a context; 0 if there is none."""
    node = 0
    for token in tokens:
        node = child(reader.text, node, token)
        if not node:
            break
    return node


def successors(trie, node):
    """The three most frequent next tokens."""
    record = trie.nodes[node]
    return [int(trie.nodes[n].token) for n in (record.first, record.second, record.third) if n]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 5))
def test_suffix_trie_counts_what_is_there(text, order):
    trie = SuffixTrie(order)
    reader = trie.begin()
    reader.feed(text)
    for n in range(1, order + 1):
        for start in range(len(text) - n):
            context = text[start : start + n]
            node = context_of(reader, context)
            assert node
            followers = [text[i + n] for i in range(len(text) - n) if text[i : i + n] == context]
            assert trie.nodes[node].total == len(followers)
            for token in range(4):
                longer = child(reader.text, node, token)
                assert (trie.nodes[longer].count if longer else 0) == followers.count(token)
            counts = sorted((followers.count(t) for t in set(followers)), reverse=True)
            assert [followers.count(t) for t in successors(trie, node)] == counts[:3]
    longest = max(
        (n for n in range(order + 1) if n <= len(text) and text[len(text) - n :] in _ngrams(text[:-1], n)),
        default=0,
    )
    end = end_of(reader.text)
    assert trie.nodes[end].depth == longest
    for token in range(4):
        extended = [*text, token]
        expected = max(
            n
            for n in range(order + 1)
            if n == 0 or (n <= len(extended) and extended[len(extended) - n :] in _ngrams(text[:-1], n))
        )
        assert trie.nodes[follow(reader.text, end, token)].depth == expected


def _ngrams(text, n):
    return [text[i : i + n] for i in range(len(text) - n + 1)] if n else [[]]


def test_suffix_candidates_are_ranked_by_count():
    config = Adaptive(suffix_order=3)
    memory = SequenceMemory(AdaptiveState(config), 32, config)
    memory.read([1, 2, 1, 3, 1, 2, 1, 2, 9, 1])
    memory.grow(2, 1)
    found = memory.memory.tree.matches[0, 0]
    assert found["token"].tolist() == [2, 3, -1]
    assert found["bucket"][0] > found["bucket"][1]
    memory.append([30])
    memory.grow(2, 1)
    match(memory.memory.sources[0], memory.memory.tree, 0, 0)
    assert memory.memory.tree.matches[0, 0]["token"][0] == -1


def test_a_full_trie_starts_afresh_and_readers_follow():
    trie = SuffixTrie(4, max_nodes=50)
    reader = trie.begin()
    other = trie.begin()
    rng = random.Random(0)
    for _ in range(100):
        reader.feed([rng.randrange(50)])
        assert trie.used < 60
        assert trie.nodes[end_of(reader.text)].depth <= 4
    assert trie.generation > 1
    assert other.catch_up()
    assert not reader.catch_up()


def rows_written(memory, ids, odds, path, rows):
    """Keep rows of a tree as a step does."""
    scores = SimpleNamespace(top=lambda nodes, k: (ids[:rows], odds[:rows]))
    memory.learn(scores, path, [0] * len(path), rows)


def test_logit_cache_keeps_the_later_row_and_a_bounded_number():
    config = Adaptive(max_entries=1000, max_rows=8)
    state = AdaptiveState(config)
    cache = state.tables(False).logits
    memory = SequenceMemory(state, 100_000, config)
    memory.read([5, 6, 7])
    memory.grow(3, 0)
    tree = TokenTree(7)
    tree.add_candidate([8, 7])
    memory.adopt(tree)
    memory.rows = 3  # as if the sources had proposed these rows
    ids, odds = np.array([[1, 2], [3, 4], [9, 2]]), np.array([[0, -1.0], [0, -2.0], [0, -9.0]])
    rows_written(memory, ids, odds, [0], 3)
    keys, kept, _, origins = entries(cache, 0)
    # Rows 0 and 2 end in token 7. Likelier rows are written later, the path last.
    assert dict(zip(keys.tolist(), kept[:, :2].tolist(), strict=True)) == {7: [1, 2], 8: [3, 4]}
    assert dict(zip(keys.tolist(), origins.tolist(), strict=True)) == {7: 0, 8: 1}
    keys, kept, _, _ = entries(cache, 1)
    found = dict(zip(keys.tolist(), kept[:, :2].tolist(), strict=True))
    assert found == {600_007: [1, 2], 700_008: [3, 4], 800_007: [9, -1]}
    for token in range(5000):
        memory.append([token, token, token])
        memory.grow(1, 0)
        rows_written(memory, ids, odds, [0], 1)
    assert all(cache.size(order) <= 1000 for order in range(3))
    assert 4999 in entries(cache, 0)[0]
    assert 0 not in entries(cache, 0)[0]


def test_every_proposal_is_a_label_verified_or_not():
    buckets = np.zeros(2, BUCKET)
    buckets["prior"] = 0.5
    load(buckets, np.zeros(2), np.zeros(2))
    count(buckets[0], True)
    assert buckets["probability"][0] == pytest.approx((1 + 16 * 0.5) / 17)
    for _ in range(1000):
        count(buckets[0], True)
    assert buckets["probability"][0] == MAX_PROBABILITY
    count(buckets[1], False)
    assert buckets["probability"][1] == pytest.approx(8 / 17)
    # Two rows verify at most one proposal, but every proposal is counted.
    state = AdaptiveState(adaptive_of({"rows": 2}))
    adaptive(FakeTarget(32), {"rows": 2}, state=state)
    joint = state.tables(False).buckets["joint"]
    assert joint["trials"].sum() > 100
    assert joint["hits"].sum() > 30


@pytest.mark.parametrize("name", ["suffix", "logits", "jacobi"])
def test_a_source_that_is_off_has_no_credit(name):
    everything = ("suffix", "logits", "jacobi")
    target = FakeTarget(32, repetitive_text(32, seed=4))
    # Without rows of another source, the target gives no answers at later positions.
    with_rows = (name, "suffix") if name == "jacobi" else (name,)
    text = FakeTarget(32) if name == "jacobi" else target
    alone = adaptive(text, {"rows": 64, "sources": with_rows}, new=150)
    rest = tuple(other for other in everything if other != name)
    others = adaptive(target, {"rows": 64, "sources": rest}, new=150)
    assert sum(g.stats.drafter[f"accepted_by_{name}"] for g in alone) > 0
    assert sum(g.stats.drafter[f"accepted_by_{name}"] for g in others) == 0


def test_credits_sum_to_the_accepted_tokens():
    for sequence in adaptive(FakeTarget(32), {"rows": 64}):
        figures = sequence.stats.drafter
        credit = sum(value for key, value in figures.items() if key.startswith("accepted_by_"))
        assert credit == figures["acceptance"] == sequence.stats.accepted


# -- the tree -----------------------------------------------------------------------------------------------


def random_memory(seed, vocabulary=6, rows=10_000):
    rng = random.Random(seed)
    config = Adaptive(sources=tuple(SOURCES), max_entries=1000, suffix_order=4)
    object.__setattr__(config, "max_rows", rows)  # more than the settings allow
    state = AdaptiveState(config)
    memory = SequenceMemory(state, vocabulary, config)
    memory.read([rng.randrange(vocabulary) for _ in range(40)])
    ids = np.array([rng.sample(range(vocabulary), 4) for _ in range(40)])
    odds = -np.sort(np.random.default_rng(seed).gamma(1, 2, (40, 4)), axis=1)
    odds[:, 0] = 0
    for order in range(3):
        keys = {rng.randrange(vocabulary ** (order + 1)): row for row in range(40)}
        chosen = list(keys.values())
        logits = state.tables(False).logits
        fill(logits, order, np.array(list(keys)), ids[chosen], odds[chosen])
    return memory


@pytest.mark.parametrize("seed", range(8))
def test_the_likeliest_nodes_are_taken(seed):
    """Compare with brute force: all nodes to depth 5, by probability."""
    everything = random_memory(seed)
    everything.grow(10_000, 5)
    assert everything.rows < 10_000
    exact = random_memory(seed)
    exact.memory.step["expansion_factor"] = 1.0
    exact.grow(24, 5)
    best = sorted(everything.probabilities, reverse=True)[:24]
    assert exact.probabilities == pytest.approx(best)
    hasty = random_memory(seed)
    hasty.grow(24, 5)
    assert sum(hasty.probabilities) > 0.97 * sum(best)


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_is_a_trie_whose_edges_sum_to_less_than_one(seed):
    memory = random_memory(seed)
    memory.grow(200, 6)
    tree = memory.tree()
    assert tree.depths == memory.memory.tree.nodes["depth"][: len(tree)].tolist()
    under = [0.0] * len(tree)
    for node in range(1, len(tree)):
        under[tree.parents[node]] += memory.probabilities[node]
    assert all(
        total <= MAX_PROBABILITY * p + 1e-9 for total, p in zip(under, memory.probabilities, strict=True)
    )


def test_tree_of_equals_adding_one_by_one():
    slow = TokenTree(4)
    slow.add_candidate([1, 2, 3])
    slow.add_candidate([1, 5])
    slow.add_candidate([7, 2])
    fast = TokenTree.of(slow.tokens, slow.parents)
    for name in TokenTree.__slots__:
        assert getattr(fast, name) == getattr(slow, name)
    with pytest.raises(ValueError, match="not a trie"):
        TokenTree.of([1, 2, 2], [-1, 0, 0])
    with pytest.raises(ValueError, match="not a trie"):
        TokenTree.of([1, 2, 3], [-1, 2, 0])


# -- what is kept -------------------------------------------------------------------------------------------


def rows_of(sequences):
    return [g.stats.rows_per_step for g in sequences]


def test_nothing_is_kept_between_texts_without_a_state():
    config = {"rows": 64}
    target = FakeTarget(32)
    drafter = adaptive_of(config)
    first = run(target, [Request(PROMPTS[0], drafter, 60)])
    run(target, [Request(PROMPTS[2], drafter, 60)])
    again = run(target, [Request(PROMPTS[0], drafter, 60)])
    assert rows_of(first) == rows_of(again)


def test_a_warm_state_helps():
    target = FakeTarget(300)
    config = {"rows": 64}

    def steps(state):
        return sum(g.stats.steps for g in adaptive(target, config, vocabulary=300, state=state))

    state = AdaptiveState(adaptive_of(config))
    cold = steps(state)
    assert steps(state) < 0.7 * cold


def test_a_state_learns_nothing_from_another_one():
    one, two = AdaptiveState(), AdaptiveState()
    adaptive(FakeTarget(32), {"rows": 64}, state=one)
    assert one.tables(False).logits.size(0) > 0
    assert two.tables(False).logits.size(0) == 0


def test_texts_of_other_requests_are_proposed_only_on_request():
    config = {"rows": 64, "sources": ("suffix",)}
    target = FakeTarget(300)
    state = AdaptiveState(adaptive_of(config))
    adaptive(target, config, state=state, vocabulary=300)
    assert state.corpus.used == 1
    with_corpus = {"rows": 64, "sources": ("suffix", "corpus")}
    adaptive(target, with_corpus, state=state, vocabulary=300)
    assert state.corpus.used > 100


class OneToken:
    """Scores whose best token is always the same."""

    def top(self, nodes, k):
        return np.ones((len(nodes), k), np.int32), np.zeros((len(nodes), k), np.float32)


def test_no_context_of_a_cleared_corpus_is_used():
    """The corpus is full at the end of a step, which clears it while the tree still has its contexts."""
    config = adaptive_of({"rows": 4, "max_entries": 1000, "sources": ("suffix", "corpus")})
    state = AdaptiveState(config)
    sequence = SequenceMemory(state, 500, config, keeps=True)
    sequence.read(list(range(7, 100)) * 2 + [7, 8, 9])
    sequence.use_costs(np.ones(5), np.zeros(5))
    assert sequence.grow(4, 8) == 4
    contexts = sequence.memory.tree.contexts[ALL.index(Corpus), :3]
    assert contexts.min() > 0
    generation = state.corpus.generation
    state.corpus.begin().feed(np.random.default_rng(0).integers(0, 400, 1000))
    assert state.corpus.used > state.corpus.max_nodes
    assert state.corpus.generation == generation
    sequence.learn(OneToken(), [0], [1], 4)
    assert state.corpus.generation == generation + 1
    assert contexts.max() == 0


def test_threads_take_turns_in_a_shared_state(monkeypatch):
    """No thread changes tables or corpus between another's making room in them and writing to them."""
    config = adaptive_of({"rows": 4, "sources": ("suffix", "corpus")})
    state = AdaptiveState(config)
    seen = []

    def watch(owner, name):
        function = getattr(owner, name)

        def watched(*given):
            seen.append(threading.get_ident())
            result = function(*given)
            time.sleep(0.002)
            return result

        monkeypatch.setattr(owner, name, watched)

    def steps(memory):
        memory.append([5, 6, 7, 5, 6, 7])
        for _ in range(3):
            memory.grow(4, 8)
            memory.cut(1)
            memory.learn(OneToken(), [0], [1], 1)

    watch(SequenceMemory, "_make_room")
    watch(SequenceMemory, "_catch_up")
    for owner, name in ((tree_growth, "grow_tree"), (learning, "learn"), (learning, "append")):
        watch(owner, name)
    threads = [
        threading.Thread(target=steps, args=(SequenceMemory(state, 500, config, keeps=True),))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Of a turn, the calls are: append 2 (make room, append), grow 2 (catch up, grow), learn 3.
    turns, begin = 0, 0
    expected = {thread.ident: [2, *[2, 3] * 3] for thread in threads}
    while begin < len(seen):
        length = expected[seen[begin]].pop(0)
        assert len(set(seen[begin : begin + length])) == 1
        begin += length
        turns += 1
    assert turns == 14
