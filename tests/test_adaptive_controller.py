"""The controller: the lambda rule against the best fixed number of rows, the bound on regret, the step times."""

import random
from functools import partial

import numpy as np
import pytest

from lookahead.core import Engine, Request, SettingsError
from lookahead.drafters import Adaptive
from lookahead.drafters.adaptive import step_times
from lookahead.drafters.adaptive.controller import (
    COLD_SHARE,
    COOLDOWN,
    EXPLORATION,
    MAX_REGRET,
    SHARE,
    Controller,
)
from lookahead.drafters.adaptive.measure import measure_times
from lookahead.drafters.adaptive.sequence import AdaptiveDraftState, Drafting, PlainSteps
from lookahead.drafters.adaptive.step_times import (
    EVIDENCE,
    FORMAT,
    GUESS,
    MENU,
    REMEMBERED,
    SAMPLED,
    WEIGHT,
    StepTimes,
    from_points,
    load_times,
    menu_index,
    save_times,
    times_file,
)
from lookahead.testing import FakeTarget, run

FLAT = [0.010 * (1 + 0.002 * k) for k in MENU]
STEEP = [0.010 * (1 + 0.25 * k) for k in MENU]
#: Almost free up to 16 rows, expensive beyond.
KNEE = [0.010 * (1 + 0.005 * k + 0.1 * max(0, k - 16)) for k in MENU]
#: SmolLM2-135M in fp32 on two cores.
CPU = from_points({1: 0.018, 4: 0.021, 8: 0.026, 16: 0.040, 64: 0.100})
TABLES = pytest.mark.parametrize("table", [FLAT, STEEP, KNEE, CPU], ids=["flat", "steep", "knee", "cpu"])


def times_of(table):
    times = StepTimes({(0, 0): list(table)})
    times.probe.value = times.setup.value = 0.0
    return times


def controller_of(table):
    return Controller(times_of(table), 100)


def falling(first, ratio, count=64):
    return [1.0] + [first * ratio**i for i in range(count - 1)]


def test_one_row_where_rows_cost_more_than_they_bring():
    controller = controller_of(STEEP)
    assert controller.choose(falling(0.1, 0.9)) == 1
    assert controller.choose(falling(0.9, 0.95)) > 1


def test_a_row_that_hardly_pays_is_made_for_what_it_teaches():
    """At 0.1 plain steps a row: a row of probability p brings p tokens now and EXPLORATION later."""
    table = [0.010 * (1 + 0.1 * (k - 1)) for k in MENU]
    for p, rows in ((0.1 - 1.1 * EXPLORATION, 1), (0.1 - 0.9 * EXPLORATION, 2)):
        controller = controller_of(table)
        assert controller.choose([1.0, p]) == rows
        assert (controller.prices(2)[1] <= p) == (rows == 2)


def test_cheap_probes_are_made_at_every_step():
    for share, steps in ((0.049, 0), (0.051, 2)):
        controller = controller_of(FLAT)
        controller.times.probe.value = share * FLAT[0]
        assert controller.cooldown(1) == steps


def test_all_rows_where_they_are_free():
    assert controller_of([0.01] * len(MENU)).choose(falling(0.5, 0.9)) == 64


def test_the_example_in_the_module_is_right(monkeypatch):
    controller = controller_of(from_points({1: 0.010, 2: 0.0102, 4: 0.0105, 8: 0.012, 16: 0.017, 32: 0.030}))
    probabilities = [1, 0.6, 0.4, 0.3, 0.2, 0.18, 0.15, 0.12, 0.1, 0.09, 0.08, 0.07, 0.04, 0.04, 0.03, 0.03]
    assert sum(probabilities[:8]) == pytest.approx(2.95)
    assert sum(probabilities) == pytest.approx(3.43)
    assert controller.rate == pytest.approx(100)
    assert controller.choose(probabilities) == 12
    monkeypatch.setattr(Controller, "rate", 200)
    assert controller.choose(probabilities) == 8
    assert controller.prices(16)[8] == pytest.approx(0.115)


def test_the_controller_chooses_the_rows_before_steps_become_slow():
    controller = controller_of(KNEE)
    for step in range(200):  # lambda settles at what 16 rows bring
        controller.learn(16, 4.5, 4 + step % 2, KNEE[menu_index(16)])
    assert controller.choose(falling(0.3, 0.97)) == 16


def simulate(choose, table, worth=1.0, steps=1500, seed=0):
    """(tokens, seconds): drafts that differ from step to step, worth what their probabilities say times ``worth``."""
    rng = random.Random(seed)
    tokens = seconds = 0.0
    for _ in range(steps):
        probabilities = falling(rng.choice([0.02, 0.3, 0.9]), rng.choice([0.7, 0.9, 0.97]))
        rows, learn = choose(probabilities)
        emitted = 1 + sum(rng.random() < p * worth for p in probabilities[1:rows])
        spent = table[menu_index(rows)]
        learn(rows, sum(probabilities[:rows]), emitted, spent)
        tokens += emitted
        seconds += spent
    return tokens, seconds


def adaptive_choice(controller):
    """``choose`` for ``simulate``: what the drafter does with a controller."""
    left = 0

    def learn(rows, expected, emitted, seconds):
        nonlocal left
        probed, left = not left, max(0, left - 1)
        if probed:
            controller.learn(rows, expected, emitted, seconds)
        else:
            controller.learn_plain([seconds], 0.0, False)
        if probed:
            left = controller.cooldown(rows)

    def choose(probabilities):
        limit = len(controller.prices(64)) - 1
        return (1 if left else controller.choose(probabilities[:limit])), learn

    return choose


def fixed_choice(rows):
    return lambda probabilities: (rows, lambda *step: None)


@TABLES
def test_near_the_best_fixed_number_of_rows_where_drafts_pay(table):
    tokens, seconds = simulate(adaptive_choice(controller_of(table)), table)
    rates = {k: (lambda done: done[0] / done[1])(simulate(fixed_choice(k), table)) for k in MENU if k <= 64}
    assert tokens / seconds > 0.98 * max(rates.values())


@TABLES
@pytest.mark.parametrize("worth", [0.0, 0.3, 0.6])
def test_estimates_that_promise_too_much_cost_no_more_than_the_bound(table, worth):
    controller = controller_of(table)
    tokens, seconds = simulate(adaptive_choice(controller), table, worth)
    assert seconds <= (tokens + MAX_REGRET) * table[0] + SHARE * seconds


def test_growth_stops_no_earlier_than_the_choice():
    for table in (FLAT, STEEP, KNEE):
        for first, ratio in ((0.02, 0.9), (0.4, 0.9), (0.9, 0.97)):
            controller = controller_of(table)
            probabilities = falling(first, ratio)
            prices = controller.prices(64)
            most = len(prices) - 1
            grown = next((k for k in range(1, most) if probabilities[k] < prices[k]), most)
            assert grown >= controller.choose(probabilities[:most])
            assert grown < 64 or table is FLAT


@TABLES
def test_a_step_never_loses_more_than_the_loss_budget(table):
    controller = controller_of(table)
    hopeful, plain, lost = falling(0.98, 0.99), table[0], 0.0
    choose = adaptive_choice(controller)
    for _ in range(2000):
        budget = controller.loss_budget
        rows, learn = choose(hopeful)
        assert table[menu_index(rows)] - plain <= budget + 1e-9
        learn(rows, sum(hopeful[:rows]), 1, table[menu_index(rows)])  # and nothing ever comes of it
        lost += table[menu_index(rows)] - plain
    assert lost <= MAX_REGRET * plain + SHARE * controller.spent + 1e-9
    assert controller.cooldowns > 2 or table in (FLAT, KNEE)  # there the correction of F forbids drafts first


def test_first_drafts_cannot_take_the_whole_loss_budget():
    cold, proven = controller_of(CPU), controller_of(CPU)
    proven.learn(2, 1.5, 2, CPU[1])  # a draft was accepted
    for controller, share in ((cold, COLD_SHARE), (proven, 1.0)):
        most = len(controller.prices(64)) - 1
        lost = [CPU[menu_index(rows)] - CPU[0] for rows in (most, most + 1)]
        assert lost[0] <= share * controller.loss_budget < lost[1]
    dear = controller_of(STEEP)  # the second row alone takes more than that share
    dear.regret = (MAX_REGRET - 0.5) * STEEP[0]
    assert len(dear.prices(64)) - 1 == 2


def test_a_cooldown_lasts_until_the_loss_budget_can_pay_again():
    controller = controller_of(FLAT)
    for _ in range(8):
        steps = 0
        while not steps:
            controller.learn(64, 20.0, 1, 1.9 * FLAT[0])
            steps = controller.cooldown(64)
        assert steps >= COOLDOWN
        controller.learn_plain([FLAT[0]] * steps, 0.0, True)
        assert controller.cooldown(64) == 0
    controller.learn(64, 20.0, 1, 1.9 * FLAT[0])
    assert controller.cooldown(64) > 0
    controller.learn(8, 4.0, 4, FLAT[menu_index(8)])
    assert controller.cooldown(8) == 0  # gains pay, too


def test_expensive_probes_are_made_rarely():
    controller = controller_of(FLAT)
    controller.times.probe.value = 0.2 * FLAT[0]
    probes = wait = 0
    for _ in range(2000):
        if wait:
            controller.learn_plain([FLAT[0]], 0.0, False)
            wait -= 1
        else:
            controller.learn(1, 1.0, 1, FLAT[0], 0.2 * FLAT[0])
            wait = controller.cooldown(1)
            probes += 1
    assert 10 < probes <= (MAX_REGRET + SHARE * 2050) / 0.2
    controller = controller_of(FLAT)
    controller.times.probe.value = 0.005 * FLAT[0]
    controller.learn(1, 1.0, 1, FLAT[0], 0.005 * FLAT[0])
    assert controller.cooldown(1) == 0  # cheap ones always


def test_plain_steps_move_the_whole_table_and_drafted_steps_only_their_entry():
    times = times_of(FLAT)
    for _ in range(200):
        times.learn((1, 100), 16, 2 * FLAT[menu_index(16)])
    table = times.table(1, 100)
    assert table[menu_index(16)] == pytest.approx(2 * FLAT[menu_index(16)], rel=0.02)
    assert table[0] == FLAT[0]
    assert table == sorted(table)
    for _ in range(200):
        times.learn((1, 100), 1, 2 * FLAT[0])
    assert table[0] == pytest.approx(2 * FLAT[0], rel=0.02)
    assert table[menu_index(16)] == pytest.approx(4 * FLAT[menu_index(16)], rel=0.05)


def test_an_interrupted_step_counts_for_little():
    times = times_of(FLAT)
    times.learn((1, 100), 16, 10.0)
    assert times.table(1, 100)[menu_index(16)] < 1.1 * FLAT[menu_index(16)]
    controller = controller_of(FLAT)
    controller.learn(2, 1.5, 1, 100.0)
    assert controller.regret < 1.2 * FLAT[0]


def test_a_machine_that_becomes_slower_is_no_price_of_drafts():
    slower = 1.3 * FLAT[0]
    for rows, charged in ((1, False), (4, True)):
        controller = controller_of(FLAT)
        controller.learn(rows, 1.0, 1, slower)
        controller.learn_plain([slower], 0.0, True)
        assert (controller.times.after.value > 0) is charged


def test_step_times_are_kept_by_context_and_batch():
    times = times_of(FLAT)
    far = times.table(1, 5000)
    assert far == FLAT
    assert far is not times.table(1, 100)
    for _ in range(50):
        times.learn((1, 5000), 8, 0.1)
    assert times.table(1, 100) == FLAT
    assert times.table(1, 5000)[menu_index(8)] > 0.05


def test_a_plain_step_of_few_sequences_is_not_guessed_as_slow_as_one_of_many():
    """In vLLM the first passes may have 16 requests; a plain step of two has fewer rows than any of them."""
    times = StepTimes(guess=0.25)
    times.learn((16, 100, 0), 1, 0.260)
    few = times.table(2, 100)
    assert few[0] == pytest.approx(0.260 * 1.25 / 4.75)
    assert few[menu_index(8)] == pytest.approx(0.260)  # as many rows in all as were measured
    assert few == sorted(few)


def test_before_any_measurement_rows_of_a_batch_cost_what_as_many_rows_of_one_text_cost():
    """16 sequences, and rows that each cost a quarter of a plain step: a second row of each: 1.84 times as long."""
    times = StepTimes(guess=0.25)
    times.learn((16, 100, False), 1, 0.475)
    table = times.table(16, 100)
    assert table[MENU.index(1)] == pytest.approx(0.475)
    assert table[MENU.index(2)] == pytest.approx(0.475 * (1 + 0.25 * 31) / (1 + 0.25 * 15))
    alone = StepTimes(guess=0.25)
    alone.learn((1, 100, False), 1, 0.1)
    assert alone.table(16, 100)[MENU.index(2)] == pytest.approx(table[MENU.index(2)])


def test_a_batch_that_was_never_measured_is_priced_by_its_rows():
    times = StepTimes({(0, 0): [1.0 + 0.1 * k for k in MENU]})
    assert times.table(16, 100) == pytest.approx([1.0 + 0.1 * 16 * k for k in MENU])
    assert times.table(16, 100, True) == pytest.approx([1.0 + 0.1 * 16 * k for k in MENU])
    alone = StepTimes({(8, 0): [1.0 + 0.1 * 16 * k for k in MENU]}).table(1, 100)
    assert alone[menu_index(32)] == pytest.approx(1.0 + 0.1 * 32)
    assert alone[0] == pytest.approx((1.0 + 0.1 * 16) / (1 + GUESS * 15))  # of fewer rows there is the guess


def test_a_slow_machine_is_not_a_loss():
    """Passes take a half longer for a while; plain ones would, too. One such step used to take half of the budget."""
    controller = controller_of(FLAT)
    before = controller.loss_budget
    for _ in range(30):
        controller.learn(1, 1.0, 1, 1.5 * FLAT[0])
    assert controller.loss_budget >= before


def test_rows_of_a_batch_are_the_loss_of_the_one_that_has_them():
    """One of four drafts three rows more; the pass takes 1.6 where a plain one takes 1. All four wait for it."""
    table = [1.0 + 0.8 * (k - 1) for k in MENU]
    times = StepTimes({StepTimes.bin_of(4, 100): table})
    drafts, plain = Controller(times, 100), Controller(times, 100)
    for controller, rows in ((plain, 1), (plain, 1), (plain, 1), (drafts, 4)):
        controller.batch = 4
        times.drafted(rows)
    times.evaluated()
    plain.learn(1, 1.0, 1, 1.6)
    assert plain.regret == pytest.approx(0.0)
    drafts.learn(4, 2.0, 2, 1.6)
    assert drafts.regret == pytest.approx(4 * 0.6 - 1.0, rel=0.1)


def test_what_a_drafter_takes_keeps_the_whole_batch_waiting():
    """A probe and the set-up cost each sequence of the pass as much, so they are counted for each."""
    alone, shared = controller_of(FLAT), controller_of(FLAT)
    shared.batch = 16
    for controller in (alone, shared):
        controller.times.probe.value = 0.01 * FLAT[0]
        controller.learn_plain([], 0.01 * FLAT[0], False)
        controller.learn(1, 1.0, 1, FLAT[0], 0.01 * FLAT[0])
    assert shared.regret == pytest.approx(16 * alone.regret)
    assert alone.cooldown(1) == 0
    assert shared.cooldown(1) == 7  # 16 times 1 % of a plain step, of which 2 % may go into probes


def test_rows_of_few_sequences_say_what_more_of_each_would_cost():
    """Four of 16 sequences draft a row more, and the pass takes 1.2 in place of 1."""
    times = StepTimes({StepTimes.bin_of(16, 100): [1.0 + 0.1 * (k - 1) for k in MENU]})
    for _ in range(400):
        times.learn((16, 100), 20 / 16, 1.2)
    table = times.table(16, 100)
    assert table[0] == 1.0
    assert table[menu_index(2)] == pytest.approx(1.0 + 0.2 * 16 / 4, rel=0.02)


def test_a_sampled_text_does_not_change_what_is_known_of_greedy_ones():
    times = times_of(FLAT)
    for sampled in (True, False):
        controller = Controller(times, 100, sampled)
        controller.learn_plain([1.5 * FLAT[0]] * 50 if sampled else [FLAT[0]], 0.0, False)
    assert times.table(1, 100)[0] == pytest.approx(FLAT[0])
    assert times.table(1, 100, True)[0] > 1.4 * FLAT[0]


def test_sequences_in_one_pass_are_counted():
    target = FakeTarget(32)
    requests = [Request([1, 2, 3], Adaptive(max_rows=1), 20, step_times=times_of(FLAT)) for _ in range(3)]
    (alone,) = run(target, requests[:1])
    assert alone.drafting._controller.batch == 1
    assert {sequence.drafting._controller.batch for sequence in run(target, requests)} == {3}


def test_a_pass_in_which_others_draft_is_no_plain_step(clock):
    """Of two texts one is random and the other repeats itself: where one drafts, the other's steps are as long."""
    target = Clocked(200, lambda prefix: 7 if prefix[2] == 3 else unpredictable(prefix))
    times, drafter = measured(target), Adaptive(window_size=0)
    run(target, [Request([1, 2, 3 + i], drafter, 60, step_times=times) for i in range(2)])
    assert times.table(1, 3)[0] == pytest.approx(1.0)


def test_measured_points_are_interpolated_to_a_table():
    table = from_points({1: 0.01, 16: 0.012, 64: 0.03})
    assert table[menu_index(1)] == 0.01
    assert table[menu_index(64)] == pytest.approx(0.03)
    assert table[menu_index(32)] == pytest.approx(0.018)
    assert table[menu_index(128)] > 0.05
    assert table == sorted(table)
    assert from_points({1: 0.01}) == [0.01] * len(MENU)


class Clocked(FakeTarget):
    """A target whose clock advances with the rows it evaluates."""

    now = 0.0
    per_row = 0.2
    speed = 1.0

    def cost(self, trees):
        return (1 + self.per_row * (max(len(tree) for _, tree in trees) - 1)) / self.speed

    def forward(self, trees):
        Clocked.now += self.cost(trees)
        return super().forward(trees)


@pytest.fixture
def clock(monkeypatch):
    Clocked.now = 0.0
    for module in ("sequence", "measure"):
        monkeypatch.setattr(f"lookahead.drafters.adaptive.{module}.perf_counter", lambda: Clocked.now)


def measured(target, vocabulary=200):
    """The target's step times, the clock at zero."""
    times = measure_times(target, vocabulary, repeats=2)
    times.probe.value = times.setup.value = 0.0
    Clocked.now = 0.0
    return times


def request(times, tokens, prompt=(1, 2, 3), drafter=None, **more):
    return Request(
        list(prompt), drafter if drafter is not None else Adaptive(), tokens, step_times=times, **more
    )


def unpredictable(prefix):
    return random.Random(repr(prefix)).randrange(200)


def bound(tokens, plain=1.0):
    """Seconds that a text may take at most, its prefill free."""
    return (tokens - 1 + MAX_REGRET) * plain / (1 - SHARE) + 1e-6


@pytest.mark.parametrize("per_row", [0.0, 0.05, 0.3, 1.0])
def test_never_slower_on_text_that_nothing_predicts(clock, per_row):
    target = Clocked(200, unpredictable)
    target.per_row = per_row
    for tokens in (60, 400):
        times = measured(target)
        run(target, [request(times, tokens)])
        assert Clocked.now <= bound(tokens)


class Lingering(Clocked):
    """Whoever reads rows takes a while, and leaves cold caches behind for the next pass."""

    left = 0.0

    def forward(self, trees):
        Clocked.now += self.left
        self.left = 0.0
        scores = super().forward(trees)
        for score in scores:
            score.top = partial(self.read, score.top)
        return scores

    def read(self, top, nodes, k):
        Clocked.now += 0.1
        self.left = 0.3
        return top(nodes, k)


@pytest.mark.parametrize("often", [1, 3, 8])
def test_never_slower_when_all_that_a_draft_costs_is_counted(clock, often):
    """Also what it costs the plain step after it; one token in ``often`` is unpredictable."""

    target = Lingering(200, lambda prefix: unpredictable(prefix) if len(prefix) % often == 0 else 7)
    target.per_row = 0.3
    times = measured(target)
    # What is left behind is not known before it was seen: 0.4 of a step, learnt at a rate of WEIGHT, once by a model.
    for unknown in (0.4 / WEIGHT / 2, 1.0, 0.3):
        Clocked.now = 0.0
        run(target, [request(times, 400)])
        assert Clocked.now <= bound(400) + unknown


class Liar:
    """A grower that is sure of what never comes."""

    def __init__(self, tokens):
        self.tail, self.noise, self.temperature, self.credit = [0], None, 1.0, {}
        self.reader = self.corpus = None
        self.text = list(tokens)

    def take(self, tokens):
        self.text += tokens

    def forget_answers(self):
        pass

    def grow(self, rows, max_depth, stop=None):
        count = min(rows, max_depth + 1)
        self.tokens = [self.text[-1]] + [(self.text[-1] + 100) % 200] * (count - 1)
        self.parents = list(range(-1, count - 1))
        self.probabilities = [0.95**i for i in range(count)]

    def cut(self, rows):
        del self.tokens[rows:], self.parents[rows:], self.probabilities[rows:]

    def learn(self, scores, path, tokens, window):
        assert len(path) == 1
        return [], 0


@pytest.mark.parametrize("per_row", [0.01, 0.05, 0.3])
@pytest.mark.parametrize("interrupted", [False, True])
def test_never_slower_where_drafts_are_never_right(clock, monkeypatch, per_row, interrupted):
    rng = random.Random(5)
    extra = 0.0

    class Interrupted(Clocked):
        def forward(self, trees):
            nonlocal extra
            if interrupted and rng.random() < 0.05:
                Clocked.now += 20
                extra += 20
            return super().forward(trees)

    target = Interrupted(200, lambda prefix: (prefix[-1] + 1) % 200)
    target.per_row = per_row
    times = measured(target)
    extra = 0.0
    monkeypatch.setattr("lookahead.drafters.adaptive.sequence.Grower", lambda *args: Liar([]))
    (sequence,) = run(target, [request(times, 500, drafter=Adaptive(window_size=0))])
    # An interrupted plain step counts as twice a plain step in t(1), for a while.
    assert Clocked.now - extra <= (1.03 if interrupted else 1.0) * bound(500)
    assert sequence.stats.drafter["cooldowns"] > 1 or per_row == 0.01


def test_right_then_wrong_loses_no_more_than_the_gains_that_count(clock):
    def text(prefix):
        return unpredictable(prefix) if len(prefix) > 400 else len(prefix) % 7

    target = Clocked(200, text)
    target.per_row = 0.1
    run(target, [request(measured(target), 400)])
    half = Clocked.now
    assert half < 0.5 * 400
    run(target, [request(measured(target), 1000)])
    assert Clocked.now < half + 1.03 * 600 + 9


def test_drafting_goes_on_when_the_text_becomes_predictable(clock):
    def text(prefix):
        return unpredictable(prefix) if len(prefix) < 200 else len(prefix) % 7

    target = Clocked(200, text)
    target.per_row = 0.1
    (sequence,) = run(target, [request(measured(target), 1000)])
    assert sequence.stats.drafter["plain_steps"] > 100
    assert Clocked.now < 1.03 * 200 + 0.5 * 800


def test_never_slower_when_the_batch_changes(clock):
    """The pass of three sequences is three times as long; two texts end early. Nothing predicts any of them."""

    class Batched(Clocked):
        def cost(self, trees):
            return super().cost(trees) * len(trees)

    target = Batched(200, unpredictable)
    target.per_row = 0.2
    times = measured(target)
    lengths = (100, 200, 400)
    run(target, [request(times, length, (1, 2, i)) for i, length in enumerate(lengths)])
    plain = 99 * 3 + 100 * 2 + 200
    # What one loses is lost to all: of a pass of three each may lose a third, at the end of each text.
    spent = (300, 500, 700)
    assert Clocked.now <= plain + sum(
        MAX_REGRET + SHARE * s / b for s, b in zip(spent, (3, 2, 1), strict=True)
    )


@pytest.mark.parametrize("text", [None, lambda prefix: len(prefix) % 23], ids=["order two", "loop"])
@pytest.mark.parametrize("per_row", [0.01, 0.05, 0.2])
def test_near_the_best_fixed_number_of_rows_on_texts(clock, text, per_row):
    target = Clocked(200, text)
    target.per_row = per_row
    run(target, [request(measured(target), 400)])
    ours, best = Clocked.now, 399.0
    for rows in (2, 4, 8, 16, 32, 64):
        Clocked.now = 0.0
        run(target, [request(None, 400, drafter=Adaptive(rows, budget=False))])
        best = min(best, Clocked.now)
    assert 399 - ours >= 0.95 * (399 - best)


def test_measured_times_choose_the_rows(clock):
    target = Clocked(32)
    target.per_row = 0.02
    assert measure_times(target, 32).table(1, 64)[menu_index(16)] == pytest.approx(1.3)
    assert not target.committed
    rows = {}
    for per_row in (0.001, 0.3):
        target.per_row = per_row
        (sequence,) = run(target, [request(measured(target, 32), 200, [1, 2, 3] * 5)])
        rows[per_row] = sequence.stats.rows / sequence.stats.steps
    assert rows[0.001] > 1.1 * rows[0.3]


class Counted(Clocked):
    """Counts the rows of its steps."""

    def forward(self, trees):
        self.counts.append(len(trees[0][1]))
        return super().forward(trees)


def test_a_slow_model_is_not_held_up(clock):
    target = Counted(200)
    target.counts = []
    times = measure_times(target, 200)
    assert sorted(target.counts) == [1, 1, 16, 16]  # over the time, the second point is still measured
    assert times.table(1, 64)[menu_index(64)] > times.table(1, 64)[menu_index(16)] > times.table(1, 64)[0]
    target.counts.clear()
    measure_times(target, 200, rows=(1, 4, 16, 64), patience=float("inf"))
    assert {count: target.counts.count(count) for count in target.counts} == {1: 12, 4: 6, 16: 6, 64: 6}


def test_a_quick_model_is_measured_at_all_points(clock):
    target = Counted(200)
    target.counts, target.speed = [], 1000.0
    measure_times(target, 200)
    assert {count: target.counts.count(count) for count in target.counts} == {1: 12, 4: 6, 16: 6, 64: 6}


def test_compilation_and_capture_are_not_measured(clock):
    class Captured(Counted):
        path = "cuda-graph"

        def cost(self, trees):
            return 0.1 if self.counts.count(self.counts[-1]) <= 2 else 0.001

    target = Captured(200)
    target.counts = []
    assert measure_times(target, 200).table(1, 64)[0] == pytest.approx(0.001)
    target.counts, target.path = [], "cpu"
    assert measure_times(target, 200, repeats=1).table(1, 64)[0] == pytest.approx(0.1)


def test_times_are_kept_by_machine_and_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_times("model A") is None
    times = times_of(KNEE)
    path = save_times("model A", times)
    assert path.is_relative_to(tmp_path)
    times.bins[0, 0][0] = 0.007
    save_times("model A", times)
    assert load_times("model A").bins == times.bins
    assert load_times("model B") is None
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', '"format": 1'))
    assert load_times("model A") is None  # of another version: measured again
    for damaged in ('{"menu": 3}', "[]", '{"format": 2, "menu": 3}', "{"):
        times_file("model A").write_text(damaged)
        with pytest.raises(SettingsError, match="delete it or run lookahead tune"):
            load_times("model A")
    for wrong in ([-1.0] * len(MENU), [1.0], ["a"] * len(MENU)):
        save_times("model A", StepTimes({(0, 0): wrong}))
        with pytest.raises(SettingsError, match=r"positive|could not convert"):
            load_times("model A")


def test_step_times_are_kept_for_each_number_of_threads(monkeypatch):
    """Also where torch is not loaded, as with packed weights."""
    files = set()
    for count in (1, 2):
        monkeypatch.setattr(step_times, "thread_count", lambda count=count: count)
        files.add(times_file("model A"))
    assert len(files) == 2


def test_setting_up_waits_until_the_loss_budget_can_pay(clock):
    def text(prefix):
        return len(prefix) % 7

    target = Clocked(200, text)
    target.per_row = 0.05
    times = measured(target)
    times.setup.value = MAX_REGRET + 1
    (sequence,) = run(target, [request(times, 60)])
    assert isinstance(sequence.drafting._phase, PlainSteps)
    assert sequence.stats.steps == sequence.stats.drafter["plain_steps"] == 59
    (sequence,) = run(target, [request(times, 400)])
    assert isinstance(sequence.drafting._phase, Drafting)
    assert sequence.stats.drafter["plain_steps"] > 100
    assert sequence.stats.drafter["accepted_by_suffix"] > 50


def test_in_batches_where_drafting_has_lost_time_one_text_of_eight_tries_it(clock):
    target = Clocked(200, lambda prefix: len(prefix) % 7)
    target.per_row = 0.05
    times = measured(target)

    def drafted(batch):
        engine = Engine(lambda: target)
        made = [engine.add(request(times, 5000, (1, 2, i))) for i in range(batch)]
        for _ in range(30):  # no text ends, so the batch stays
            engine.step()
        count = sum(sequence.drafting._drafting is not None for sequence in made)
        engine.close()
        return count

    assert drafted(8) == 8
    assert times.gains[6] > 0, "these drafts gained time"
    times.gains[6] = -EVIDENCE - 100
    assert drafted(8) == 1
    assert drafted(8) == 8, "that text gained so much that all others try again"
    times.gains[6] = -EVIDENCE - 1000
    assert [drafted(8), drafted(8)] == [1, 1]
    assert drafted(1) == 1, "alone, the loss budget is enough"
    assert drafted(4) == 4, "each size of a batch counts for itself"
    times.gains[6] = -EVIDENCE / 2
    assert drafted(8) == 8, "a few lost steps show nothing"


def test_a_batch_counts_what_drafting_gains_and_loses():
    controller = controller_of(STEEP)
    times, plain = controller.times, STEEP[0]
    controller.set_up(plain)
    controller.learn(2, 1.5, 1, STEEP[1])
    assert times.gains == {}, "alone, no other text waits"
    controller.batch = times.batch = 2
    times.rows = 4
    times.bins[times.bin_of(2, controller.context)] = list(STEEP)
    times.setup.value = plain
    controller.set_up(plain)
    assert times.gains[2] == pytest.approx(-2)  # both texts wait
    controller.learn(2, 1.5, 2, STEEP[1])  # two rows for each, one draft accepted
    assert times.gains[2] == pytest.approx(-2 * REMEMBERED + 2 - STEEP[1] / plain)


def test_a_drafter_that_is_interrupted_in_a_plain_step_has_lost_nothing(clock, monkeypatch):
    """The garbage collector takes 30 plain steps' time in what the drafter does: that is no price of drafts."""
    target = Clocked(200, lambda prefix: len(prefix) % 7)
    target.per_row = 0.1
    times = measured(target)
    times.probe.value = 0.1  # so that a plain step follows upon a probe that found nothing
    drafted, cooling = times.drafted, []
    engine = Engine(lambda: target)
    sequence = engine.add(request(times, 400))

    def interrupted(rows):
        cooling.append(sequence.drafting.cooling)
        Clocked.now += 30.0 if sum(cooling) == 1 and cooling[-1] else 0.0
        drafted(rows)

    monkeypatch.setattr(times, "drafted", interrupted)
    while engine.busy:
        engine.step()
    assert any(cooling)
    assert sequence.stats.drafter["cooldowns"] == 0
    assert sequence.stats.steps < 200


class Dear:
    """Noise that takes 0.4 plain steps a position, whoever asks first."""

    temperature, overlaps = 1.0, False

    def __init__(self):
        self.known = set()

    def __call__(self, index):
        Clocked.now += 0.0 if index in self.known else 0.4
        self.known.add(index)
        return np.zeros(200, np.float32)


def test_noise_that_plain_decoding_draws_too_is_no_price_of_drafts(clock):
    target = Clocked(200, unpredictable)
    target.per_row = 0.02
    times = measured(target)
    ((key, table),) = times.bins.items()
    times.bins[key[0] + SAMPLED, key[1]] = [seconds + 0.4 for seconds in table]
    noise = Dear()
    (sequence,) = run(target, [request(times, 12, noise=noise)])
    assert len(noise.known) >= 11
    assert times.probe.value == pytest.approx(0.0, abs=1e-9)
    assert times.table(1, 100, True)[0] == pytest.approx(1.4, rel=0.01)
    assert sequence.stats.drafter["cooldowns"] == 0


def everything(drafter):
    """All that may be asked of a drafter at any time."""
    assert drafter.stats()["acceptance"] >= 0
    assert isinstance(drafter.estimates, list)
    assert drafter.cooling in (False, True)


def test_no_phase_lacks_a_part(clock):
    """Whatever the step times say, everything can be asked for before, between and after all calls."""

    class Asked(Adaptive):
        def start(self, sequence):
            state = AskedState(self, self.state, sequence)
            everything(state)
            return state

    class AskedState(AdaptiveDraftState):
        def draft(self, *limits):
            everything(self)
            tree = super().draft(*limits)
            everything(self)
            phases.add(type(self._phase))
            return tree

        def observe(self, *step):
            super().observe(*step)
            everything(self)

    for text, setup, probe, expected in (
        (unpredictable, 1e9, 0.0, {PlainSteps}),
        (unpredictable, 0.0, 1e9, {PlainSteps}),
        (unpredictable, 0.0, 0.5, {Drafting, PlainSteps}),
        (lambda prefix: 7, 0.0, 0.0, {Drafting}),
    ):
        target = Clocked(200, text)
        times = measured(target)
        times.setup.value, times.probe.value = setup, probe
        times.probe.weight = 0.0
        phases = set()
        run(target, [request(times, 40, drafter=Asked())])
        assert phases == expected
    for drafter, count in ((Asked(), 1), (Asked(), 3), (Asked(budget=False), 2)):
        run(target, [request(None, 30, drafter=drafter) for _ in range(count)])
