"""The cost curve: measured, saved where the drafter finds it, then only read."""

import json
import os
import re
import time
from contextlib import closing
from dataclasses import replace
from math import inf, isinf
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from typer.testing import CliRunner

import lookahead
from lookahead.cli import app
from lookahead.core import Request, SettingsError
from lookahead.drafters import Adaptive
from lookahead.drafters.adaptive import base_files, cost, measure, model_curves
from lookahead.drafters.adaptive.cost import CostCurve, fitted
from lookahead.drafters.adaptive.model_curves import (
    cost_path,
    curve_at_hand,
    curve_file,
    curve_key,
    load_curve,
    machine,
    measure_wanted,
    measured,
    save_curve,
)
from lookahead.drafters.adaptive.state import AdaptiveState
from lookahead.drafters.prepare import Preparation
from lookahead.hf.cuda_graphs import division
from lookahead.hf.model import config_key
from lookahead.llamacpp.model import LlamaCppModel
from lookahead.model import Shape
from lookahead.options import MachineOptions, Options
from lookahead.testing import FakeTarget

pytestmark = pytest.mark.usefixtures("measured_curves")

CURVE = CostCurve({64: {1: 1.0, 4: 1.2, 8: 1.6}, 512: {1: 1.0, 4: 1.4}}, 0.04)


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    """Keep what is measured, although this machine may be busy, and measure for a short time."""
    checked = measure.is_steady
    monkeypatch.setattr(measure, "STEADY", inf)
    # A pass that other work interrupts for long is not timed twice before the toy's positions end.
    monkeypatch.setattr(measure, "is_steady", lambda some: isinf(measure.STEADY) or checked(some))
    monkeypatch.setattr(measure, "LEAST_COST", 0.0)
    monkeypatch.setattr(measure.measure, "__defaults__", (0.05,))
    monkeypatch.setattr(model_curves, "TUNING", 0.1)


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


def forget(llm):
    """Let curves be read from disk again, as in another process."""
    for name in ("curves", "outdated curve", "disturbed curve"):
        llm.model.state.pop(name, None)


@pytest.fixture
def llm(loaded, cache):
    """A model whose cost curve is unknown."""
    forget(loaded)
    yield loaded
    forget(loaded)


def call(*arguments):
    return CliRunner().invoke(app, ["tune", *arguments])


def curve_for(llm, notices=None):
    said = notices.append if notices is not None else pytest.fail
    curve_at_hand(llm.model, llm.target(), said)
    measure_wanted(llm.model, llm.target, said)
    return curve_at_hand(llm.model, llm.target(), said)


def saved_for(llm):
    return load_curve(curve_key(llm.model, llm.target()), pytest.fail)


# ---- the curve


def test_costs_are_linear_between_points_and_go_on_with_the_last_slope():
    assert [CURVE.pass_cost(k, 64) for k in (1, 2, 4, 6, 8, 16)] == pytest.approx(
        [1, 1.2 / 3 + 2 / 3, 1.2, 1.4, 1.6, 2.4]
    )
    assert CURVE.pass_cost(4, 288) == pytest.approx(1.3)
    assert CURVE.pass_cost(4, 100_000) == CURVE.pass_cost(4, 512) == pytest.approx(1.4)
    costs, slopes = CURVE.table(8, 64)
    assert costs[1:].tolist() == pytest.approx([1.0] + [CURVE.pass_cost(k, 0) + 0.04 for k in range(2, 9)])
    assert slopes[4] == pytest.approx(min((costs[k] - costs[4]) / (k - 4) for k in range(5, 9)))


def test_the_example_in_the_module_is_right():
    curve = CostCurve({64: {1: 1.0, 2: 1.2, 4: 1.4, 8: 2.1}}, 0.04)
    assert curve.table(8, 64)[0][8] == pytest.approx(2.1 + 0.04)
    costs, _ = curve.table(2, 64, 4)
    assert costs.tolist() == pytest.approx([1.0, 1.0, (2.1 + 4 * 0.04) / 1.4])
    assert curve.drafting_of(4, 64) == pytest.approx(4 * 0.04 / 1.4)


def test_more_rows_are_never_cheaper():
    costs, slopes = CostCurve({0: {1: 1.0, 2: 0.97, 4: 1.1}}).table(4, 0)
    assert costs.tolist() == pytest.approx([1.0, 1.0, 1.0, 1.05, 1.1])
    assert all(slopes >= 0)


def test_the_fit_goes_below_disturbed_points():
    """The example of its docstring, and points that no number of rows should have."""
    assert fitted({1: 5.0, 2: 5.5, 4: 6.4, 8: 6.9, 16: 8.9}) == pytest.approx(
        {1: 1.0, 2: 1.1, 4: 1.1933, 8: 1.38, 16: 1.78}, rel=1e-3
    )
    assert fitted({1: 5.0, 2: 4.0}) == {1: 1.0, 2: 1.0}
    assert fitted({1: 1.0, 2: 1.5, 4: 1.2, 8: 1.4}) == pytest.approx({1: 1.0, 2: 1.2, 4: 1.2, 8: 1.4})
    # A curve that is convex from two rows on stays as it is, however large the step from one row is.
    convex = {1: 1.0, 2: 1.3, 4: 1.4, 8: 1.7, 64: 9.0}
    assert fitted(convex) == pytest.approx(convex)


@pytest.mark.parametrize("seed", range(20))
def test_a_fit_is_the_greatest_convex_curve_below_the_points(seed):
    rng = np.random.default_rng(seed)
    sizes = [1, *sorted(rng.choice(np.arange(2, 130), 6, replace=False).tolist())]
    seconds = {size: float(time) for size, time in zip(sizes, 1 + rng.random(7) * 3, strict=True)} | {1: 1.0}
    curve = fitted(seconds)
    costs = np.array([curve[size] for size in sizes[1:]])
    slopes = np.diff(costs) / np.diff(sizes[1:])
    assert all(slopes >= 0)
    assert all(np.diff(slopes) >= -1e-12)
    assert all(costs <= np.array([seconds[size] for size in sizes[1:]]) + 1e-12)
    # It touches a point wherever its slope changes, or a later, lower one where it is flat.
    for index in np.flatnonzero(np.diff(slopes) > 1e-9) + 1:
        assert costs[index] == pytest.approx(min(seconds[size] for size in sizes[1 + index :]))


@pytest.mark.parametrize("rows", [{}, {0: {}}, {0: {1: 0.0}}, {0: {1: "1"}}, {0: {1: float("nan")}}])
def test_points_that_are_no_costs_are_refused(rows):
    with pytest.raises(SettingsError, match="every cost must be a positive number"):
        CostCurve(rows)


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
    monkeypatch.setattr(model_curves, "load_curve", lambda *given: curve)
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
        monkeypatch.setattr(model_curves, "load_curve", lambda *given: curve)
    engine = llm.engine(row_budget=None)
    if curve is not None:
        engine.add(llm.prepare([5, 6, 7], Options(max_new_tokens=2)))
        engine.step()
    assert engine.row_budget(1) == budget
    assert llm.engine(row_budget=7).row_budget == 7


# ---- the file


def test_a_server_waits_for_a_table_before_it_measures_its_curve(llm, monkeypatch):
    """Not again for each request: on a busy machine, the table may take long."""
    order = []
    monkeypatch.setattr(base_files, "wait_for_tables", lambda seconds: order.append("table"))
    monkeypatch.setattr(measure, "measure", lambda target: order.append("curve") or (CURVE, True))
    for _ in range(2):
        with closing(llm.engine(row_budget=None)) as engine:
            engine.add(Request([5, 9, 14], Adaptive(), 4))
            while engine.busy:
                engine.step()
    assert order == ["table", "curve"]


def test_a_curve_is_kept_by_machine_and_model(cache, monkeypatch):
    save_curve("a", CURVE)
    assert load_curve("a", pytest.fail) == CURVE
    assert load_curve("b", pytest.fail) is None
    monkeypatch.setattr(model_curves.processor, "name", lambda: "another processor")
    assert load_curve("a", pytest.fail) is None


@pytest.mark.parametrize(
    ("name", "other"), [("format", model_curves.FORMAT - 1), ("machine", "another processor"), ("model", "b")]
)
def test_a_curve_of_something_else_is_measured_again_with_a_notice(llm, monkeypatch, name, other):
    # A busy machine may leave time for one pass of a size, and such a measurement is not saved.
    monkeypatch.setattr(measure, "measure", lambda target: (CostCurve({64: {1: 1.0, 4: 1.3}}), True))
    path = save_curve(curve_key(llm.model, llm.target()), CURVE)
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: other}))
    notices = []
    curve = curve_for(llm, notices)
    (notice,) = notices
    assert notice.startswith(f"{path} must contain a cost curve")
    assert f"it is of another {name}" in notice
    assert notice.endswith("measuring it again")
    assert saved_for(llm) == curve != CURVE


WHOLE = {"format": model_curves.FORMAT, "drafting": 0.1, "plain": 0.01}
DAMAGED = {
    "empty": "",
    "a list": "[]",
    "an empty object": "{}",
    "cut": '{"format": 1',
    "a negative cost": '{"rows": {"64": {"1": -1}}}',
    "deep": "[" * 100_000,
    "infinite": '{"rows": {"64": {"1": 1.0, "2": Infinity}}}',
    "not a number": '{"rows": {"64": {"1": NaN}}}',
    "a huge number": '{"rows": {"64": {"1": 1e999}}}',
    "digits": '{"rows": {"64": {"1": ' + "9" * 5000 + "}}}",
    "large": " " * (2 << 20),
    "not text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("what", [*DAMAGED, "a fifo", "a folder"])
def test_a_damaged_curve_is_measured_again_with_a_notice(llm, what):
    """None of these files may end a generation or let it wait."""
    path = save_curve(curve_key(llm.model, llm.target()), CURVE)
    origin = json.loads(path.read_text())
    path.unlink()
    if what == "a fifo":
        os.mkfifo(path)
    elif what == "a folder":
        path.mkdir()
    elif isinstance(DAMAGED[what], bytes):
        path.write_bytes(DAMAGED[what])
    else:
        text = DAMAGED[what]
        path.write_text(json.dumps(origin)[:-1] + ", " + text[1:] if text.startswith('{"rows"') else text)
    notices = []
    curve = curve_for(llm, notices)
    assert "must contain a cost curve" in notices[0]
    assert curve.pass_cost(1) == 1.0
    forget(llm)
    assert curve_for(llm, notices).pass_cost(1) == 1.0


def test_where_nothing_can_be_kept_the_curve_lives_in_memory(llm, cache, capsys):
    """The reason is printed once."""
    cache.write_text("a file where the folder should be")
    for _ in range(2):
        assert llm.generate([5, 6, 7], max_new_tokens=5).tokens
    assert saved_for(llm) is None
    (line,) = capsys.readouterr().err.splitlines()
    path = curve_file(curve_key(llm.model, llm.target()))
    assert re.fullmatch(
        rf"lookahead: {path} must be a writable file with free disk space \(.+\); the cost curve is not saved and is "
        "kept in memory for this process",
        line,
    )


def test_a_full_disk_leaves_no_temporary_file(cache, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_curves.os, "replace", full)
    with pytest.raises(SettingsError, match="No space"):
        save_curve("a", CURVE)
    assert list(curve_file("a").parent.iterdir()) == []


# ---- its key


class Ranks(FakeTarget):
    """A target evaluated by two ranks."""

    ranks = 2


class WithTriton(FakeTarget):
    attention = SimpleNamespace(backend="triton")


@pytest.mark.parametrize("other", [Ranks, WithTriton])
def test_targets_whose_steps_differ_in_cost_have_separate_curves(llm, monkeypatch, other):
    """Also if they evaluate the same model on the same path."""
    timed = []

    def measure_steps(target):
        timed.append(target)
        return CostCurve({64: {1: 1.0, 4: 1.5 + 0.1 * len(timed)}}), True

    monkeypatch.setattr(measure, "measure", measure_steps)
    targets = FakeTarget(), other()
    for load_again in (False, True):
        curves = []
        for target in targets:
            Adaptive().prepare(llm.model, target)
            measure_wanted(llm.model, lambda target=target: target, pytest.fail)
            prepared = Adaptive().prepare(llm.model, target)
            curves.append(prepared.for_model.cost_curve.pass_cost(4))
        assert curves == pytest.approx([1.6, 1.7])
        if not load_again:
            forget(llm)  # as in another process
    assert timed == list(targets)


def test_the_first_text_does_not_wait_for_the_curve(llm, monkeypatch):
    """The second has the measured curve, and the next process reads it."""
    measured = []
    monkeypatch.setattr(measure, "measure", lambda target: measured.append(1) or (CURVE, True))
    before = [len(measured) for _ in llm.run([[5, 9, 14]], max_new_tokens=6)]
    assert not any(before)
    assert len(measured) == 1
    assert Adaptive().prepare(llm.model, llm.target()).for_model.cost_curve == CURVE
    forget(llm)
    llm.generate([5, 9, 14], max_new_tokens=6)
    assert len(measured) == 1


@pytest.mark.parametrize(
    ("plain", "tokens", "again"), [(100.0, 60, 1), (1e-9, 60, 0), (0.0, 60, 0), (100.0, 3, 0)]
)
def test_a_curve_of_a_slower_machine_is_measured_again_once(llm, monkeypatch, plain, tokens, again):
    """A text with enough steps shows it; a slow text, which other work may have disturbed, shows nothing."""
    save_curve(curve_key(llm.model, llm.target()), replace(CURVE, plain=plain))
    measured = []
    new = CostCurve({64: {1: 1.0, 4: 2.0}}, 0.04, plain=90.0)
    monkeypatch.setattr(measure, "measure", lambda target: measured.append(1) or (new, True))
    for _ in range(2):
        llm.generate([5, 9, 14], max_new_tokens=tokens, ignore_eos=True)
        assert len(measured) == again
    assert saved_for(llm) == (new if again else replace(CURVE, plain=plain))
    assert Adaptive().prepare(llm.model, llm.target()).for_model.cost_curve == saved_for(llm)


@pytest.mark.parametrize(("seconds", "again"), [(0.0, 1), (1e9, 0)])
def test_a_disturbed_measurement_is_repeated_once_after_some_decoding(llm, monkeypatch, seconds, again):
    monkeypatch.setattr(model_curves, "REPEAT", seconds)
    measured = []
    disturbed = replace(CURVE, plain=100.0), False
    monkeypatch.setattr(measure, "measure", lambda target: measured.append(1) or disturbed)
    for _ in range(4):
        llm.generate([5, 9, 14], max_new_tokens=60, ignore_eos=True)
    assert len(measured) == 1 + again
    assert saved_for(llm) is None


def test_a_model_is_not_measured_for_drafters_without_a_curve(llm, cache):
    for drafter in ("plain", "5,4,5", Adaptive(rows=4)):
        llm.generate([5, 9, 14], max_new_tokens=6, drafter=drafter)
    assert not (cache / "lookahead-decoding" / "costs").exists()


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


def test_a_curve_of_llama_cpp_is_for_the_device_it_runs_on():
    assert of_llama_cpp("cpu").key != of_llama_cpp("gpu").key


def test_code_for_another_processor_has_a_curve_of_its_own(monkeypatch):
    """With AVX2 instead of AVX-512, four rows of packed weights cost twice as much as one."""
    compiled = type("Compiled", (FakeTarget,), {"runs_compiled": True})()
    monkeypatch.delenv("LOOKAHEAD_LEVEL", raising=False)
    own = cost_path(compiled)
    monkeypatch.setenv("LOOKAHEAD_LEVEL", "x86-64-v3")
    assert cost_path(compiled) == f"{own}, compiled for x86-64-v3"
    assert cost_path(FakeTarget()) == FakeTarget.path


def test_a_machine_has_all_of_its_gpus(monkeypatch):
    """A model may be on any of them."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ("small", "large")[index])
    assert machine().endswith("threads, small, large")


# ---- the measurement


def test_without_tuning_the_engine_measures_once(llm, monkeypatch):
    calls = []
    original = measure.measure
    monkeypatch.setattr(measure, "measure", lambda target: calls.append(1) or original(target))
    for _ in range(2):
        llm.generate([5, 6, 7], max_new_tokens=5)
    llm.generate([5, 6, 7], max_new_tokens=5, drafter=lookahead.Adaptive(state=AdaptiveState()))
    assert len(calls) == 1
    assert saved_for(llm) is not None
    forget(llm)  # as in another process
    llm.generate([5, 6, 7], max_new_tokens=5)
    assert len(calls) == 1


def test_threads_measure_one_after_the_other(llm, monkeypatch):
    """Two that measure at once would disturb each other."""
    running, most = [], []

    def slow(target):
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


def test_a_curve_that_other_work_disturbed_is_not_kept_and_rows_cost_at_least_what_is_assumed(
    cache, monkeypatch
):
    """A single row may seem to cost a whole step, as on llama.cpp's engine, or nothing."""
    for row, cost_of_four in ((1.0, 4.0), (0.0, 1.62)):
        target = ClockedTarget(CostCurve({0: {1: 1.0, 2: 1.0 + row}}))
        use_clock(monkeypatch, target)
        monkeypatch.setattr(measure, "STEADY", 0.0)
        curve = measured(target, "a", pytest.fail, False)
        assert curve.pass_cost(4) == pytest.approx(cost_of_four)
        assert load_curve("a", pytest.fail) is None
        assert measured(target, "a", pytest.fail, True).pass_cost(4) < 1.2 + 4 * row


def test_a_damaged_curve_is_named_where_a_line_has_said_that_nothing_can_be_written(llm, cache, monkeypatch):
    file = curve_file(curve_key(llm.model, llm.target()))
    file.parent.mkdir(parents=True)
    file.write_text("{")
    monkeypatch.setitem(llm.model.state, "unwritable cache", {})
    monkeypatch.setattr(
        model_curves, "measured", lambda target, name, notice, on_gpu: notice("again") or CURVE
    )
    lines = []
    curve_for(llm, lines)
    assert [str(file) in line for line in lines] == [True]


def test_two_fast_passes_confirm_each_other(monkeypatch):
    monkeypatch.setattr(measure, "STEADY", 1.1)
    assert measure.is_steady([1.0, 9.0, 1.05, 5.0])
    assert not measure.is_steady([9.0, 1.0, 5.0])
    assert not measure.is_steady([1.0])


@pytest.mark.parametrize(("on_gpu", "cost"), [(True, 1.2), (False, 16.0)])
def test_a_model_that_cannot_be_measured_has_the_assumed_curve_of_its_device(cache, on_gpu, cost):
    target = FakeTarget(500, max_positions=64)  # too short for a measurement
    assert measured(target, "a", pytest.fail, on_gpu).pass_cost(64) == pytest.approx(cost)
    assert load_curve("a", pytest.fail) is None


class ClockedTarget(FakeTarget):
    """A target whose passes advance the test's clock by p(k)."""

    def __init__(self, curve, vocabulary=512, **limits):
        super().__init__(vocabulary, **limits)
        self.curve, self.now, self.seen = curve, 0.0, []

    def forward(self, trees):
        ((_, tree),) = trees
        self.seen.append(len(tree))
        self.now += float(self.curve.pass_cost(self.padded(len(tree))))
        return super().forward(trees)

    def padded(self, rows):
        return rows


class CapturedTarget(ClockedTarget):
    """The same for captured steps, as on a GPU."""

    path = "cuda-graph"
    captures = True

    def padded(self, rows):
        return next(size for size in (1, 4, 8, 16, 32, 64, 128, 256) if size >= rows)


def use_clock(monkeypatch, target, drafting=0.0):
    """Let time pass only in the target's passes and in the drafter."""

    class Clocked(measure.AdaptiveDraftState):
        def draft(self, *limits):
            target.now += drafting
            return super().draft(*limits)

    monkeypatch.setattr(measure, "perf_counter", lambda: target.now)
    monkeypatch.setattr(measure, "AdaptiveDraftState", Clocked)


EPYC = CostCurve({0: {1: 1.0, 2: 1.1, 4: 1.25, 8: 1.6, 16: 2.5, 64: 9.5}})


@pytest.mark.parametrize("target_class", [ClockedTarget, CapturedTarget])
def test_a_measured_curve_is_the_target_s(monkeypatch, target_class):
    target = target_class(EPYC)
    use_clock(monkeypatch, target, drafting=0.03)
    curve, steady = measure.measure(target, 1000.0)
    assert steady
    assert curve.drafting == pytest.approx(0.03)
    assert set(curve.rows) == {64, 512}
    for rows in (1, 4, 8, 16, 64, 128):
        assert curve.pass_cost(rows) == pytest.approx(EPYC.pass_cost(rows)), rows
    assert not target.committed


@pytest.mark.parametrize("seed", range(5))
def test_other_work_hardly_changes_the_curve(monkeypatch, seed):
    """It makes a third of the passes up to twice as slow."""
    rng = np.random.default_rng(seed)
    target = ClockedTarget(EPYC)
    forward = target.forward

    def slow(trees):
        begin = target.now
        scores = forward(trees)
        target.now += (target.now - begin) * (rng.random() + 0.1) * (rng.random() < 0.33)
        return scores

    target.forward = slow
    use_clock(monkeypatch, target)
    curve, steady = measure.measure(target, 300.0)
    assert steady
    for rows in (1, 2, 4, 6, 8, 16):
        assert curve.pass_cost(rows) == pytest.approx(EPYC.pass_cost(rows), rel=0.03), rows


def test_each_number_of_rows_has_an_equal_share_of_the_time(monkeypatch):
    target = ClockedTarget(EPYC)
    use_clock(monkeypatch, target)
    passes, drafting = measure.time_steps(target, 64, (1, 2, 8, 64), 180.0)
    assert [len(some) for some in passes.values()] == pytest.approx([45, 41, 28, 5], abs=2)
    assert len(drafting) == sum(len(some) for rows, some in passes.items() if rows > 1)
    assert max(map(sum, passes.values())) - min(map(sum, passes.values())) <= 9.5


def test_several_passes_of_exact_mode_on_a_gpu_are_in_the_curve(monkeypatch):
    """It evaluates 64 rows per pass, so 256 rows cost four."""
    target = ClockedTarget(CostCurve({0: {1: 1.0, 64: 1.0, 128: 2.0, 192: 3.0, 256: 4.0}}))
    use_clock(monkeypatch, target)
    assert measure.measure(target, 1000.0)[0].pass_cost(256) > 2.9


def test_sizes_without_memory_or_tokens_are_left_out(cache):
    curve, _ = measure.measure(FakeTarget(512, max_rows=12), 9.0)
    assert [list(points) for points in curve.rows.values()] == [[1, 2, 4, 8]] * 2
    for rows in (0, 1):
        none = measured(FakeTarget(512, max_rows=rows), f"b{rows}", pytest.fail, False)
        assert none == CostCurve.assumed()
        assert load_curve(f"b{rows}", pytest.fail) is None


def test_a_slow_model_is_not_held_up(monkeypatch):
    """When time is up, only the smallest numbers of rows have been measured, and one context."""
    target = ClockedTarget(EPYC)
    use_clock(monkeypatch, target)
    curve, steady = measure.measure(target, 0.5)
    assert {context: list(points) for context, points in curve.rows.items()} == {64: [1, 2, 4, 8, 16]}
    assert target.now < 21
    assert steady


@pytest.mark.parametrize(("patience", "contexts"), [(100.0, [64, 512]), (50.0, [64, 64])])
def test_a_model_with_a_slow_prefill_is_measured_twice_after_the_short_context(
    monkeypatch, patience, contexts
):
    """512 rows of 2.5 / 16 plain passes each take 80."""
    target = ClockedTarget(EPYC)
    use_clock(monkeypatch, target)
    timed = []
    time_steps = measure.time_steps
    monkeypatch.setattr(
        measure, "time_steps", lambda target, at, *more: timed.append(at) or time_steps(target, at, *more)
    )
    curve, _ = measure.measure(target, patience)
    assert timed == contexts
    assert list(curve.rows) == list(dict.fromkeys(contexts))
    assert curve.pass_cost(8) == pytest.approx(EPYC.pass_cost(8))


def test_a_slow_plain_pass_does_not_make_rows_look_free(monkeypatch, cache):
    """As beside fifteen busy processes, where every plain pass of a large model took longer than one of four rows."""

    class Disturbed(ClockedTarget):
        def forward(self, trees):
            self.now += len(trees[0][1]) == 1
            return super().forward(trees)

    target = Disturbed(EPYC)
    use_clock(monkeypatch, target)
    monkeypatch.setattr(measure, "STEADY", 1.1)
    monkeypatch.setattr(measure, "LEAST_COST", 0.95)
    monkeypatch.setattr(measure.measure, "__defaults__", (0.5,))
    curve = measured(target, "a", pytest.fail, False)
    assert curve.pass_cost(16) >= CostCurve.assumed().pass_cost(16)
    assert load_curve("a", pytest.fail) is None


def test_a_target_without_drafts_is_timed_one_row_at_a_time():
    class Plain(FakeTarget):
        def depth_limit(self, slot):
            return 0

    passes, drafting = measure.time_steps(Plain(), 8, (1,), 0.01)
    assert list(passes) == [1]
    assert drafting == []


def test_a_measurement_takes_two_seconds(monkeypatch):
    monkeypatch.undo()
    begin = time.perf_counter()
    measure.measure(FakeTarget(512))
    assert time.perf_counter() - begin < measure.PATIENCE + 8  # this machine may be busy
    assert measure.PATIENCE == 2.0


# ---- the command


def test_tuned_costs_are_found_again_and_replace_those_in_use(toy, llm, monkeypatch):
    # The machine may be less busy than during the measurement, which would then be repeated.
    monkeypatch.setattr(model_curves, "FASTER", 0.0)
    result = call(toy, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert set(report["costs"]) == {"64"}  # the toy has 256 positions
    kept = saved_for(llm)
    assert report["file"] == str(curve_file(curve_key(llm.model, llm.target())))
    assert kept.rows == {64: {int(rows): cost for rows, cost in report["costs"]["64"].items()}}
    plain = llm.generate([5, 6, 7] * 4, max_new_tokens=30, drafter="off")
    assert llm.generate([5, 6, 7] * 4, max_new_tokens=30).tokens == plain.tokens
    assert curve_for(llm) == kept
    tuned, _ = llm.tune()
    assert curve_for(llm) == tuned != kept


def test_tuning_prints_a_table_and_replaces_a_damaged_curve(toy, llm):
    path = save_curve(curve_key(llm.model, llm.target()), CURVE)
    path.write_text("{")
    result = call(toy)
    assert result.exit_code == 0, result.output
    assert "1.00" in result.output
    assert "saved to" in result.output
    assert set(saved_for(llm).rows) == {64}


def test_tuning_while_other_work_runs_is_not_kept(toy, llm, monkeypatch):
    monkeypatch.setattr(measure, "STEADY", 0.0)
    result = call(toy)
    assert result.exit_code == 1
    assert "not saved" in result.output
    assert saved_for(llm) is None


def test_a_folder_that_cannot_be_written_is_one_line(toy, cache):
    cache.write_text("a file where the folder should be")
    result = call(toy)
    assert "must be a writable file" in " ".join(result.output.split())  # lines are wrapped
    assert "must be a writable file" in result.output
