"""The cost curve: measured, saved where the drafter finds it, then only read."""

import json
import os
import re
from functools import partial
from math import inf
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from typer.testing import CliRunner

import lookahead
from lookahead.cli import app
from lookahead.core import OutOfMemory, SettingsError
from lookahead.drafters import Adaptive
from lookahead.drafters.adaptive import cost, measure, model_curves
from lookahead.drafters.adaptive.cost import CostCurve, curve_file, load_curve, machine, save_curve
from lookahead.drafters.adaptive.measure import Measurement
from lookahead.drafters.adaptive.model_curves import cost_path, curve_key, curve_of
from lookahead.drafters.adaptive.state import AdaptiveState
from lookahead.drafters.prepare import Preparation
from lookahead.hf.cuda_graphs import division
from lookahead.hf.model import config_key
from lookahead.llamacpp.model import LlamaCppModel
from lookahead.model import Shape
from lookahead.options import MachineOptions, Options
from lookahead.testing import FakeModel, FakeTarget

pytestmark = pytest.mark.usefixtures("measured_curves")

CURVE = CostCurve({64: {1: 1.0, 4: 1.2, 8: 1.6}, 512: {1: 1.0, 4: 1.4}}, {4: 1.3, 16: 3.0}, 0.04, 0.003)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder that does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def toy(cache, toy_plain):
    return str(toy_plain)


@pytest.fixture(scope="module")
def loaded(toy_plain):
    return lookahead.load(toy_plain, drafter="adaptive")


@pytest.fixture
def llm(loaded, cache):
    """A model whose cost curve is unknown."""
    model_curves.forget_curves(loaded.model)
    yield loaded
    model_curves.forget_curves(loaded.model)


def call(*arguments):
    return CliRunner().invoke(app, ["tune", *arguments])


def curve_for(llm, notices=None):
    said = notices.append if notices is not None else pytest.fail
    return curve_of(llm.model, llm.target(), llm.target, said)


def test_costs_are_linear_between_points_and_go_on_with_the_last_slope():
    assert [CURVE.cost(k, 64) for k in (1, 2, 4, 6, 8, 16)] == pytest.approx(
        [1, 1.2 / 3 + 2 / 3, 1.2, 1.4, 1.6, 2.4]
    )
    assert CURVE.cost(4, 288) == pytest.approx(1.3)
    assert CURVE.cost(4, 100_000) == pytest.approx(1.4)
    costs, slopes = CURVE.table(8, 64)
    assert (costs[1], costs[8]) == pytest.approx((1.0, 1.6), rel=0.1)
    assert all(np.diff(costs) >= 0)
    assert slopes[4] == pytest.approx(min((costs[k] - costs[4]) / (k - 4) for k in range(5, 9)))


def test_the_example_in_the_module_is_right():
    costs, _ = CURVE.table(2, 64, 4)
    # The table covers the first 256 tokens, so it is read at context 0, as for the shortest context.
    assert costs[1] == 1.0
    assert costs[2] == pytest.approx((1.3 + 1.6 - 1.2 + 4 * 0.04) / 1.3)


def test_more_rows_are_never_cheaper_and_batches_without_points_are_read_by_their_rows():
    noisy = CostCurve({0: {1: 1.0, 2: 0.97, 4: 1.1}})
    costs, slopes = noisy.table(4, 0)
    assert costs.tolist() == pytest.approx([1.0, 1.0, 1.0, 1.035, 1.1])
    assert all(slopes >= 0)
    plain = CostCurve({0: {1: 1.0, 2: 1.1, 4: 1.5}})
    assert plain.table(2, 0, 2)[0][2] == pytest.approx(1.5 / 1.1)


@pytest.mark.parametrize("rows", [{}, {0: {}}, {0: {1: 0.0}}, {0: {1: "1"}}, {0: {1: float("nan")}}])
def test_points_that_are_no_costs_are_refused(rows):
    with pytest.raises(SettingsError, match="every cost must be a positive number"):
        CostCurve(rows)


def test_a_curve_is_kept_by_machine_and_model(cache, monkeypatch):
    save_curve("a", CURVE)
    assert load_curve("a") == CURVE
    assert load_curve("b") is None
    monkeypatch.setattr(cost, "get_host_cpu_name", lambda: "another processor")
    assert load_curve("a") is None


def test_a_curve_of_another_processor_under_the_same_name_is_not_read(cache):
    path = save_curve("a", CURVE)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"machine": "another processor"}))
    with pytest.raises(SettingsError, match="a cost curve of this machine, but contains one of another"):
        load_curve("a")


@pytest.mark.parametrize(
    ("name", "other"), [("format", cost.FORMAT - 1), ("machine", "another processor"), ("model", "b")]
)
def test_a_curve_of_something_else_is_measured_again_with_a_notice(llm, monkeypatch, name, other):
    monkeypatch.setattr(measure, "STEADY", float("inf"))  # this machine may be busy
    key = curve_key(llm.model, llm.target())
    path = save_curve(key, CURVE)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: other}))
    notices = []
    curve = curve_for(llm, notices)
    (notice,) = notices
    assert notice == (
        f"{path} must contain a cost curve of this {name}, but contains one of another; measuring it again"
    )
    assert load_curve(key) == curve != CURVE


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1', '{"rows": {"64": {"1": -1}}}'])
def test_a_damaged_curve_is_measured_again_with_a_notice(llm, text):
    path = curve_file(curve_key(llm.model, llm.target()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    notices = []
    curve = curve_for(llm, notices)
    assert len(notices) == 1
    assert "must contain a cost curve" in notices[0]
    assert curve.cost(1) == 1.0


def test_tuned_costs_are_found_again_and_do_not_change(toy, llm, monkeypatch):
    monkeypatch.setattr(measure, "STEADY", float("inf"))  # this machine may be busy
    result = call(
        toy, "--json", "--rows", "1,4,8", "--contexts", "8,100000", "--batches", "4", "--repeats", "1"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    points = {(p["batch"], p["context"], p["rows"]) for p in report["points"]}
    assert points == {(1, 8, 1), (1, 8, 4), (1, 8, 8), (4, 8, 1)}
    kept = load_curve(curve_key(llm.model, llm.target()))
    assert kept is not None
    assert (set(kept.rows), set(kept.sequences)) == ({8}, {4})
    plain = llm.generate([5, 6, 7] * 4, max_new_tokens=30, drafter="off")
    assert llm.generate([5, 6, 7] * 4, max_new_tokens=30).tokens == plain.tokens
    assert curve_for(llm) == kept


def test_tuned_costs_replace_those_in_use(llm, monkeypatch):
    monkeypatch.setattr(measure, "STEADY", float("inf"))  # this machine may be busy
    before = curve_for(llm)
    llm.tune((1, 4), (8,), (), 1, lambda *point: None)
    assert set(before.rows) == {64}
    assert set(curve_for(llm).rows) == {8}


class Ranks(FakeTarget):
    """A target evaluated by two ranks."""

    ranks = 2


class WithTriton(FakeTarget):
    attention = SimpleNamespace(backend="triton")


@pytest.mark.parametrize("other", [Ranks, WithTriton])
def test_targets_whose_steps_differ_in_cost_have_separate_curves(llm, monkeypatch, other):
    """Also if they evaluate the same model on the same path."""
    measured = []

    def measure_steps(target, device):
        measured.append(target)
        result = Measurement()
        result.seconds = {(1, 64, 1): 1.0, (1, 64, 4): 1.5 + 0.1 * len(measured)}
        return result

    monkeypatch.setattr(measure, "measure", measure_steps)
    targets = FakeTarget(), other()
    for load_again in (False, True):
        curves = []
        for target in targets:
            prepared = Adaptive().prepare(llm.model, target, lambda target=target: target)
            curves.append(prepared.for_model.cost_curve.cost(4))
        assert curves == pytest.approx([1 + 1.25 * 0.6, 1 + 1.25 * 0.7])
        if not load_again:
            model_curves.forget_curves(llm.model)  # as in another process
    assert measured == list(targets)


def of_llama_cpp(runs_on="cpu", **options):
    """A model of llama.cpp's engine without llama.cpp."""
    model = object.__new__(LlamaCppModel)
    model.loaded = SimpleNamespace(options=MachineOptions(engine="llama.cpp", **options))
    model.shape, model.weights, model.runs_on = Shape("llama", 96, 64, 2), "Q4_0", runs_on
    return model


def test_a_key_names_what_determines_the_cost():
    def config(**fields):
        made = transformers.LlamaConfig(hidden_size=64)
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    def loaded(**options):
        return SimpleNamespace(options=MachineOptions(engine="llama.cpp", **options))

    awq = [config(quantization_config={"quant_method": "awq", "bits": bits}) for bits in (4, 8)]
    loading = [
        config(quantization_config=transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True}))
        for bits in (4, 8)
    ]
    options = [
        {},
        {"flash_attn": "off"},
        {"cache_type_k": "q8_0"},
        {"cache_type_v": "q8_0"},
        {"threads": 1},
        {"n_gpu_layers": 0},
    ]
    keys = [config_key(each) for each in (config(), config(max_position_embeddings=9), *awq, *loading)]
    keys += [of_llama_cpp(**each).key for each in options]
    assert len(set(keys)) == len(keys)
    assert "quantization_config" not in config_key(config())
    assert cost_path(FakeTarget()) == FakeTarget.path


def test_code_for_another_processor_has_a_curve_of_its_own(monkeypatch):
    """With AVX2 instead of AVX-512, four rows of packed weights cost twice as much as one."""
    compiled = type("Compiled", (FakeTarget,), {"runs_compiled": True})()
    monkeypatch.delenv("NUMBA_CPU_NAME", raising=False)
    own = cost_path(compiled)
    monkeypatch.setenv("NUMBA_CPU_NAME", "haswell")
    assert cost_path(compiled) == f"{own}, compiled for haswell"
    assert cost_path(FakeTarget()) == FakeTarget.path


def test_a_machine_has_all_of_its_gpus(monkeypatch):
    """A model may be on any of them."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ("small", "large")[index])
    assert machine().endswith("threads, small, large")


def test_without_tuning_the_engine_measures_once(llm, monkeypatch):
    calls = []
    original = measure.measure
    monkeypatch.setattr(measure, "measure", lambda target, device: calls.append(1) or original(target))
    monkeypatch.setattr(measure, "STEADY", float("inf"))  # this machine may be busy
    for _ in range(2):
        llm.generate([5, 6, 7], max_new_tokens=5)
    llm.generate([5, 6, 7], max_new_tokens=5, drafter=lookahead.Adaptive(state=AdaptiveState()))
    assert len(calls) == 1
    assert load_curve(curve_key(llm.model, llm.target())) is not None
    model_curves.forget_curves(llm.model)  # as in another process
    llm.generate([5, 6, 7], max_new_tokens=5)
    assert len(calls) == 1


def test_threads_measure_one_after_the_other(llm, monkeypatch):
    """Two that measure at once would disturb each other."""
    running, most = [], []

    def slow(target, device):
        running.append(1)
        most.append(len(running))
        try:
            return original(target)
        finally:
            running.pop()

    original = measure.measure
    monkeypatch.setattr(measure, "measure", slow)
    threads = [Thread(target=llm.generate, args=([5, 6, 7],), kwargs={"max_new_tokens": 5}) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_a_curve_that_other_work_disturbed_is_neither_used_nor_kept(llm, monkeypatch):
    monkeypatch.setattr(measure, "STEADY", 1.0)
    assert curve_for(llm) == CostCurve.typical()
    assert load_curve(curve_key(llm.model, llm.target())) is None


@pytest.mark.parametrize(("compiled", "expected"), [(True, (1.6, 2.4)), (False, (4.75, 9.75))])
def test_a_disturbed_measurement_counts_where_rows_cost_more_than_usual(
    compiled, expected, monkeypatch, cache
):
    """On llama.cpp's engine each row may cost a whole step: the compiled path's typical curve would draft there."""
    target = ClockedTarget(CostCurve({0: {1: 1.0, 2: 2.0}}))
    monkeypatch.setattr(target, "runs_compiled", compiled)
    monkeypatch.setattr(measure, "perf_counter", lambda: target.now)
    monkeypatch.setattr(measure, "STEADY", 0.0)
    curve = model_curves._load_or_measure(target, "a", pytest.fail, "cpu")
    assert (curve.cost(4), curve.cost(8)) == pytest.approx(expected)
    assert load_curve("a") is None


def test_noise_makes_no_row_cheaper_than_usual():
    """Between 4 and 8 rows the cost fell, by noise; beyond 8, rows must not be free."""
    curve = CostCurve({64: {1: 1.0, 4: 3.0, 8: 2.9}}).at_least(CostCurve.typical())
    assert curve.cost(4) == 3
    assert curve.cost(64) == CostCurve.typical().cost(64)
    assert curve.drafting == CostCurve.typical().drafting


def test_rows_are_assumed_nearly_free_on_a_gpu():
    assert CostCurve.typical(on_gpu=True).cost(64) == pytest.approx(1.2)
    assert CostCurve.typical().cost(64) > 4


@pytest.mark.parametrize(("device", "cost"), [("cuda", 1.2), ("gpu", 1.2), ("cpu", 2.26)])
def test_a_model_that_cannot_be_measured_has_the_guess_for_its_device(cache, device, cost):
    target = FakeTarget(500, max_positions=64)  # too short for a measurement
    curve = model_curves._load_or_measure(target, "a", pytest.fail, device)
    assert curve.cost(64) == pytest.approx(cost)


def test_the_curve_is_the_mean_of_three_measurements_ten_minutes_apart(cache, monkeypatch):
    costs = iter([1.1, 1.5, None, 1.9])  # of four rows; None is a disturbed measurement

    def measured(target, device):
        """Without a correction for long runs."""
        result, four = Measurement(), next(costs)
        result.sustained = 1.0
        result.add((1, 64, 1), [0.001] * 4)
        result.add((1, 64, 4), [0.001, 0.002, 0.003, 0.004] if four is None else [0.001 * four] * 4)
        return result

    monkeypatch.setattr(measure, "measure", measured)
    load = partial(model_curves._load_or_measure, FakeTarget(512), "a", pytest.fail, "cpu")
    for expected, count in ((1.1, 1), (1.3, 2)):
        curve = load()
        assert curve.cost(4, 64) == pytest.approx(expected)
        assert curve.measured == count
        assert load() == curve == load_curve("a")  # it is too early for another measurement
        os.utime(curve_file("a"), (0, 0))
    for _ in range(2):
        assert load() == curve  # a disturbed measurement does not count, and the next one is not sooner
    os.utime(curve_file("a"), (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(cost.os, "access", lambda path, mode: False)
        assert load() == curve  # a folder that cannot be written, as in a container's image
    assert load().cost(4, 64) == pytest.approx(1.5)
    os.utime(curve_file("a"), (0, 0))
    assert load().measured == 3
    assert list(costs) == []


def test_a_mean_has_the_points_of_both_curves():
    one = CostCurve({64: {1: 1.0, 4: 1.2, 8: 1.6}}, {4: 1.3}, 0.04, 0.003, {"a head": 0.1}, measured=2)
    other = CostCurve({64: {1: 1.0, 6: 2.0}, 512: {1: 1.0, 4: 1.5}}, {4: 1.6, 16: 3.0}, 0.01, 0.006)
    mean = one.averaged(other)
    assert {context: list(points) for context, points in mean.rows.items()} == {64: [1, 4, 6, 8], 512: [1, 4]}
    assert [mean.rows[64][k] for k in (1, 4, 6, 8)] == pytest.approx([1.0, 1.2 + 0.4 / 3, 1.6, 1.6 + 0.8 / 3])
    assert mean.rows[512][4] == pytest.approx(1.3)  # the first curve's only context holds for all
    assert mean.sequences == pytest.approx({4: 1.4, 16: 3.0})
    assert (mean.drafting, mean.seconds) == pytest.approx((0.03, 0.004))
    assert (mean.heads, mean.measured) == ({"a head": 0.1}, 3)


def test_sizes_without_memory_are_left_out(cache):
    class Small(FakeTarget):
        def prefill(self, prompts):
            if len(prompts) > 16:
                self.committed.update((slot, []) for slot, _ in prompts)  # as real targets do
                raise OutOfMemory("no room for so many sequences")
            return super().prefill(prompts)

    target = Small(512, max_rows=12)
    curve = measure.measure(target, patience=inf).curve()
    assert {number for points in curve.rows.values() for number in points} == {1, 2, 3, 4, 6, 8, 12}
    assert set(curve.sequences) == {4, 16}
    assert target.committed == {}
    for rows in (0, 1):
        none = model_curves._load_or_measure(Small(512, max_rows=rows), f"b{rows}", pytest.fail, "cpu")
        assert none.cost(64) == CostCurve.unmeasured(False).cost(64)
        assert load_curve(f"b{rows}") is None


class ClockedTarget(FakeTarget):
    """A target whose steps advance the test's clock by c(k)."""

    def __init__(self, curve):
        super().__init__(512)
        self.curve, self.now = curve, 0.0

    def forward(self, trees):
        self.now += self.curve.cost(self.padded(sum(len(tree) for _, tree in trees)))
        return super().forward(trees)

    def padded(self, rows):
        return rows


class CapturedTarget(ClockedTarget):
    """The same for captured steps, as on a GPU."""

    path = "cuda-graph"
    captures = True

    def padded(self, rows):
        return next(size for size in (1, 4, 8, 16, 32, 64, 128, 256) if size >= rows)


def use_clock(monkeypatch, target, drafting=0.0, of_a_row=0.0):
    """Let time pass only in the target's steps and in the drafter, which takes ``of_a_row`` more for each row."""

    class Clocked(measure.AdaptiveDraftState):
        def draft(self, limit):
            target.now += drafting
            return super().draft(limit)

        def pad(self, tree, rows):
            super().pad(tree, rows)
            target.now += of_a_row * len(tree)

    monkeypatch.setattr(measure, "perf_counter", lambda: target.now)
    monkeypatch.setattr(measure, "AdaptiveDraftState", Clocked)


def test_a_curve_of_llama_cpp_is_for_the_device_it_runs_on():
    assert of_llama_cpp("cpu").key != of_llama_cpp("gpu").key


def test_several_passes_of_exact_mode_on_a_gpu_are_in_the_curve(monkeypatch):
    """It evaluates 64 rows per pass, so 256 rows cost four."""
    target = ClockedTarget(CostCurve({0: {1: 1.0, 64: 1.0, 128: 2.0, 192: 3.0, 256: 4.0}}))
    use_clock(monkeypatch, target)
    assert measure.measure(target, patience=inf, device="cuda").curve().cost(256) > 2.9


def test_a_gpu_reads_its_own_curve_from_the_largest_number_of_rows_on(monkeypatch):
    """Where rows are free, a slope between few rows is noise, so 64 rows are measured even in a hurry."""
    target = CapturedTarget(CostCurve({0: {1: 1.0, 64: 1.2, 128: 1.9}}))
    use_clock(monkeypatch, target, drafting=0.03)
    hurried = measure.measure(target, patience=0.0)
    assert set(hurried.seconds) == {(1, 64, 1), (1, 64, 64), (1, 64, 8)}
    assert hurried.curve().drafting == pytest.approx(0.03)
    curve = measure.measure(target, patience=1e6).curve()
    assert curve.cost(64) == pytest.approx(1.23, abs=0.01)
    assert curve.cost(128) == pytest.approx(1.93, abs=0.01)
    assert curve.drafting == pytest.approx(0.03)


@pytest.mark.parametrize(("target_class", "fewest"), [(ClockedTarget, 2), (CapturedTarget, 4)])
def test_the_cost_of_drafting_is_that_of_the_fewest_rows(monkeypatch, target_class, fewest):
    target = target_class(CostCurve({0: {1: 1.0, 64: 1.2}}))
    use_clock(monkeypatch, target, drafting=0.03, of_a_row=0.01)
    curve = measure.measure(target, patience=1e6).curve()
    assert curve.drafting == pytest.approx(0.03 + 0.01 * fewest)


@pytest.mark.parametrize(("device", "sustained"), [("cpu", 1.25), ("cuda", 1.0)])
def test_rows_cost_more_in_long_runs_on_a_cpu_only(monkeypatch, device, sustained):
    target = ClockedTarget(CostCurve({0: {1: 1.0, 4: 1.2}}))
    use_clock(monkeypatch, target)
    assert measure.measure(target, rows=(4,), device=device).curve().cost(4) == pytest.approx(
        1 + 0.2 * sustained
    )


def test_a_target_without_drafts_is_measured_one_row_at_a_time():
    class Plain(FakeTarget):
        def depth_limit(self, slot):
            return 0

    measured = measure.measure(Plain(), rows=(1,), contexts=(8,), sequences=())
    assert set(measured.seconds) == {(1, 8, 1)}


@pytest.mark.parametrize(
    ("points", "budgets"),
    [
        ({1: 1.0, 64: 1.2}, {1: 256, 2: 256, 64: 256}),  # a GPU: 128 rows cost far less than two plain passes
        ({1: 1.0, 64: 1.5, 128: 2.5}, {1: 96, 4: 96}),
        ({1: 1.0, 8: 1.7, 16: 2.8}, {1: 10}),  # a CPU
    ],
)
def test_a_pass_may_have_as_many_rows_as_two_plain_passes_cost(points, budgets):
    curve = CostCurve({0: points})
    for sequences, rows in budgets.items():
        assert curve.budget(sequences) == rows


@pytest.mark.parametrize("sequences", range(1, 17))
def test_a_full_row_budget_fits_in_one_captured_pass(sequences):
    """Two passes would read the weights twice."""
    curve = CostCurve({0: {1: 1.0, 64: 1.0}})
    rows = curve.budget(sequences, captured=True) // sequences
    assert len(division([rows] * sequences)) == 1
    assert len(division([rows + 1] * sequences)) > 1 or rows == cost.MOST_ROWS
    assert curve.budget(sequences) == sequences * (cost.MOST_ROWS // sequences)


@pytest.mark.parametrize(("captures", "budget"), [(True, 5 * 32), (False, 5 * 51)])
def test_the_row_budget_depends_on_whether_passes_are_captured(llm, monkeypatch, captures, budget):
    curve = CostCurve({0: {1: 1.0, 64: 1.0}})
    monkeypatch.setattr(model_curves, "_load_or_measure", lambda *given: curve)
    prepare = Preparation(llm.model, True, llm.target, limits_rows=True)
    target = FakeTarget()
    target.captures = captures
    prepare(Adaptive(), target)
    assert prepare.row_budget(5) == budget


@pytest.mark.parametrize(
    ("on_gpu", "curve", "drafter", "budget"),
    [
        (True, None, "adaptive", 256),  # the default
        (False, None, "adaptive", 64),
        (False, CostCurve({0: {1: 1.0, 64: 1.1, 128: 2.0}}), "adaptive", 128),
        (False, CostCurve({0: {1: 1.0, 64: 1.1, 128: 2.0}}), "15,5,15", 128),
        (False, CostCurve({0: {1: 1.0, 64: 1.1, 128: 2.0}}), "5,3,5", 64),  # not measured for few rows
        (True, CostCurve({0: {1: 1.0, 8: 3.0}}), "15,5,15", 64),  # a GPU on which rows are expensive
    ],
)
def test_a_server_takes_its_row_budget_from_the_curve(llm, monkeypatch, on_gpu, curve, drafter, budget):
    llm = lookahead.LLM(llm.model, drafter=drafter)
    monkeypatch.setattr(type(llm.model), "runs_on", "cuda" if on_gpu else "cpu")
    if curve is not None:
        monkeypatch.setattr(model_curves, "_load_or_measure", lambda *given: curve)
    engine = llm.engine(row_budget=None)
    if curve is not None:
        engine.add(llm.prepare([5, 6, 7], Options(max_new_tokens=2)))
        engine.step()
    assert engine.row_budget(1) == budget
    assert llm.engine(row_budget=7).row_budget == 7


def test_of_repeated_steps_the_faster_half_counts():
    measured = Measurement()
    measured.add((1, 64, 1), [1.0, 1.02, 9.0, 9.0])
    measured.add(
        (1, 64, 4), [2.04, 2.0, 50.0, 50.0], [2.0, 2.04, 30.0, 30.0]
    )  # the machine was twice as slow
    assert measured.steady
    assert measured.curve().cost(4) == pytest.approx(1.0)
    measured.add((1, 64, 4), [1.2, 1.2], [1.0, 1.0])
    assert measured.curve().cost(4) == pytest.approx(1 + measure.SUSTAINED * 0.2)
    measured.add((1, 64, 8), [2.0, 3.0, 4.0, 5.0], [1.0, 1.0, 1.0, 1.0])
    assert measured.unsteady == {(1, 64, 8)}
    measured.add((1, 64, 8), [2.0, 2.0], [1.0, 1.0])  # measured again
    assert measured.steady
    measured.add((1, 64, 1), [2.0, 2.0])  # the base of all costs
    assert measured.curve().cost(4) == pytest.approx(1 + measure.SUSTAINED * 0.2)


def test_a_disturbed_size_is_timed_again(monkeypatch):
    """Other work disturbs the first steps of 8 rows, and then all of them."""
    target = ClockedTarget(CostCurve({0: {1: 1.0, 8: 2.0}}))
    forward, disturbed = target.forward, {8: 8}

    def slow_at_first(trees):
        rows = len(trees[0][1])
        if disturbed.get(rows):
            disturbed[rows] -= 1
            target.now += 10.0 * (disturbed[rows] % 5)
        return forward(trees)

    monkeypatch.setattr(target, "forward", slow_at_first)
    monkeypatch.setattr(measure, "perf_counter", lambda: target.now)
    options = {"rows": (4, 8), "contexts": (64,), "sequences": (4,), "patience": inf}
    measured = measure.measure(target, **options)
    assert measured.steady
    assert measured.seconds[1, 64, 8] == pytest.approx(2.0)
    assert measured.seconds[1, 64, 4] == pytest.approx(1 + 3 / 7)
    disturbed[8] = 100
    assert measure.measure(target, **options).unsteady == {(1, 64, 8)}


def test_a_size_that_no_longer_fits_when_it_is_timed_again_loses_no_other(monkeypatch):
    target = ClockedTarget(CostCurve({0: {1: 1.0, 8: 2.0}}))
    prefill, prompts = target.prefill, []

    def full(prompts_by_slot):
        prompts.extend(tokens for _, tokens in prompts_by_slot if len(tokens) == 64)
        scores = prefill(prompts_by_slot)
        if len(prompts) > 1:
            raise OutOfMemory("no memory for a prompt")
        return scores

    monkeypatch.setattr(target, "prefill", full)
    monkeypatch.setattr(measure, "perf_counter", lambda: target.now)
    monkeypatch.setattr(measure, "STEADY", 0.0)  # every size is timed again
    measured = measure.measure(target, rows=(4, 8), contexts=(64,), sequences=(), patience=inf)
    assert len(prompts) == 2
    assert set(measured.seconds) == measured.unsteady == {(1, 64, 1), (1, 64, 4), (1, 64, 8)}


def test_measured_steps_have_the_rows_that_were_asked_for():
    seen = []

    class Watched(FakeTarget):
        def forward(self, trees):
            seen.append([len(tree) for _, tree in trees])
            return super().forward(trees)

    target = Watched(500)
    measured = measure.measure(target, rows=(2, 4, 16), contexts=(8,), sequences=(4,), patience=60.0)
    assert set(measured.seconds) == {(1, 8, 1), (1, 8, 2), (1, 8, 4), (1, 8, 16), (4, 8, 1)}
    for rows in (2, 4, 16):
        assert seen.count([rows]) >= measure.ROUNDS
    assert not target.committed


def test_a_slow_model_is_not_held_up(monkeypatch):
    """When time is up, only two row counts beyond a single row have been measured."""
    measured = measure.measure(FakeTarget(500), patience=0.0)
    assert set(measured.seconds) == {(1, 64, 1), (1, 64, 4), (1, 64, 8)}


def test_where_nothing_can_be_kept_the_curve_lives_in_memory(llm, cache, monkeypatch, capsys):
    """The reason is printed once."""
    monkeypatch.setattr(measure, "STEADY", float("inf"))  # this machine may be busy
    cache.write_text("a file where the folder should be")
    for _ in range(2):
        assert llm.generate([5, 6, 7], max_new_tokens=5).tokens
    key = curve_key(llm.model, llm.target())
    assert load_curve(key) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"lookahead: {curve_file(key)} must be a writable file with free disk space \(.+\); the cost curve is not "
        "saved and is kept in memory for this process",
        line,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "2,4"), "must contain 1"),
        (("--rows", "1"), "must contain a number above 1"),
        (("--rows", "1,x"), "whole numbers"),
        (("--rows", "1,4,1024"), "rows must be"),
        (("--repeats", "0"), "at least 1"),
        (("--contexts", "99999999"), "a context must be shorter than"),
    ],
)
def test_wrong_options_are_one_line(toy, arguments, message):
    result = call(toy, *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_tuning_while_other_work_runs_is_not_kept(toy, llm, monkeypatch):
    monkeypatch.setattr(measure, "STEADY", 1.0)
    result = call(toy, "--rows", "1,4", "--contexts", "8", "--batches", "4", "--repeats", "4")
    assert result.exit_code == 1
    assert "not saved" in result.output
    assert load_curve(curve_key(llm.model, llm.target())) is None


def test_tuning_keeps_the_costs_of_light_heads_and_replaces_a_damaged_curve(toy, llm, monkeypatch):
    monkeypatch.setattr(measure, "STEADY", inf)  # this machine may be busy
    key = curve_key(llm.model, llm.target())
    words = ("--rows", "1,4", "--contexts", "8", "--batches", "4", "--repeats", "4")
    file = save_curve(key, CostCurve({8: {1: 1.0, 2: 9.0}}, heads={"a shape": 0.5}))
    assert call(toy, *words).exit_code == 0
    saved = load_curve(key)
    assert saved.heads == {"a shape": 0.5}
    assert 2 not in saved.rows[8]
    file.write_text("{")
    assert call(toy, *words).exit_code == 0
    assert load_curve(key).heads == {}


@pytest.mark.parametrize(("rows", "saved"), [((1, 64), False), ((1, 4), True)])
def test_a_curve_needs_steps_of_several_rows(cache, monkeypatch, rows, saved):
    """Without one, more rows would seem to be free."""
    monkeypatch.setattr(measure, "STEADY", inf)
    llm = SimpleNamespace(model=FakeModel(), target=lambda: FakeTarget(512, max_rows=12))
    tune = partial(lookahead.LLM.tune, llm, rows, (8,), (), 1, lambda *point: None)
    if saved:
        assert tune().exists()
        return
    with pytest.raises(
        SettingsError, match=r"number above 1 whose steps fit in memory .* got 1, 64; give other"
    ):
        tune()
    assert not cache.exists()


def test_a_full_disk_leaves_no_temporary_file(cache, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cost.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        save_curve("a", CURVE)
    assert list(curve_file("a").parent.iterdir()) == []


def test_a_curve_that_cannot_be_kept_is_one_line(toy, cache, monkeypatch):
    monkeypatch.setattr(measure, "STEADY", float("inf"))
    cache.write_text("a file where the folder should be")
    result = call(toy, "--rows", "1,4", "--contexts", "8", "--batches", "4", "--repeats", "1")
    assert result.exit_code == 2
    assert "not writable" in result.output
    assert "Traceback" not in result.output
