"""The loop on a target in pure Python: exactness, stopping, limits, errors, statistics."""

import gc
import re
import weakref
from functools import partial
from math import isnan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.core import (
    DraftState,
    Engine,
    NumericalError,
    OutOfMemory,
    Request,
    SettingsError,
    Start,
    TokenTree,
    decode,
)
from lookahead.core.stats import Stats, first_divergence, timed
from lookahead.core.verify import Choose, as_choose, greedy
from lookahead.drafters import (
    PRESETS,
    Adaptive,
    Jacobi,
    Lookahead,
    NGramPool,
    Plain,
    PromptLookup,
    as_drafter,
)
from lookahead.drafters.adaptive.cost import CostCurve
from lookahead.drafters.names import METHODS
from lookahead.testing import FakeTarget, assert_same_as_autoregressive, repetitive_text, run

PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [3]]
TRIPLES = ["15,5,15", "1,2,0", "1,5,3", "7,2,4", "5,3,0", "2,7,2", "1,1,0"]
CORE_DRAFTERS = [Lookahead(5, 4, 5), Jacobi(5), PromptLookup()]
DRAFTERS = [
    *map(as_drafter, TRIPLES),
    *map(Jacobi, range(1, 5)),
    Jacobi(17),
    PromptLookup(),
    PromptLookup(1, 1),
    Jacobi(16, max_jacobi_iterations=2),
    Lookahead(5, 4, 5, max_jacobi_iterations=3),
    *map(Lookahead.preset, PRESETS),
]


def finish(engine):
    while engine.busy:
        engine.step()


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
def test_every_method_gives_the_text_of_plain_decoding(drafter):
    assert_same_as_autoregressive(FakeTarget(40), PROMPTS, drafter, 90, frozenset({39}))


@pytest.mark.parametrize("drafter", CORE_DRAFTERS, ids=str)
def test_the_comparison_fails_when_a_wrong_node_is_accepted(drafter, accept_a_wrong_node):
    with pytest.raises(AssertionError, match="differs from plain decoding"):
        assert_same_as_autoregressive(FakeTarget(40), PROMPTS, drafter, 90)


@settings(max_examples=60, deadline=None)
@given(
    w=st.integers(1, 9),
    n=st.integers(2, 7),
    g=st.integers(0, 9),
    prompt=st.lists(st.integers(0, 11), min_size=1, max_size=30),
    seed=st.integers(0, 99),
    new=st.integers(1, 70),
    positions=st.integers(2, 60),
)
def test_exact_for_any_settings(w, n, g, prompt, seed, new, positions):
    drafter = Lookahead(w, n, g, seed=seed)
    target = FakeTarget(12, repetitive_text(12, seed), max_positions=len(prompt) + positions)
    (ours,) = assert_same_as_autoregressive(target, [prompt], drafter, new, frozenset({11}))
    assert ours.stats.rows <= ours.stats.steps * drafter.max_step_rows
    assert target.committed == {}


def test_drafts_pay_on_text_that_repeats():
    (ours,) = assert_same_as_autoregressive(FakeTarget(30), [list(range(30))], "7,4,7", 300)
    assert ours.stats.compression_ratio > 1.5
    (plain,) = run(FakeTarget(30), [Request([1], Plain(), 50)])
    assert plain.stats.compression_ratio == 1.0
    assert plain.stats.steps == 49


def test_a_full_match_keeps_the_bonus_token():
    target = FakeTarget(100, lambda prefix: (prefix[-1] + 1) % 100)
    pool = NGramPool(1)
    pool.add_text([t % 100 for t in range(300)], 4)
    (ours,) = run(target, [Request([5], Lookahead(1, 4, 1, pool=pool), 41)])
    assert ours.stats.steps == 10  # N - 1 accepted and a bonus: 4 tokens per step


def test_jacobi_counts_the_steps_to_the_fixed_point():
    # The next token ignores the guesses, so a block is right after one iteration and confirmed after two.
    target = FakeTarget(10, lambda prefix: 7)
    (ours,) = run(target, [Request([1, 2, 3], Jacobi(8), 64)])
    assert ours.stats.drafter["converged_blocks"] > 0
    assert 1 <= ours.stats.drafter["iterations_per_block"] <= 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block", [1, 2, 4, 8, 17])
def test_a_jacobi_block_of_m_tokens_converges_in_at_most_m_steps(block, seed):
    target = FakeTarget(40, repetitive_text(40, seed))
    (ours,) = run(target, [Request([1, 2, 3, 4, 5], Jacobi(block), 10 * block + 1)])
    stats = ours.stats
    assert stats.drafter["converged_blocks"] == 10
    assert 1 <= stats.drafter["iterations_per_block"] <= stats.drafter["most_iterations"] <= block
    assert stats.drafter["iterations_per_block"] == stats.steps / 10
    assert max(stats.rows_per_step) == block


@pytest.mark.parametrize("max_rows", [1, 3, 6])
def test_a_jacobi_block_converges_where_steps_are_narrow(max_rows):
    target = FakeTarget(40, max_rows=max_rows)
    with pytest.warns(RuntimeWarning, match="did not fit"):
        (ours,) = run(target, [Request([1, 2, 3], Jacobi(8), 81)])
    assert ours.tokens == run(FakeTarget(40), [Request([1, 2, 3], Plain(), 81)])[0].tokens
    assert ours.stats.drafter["converged_blocks"] == 10
    assert ours.stats.drafter["most_iterations"] <= 8


@pytest.mark.parametrize("drafter", CORE_DRAFTERS, ids=str)
def test_the_end_token_inside_an_accepted_path_ends_the_text(drafter):
    target = FakeTarget(50, lambda prefix: (prefix[-1] + 1) % 50)
    prompt = [*range(30), *range(5)]
    (ours,) = assert_same_as_autoregressive(target, [prompt], drafter, 60, frozenset({11, 33}))
    assert ours.tokens == [5, 6, 7, 8, 9, 10, 11]
    assert ours.finish_reason == "stop"


def test_a_limit_inside_an_accepted_path_is_kept_to_the_token():
    target = FakeTarget(50, lambda prefix: (prefix[-1] + 1) % 50)
    for limit in range(1, 12):
        prompt = [*range(30), *range(5)]
        (ours,) = assert_same_as_autoregressive(target, [prompt], "4,5,4", limit)
        assert len(ours.tokens) == limit
        assert ours.finish_reason == "length"


def test_a_callers_criterion_is_asked_for_every_token_once():
    asked = []
    target = FakeTarget(50, lambda prefix: (prefix[-1] + 1) % 50)
    request = Request([*range(30), 5], Lookahead(4, 5, 4), 40)
    request.finished = lambda token: asked.append(token) or ("stop" if token == 13 else None)
    (ours,) = run(target, [request])
    assert asked == ours.tokens == list(range(6, 14))


def test_sequences_join_and_leave_between_steps():
    target = FakeTarget(40)
    engine = Engine(lambda: target)
    alone = [run(FakeTarget(40), [Request(p, Plain(), 30)])[0].tokens for p in PROMPTS]
    first = engine.add(Request(PROMPTS[0], Lookahead(4, 4, 4), 30))
    for _ in range(3):
        engine.step()
    second = engine.add(Request(PROMPTS[1], Jacobi(4), 30))
    engine.step()
    gone = engine.add(Request(PROMPTS[2], Lookahead(4, 4, 4), 30))
    engine.step()
    engine.step()
    engine.cancel(gone)
    while engine.busy:
        engine.step()
    assert [first.tokens, second.tokens] == alone[:2]
    assert gone.finish_reason == "cancelled"
    assert gone.tokens == alone[2][: len(gone.tokens)]
    assert "pool_keys" in gone.stats.drafter
    assert target.committed == {}


def test_a_step_too_wide_for_memory_is_halved_and_said_once():
    target = FakeTarget(40, max_rows=9)
    with pytest.warns(RuntimeWarning, match="did not fit") as caught:
        ours = run(target, [Request(p, Lookahead(15, 5, 15), 60) for p in PROMPTS])
    assert len(caught) == 1
    for sequence, prompt in zip(ours, PROMPTS, strict=True):
        (plain,) = run(FakeTarget(40), [Request(prompt, Plain(), 60)])
        assert sequence.tokens == plain.tokens
        assert max(sequence.stats.rows_per_step) <= 9


def test_steps_may_be_large_again_once_a_sequence_has_ended():
    target = FakeTarget(40, max_rows=20)
    engine = Engine(lambda: target)

    first = engine.add(Request(PROMPTS[0], Lookahead(15, 5, 15), 20))
    with pytest.warns(RuntimeWarning, match="did not fit"):
        finish(engine)
    assert max(first.stats.rows_per_step) <= 20
    target.max_rows = 1 << 20
    second = engine.add(Request(PROMPTS[1], Lookahead(15, 5, 15), 20))
    finish(engine)
    assert max(second.stats.rows_per_step) > 20


def test_one_row_too_many_is_an_error_and_keeps_what_there_is():
    target = FakeTarget(40, max_rows=0)
    (ours,) = run(target, [Request([1, 2], Plain(), 5)])
    assert ours.finish_reason == "error"
    assert isinstance(ours.error, OutOfMemory)
    assert len(ours.tokens) == 1


@pytest.mark.parametrize("budget", [64, lambda sequences: CostCurve.assumed(True).budget(sequences)])
def test_running_out_of_memory_with_one_row_ends_only_the_longest_sequence(budget):
    """Another sequence, whose prompt is being evaluated, goes on."""

    class Full(FakeTarget):
        def forward(self, trees):
            if any(self.committed[slot][0] == 1 for slot, _ in trees):
                raise OutOfMemory("no memory for a row")
            return super().forward(trees)

    target = Full(40)
    engine = Engine(lambda: target, target=target, prompt_rows=4, row_budget=budget)
    first = engine.add(Request([1, 2], Plain(), 5))
    second = engine.add(Request([3] * 9, Plain(), 5))
    while engine.busy:
        engine.step()
    assert isinstance(first.error, OutOfMemory)
    assert (second.finish_reason, len(second.tokens)) == ("length", 5)


class Crowded(FakeTarget):
    """Has memory for 60 tokens across all sequences."""

    def forward(self, trees):
        if sum(len(self.committed[slot]) for slot, _ in trees) > 60:
            raise OutOfMemory("the cache of a step did not fit in memory")
        return super().forward(trees)


def test_without_memory_for_one_row_of_each_the_longest_sequence_ends_and_the_others_go_on():
    prompts, limits = [[1, 2, 3], list(range(12)), [5, 6]], (15, 40, 15)
    requests = [Request(prompt, Plain(), limit) for prompt, limit in zip(prompts, limits, strict=True)]
    ours = run(Crowded(40), [*requests, Request([9] * 20, Plain(), 40)])
    assert [sequence.finish_reason for sequence in ours] == ["length", "length", "length", "error"]
    assert isinstance(ours[3].error, OutOfMemory)
    for sequence, request in zip(ours, requests, strict=False):
        (alone,) = run(FakeTarget(40), [request])
        assert sequence.tokens == alone.tokens


class Spoiled(FakeTarget):
    """A drafted token of 12 or above makes all logits of its step NaN."""

    def forward(self, trees):
        scores = super().forward(trees)
        for one, (_, tree) in zip(scores, trees, strict=True):
            if max(tree.tokens[1:], default=0) >= 12:
                one.best = lambda node: self.nan()
        return scores

    def nan(self):
        raise NumericalError("the logits are NaN")


class Wild(Plain):
    """Drafts the next token and one that causes NaN."""

    def start(self, sequence):
        return WildState(sequence.first)


class WildState(DraftState):
    def __init__(self, last):
        self.last = last

    def draft(self, max_depth, max_rows=1, batch=1):
        tree = TokenTree(self.last)
        if max_depth and max_rows > 2:
            tree.add_candidate([(self.last + 1) % 12])
            tree.add_candidate([13])
        return tree

    def observe(self, tree, scores, path, tokens):
        self.last = tokens[-1]


def test_drafts_whose_logits_are_nan_end_no_sequence():
    def next_token(prefix):
        return (prefix[-1] + 1) % 12

    target, drafter = Spoiled(16, next_token), Wild()
    with pytest.warns(RuntimeWarning, match="evaluated twice") as said:
        (ours,) = run(target, [Request([1, 2, 3], drafter, 40)])
    assert len(said) == 1
    assert ours.finish_reason == "length"
    (plain,) = run(FakeTarget(16, next_token), [Request([1, 2, 3], Plain(), 40)])
    assert ours.tokens == plain.tokens


class Overflowing(FakeTarget):
    """Only rows of the true text have logits; those of other tokens are NaN, and their best tokens mean nothing."""

    def __init__(self, text):
        def next_token(prefix):
            return text[len(prefix)] if list(prefix) == text[: len(prefix)] else -1

        super().__init__(32, next_token)

    def forward(self, trees):
        scores = super().forward(trees)
        for one in scores:
            one.top = partial(self.top, one.top)
        return scores

    @staticmethod
    def top(top, nodes, k):
        ids, odds = top(nodes, k)
        return [[2**31 - 1] * k if isnan(o[0]) else i for i, o in zip(ids, odds, strict=True)], odds


@pytest.mark.parametrize(
    "drafter",
    [*METHODS, Lookahead(4, 4, 4), Lookahead(3, 2, 3), Jacobi(8), Adaptive(rows=48)],
    ids=str,
)
def test_nan_logits_off_the_path_change_no_token(drafter):
    prompt, new = [1, 2, 3, 1, 2, 3], 60
    (plain,) = run(FakeTarget(32), [Request(prompt, Plain(), new)])
    text = prompt + plain.tokens
    (ours,) = run(Overflowing(text), [Request(prompt, as_drafter(drafter), new)])
    assert ours.error is None
    assert ours.tokens == plain.tokens


def test_jacobi_keeps_a_guess_whose_row_is_nan():
    def next_token(prefix):
        return -1 if prefix[-1] == 8 else prefix[-1] + 1

    target = FakeTarget(32, next_token)
    target.prefill([(0, [1])])
    state = Jacobi(4).start(Start([1], 2))
    state._guesses = [7, 8, 9]
    tree = state.draft(8)
    (scores,) = target.forward([(0, tree)])
    state.observe(tree, scores, [0], [3])
    assert state.draft(8).tokens == [3, 8, 9]


def test_nan_logits_end_one_sequence_and_not_the_others():
    def next_token(prefix):
        return -1 if prefix[0] == 9 and len(prefix) > 20 else (prefix[-1] + 1) % 8

    target = FakeTarget(10, next_token)
    requests = [Request([first, 1], Lookahead(4, 4, 4), 40) for first in (9, 1)]
    broken, fine = run(target, requests)
    assert isinstance(broken.error, NumericalError)
    assert broken.tokens == [(2 + i) % 8 for i in range(len(broken.tokens))]
    assert fine.finish_reason == "length"
    assert len(fine.tokens) == 40
    with pytest.raises(NumericalError, match="NaN"):
        list(decode(target, [Request([9, 1], Lookahead(4, 4, 4), 40)]))


def test_a_pool_can_be_kept_across_calls():
    pool = NGramPool(7)
    request = lambda: Request([1, 2, 3], Lookahead(5, 4, 7, pool=pool), 80)  # noqa: E731
    (cold,) = run(FakeTarget(40), [request()])
    (warm,) = run(FakeTarget(40), [request()])
    assert warm.tokens == cold.tokens
    assert warm.stats.steps < cold.stats.steps


def test_statistics_sum_to_the_emitted_tokens():
    (ours,) = run(FakeTarget(40), [Request([1, 2, 3], Lookahead(5, 4, 5), 80)])
    stats = ours.stats
    assert sum(k * v for k, v in stats.tokens_per_step.items()) == stats.new_tokens - 1 == 79
    assert sum(stats.tokens_per_step.values()) == stats.steps == sum(stats.rows_per_step.values())
    assert sum(k * v for k, v in stats.rows_per_step.items()) == stats.rows
    assert stats.accepted == stats.new_tokens - 1 - stats.steps
    assert 0 < stats.acceptance_rate <= 1
    by_position = stats.acceptance_by_position
    assert sum(by_position) * stats.steps == pytest.approx(stats.accepted)
    assert by_position == sorted(by_position, reverse=True)
    assert stats.as_dict()["compression_ratio"] == pytest.approx(79 / stats.steps)


@pytest.mark.parametrize("ngram_size", [2, 3, 4, 6])
def test_drafted_counts_only_rows_that_verification_can_reach(ngram_size):
    request = Request([1, 2, 3], Lookahead(5, ngram_size, 0), 40)
    drafted, reachable = 0, []
    for step in decode(FakeTarget(40), [request]):
        stats, tree = step.sequence.stats, step.tree
        if tree is None:
            continue
        reached = {0}
        for node in range(1, len(tree)):
            if tree.needs_logits[node] and tree.parents[node] in reached:
                reached.add(node)
        assert set(step.path) <= reached
        drafted += len(reached) - 1
        reachable.append(len(reached) - 1)
    assert stats.drafted == drafted
    # After N - 2 warm-up steps, a window with N >= 4 has no acceptable row; one with N < 4 always has one.
    assert all((count > 0) == (ngram_size < 4) for count in reachable[ngram_size - 2 : -8])


def test_hit_rate_and_match_length_are_what_the_pool_gave():
    # The completion counts up and is in the pool: three right tokens in each of ten steps.
    pool = NGramPool(1)
    pool.add_text([t % 100 for t in range(300)], 4)
    target = FakeTarget(100, lambda prefix: (prefix[-1] + 1) % 100)
    (ours,) = run(target, [Request([5], Lookahead(1, 4, 1, pool=pool), 41)])
    assert ours.stats.drafter["pool_hit_rate"] == 1
    assert ours.stats.drafter["mean_match_length"] == 3
    # A pool that contains only a wrong continuation of one token in ten.
    pool = NGramPool(1)
    pool.add(7, (1, 2, 3))
    target = FakeTarget(10, lambda prefix: (prefix[-1] + 1) % 10)
    drafter = Lookahead(1, 4, 1, pool_from_prompt=False, pool_from_output=False, pool=pool)
    state = drafter.start(Start([5], 6))
    target.prefill([(0, [5])])
    for token in range(6, 16):
        tree = state.draft(0 if token != 7 else 1)
        (scores,) = target.forward([(0, tree)])
        state.observe(tree, scores, [0], [(token + 1) % 10])
        target.commit([(0, [0])])
    assert (state.stats()["pool_hit_rate"], state.stats()["mean_match_length"]) == (0.1, 0)


def test_a_plain_function_chooses_as_an_object_does():
    class Second(Choose):
        def __call__(self, scores, node):
            row = scores.row(node)
            return sorted(range(len(row)), key=row.__getitem__)[-2]

    made = Second()
    assert as_choose(made) is made
    assert as_choose(greedy) is greedy
    texts = [
        run(FakeTarget(20), [Request([1, 2], Lookahead(4, 4, 4), 30, choose)])[0].tokens
        for choose in (made, lambda scores, node: made(scores, node))
    ]
    assert texts[0] == texts[1] != run(FakeTarget(20), [Request([1, 2], Plain(), 30)])[0].tokens


def test_a_phase_is_timed_for_every_sequence_and_also_when_it_fails():
    both = [Stats(), Stats()]
    with pytest.raises(ZeroDivisionError), timed("draft", both):
        1 / 0  # noqa: B018
    with timed("draft", both[:1]):
        pass
    assert both[0].seconds["draft"] > both[1].seconds["draft"] > 0


def test_where_two_texts_part():
    assert first_divergence([1, 2], [1, 2]) is None
    assert first_divergence([1, 2, 3], [1, 2]) == first_divergence([1, 2], [1, 2, 3]) == 2
    assert first_divergence([1, 5, 3], [1, 2, 3]) == 1
    assert first_divergence([], []) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Request([], Lookahead(), 5), "at least one token"),
        (lambda: Request([1], Lookahead(), 0), "max_new_tokens must be at least 1, got 0"),
        (lambda: Request([1], Lookahead(), -3), "got -3"),
        (lambda: as_drafter("beam"), "drafter must be one of lookahead, .* got 'beam'"),
        (lambda: Lookahead(0, 5, 15), "window_size must be a whole number between 1"),
        (lambda: Lookahead(5, 1, 15), "ngram_size must be a whole number between 2"),
        (lambda: Lookahead(5, 5, -1), "guess_set_size must be a whole number between 0"),
        (lambda: Lookahead(5.5, 5, 1), "whole number"),
        (lambda: Lookahead(max_pool_keys=0), "max_pool_keys"),
        (lambda: Jacobi(0), "block_size must be a whole number between 1 and 512, got 0"),
        (lambda: PromptLookup(max_ngram=0), "max_ngram must be a whole number between 1 and 32, got 0"),
        (lambda: Lookahead(1, 1, 0), r"use lookahead\.Plain\(\)"),
        (lambda: Lookahead(pool={}), "pool must be an NGramPool or None, got dict"),
        (lambda: Adaptive(state=NGramPool(1)), "state must be an AdaptiveState or None, got NGramPool"),
        (lambda: Adaptive(sources="suffix"), "sources must be a list of names"),
        (lambda: Lookahead.preset("poem"), "preset must be one of code, text, creative, .* got 'poem'"),
        (lambda: Lookahead.preset("code", max_rows=4), "preset code: .*max_rows"),
        (lambda: Lookahead.for_model(0), "parameters must be a number above 0"),
        (lambda: Request([1], "adaptive", 5), "drafter must be a Drafter, such as .* got 'adaptive'"),
    ],
)
def test_bad_settings_say_what_must_hold(make, message):
    with pytest.raises(SettingsError, match=message):
        make()


def budgeted(rows_of_step, drafter, new=200):
    """Decode with a separate row budget per step; return the rows of each step and the sequence."""
    engine = Engine(lambda: FakeTarget(40))
    sequence = engine.add(Request([1, 2, 3, 4, 5, 6], drafter, new))
    rows = []
    while engine.busy:
        engine.row_budget = rows_of_step(len(rows))
        rows += [step.rows for step in engine.step()]
    return rows[1:], sequence


def test_a_window_that_a_burst_has_narrowed_reopens():
    whole, _ = budgeted(lambda step: 1000, Lookahead(7, 4, 0))
    burst, _ = budgeted(lambda step: 4 if 20 <= step < 30 else 1000, Lookahead(7, 4, 0))
    assert max(burst[20:28]) <= 4
    assert sum(burst[40:80]) > 0.9 * sum(whole[40:80]) > 600  # rows with a common path are merged


@pytest.mark.parametrize("budget", [8, 16, 24, 64, 90])
def test_a_small_row_budget_leaves_rows_for_candidates(budget):
    """A full pool of candidates gets half of the rows; the completion equals plain decoding."""
    pool = NGramPool(15)
    for token in range(40):
        for other in range(15):
            pool.add(token, ((token + other) % 40, other, 1, 2))
    drafter = Lookahead(15, 5, 15, pool=pool, pool_from_output=False, pool_from_prompt=False)
    rows, sequence = budgeted(lambda step: budget, drafter)
    assert max(rows) <= budget
    window, _ = budgeted(lambda step: budget, Lookahead(15, 5, 0))
    assert max(window) <= budget
    assert sequence.stats.drafted >= budget // 4 * sequence.stats.steps
    assert sequence.tokens == budgeted(lambda step: 1000, Plain())[1].tokens


@pytest.mark.parametrize("captures", [False, True])
def test_in_captured_passes_all_trees_count_as_the_largest(captures):
    """They are padded to it. In other passes, later sequences get the rows that earlier ones leave."""

    class Watched(FakeTarget):
        def forward(self, trees):
            passes.append([len(tree) for _, tree in trees])
            return super().forward(trees)

    passes, budget = [], 5 * 32
    target = Watched(40)
    target.captures = captures
    engine = Engine(lambda: target, row_budget=budget)
    for prompt, drafter in zip(range(5), [*4 * [Plain()], Lookahead(15, 5, 15)], strict=True):
        engine.add(Request([prompt, 2, 3, 4, 5, 6], drafter, 100))
    while engine.busy:
        engine.step()
    together = [rows for rows in passes if len(rows) == 5]
    assert len(together) > 10
    largest = max(5 * max(rows) for rows in together)
    assert (largest <= budget) == captures
    assert max(sum(rows) for rows in together) <= budget


def test_a_text_that_ends_with_the_prefill_needs_no_drafter():
    class Broken(Lookahead):
        def start(self, sequence):
            raise ValueError("broken on purpose")

    (sequence,) = run(FakeTarget(40), [Request([1, 2], Broken(5, 4, 5), 1)])
    assert (sequence.finish_reason, sequence.error) == ("length", None)


@pytest.mark.parametrize("failing", ["observe", "stats"])
def test_a_drafter_that_fails_after_the_end_costs_no_completion(failing):
    class Broken(Lookahead):
        def start(self, sequence):
            state = super().start(sequence)
            honest = getattr(state, failing)

            def fail(*given):
                if len(given) == 0 or ours.finish_reason is not None:
                    raise ZeroDivisionError("broken on purpose")
                return honest(*given)

            setattr(state, failing, fail)
            return state

    engine = Engine(lambda: FakeTarget(40))
    ours = engine.add(Request([1, 2], Broken(5, 4, 5), 9))
    words = r"the drafter failed: ZeroDivisionError.*completion is not affected"
    with pytest.warns(RuntimeWarning, match=words):
        finish(engine)
    assert (ours.finish_reason, ours.error, len(ours.tokens)) == ("length", None, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choose": lambda scores, node: 1 / 0}, "^choosing a token failed: ZeroDivisionError"),
        ({"read_prompt": lambda *given: 1 / 0}, "^reading the prompt's logits failed: ZeroDivisionError"),
    ],
)
def test_an_error_at_the_first_token_says_what_failed(change, message):
    (sequence,) = run(FakeTarget(40), [Request([1, 2, 3], Plain(), 5, **change)])
    assert (sequence.finish_reason, sequence.tokens) == ("error", [])
    assert re.search(message, str(sequence.error))


@pytest.mark.parametrize("name", ["max_sequences", "prompt_rows"])
def test_an_engine_needs_room(name):
    with pytest.raises(SettingsError, match=f"{name} must be at least 1, got 0"):
        Engine(lambda: FakeTarget(40), **{name: 0})


@pytest.mark.parametrize("token", [-1, 40])
def test_a_drafted_token_outside_the_vocabulary_is_named(token):
    class Wrong(Lookahead):
        def start(self, sequence):
            state = super().start(sequence)
            draft = state.draft

            def outside(*given):
                tree = draft(*given)
                tree.tokens[-1] = token
                return tree

            state.draft = outside
            return state

    target = FakeTarget(40)
    target.vocabulary = 40
    (sequence,) = run(target, [Request([1, 2], Wrong(5, 4, 5), 9)])
    assert f"between 0 and 39, got {token}" in str(sequence.error)


def another_root(root, depth, rows):
    return TokenTree((root + 1) % 40)


def one_row_too_many(root, depth, rows):
    return TokenTree.of([root, *range(rows)], [-1] + [0] * rows)


def one_level_too_deep(root, depth, rows):
    tree = TokenTree(root)
    tree.add_candidate([5] * (depth + 1))
    return tree


@pytest.mark.parametrize(
    ("wrong", "budget"), [(another_root, 1000), (one_row_too_many, 16), (one_level_too_deep, 1000)]
)
def test_an_invalid_tree_ends_its_sequence_and_no_other(wrong, budget):
    class Wrong(Lookahead):
        def start(self, sequence):
            state = super().start(sequence)
            draft = state.draft
            state.draft = lambda depth, rows, batch: wrong(draft(depth, rows, batch).tokens[0], depth, rows)
            return state

    engine = Engine(lambda: FakeTarget(40), row_budget=budget)
    sequences = [engine.add(Request(prompt, Lookahead(5, 4, 5), 30)) for prompt in PROMPTS]
    broken = engine.add(Request([1, 2], Wrong(5, 4, 5), 30))
    while engine.busy:
        engine.step()
    assert broken.finish_reason == "error"
    assert isinstance(broken.error, SettingsError)
    assert "a drafted tree must begin with the last token and have at most" in str(broken.error)
    assert len(broken.tokens) == 1  # the prefill's
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert sequence.tokens == run(FakeTarget(40), [Request(prompt, Plain(), 30)])[0].tokens


def test_a_comparison_with_plain_decoding_needs_a_plain_decoding():
    with pytest.raises(AssertionError, match="plain decoding failed for prompt 0"):
        assert_same_as_autoregressive(FakeTarget(40, lambda prefix: -1), [[1, 2]])


def test_an_error_keeps_nothing_of_the_failed_pass_alive():
    """Its traceback holds the frames of the pass, whose tensors the next pass may need the room of."""

    class Large:
        pass

    class Full(FakeTarget):
        def forward(self, trees):
            activations = Large()
            kept.append(weakref.ref(activations))
            raise OutOfMemory("no room")

    kept = []
    gc.disable()
    try:
        (sequence,) = run(Full(40), [Request([1, 2], Plain(), 30)])
        assert isinstance(sequence.error, OutOfMemory)
        assert kept[-1]() is None
    finally:
        gc.enable()


def test_an_error_that_is_its_own_cause_ends_its_sequence():
    class Circular(Lookahead):
        def start(self, sequence):
            error = ValueError("no")
            raise error from error

    (sequence,) = run(FakeTarget(40), [Request([1, 2], Circular(5, 4, 5), 30)])
    assert "no" in str(sequence.error)
