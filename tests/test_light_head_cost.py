"""The cost of a light head's calls: measured once and saved with the cost curve, because it decides rows."""

import json
import subprocess
import sys
import time

import pytest

import lookahead
from lookahead.core import SettingsError
from lookahead.cpu.compiled_head import CompiledHead
from lookahead.drafters import Adaptive
from lookahead.drafters.adaptive import measure, model_curves
from lookahead.drafters.adaptive.cost import TYPICAL_HEAD, CostCurve, curve_file, load_curve, save_curve
from lookahead.drafters.adaptive.heads import head_of
from lookahead.drafters.adaptive.model_curves import curve_key
from lookahead.hf.model import HFModel
from lookahead.hf.quantize import quantize_model
from lookahead.testing import FakeTarget, tiny_model
from test_light_head import HIDDEN, weights

pytestmark = pytest.mark.usefixtures("measured_curves")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "STEADY", float("inf"))  # this machine may be busy
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def llm():
    model = HFModel(tiny_model("llama"))
    return lookahead.LLM(quantize_model(model, "q8_0"))


@pytest.fixture
def file(tmp_path):
    weights().save(tmp_path / "head")
    return tmp_path / "head"


@pytest.fixture(autouse=True)
def forgotten(llm):
    forget(llm)


def forget(llm):
    """As in another process, nothing is known but what is saved."""
    model_curves.forget_curves(llm.model)
    llm.model.state.pop("heads", None)


def key(llm):
    return curve_key(llm.model, llm.target())


def cost_in(llm, file, said=pytest.fail):
    """The cost of the head of this file in a new process."""
    forget(llm)
    return head_of(llm.model, llm.target(), str(file), llm.target, said).cost


@pytest.fixture
def timed(monkeypatch):
    """The heads that were timed."""
    heads, original = [], measure.measure_head

    def measure_head(target, head):
        heads.append(head)
        return original(target, head)

    monkeypatch.setattr(measure, "measure_head", measure_head)
    return heads


def test_the_cost_is_measured_once_for_each_shape_of_a_head(llm, file, cache, timed, tmp_path):
    first = cost_in(llm, file)
    saved = load_curve(key(llm))
    assert saved.heads == {f"hidden {HIDDEN}, width 96, shortlist 47, 8 bits": first}
    assert cost_in(llm, file) == first
    assert len(timed) == 1
    # A trained head of another shape, and one of the same shape.
    weights(width=64).save(tmp_path / "narrow")
    narrow = cost_in(llm, tmp_path / "narrow")
    weights(scale=0.5).save(file)
    assert (cost_in(llm, file), cost_in(llm, tmp_path / "narrow")) == (first, narrow)
    assert len(timed) == 2
    assert len(load_curve(key(llm)).heads) == 2
    assert load_curve(key(llm)).rows == saved.rows


def test_the_cost_is_the_time_of_a_call_in_plain_steps(monkeypatch):
    now = 0.0

    class Target(FakeTarget):
        def forward(self, trees):
            nonlocal now
            now += 2.0 + 9.0 * (len(self.committed[0]) % 3 == 0)  # other work interrupts a third
            return super().forward(trees)

    class Head:
        hidden = HIDDEN

        def guess(self, states, tokens, k):
            nonlocal now
            now += 0.5
            return states, None, None

    monkeypatch.setattr(measure, "perf_counter", lambda: now)
    target = Target()
    assert measure.measure_head(target, Head()) == pytest.approx(0.25)
    assert not target.committed
    monkeypatch.setattr(measure, "STEADY", 0.99)
    assert measure.measure_head(target, Head()) is None


def test_a_disturbed_cost_is_neither_used_nor_kept(llm, file, cache, timed, monkeypatch):
    llm.generate([5, 6, 7], max_new_tokens=2)  # a steady curve
    monkeypatch.setattr(measure, "STEADY", 0.0)
    assert cost_in(llm, file) == TYPICAL_HEAD
    assert load_curve(key(llm)).heads == {}
    monkeypatch.setattr(measure, "STEADY", float("inf"))
    assert cost_in(llm, file) == load_curve(key(llm)).heads[timed[0].shape]
    assert len(timed) == 2


def test_beside_a_disturbed_curve_the_head_is_not_measured(llm, file, cache, timed, monkeypatch):
    monkeypatch.setattr(measure, "STEADY", 0.0)
    assert cost_in(llm, file) == TYPICAL_HEAD
    assert not timed
    assert load_curve(key(llm)) is None


def test_where_nothing_can_be_kept_it_is_said_once(llm, file, cache):
    cache.write_text("a file where the folder should be")
    said = []
    assert cost_in(llm, file, said.append) != TYPICAL_HEAD
    (line,) = said
    assert "the cost curve is not saved" in line


def test_a_curve_that_was_tuned_meanwhile_stays(llm, file, cache):
    """Another process replaces the curve while this one runs."""
    llm.generate([5, 6, 7], max_new_tokens=2)
    tuned = CostCurve({8: {1: 1.0, 4: 1.3}}, heads={"another": 0.5})
    save_curve(key(llm), tuned)
    head = head_of(llm.model, llm.target(), str(file), llm.target, pytest.fail)
    saved = load_curve(key(llm))
    assert saved.rows == tuned.rows
    assert saved.heads == {"another": 0.5, head.shape: head.cost}


@pytest.mark.parametrize("wrong", [0, -1.0, "x", None])
def test_a_cost_that_is_no_positive_number_is_refused(llm, cache, wrong):
    save_curve("a", CostCurve({8: {1: 1.0, 4: 1.3}}, heads={"this": 0.5}))
    path = curve_file("a")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"heads": {"this": wrong}}))
    with pytest.raises(SettingsError, match="must contain a cost curve"):
        load_curve("a")


def test_rows_are_the_same_next_to_a_busy_process(llm, file, cache, monkeypatch):
    """Once the costs are saved, no clock is read."""
    shape = weights().shape
    save_curve(key(llm), CostCurve({8: {1: 1.0, 64: 1.1}}, seconds=0.001, heads={shape: 0.01}))

    def rows():
        forget(llm)
        result = llm.generate([5, 6, 7], max_new_tokens=60, drafter=Adaptive(head=str(file)))
        return result.stats.rows_per_step, result.stats.drafter["head_calls"]

    quiet = rows()
    assert quiet[1] > 0
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    guess = CompiledHead.guess
    monkeypatch.setattr(CompiledHead, "guess", lambda *given: (time.sleep(0.003), guess(*given))[1])
    try:
        assert rows() == quiet
    finally:
        busy.kill()
        busy.wait()
