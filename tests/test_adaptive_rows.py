"""The rule for the number of rows depends only on tokens and the cost curve."""

import random
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from families import tiny_model
from lookahead.bench import step_cost
from lookahead.core import Request, Start, TokenTree
from lookahead.drafters import Adaptive, Plain
from lookahead.drafters.adaptive import measure
from lookahead.drafters.adaptive.cost import CostCurve
from lookahead.drafters.adaptive.for_model import ForModel
from lookahead.drafters.adaptive.layout import NODE, SIZES, STEP
from lookahead.drafters.adaptive.rows import EXPLORATION, RowRule, choose, pays
from lookahead.drafters.prepare import Preparation
from lookahead.hf.paths import make_target
from lookahead.llamacpp.library import Weights
from lookahead.testing import FakeModel, FakeTarget, repetitive_text, run

FLAT = CostCurve({0: {1: 1.0, 64: 1.2}})
STEEP = CostCurve({0: {1: 1.0, 2: 2.5, 64: 90.0}})
CPU = CostCurve({0: {1: 1.0, 2: 1.05, 4: 1.17, 8: 1.66, 16: 2.7, 64: 9.5}})
CURVES = pytest.mark.parametrize("curve", [FLAT, STEEP, CPU], ids=["flat", "steep", "cpu"])


class Grown:
    """The parts of a memory that the rule reads: a grown tree's nodes and a table of costs."""

    def __init__(self, probabilities, costs, slopes=None, rate=1.0):
        self.step, self.tree = np.zeros(1, STEP), self
        self.nodes, self.sizes = np.zeros(len(probabilities), NODE), np.zeros(1, SIZES)
        self.nodes["probability"], self.sizes["rows"] = probabilities, len(probabilities)
        self.step["rate"] = rate
        self.costs, self.slopes = costs, slopes
        # Access fields by name, as compiled code does.
        self.step, self.nodes, self.sizes = (
            part.view(np.recarray) for part in (self.step, self.nodes, self.sizes)
        )


def test_the_example_in_the_module_is_right():
    curve = CostCurve({0: {1: 1.0, 2: 1.02, 4: 1.05, 6: 1.12, 8: 1.2, 12: 1.45, 16: 1.7}})
    costs, slopes = curve.table(16, 0)
    expected = np.interp(range(1, 17), [1, 2, 4, 6, 8, 12, 16], [1, 1.6, 2.3, 2.68, 2.95, 3.29, 3.43])
    probabilities = [1.0, *np.diff(expected)]
    assert choose(Grown(probabilities, costs)) == 12
    assert choose(Grown(probabilities, costs, rate=2.0)) == 8
    assert slopes[8] == pytest.approx(0.0625)
    assert pays(Grown(probabilities, costs, slopes, rate=2.0), 8, 0.116)
    assert not pays(Grown(probabilities, costs, slopes, rate=2.0), 8, 0.114)


@CURVES
def test_the_choice_maximises_the_rule_and_growth_stops_no_earlier(curve):
    rng = random.Random(0)
    for _ in range(200):
        falling = sorted((rng.random() ** 2 for _ in range(40)), reverse=True)
        costs, slopes = curve.table(41, 100)
        rate = 1 + rng.random()
        grown = Grown([1.0, *falling], costs, slopes, rate)
        values = [1 + sum(falling[: k - 1]) + EXPLORATION * (k - 1) - rate * costs[k] for k in range(1, 42)]
        best = choose(grown)
        assert values[best - 1] == pytest.approx(max(values))
        assert all(pays(grown, k, falling[k - 1]) for k in range(1, best))


def test_the_rate_follows_recent_steps_and_starts_from_plain_decoding():
    rule = RowRule()
    assert rule.rate == 1.0
    for _ in range(500):
        rule.count(3, 1.5)
    assert rule.rate == pytest.approx(2.0, rel=0.05)
    for _ in range(500):
        rule.count(1, 1.5)
    assert rule.rate == 1.0


@pytest.mark.parametrize(("drafting", "longest"), [(0.0, 1), (0.04, 1), (0.18, 8), (50.0, 64)])
def test_pauses_grow_until_unused_trees_cost_little_and_end_with_a_draft(drafting, longest):
    rule, pauses = RowRule(), []
    rule.drafting = drafting
    for _ in range(8):
        rule.count_grown(1)
        pauses.append(rule.pause)
        while rule.pause:
            rule.rest()
    assert pauses == [min(2**number - 1, longest) for number in range(8)]
    rule.count_grown(4)
    rule.count_grown(1)
    assert rule.pause == 0
    rule.count_grown(1)
    assert rule.pause == 1


def test_one_row_also_costs_the_drafting_of_the_tree_that_it_leaves_unused():
    """If the 0.08 already spent were ignored, a second row at 0.12 would need a probability of 0.12."""
    curve = CostCurve({0: {1: 1.0, 2: 1.04, 64: 9.5}}, drafting=0.08)
    state = Adaptive(for_model=ForModel(curve)).start(Start([1, 2, 3], 4, vocabulary=64))
    state.draft(64)
    costs = state._memory.memory.costs
    assert choose(Grown([1.0, 0.1], costs)) == 2
    assert choose(Grown([1.0, 0.02], costs)) == 1
    # The sequence's rate includes it too.
    state.observe(TokenTree(4), FakeTarget(64).prefill([(0, [1, 2, 3, 4])])[0], [0], [5])
    assert state._rule._cost == pytest.approx(1.08 / 64)
    # Even if a curve prices drafting above the second row, two rows must not be cheaper than one.
    state._memory.use_costs(*curve.table(64, 0), drafting=0.5)
    assert state._memory.memory.costs[1] == state._memory.memory.costs[2]


class Kept(Adaptive):
    """Keeps its states and the rows of every step."""

    states: ClassVar = []

    def start(self, sequence):
        state = super().start(sequence)
        state.rows, observe = [], state.observe

        def noted(tree, *rest):
            state.rows.append(len(tree))
            observe(tree, *rest)

        state.observe = noted
        Kept.states.append(state)
        return state


def rows_of(target, curve, new=200, **settings):
    Kept.states.clear()
    (sequence,) = run(target, [Request([1, 2, 3], Kept(**settings, for_model=ForModel(curve)), new)])
    return Kept.states[0].rows, sequence


@CURVES
def test_texts_are_equal_and_cost_no_more_than_plain_decoding(curve):
    for text in (repetitive_text(40), None):
        target = FakeTarget(200) if text is None else FakeTarget(200, text)
        (plain,) = run(target, [Request([1, 2, 3], Plain(), 200)])
        rows, sequence = rows_of(target, curve)
        assert sequence.tokens == plain.tokens
        cost = sum(curve.pass_cost(k) for k in rows)
        assert cost <= 1.08 * len(plain.tokens)


def test_all_rows_where_they_are_free_and_one_where_certain_rows_would_lose():
    target = FakeTarget(40, repetitive_text(40))
    assert max(rows_of(target, FLAT)[0]) > 16
    rows, sequence = rows_of(target, STEEP)
    assert set(rows) == {1}
    assert "accepted_by_suffix" in sequence.stats.drafter


@pytest.mark.parametrize("rows", [1, 2, 4, 9])
def test_a_fixed_number_of_rows_is_used_whatever_it_costs(rows):
    target = FakeTarget(40, repetitive_text(40))
    found, sequence = rows_of(target, STEEP, rows=rows)
    assert max(found) == rows
    assert sequence.tokens == run(target, [Request([1, 2, 3], Plain(), 200)])[0].tokens


@contextmanager
def busy_process():
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_rows_are_the_same_next_to_a_busy_process():
    """The rule reads no clock: run one request twice, once alongside a busy process."""
    target = FakeTarget(40, repetitive_text(40, seed=5))
    quiet, _ = rows_of(target, CPU)
    with busy_process():
        slow = FakeTarget(40, repetitive_text(40, seed=5))
        forward = slow.forward
        slow.forward = lambda trees: (time.sleep(random.random() / 500), forward(trees))[1]
        assert rows_of(slow, CPU)[0] == quiet
    assert len(set(quiet)) > 1


@pytest.mark.parametrize(
    ("family", "path"),
    [("llama", "cpu"), ("llama", "transformers"), ("llama", "exact"), ("lfm2", "batch-rows")],
)
def test_rows_are_the_same_next_to_a_busy_process_on_every_path(family, path):
    target = make_target(tiny_model(family, initializer_range=0.1), path=path)
    assert target.path == path
    quiet, _ = rows_of(target, CPU)
    with busy_process():
        forward = target.forward
        target.forward = lambda trees: (time.sleep(random.random() / 500), forward(trees))[1]
        assert rows_of(target, CPU)[0] == quiet
    assert len(set(quiet)) > 1


def test_in_a_batch_the_curve_is_read_at_the_rows_of_all():
    target = FakeTarget(40, repetitive_text(40))
    alone, _ = rows_of(target, CPU)
    Kept.states.clear()
    run(target, [Request([1, 2, 3], Kept(for_model=ForModel(CPU)), 200) for _ in range(16)])
    together = [max(state.rows) for state in Kept.states]
    assert max(alone) > max(together)


# ---- which sizes are measured, and on what


@pytest.mark.parametrize(("family", "path"), [("llama", "exact"), ("mamba", "plain")])
def test_positions_are_not_the_depth_of_a_tree(family, path):
    """Exact mode limits the depth of a tree, and other targets allow no tree."""
    target = make_target(tiny_model(family, initializer_range=0.1, max_position_embeddings=1024), path=path)
    target.prefill([(0, [3] * 900)])
    assert target.depth_limit(0) < 100
    assert target.positions_left(0) == 1024 - 1 - 900


def test_the_cost_of_steps_in_exact_mode_is_measured():
    model = tiny_model("llama", initializer_range=0.1, max_position_embeddings=1024)
    target = make_target(model, path="exact")
    curve, _ = measure.measure(target, 0.1)
    assert 64 in curve.rows
    tested = SimpleNamespace(target=target, name="it", dtype="float32", max_positions=1024)
    records = step_cost.measure(tested, (64, 1020), (1, 4), lambda *given: None)
    assert [(record["context"], record["rows"]) for record in records] == [(64, 1), (64, 4)]


@pytest.mark.parametrize(
    ("offload", "layers", "device", "gpu"),
    [
        (True, None, "GPU", True),
        (True, -1, "GPU", True),
        (True, 30, "GPU", True),
        (True, 29, "GPU and CPU", False),
        (True, 0, "CPU", False),
        (False, None, "CPU", False),
    ],
)
def test_llama_cpp_on_a_gpu_has_the_curve_of_a_gpu(offload, layers, device, gpu):
    weights = object.__new__(Weights)
    weights.library = SimpleNamespace(llama_supports_gpu_offload=lambda: offload)
    weights.options, weights.layers = SimpleNamespace(n_gpu_layers=layers), 30
    assert weights.device == device
    model = FakeModel()  # its logits are on the CPU
    model.runs_on = weights.runs_on
    assert Preparation(model, True, FakeTarget).row_budget(1) == (256 if gpu else 64)
