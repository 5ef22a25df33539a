"""The drafter's code is compiled by another process at the first use of a machine."""

import sys
from types import SimpleNamespace

import pytest

import lookahead
from families import tiny_model
from lookahead.drafters.adaptive import grow, learn, precompile
from lookahead.drafters.adaptive.measure import compile_all
from lookahead.jit import is_on_disk

ENTRIES = (grow.grow, learn.learn)


def overloads():
    return [len(entry.overloads) for entry in ENTRIES]


def test_what_the_other_process_compiles_is_what_a_model_needs():
    compile_all()
    assert all(is_on_disk(entry) for entry in ENTRIES)
    assert overloads() == [1, 1]
    llm = lookahead.LLM(tiny_model("llama", eos_token_id=None))
    llm.generate([1, 2, 3], max_new_tokens=8)
    llm.generate([1, 2, 3], max_new_tokens=8, temperature=1.0)
    assert overloads() == [1, 1]


def test_it_starts_only_where_code_is_missing(monkeypatch: pytest.MonkeyPatch):
    started = []
    monkeypatch.setattr(
        precompile.subprocess,
        "Popen",
        lambda command, **_: started.append(command) or SimpleNamespace(wait=lambda limit: 0),
    )
    monkeypatch.setattr(precompile.os, "cpu_count", lambda: 2)
    compile_all()
    precompile.start()
    assert started == []
    monkeypatch.setattr(precompile, "is_on_disk", lambda entry: False)
    precompile.start()
    precompile.start()  # one process is enough
    assert len(started) == 1
    precompile.wait()
    monkeypatch.setattr(precompile.os, "cpu_count", lambda: 1)
    precompile.start()
    assert len(started) == 1


def test_a_process_that_fails_costs_nothing_but_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(precompile, "is_on_disk", lambda entry: False)
    model = tiny_model("llama", eos_token_id=None)
    plain = lookahead.LLM(model, drafter=lookahead.Plain()).generate([1, 2, 3], max_new_tokens=20).tokens
    for executable in (sys.executable, "/does/not/exist"):
        monkeypatch.setattr(precompile.sys, "executable", executable)
        monkeypatch.setattr(precompile, "CODE", "import no_such_module")
        lookahead.Adaptive().precompile()
        assert lookahead.LLM(model).generate([1, 2, 3], max_new_tokens=20).tokens == plain
    precompile.wait()


@pytest.mark.parametrize(
    ("drafter", "starts"), [({}, 1), ({"drafter": "adaptive"}, 1), ({"drafter": "off"}, 0)]
)
def test_loading_a_model_starts_it_for_the_drafter_that_will_draft(monkeypatch, drafter, starts):
    started = []
    monkeypatch.setattr(precompile, "start", lambda: started.append(1))
    lookahead.load("tiny", **drafter)
    assert len(started) == starts
