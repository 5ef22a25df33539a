"""lookahead tune keeps times where the method finds them, and the engine uses them."""

import json

import pytest
from typer.testing import CliRunner

import lookahead
from lookahead.cli import app
from lookahead.drafters.adaptive import growth, hashing
from lookahead.drafters.adaptive.measure import model_key, times_for
from lookahead.drafters.adaptive.sources import suffix
from lookahead.drafters.adaptive.state import AdaptiveState
from lookahead.drafters.adaptive.step_times import StepTimes, load_times, save_times
from toy import save


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(save(tmp_path / "toy"))


def call(*arguments):
    result = CliRunner().invoke(app, ["tune", *arguments])
    return result


def test_tuned_times_are_found_again(toy):
    result = call(
        toy, "--json", "--rows", "1,4,8", "--contexts", "8,100000", "--batches", "1,2", "--repeats", "1"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.strip().splitlines()[-1])
    assert {(p["batch"], p["context"], p["rows"]) for p in report["points"]} == {
        (batch, 8, rows) for batch in (1, 2) for rows in (1, 4, 8)
    }
    llm = lookahead.load(toy, drafter="adaptive")
    key = model_key(llm.model, llm.target().path)
    kept = load_times(key)
    assert kept is not None
    assert set(kept.bins) == {(0, 0), (2, 0)}
    plain = lookahead.load(toy, drafter="off").generate([5, 6, 7] * 4, max_new_tokens=30)
    result = llm.generate([5, 6, 7] * 4, max_new_tokens=30)
    assert result.tokens == plain.tokens
    times = times_for(llm.model, llm.target().path, lambda: pytest.fail("measured again"))
    assert times.bins != kept.bins  # it went on learning


def test_without_tuning_the_engine_measures_once(toy, monkeypatch):
    calls = []
    original = lookahead.drafters.adaptive.measure.measure_times
    monkeypatch.setattr(
        "lookahead.drafters.adaptive.measure.measure_times", lambda *a: calls.append(1) or original(*a)
    )
    # This machine may be busy at one moment and not at the next.
    monkeypatch.setattr("lookahead.drafters.adaptive.measure.BUSY", float("inf"))
    llm = lookahead.load(toy, drafter="adaptive")
    for _ in range(2):
        llm.generate([5, 6, 7], max_new_tokens=5)
    assert len(calls) == 1
    llm.generate([5, 6, 7], max_new_tokens=5, drafter=lookahead.Adaptive(state=AdaptiveState()))
    assert len(calls) == 1
    key = model_key(llm.model, llm.target().path)
    assert load_times(key) is not None
    del llm
    lookahead.load(toy, drafter="adaptive").generate([5, 6, 7], max_new_tokens=5)  # as another process would
    assert len(calls) == 1


def test_no_text_pays_for_compilation(toy, monkeypatch):
    """What is compiled for a text, however long, is compiled before the first one."""
    entries = (growth.grow, growth.learn_from_step, suffix.feed, hashing.rehash)
    for function in entries:
        monkeypatch.setattr(function, "_machine_code", None)
    llm = lookahead.load(toy, drafter="adaptive")
    times_for(llm.model, llm.target().path, llm.target)
    assert all(function._machine_code is not None for function in entries)


def test_where_nothing_can_be_kept_each_process_measures(toy, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where the folder should be")
    llm = lookahead.load(toy, drafter="adaptive")
    assert llm.generate([5, 6, 7], max_new_tokens=5).tokens
    assert load_times(model_key(llm.model, llm.target().path)) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "2,4"), "must contain 1"),
        (("--rows", "1,x"), "whole numbers"),
        (("--repeats", "0"), "at least 1"),
        (("--contexts", "99999999"), "fits the model"),
    ],
)
def test_wrong_options_are_one_line(toy, arguments, message):
    result = call(toy, *arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(("factor", "measured_again"), [(100.0, True), (0.01, False)])
def test_step_times_of_a_busy_machine_are_measured_again(toy, factor, measured_again):
    """Kept times with a plain step far slower than now are not believed; faster ones only scale with the machine."""
    llm = lookahead.load(toy, drafter="adaptive")
    key = model_key(llm.model, llm.target().path)
    times_for(llm.model, llm.target().path, llm.target)
    kept = load_times(key)
    assert kept is not None
    slow = StepTimes({place: [factor * seconds for seconds in table] for place, table in kept.bins.items()})
    save_times(key, slow)
    other = lookahead.load(toy, drafter="adaptive")
    times_for(other.model, other.target().path, other.target)
    assert (load_times(key).bins != slow.bins) is measured_again
