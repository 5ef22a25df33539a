"""The GPU check without a GPU: budget, page, parts that fail or hang, interrupts, a dry run of all parts."""

import importlib.util
import os
import re
import runpy
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

import assumed_curves
import lookahead
from lookahead.core import SettingsError
from processes import forks

SCRIPTS = Path(__file__).parent.parent / "scripts"


def module(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(loaded)
    sys.path[:] = path
    return loaded


@pytest.fixture
def check(monkeypatch):
    return module("gpu_check")


ROW = (
    'print("ROW", "speed by W", "2", \'{"W": "2", "S": "1.5", "over plain": "1.4"}\', sep="\\t", flush=True)'
)


def run(check, monkeypatch, tmp_path, programs, budget=40.0):
    """Run programs as parts; return the page."""
    monkeypatch.setattr(
        check,
        "command_of",
        lambda part, tiny, model, seconds: [sys.executable, "-c", programs[part]],
    )
    page = check.Page(tmp_path / "page.md", "command")
    try:
        check.run_all(list(programs), page, True, None, budget)
    finally:
        page.text = page.path.read_text()
    return page


def test_a_failing_part_and_one_that_hangs_end_no_other(check, monkeypatch, tmp_path):
    programs = {
        "step": f"{ROW}\nraise SystemExit('no memory')",
        "text": f"import time\n{ROW}\ntime.sleep(60)",
        "scaling": f"{ROW}",
    }
    monkeypatch.setattr(check, "SHARES", {"step": 10, "text": 1, "scaling": 10})
    monkeypatch.setattr(check, "SHORTEST", 2.0)
    page = run(check, monkeypatch, tmp_path, programs)
    verdicts = {(line[0], line[4]): line[1] for line in page.lines}
    assert "ended with status 1: no memory" in verdicts["step", "MISSED"]
    assert "did not finish within" in verdicts["text", "MISSED"]
    assert verdicts["scaling", ""] == "all of it"
    assert page.text.count("| 2 | 1.5 | 1.4 |") == 3
    assert "![speed by W](page-scaling.svg)" in page.text
    assert (tmp_path / "page-scaling.svg").exists()


def test_an_interrupt_leaves_what_was_measured(check, monkeypatch, tmp_path):
    """The page is complete while a part runs, however it ends."""
    out, seen = tmp_path / "page.md", tmp_path / "seen.md"
    wait = f"import os, shutil, signal, time\n{ROW}\ntime.sleep(1)\nshutil.copy({str(out)!r}, {str(seen)!r})"
    program = f"{wait}\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(60)"
    page = check.Page(out, "command")
    monkeypatch.setattr(check, "command_of", lambda *given: [sys.executable, "-c", program])
    with pytest.raises(KeyboardInterrupt):
        check.run_all(["step", "text"], page, True, None, 100.0)
    assert "| 2 | 1.5 | 1.4 |" in seen.read_text()
    assert "| 2 | 1.5 | 1.4 |" in out.read_text()
    assert "Interrupted in step; not measured: step, text." in out.read_text()


def test_after_a_minute_it_says_what_the_rest_takes(check, monkeypatch, tmp_path):
    monkeypatch.setattr(check, "MINUTE", 0.5)
    page = run(check, monkeypatch, tmp_path, {"step": "import time; time.sleep(1.5)", "text": ""}, 50.0)
    assert re.search(r"After [01] s: step, text take at most (49|50) s more\.", page.text)


def test_all_parts_fit_into_the_budget_and_early_ones_leave_their_time(check, monkeypatch, tmp_path):
    given = []
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(check.time, "monotonic", lambda: clock.now)

    def part(name, page, tiny, model, seconds):
        given.append(seconds)
        clock.now += seconds * (1 + check.GRACE) if name != "speed" else 1.0

    monkeypatch.setattr(check, "run_part", part)
    parts = check.chosen_parts(None, "model")
    check.run_all(parts, check.Page(tmp_path / "page.md", ""), True, "model", 600.0)
    assert parts[-1] == "ranks"
    assert clock.now <= 600
    assert given[-1] > 600 * check.SHARES["ranks"] / sum(check.SHARES[p] for p in parts)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--only", "stop"], "unknown part 'stop'; known are certificate, rows"),
        (["--budget", "0"], "--budget must be at least 60 seconds, got 0"),
        (["--only", "speed-own"], "speed-own needs --model, a directory or a GGUF file"),
        (["--model", "/nowhere"], "--model must be a directory or a GGUF file that exists, got /nowhere"),
    ],
)
def test_bad_arguments_are_one_line(check, monkeypatch, capsys, given, message):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--tiny", *given])
    assert check.main() == 2
    assert capsys.readouterr().err.startswith(message)


def test_the_path_of_a_model_may_be_relative(check, monkeypatch, tmp_path):
    """The parts run in the repository's folder."""
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path)
    given = []
    monkeypatch.setattr(check, "run_all", lambda parts, page, tiny, model, budget: given.append(model))
    monkeypatch.setattr(
        sys, "argv", ["gpu_check.py", "--tiny", "--model", "own", "--out", str(tmp_path / "page.md")]
    )
    check.main()
    assert given == [str(tmp_path / "own")]


def test_free_time_is_measured_on_the_same_steps(monkeypatch):
    """The median launch and the median rest of a step; a difference of medians would be 5 here."""
    checks = module("gpu_checks")
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(checks.time, "perf_counter", lambda: clock.now)
    launches, rests = iter([1.0, 9.0, 1.0]), iter([2.0, 2.0, 5.0])

    def spend(seconds):
        clock.now += seconds

    scores = SimpleNamespace(best=lambda node: spend(next(rests)))

    def forward(trees):
        spend(next(launches))
        return [scores]

    machine = SimpleNamespace(tiny=True, wait=lambda: None)
    assert checks.launch_times(machine, SimpleNamespace(forward=forward), None) == (1.0, 2.0)


def test_the_bundled_model_is_no_substitute_for_the_default_one(monkeypatch):
    def missing():
        raise SettingsError("the default model is not installed")

    monkeypatch.setattr("lookahead.loading.default_model", missing)
    machine = SimpleNamespace(tiny=False, model=None, model_dtype="float32", device="cpu")
    with pytest.raises(
        SystemExit, match=r"^the default model must be installed; pip install gguf accelerate && "
    ):
        module("gpu_checks").load_llm(machine)


def test_methods_of_an_attention_share_its_target(monkeypatch):
    checks = module("gpu_checks")
    llm = lookahead.load("tiny", dtype="float32")
    targets = {"a": llm.target("transformers"), "b": llm.target("transformers")}
    used, make = [], llm.target
    monkeypatch.setattr(type(llm), "target", lambda self, *path: used.append(path) or make(*path))
    machine = SimpleNamespace(tiny=True, end=0.0)
    names = [
        (attention, name) for attention in targets for name in ("plain", "prompt-lookup", "adaptive:rows=4")
    ]
    tallies = {}
    checks.compare_methods(machine, llm, targets, names, tallies.update)
    assert len(used) == len(targets)
    assert {key: tally.equal for key, tally in tallies.items()} == dict.fromkeys(names, 1)


def test_each_size_has_its_own_peak_of_memory(monkeypatch):
    """Nothing of the last size is left when the next peak starts."""
    from lookahead.hf import graph_store

    checks = module("gpu_checks")
    log, alive, init = [], weakref.WeakSet(), graph_store.GraphStore.__init__
    monkeypatch.setattr(
        graph_store.GraphStore, "__init__", lambda self, *given: (init(self, *given), alive.add(self))[0]
    )
    machine = checks.Machine(True)
    machine.start_peak = lambda: log.append(f"start with {len(alive)}")
    machine.peak = lambda: log.append("peak") or len(log) << 20
    rows = []
    monkeypatch.setattr(checks, "row", lambda title, key, **cells: rows.append(cells["peak, MiB"]))
    monkeypatch.setattr(checks, "table", lambda *given: None)
    checks.check_memory(machine)
    assert log == ["start with 0", "peak"] * len(rows)
    assert rows == [str(2 * number) for number in range(1, len(rows) + 1)]
    assert len(rows) > 1


@pytest.mark.parametrize("part", ["certificate", "memory", "step"])
def test_every_part_says_on_which_machine_it_ran(monkeypatch, capsys, part):
    checks = module("gpu_checks")
    monkeypatch.setitem(checks.CHECKS, part, lambda machine: None)
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", part, "--tiny"])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    checks.main()
    first = capsys.readouterr().out.splitlines()[0]
    assert re.fullmatch(r"WHERE\tCPU \(dry run.*, torch .*, transformers .*, commit .*", first)


def program(words, out):
    """Run the script with these arguments in a forked process, as a separate program would."""
    os.setsid()
    os.chdir(SCRIPTS.parent)
    for number in (1, 2):
        os.dup2(out.fileno(), number)
    sys.argv = words
    assumed_curves.use()
    runpy.run_path(words[0], run_name="__main__")


class Forked:
    """The part of ``Popen`` that ``run_part`` uses, without importing torch and transformers each time."""

    def __init__(self, command, **options):
        ours, theirs = forks().Pipe(duplex=False)
        self._process = forks().Process(target=program, args=(command[1:], theirs))
        self._process.start()
        theirs.close()
        self.pid = self._process.pid
        self.stdout = os.fdopen(os.dup(ours.fileno()))

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def wait(self):
        self._process.join()


@pytest.mark.slow
@pytest.mark.timeout(1500)  # a minute on an idle core
def test_a_dry_run_of_all_parts(check, monkeypatch, tmp_path):
    """The first part starts as from a user's command; the others are forked.

    Without speed-fp16: a dry run is in float32, so it would repeat speed.
    """
    parts = check.chosen_parts(None, None)
    half = check.command_of("speed-fp16", True, None, 9)
    parts.remove("speed-fp16")
    assert [word for word in half if word not in ("--dtype", "float16")] == check.command_of(
        "speed", True, None, 9
    )
    page = tmp_path / "page.md"
    starts = iter([subprocess.Popen])
    start = SimpleNamespace(
        Popen=lambda *given, **named: next(starts, Forked)(*given, **named),
        PIPE=subprocess.PIPE,
        STDOUT=subprocess.STDOUT,
    )
    monkeypatch.setattr(check, "subprocess", start)
    words = ["--tiny", "--only", ",".join(parts), "--budget", "1200", "--out", str(page)]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert check.main() == 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    text = page.read_text()
    assert set(parts) == {"certificate", "rows", "step", "speed", "scaling", "text", "memory", "ranks"}
    for part in parts:
        assert f"| {part} | all of it |" in text
    for method in ("plain", "lookahead:15,5,15", "lookahead:7,7,7", "hf-greedy", "hf-prompt-lookup"):
        assert f"| {method} |" in text
    assert re.search(r"\| 64 \| 128 \| [\d.]+ \|", text)  # t(128)
