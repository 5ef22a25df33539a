"""The budget: the lambda rule against the best fixed number of rows, the breaker, the step times."""

import random

import pytest

from lookahead.core import Request, SettingsError
from lookahead.drafters import make_drafter
from lookahead.drafters.adaptive import (
    AdaptiveDrafter,
    AdaptiveState,
    Budget,
    StepTimes,
    load_times,
    measure_times,
    save_times,
)
from lookahead.drafters.adaptive.budget import AHEAD, BLOCK, LOOK, LOOK_SHARE, MOST_STAKE, SHARE, STAKE
from lookahead.drafters.adaptive.costs import MENU, from_points, place_of, slopes
from lookahead.drafters.adaptive.times import times_file
from lookahead.testing import FakeTarget, run

FLAT = [0.010 * (1 + 0.002 * k) for k in MENU]
STEEP = [0.010 * (1 + 0.25 * k) for k in MENU]
#: Almost free up to 16 rows, dear beyond.
KNEE = [0.010 * (1 + 0.005 * k + 0.1 * max(0, k - 16)) for k in MENU]


def times_of(table):
    return StepTimes({(0, 0): list(table)})


def falling(first, ratio, count=64):
    return [1.0] + [first * ratio**i for i in range(count - 1)]


def test_one_row_where_rows_cost_more_than_they_bring():
    budget = Budget(times_of(STEEP), 64)
    assert budget.choose(falling(0.1, 0.9), 100) == 1
    assert budget.choose(falling(0.9, 0.95), 100) > 1


def test_all_rows_where_they_are_free():
    budget = Budget(times_of([0.01] * len(MENU)), 64)
    assert budget.choose(falling(0.5, 0.9), 100) == 64


def test_the_knee_is_found():
    budget = Budget(times_of(KNEE), 64)
    for _ in range(200):  # lambda settles at what 16 rows bring
        budget.learn(100, 16, 4.5, 4 + _ % 2, KNEE[place_of(16)])
    assert budget.choose(falling(0.3, 0.97), 100) == 16


def simulate(choose, table, steps=1500, seed=0):
    """Tokens per second where drafts are as good as their probabilities say, and differ from step to step."""
    rng = random.Random(seed)
    tokens = seconds = 0.0
    for _ in range(steps):
        probabilities = falling(rng.choice([0.02, 0.3, 0.9]), rng.choice([0.7, 0.9, 0.97]))
        rows, told = choose(probabilities)
        emitted = 1 + sum(rng.random() < p for p in probabilities[1:rows])
        spent = table[place_of(rows)]
        told(rows, sum(probabilities[:rows]), emitted, spent)
        tokens += emitted
        seconds += spent
    return tokens / seconds


@pytest.mark.parametrize("table", [FLAT, STEEP, KNEE], ids=["flat", "steep", "knee"])
def test_within_two_percent_of_the_best_fixed_number(table):
    budget = Budget(times_of(table), 64)

    def adaptive(probabilities):
        rows = 1 if budget.plain else budget.choose(probabilities, 100)
        return rows, lambda *step: budget.learn(100, *step)

    def fixed(k):
        return lambda probabilities: (k, lambda *step: None)

    ours = simulate(adaptive, table)
    best = max(simulate(fixed(k), table) for k in MENU if k <= 64)
    assert ours > 0.98 * best
    assert ours > 0.98 * simulate(fixed(1), table)


def test_growth_stops_no_earlier_than_the_choice():
    for table in (FLAT, STEEP, KNEE):
        for first, ratio in ((0.02, 0.9), (0.4, 0.9), (0.9, 0.97)):
            budget = Budget(times_of(table), 64)
            probabilities = falling(first, ratio)
            stop = budget.stop(100, 64)
            grown = next((k for k in range(1, 64) if probabilities[k] < stop[k]), 64)
            assert grown >= budget.choose(probabilities, 100)
    assert grown < 64 or table is not STEEP


def test_the_breaker_trips_backs_off_and_recovers():
    budget = Budget(times_of(FLAT), 64)
    level = FLAT[0] / FLAT[place_of(32)]

    def block(gain):
        for step in range(BLOCK):
            if budget.plain:
                return step
            budget._watch(gain * FLAT[place_of(32)], FLAT[place_of(32)], FLAT[0], 100)
        return BLOCK

    def sit_out():
        count = 0
        while budget.plain:
            budget.learn_plain(100, 1, FLAT[0])
            count += 1
        return count

    assert level < 1
    assert block(AHEAD - 0.01) == BLOCK  # not slower, and yet not worth it
    assert sit_out() == 32
    assert block(AHEAD - 0.01) == BLOCK
    assert sit_out() == 64
    block(AHEAD + 0.01)
    assert not budget.plain
    block(AHEAD - 0.01)
    assert sit_out() == 32
    assert budget.trips == 3
    assert budget.plain_steps == 32 + 64 + 32


def test_the_breaker_trips_early_where_much_is_lost():
    budget = Budget(times_of(STEEP), 64)
    steps = 0
    while not budget.plain:
        budget.learn(100, 8, 3.0, 1, STEEP[place_of(8)])
        steps += 1
    assert steps == 1  # eight rows at this price lose more than a plain step
    budget = Budget(times_of(FLAT), 64)
    for _ in range(BLOCK - 1):
        budget.learn(100, 8, 1.5, 1, FLAT[place_of(8)])
    assert not budget.plain


@pytest.mark.parametrize("table", [FLAT, STEEP, KNEE], ids=["flat", "steep", "knee"])
def test_a_step_never_plays_with_more_than_the_stake(table):
    budget = Budget(times_of(table), 64)
    hopeful, plain, lost = falling(0.98, 0.99), table[0], 0.0
    for step in range(2000):
        if budget.plain and step % 8:
            budget.learn_plain(100, 1, plain)
            continue
        stop = budget.stop(100, 64)
        rows = budget.choose(hopeful, 100)
        assert next((k for k in range(1, 64) if hopeful[k] < stop[k]), 64) >= rows
        seconds = table[place_of(rows)]
        assert seconds - plain <= budget.stake(budget.times.plain_of(1, 100)) + 1e-9
        budget.learn(100, rows, sum(hopeful[:rows]), 1, seconds)  # and nothing ever comes of it
        lost += seconds - plain
    assert lost <= STAKE * plain + SHARE * budget._spent + 1e-9


def test_looks_cost_no_more_than_their_purse():
    budget = Budget(times_of(FLAT), 64)
    plain, spent = FLAT[0], 0.0
    for _ in range(200):
        rest = budget.rest(100)
        if rest:
            budget.learn_plain(100, rest, rest * plain)
        budget.glanced(100, 0.3 * plain)
        spent += 0.3 * plain
    assert spent <= (LOOK * STAKE + 0.35) * plain + LOOK_SHARE * budget._spent
    assert budget.plain_steps < 200 * 70
    budget.learn(100, 8, 4.0, 8, FLAT[place_of(8)])  # a gain may be spent on looking
    assert budget.rest(100) == 0


def test_experience_sets_the_stake_of_the_next_text_and_sampled_texts_are_others():
    times = times_of(FLAT)
    for _ in range(4):
        budget = Budget(times, 64)
        budget.learn(100, 64, 20.0, 1, 2 * FLAT[0])
        budget.close(100)
    assert times.experience[False].stake == 1 / 8
    assert times.experience[True].stake == STAKE
    for _ in range(5):
        budget = Budget(times, 64)
        budget.learn(100, 8, 4.0, 4, FLAT[place_of(8)])
        budget.close(100)
    assert times.experience[False].stake == MOST_STAKE


def test_slopes_are_the_cheapest_way_on():
    rng = random.Random(3)
    for _ in range(50):
        table = [rng.random()]
        while len(table) < len(MENU):
            table.append(table[-1] + rng.choice([0.0, rng.random(), 20 * rng.random()]))
        most = rng.choice(MENU[3:])
        last = place_of(most)
        for i, slope in enumerate(slopes(table, most)):
            ways = [(table[j] - table[i]) / (MENU[j] - MENU[i]) for j in range(i + 1, last + 1)]
            assert slope == pytest.approx(min(ways, default=float("inf")))


def test_plain_steps_are_taken_in_together():
    one, many = times_of(FLAT), times_of(FLAT)
    for _ in range(16):
        one.learn_plain(1, 100, 0.02)
    many.learn_plain(1, 100, 0.02, 16)
    assert FLAT[0] < one.plain_of(1, 100) < 0.02
    assert one.plain_of(1, 100) == pytest.approx(many.plain_of(1, 100))


def test_step_times_follow_a_slower_machine_and_ignore_a_spike():
    times = times_of(FLAT)
    times.learn(1, 100, 16, 10.0)
    assert times.table(1, 100)[place_of(16)] < 1.3 * FLAT[place_of(16)]
    for _ in range(200):
        times.learn(1, 100, 16, 2 * FLAT[place_of(16)])
    table = times.table(1, 100)
    assert table[place_of(16)] == pytest.approx(2 * FLAT[place_of(16)], rel=0.05)
    assert table[0] > 1.2 * FLAT[0]
    assert table == sorted(table)


def test_bins_of_context_and_batch():
    times = times_of(FLAT)
    far = times.table(4, 5000)
    assert far == FLAT
    assert far is not times.table(1, 100)
    for _ in range(50):
        times.learn(4, 5000, 8, 0.1)
    assert times.table(1, 100) == FLAT
    assert times.table(4, 5000)[place_of(8)] > 0.05


def test_sequences_in_one_pass_are_counted():
    target = FakeTarget(32)
    state = AdaptiveState(keep=False, times=times_of(FLAT))
    drafters = [AdaptiveDrafter(None, 32, state) for _ in range(3)]
    run(target, [Request([1, 2, 3], drafter, 20) for drafter in drafters[:1]])
    assert drafters[0]._budget.batch == 1
    run(target, [Request([1, 2, 3], drafter, 40) for drafter in drafters])
    assert {drafter._budget.batch for drafter in drafters} == {3}


def test_points_become_a_table():
    table = from_points({1: 0.01, 16: 0.012, 64: 0.03})
    assert table[place_of(1)] == 0.01
    assert table[place_of(64)] == pytest.approx(0.03)
    assert table[place_of(32)] == pytest.approx(0.018)
    assert table[place_of(128)] > 0.05
    assert table == sorted(table)
    assert from_points({1: 0.01}) == [0.01] * len(MENU)


class Clocked(FakeTarget):
    """A target whose clock advances with the rows it evaluates."""

    now = 0.0
    per_row = 0.2

    def forward(self, trees):
        Clocked.now += 1 + self.per_row * (max(len(tree) for _, tree in trees) - 1)
        return super().forward(trees)


@pytest.fixture
def clock(monkeypatch):
    Clocked.now = 0.0
    for module in ("drafter", "times"):
        monkeypatch.setattr(f"lookahead.drafters.adaptive.{module}.perf_counter", lambda: Clocked.now)


def unpredictable(prefix):
    return random.Random(repr(prefix)).randrange(200)


@pytest.mark.parametrize("per_row", [0.0, 0.05, 0.3, 1.0])
def test_never_much_slower_on_text_that_nothing_predicts(clock, per_row):
    target = Clocked(200, unpredictable)
    target.per_row = per_row
    state = AdaptiveState(keep=False, times=measure_times(target, 200, repeats=2))
    Clocked.now = 0.0
    run(target, [Request([1, 2, 3], make_drafter("adaptive", None, 200, state), 400)])
    assert Clocked.now <= 1.02 * 399


def test_a_pause_ends_when_the_text_becomes_predictable(clock):
    def text(prefix):
        return unpredictable(prefix) if len(prefix) < 200 else len(prefix) % 7

    target = Clocked(200, text)
    target.per_row = 0.1
    state = AdaptiveState(keep=False, times=measure_times(target, 200, repeats=2))
    Clocked.now = 0.0
    (generation,) = run(target, [Request([1, 2, 3], AdaptiveDrafter(None, 200, state), 1000)])
    assert generation.stats.drafter["plain_steps"] > 100
    assert Clocked.now < 1.03 * 200 + 0.5 * 800


def test_texts_after_bad_ones_play_with_less(clock):
    target = Clocked(200, unpredictable)
    target.per_row = 0.4
    state = AdaptiveState(keep=False, times=measure_times(target, 200, repeats=2))
    spent = []
    for _ in range(8):
        before = Clocked.now
        run(target, [Request([1, 2, 3] * 20, AdaptiveDrafter(None, 200, state), 60)])
        spent.append(Clocked.now - before)
    assert spent[0] <= 59 + STAKE + 0.02 * 59
    assert sum(spent[4:]) <= 4 * 59 * 1.02
    assert state.times.experience[False].stake < STAKE


def test_measured_times_choose_the_rows(clock):
    target = Clocked(32)
    target.per_row = 0.02
    assert measure_times(target, 32).table(1, 64)[place_of(16)] == pytest.approx(1.3)
    assert not target.committed
    rows = {}
    for per_row in (0.001, 0.3):
        target.per_row = per_row
        state = AdaptiveState(keep=False, times=measure_times(target, 32))
        (generation,) = run(target, [Request([1, 2, 3] * 5, AdaptiveDrafter(None, 32, state), 200)])
        rows[per_row] = generation.stats.rows / generation.stats.steps
    assert rows[0.001] > 1.1 * rows[0.3]


def test_a_slow_model_is_not_held_up(clock):
    counts = []

    class Counted(Clocked):
        def forward(self, trees):
            counts.append(len(trees[0][1]))
            return super().forward(trees)

    times = measure_times(Counted(200), 200)
    assert set(counts) == {1, 16}
    assert len(counts) == 5
    assert times.table(1, 64)[place_of(64)] > times.table(1, 64)[place_of(16)] > times.plain_of(1, 64)
    counts.clear()
    measure_times(Counted(200), 200, rows=(1, 4, 16, 64), patience=float("inf"))
    assert set(counts) == {1, 4, 16, 64}


def test_times_are_kept_by_machine_and_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_times("model A") is None
    times = times_of(KNEE)
    path = save_times("model A", times)
    assert path.is_relative_to(tmp_path)
    times.plain[0, 0] = 0.007
    save_times("model A", times)
    assert load_times("model A").bins == times.bins
    assert load_times("model A").plain == {(0, 0): 0.007}
    assert load_times("model B") is None
    times_file("model A").write_text('{"menu": 3}')
    with pytest.raises(SettingsError, match="delete it or run lookahead tune"):
        load_times("model A")
    with pytest.raises(ValueError, match="positive"):
        StepTimes.from_dict({"0,0": [-1.0] * len(MENU)})


def test_where_setting_up_is_dear_a_text_is_drafted_for_once_it_repeats_itself(clock):
    def text(prefix):
        return unpredictable(prefix) if len(prefix) < 100 else len(prefix) % 7

    target = Clocked(200, text)
    target.per_row = 0.05
    state = AdaptiveState(keep=False, times=measure_times(target, 200, repeats=2))
    state.times.experience[False].opening = 1.0
    drafter = AdaptiveDrafter(None, 200, state)
    (generation,) = run(target, [Request([1, 2, 3], drafter, 60)])
    assert drafter._begin is not None  # nothing was set up
    assert generation.stats.drafter["plain_steps"] == 59
    (generation,) = run(target, [Request([1, 2, 3], drafter, 400)])
    assert generation.stats.steps < 300
    assert generation.stats.drafter["accepted_by_suffix"] > 50
