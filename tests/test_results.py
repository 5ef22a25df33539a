"""`make results` measures what is not there yet, and resumes where it stopped."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import adaptive_run, results
from benchmarks import pages as written
from benchmarks.report import page_of, write_report
from lookahead.bench import ModelUnderTest, Records, RunOptions, run
from lookahead.core import SettingsError
from lookahead.testing import FakeTarget

#: Pages with twenty prompts of each data set, or pairs of prompt and repeat; the others with records have ten.
TWENTY = ("ablation", "sampling-quality", "scaling-law", "bench-packed")


def made_here():
    """The fields of a page's JSON that say on which machine and at which commit it was made."""
    where = f"{results.describe_machine(results.machine())}, commit {results.commit()}, a model"
    return {"where": where, "processor": results.processor()}


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """A function that plans for given packages and model, making nothing: (pages by name, printed output)."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "convert", lambda source, out, kind: out.touch())
    monkeypatch.setattr(results, "export", lambda source, out: None)

    def planned(packages=(), model="SmolLM2-135M.Q4_1.gguf", limit=10, **given):
        monkeypatch.setattr(results, "find_spec", lambda name: name in packages or None)
        file = tmp_path / model if model else None
        steps = results.steps(results.Sources(tmp_path / "data", limit, file, **given))
        return {step.name: step for step in steps}, capsys.readouterr().out

    return planned


OTHERS = ["dynamics", "pass-rate", "adaptive-run", "adaptive-credit", "batch-size", "exact"]
PACKED = ["bench-packed", "bench-packed-sampled", "bench-packed-head"]
SPEED = ["speed-1.5b", "speed-0.5b", "speed-135m"]
EVERY_PAGE = [*SPEED, "llamacpp-examples", "bench-openvino", *PACKED]
EVERY_PAGE += ["startup", "serve", "rows", "kinds"]
EVERY_PAGE += ["corpus-1.5b", "corpus-0.5b", "corpus-135m"]
EVERY_PAGE += [
    "packed-accuracy",
    "packed-step",
    *OTHERS,
    "bench-bf16",
    "vllm",
    "text",
    *results.STUDY,
]


def test_the_plan_has_every_page_if_everything_is_installed(plan, tmp_path):
    (tmp_path / results.VLLM_READY).parent.mkdir(parents=True)
    (tmp_path / results.VLLM_READY).touch()
    models = Path("build/models/Q-1.5B-Instruct.Q4_K_M.gguf"), Path("build/models/Q-0.5B.Q4_K_M.gguf")
    pages, printed = plan(
        ["llama_cpp", "openvino_genai", "nncf"], llamacpp_bin=tmp_path / "bin", models=models
    )
    assert list(pages) == EVERY_PAGE
    assert not printed
    packed = " ".join(pages["bench-packed"].chosen())
    assert "benchmarks.side_by_side build/results/SmolLM2-135M.Q4_0.gguf --workload humaneval" in packed
    assert packed.endswith(
        "--limit 8 --repeats 3 --no-warm --method prompt-lookup lookahead:15,5,15 "
        "adaptive:sources=suffix+logits+jacobi adaptive "
        "llamacpp-server:build/results/SmolLM2-135M.Q4_0.gguf llamacpp-server:build/results/SmolLM2-135M.IQ4_NL.gguf "
        "llamacpp-server:build/results/SmolLM2-135M.Q4_0.gguf:ngram-mod "
        "llamacpp-server:build/results/SmolLM2-135M.Q4_0.gguf:ngram-mod:6,2,8 "
        "openvino-greedy:build/results/SmolLM2-135M.INT4.openvino:f32 "
        "openvino-lookup:build/results/SmolLM2-135M.INT4.openvino:5,3:f32 --once lookahead:15,5,15 "
        "--out build/results/bench-packed"
    )
    words = " ".join(pages["bench-packed-sampled"].words)
    assert "--limit 5 --repeats 3" in words
    assert "ngram-mod" not in words
    assert " ".join(pages["speed-1.5b"].chosen()).endswith(
        "side_by_side build/results/Q-1.5B-Instruct.Q4_K_M.gguf --workload mt-bench --workload humaneval "
        f"--data {tmp_path}/data --limit 5 --repeats 2 --no-warm --method adaptive:sources=suffix+logits+jacobi "
        "adaptive adaptive:rows=4 adaptive:rows=4:sources=suffix+logits+jacobi "
        "llamacpp-server:build/results/Q-1.5B-Instruct.Q4_K_M.gguf "
        "llamacpp-server:build/results/Q-1.5B-Instruct.Q4_0.gguf "
        "llamacpp-server:build/results/Q-1.5B-Instruct.Q4_0.gguf:ngram-mod:6,2,8 --max-new-tokens 96 "
        "--once adaptive:rows=4:sources=suffix+logits+jacobi --out build/results/speed-1.5b"
    )
    assert sum(pages[name].minutes for name in SPEED) < 30
    assert " ".join(pages["kinds"].words[1:]) == (
        "benchmarks.kinds --model build/results/Q-1.5B-Instruct.Q4_K_M.gguf "
        "--model build/results/Q-0.5B.Q4_K_M.gguf --model build/results/SmolLM2-135M.Q4_1.gguf"
    )
    assert pages["rows"].words[-2:] == ("--prompts", "5")
    tried = " ".join(pages["bench-openvino"].words)
    for head, settings in results.OPENVINO.items():
        for setting in settings:
            assert f"{head}:build/results/SmolLM2-135M.INT4.openvino:{setting}".removesuffix(":") in tried
    for other in ("Q4_0.gguf", "INT8.openvino"):
        assert f" openvino-lookup:build/results/SmolLM2-135M.{other}:3,3:f32" in tried
    examples = " ".join(pages["llamacpp-examples"].words)
    assert (
        "--model build/results/SmolLM2-135M.Q4_0.gguf --workload stdlib --workload humaneval --work"
        in examples
    )
    assert "--limit 2 --repeats 3 " in examples
    assert pages["exact"].words[-2:] == ("--cost-tokens", "16")
    small, _ = plan(["llama_cpp"], limit=1, llamacpp_bin=tmp_path / "bin")
    assert "--limit 2 " in " ".join(small["bench-packed-sampled"].words)
    assert "--limit 1 " in " ".join(small["llamacpp-examples"].words)
    for limit, most in ((8, 220), (10, 245)):  # an evening on two quiet cores
        pages, _ = plan(
            ["llama_cpp", "openvino_genai", "nncf"], limit=limit, llamacpp_bin=tmp_path / "bin", models=models
        )
        assert 90 < results.Pace().all(list(pages.values()), cores=2) < most


@pytest.mark.parametrize("limit", [8, 10])
def test_the_plan_has_as_many_prompts_as_committed_records_must_have(plan, limit):
    """test_committed_records_are_whole needs this many pairs of prompt and repeat in each data set."""
    pages, _ = plan(["llama_cpp", "openvino_genai", "nncf"], limit=limit, llamacpp_bin=Path("bin"))
    with_records = [name for name in pages if name.startswith(("bench-", "speed-")) or name in results.STUDY]
    assert len(with_records) == 6 + len(results.STUDY)
    for name in with_records:
        words = pages[name].words
        prompts, repeats = (
            int(words[words.index(option) + 1]) if option in words else 1
            for option in ("--limit", "--repeats")
        )
        assert prompts * repeats >= (20 if name in TWENTY else 10), name


def test_what_the_plan_leaves_out_is_a_line(plan):
    pages, printed = plan(["llama_cpp"])
    assert list(pages) == [
        name
        for name in EVERY_PAGE
        if not name.startswith(
            (
                "speed",
                "bench-openvino",
                "llamacpp-examples",
                "vllm",
                "corpus-1.",
                "corpus-0.",
            )
        )
    ]
    assert "speed: left out; --llamacpp-bin must name the folder of llama.cpp's programs\n" in printed
    assert (
        "llamacpp-examples: left out; --llamacpp-bin must name the folder of llama.cpp's programs\n"
        in printed
    )
    assert (
        "vllm: left out; it needs the default model and build/vllm-0.32.0, which `make vllm` makes" in printed
    )
    pages, printed = plan()
    assert [name for name in pages if "packed" in name] == [
        "bench-packed",
        "bench-packed-sampled",
        "bench-packed-head",
        "packed-accuracy",
    ]
    for peer in (" llamacpp-server:", " openvino-greedy:"):
        assert f"{peer}build/results/SmolLM2-135M.Q4_0.gguf" in " ".join(pages["bench-packed"].words), (
            "its cells say why"
        )
    assert "bench-openvino: left out; openvino-genai and nncf must be installed" in printed
    assert list(plan(model="")[0]) == ["startup", "serve", "rows", *OTHERS, *results.STUDY]


def test_the_time_left_follows_the_pages_that_were_made():
    pace = results.Pace()
    first, second = (results.Step(name, (), minutes) for name, minutes in (("first", 4.0), ("second", 10.0)))
    assert pace.minutes(second) == 10.0
    pace.add(first, 9.0)
    assert pace.minutes(second) == 22.5
    pace.add(second, 5.0)
    assert pace.minutes(first) == 4.0


def test_a_page_is_made_once_by_a_commit_and_command(plan, tmp_path):
    step = plan()[0]["batch-size"]
    assert not step.is_done()
    command = "python -m benchmarks.batch_size --data data --limit 5"
    facts = {"command": command, **made_here()}
    step.page.write_text(json.dumps(facts))
    assert step.is_done()
    assert not plan(limit=1)[0]["batch-size"].is_done()
    for other in (
        {"where": facts["where"].replace(results.commit(), "0123456789ab")},
        {"where": f"Abacus 7, commit {results.commit()}, a model"},
        {"processor": "cpu family: 7"},
    ):
        step.page.write_text(json.dumps(facts | other))
        assert not step.is_done(), other
    del facts["processor"]
    step.page.write_text(json.dumps(facts))
    assert not step.is_done(), "it may be a page of another machine"
    untimed = plan()[0]["scaling-law"]
    command = "python -m benchmarks.paper scaling-law --data data --limit 25 --max-new-tokens 64"
    facts |= {"command": f"{command} --records build/results/scaling-law"}
    untimed.page.write_text(json.dumps(facts | {"where": f"Abacus 7, commit {results.commit()}, a model"}))
    assert untimed.is_done(), "it shows no time"
    untimed.page.write_text(
        json.dumps(facts | {"where": facts["where"].replace(results.commit(), "0123456789ab")})
    )
    assert not untimed.is_done()


def test_a_page_depends_on_its_own_programs_and_not_on_those_of_others(plan, tmp_path):
    (tmp_path / results.VLLM_READY).parent.mkdir(parents=True)
    (tmp_path / results.VLLM_READY).touch()
    pages, _ = plan(["llama_cpp", "openvino_genai", "nncf"], llamacpp_bin=tmp_path / "bin")
    used = {name: step.sources() for name, step in pages.items()}
    assert {"src", "benchmarks/rows.py", "benchmarks/page.py", "benchmarks/datasets.py"} <= set(used["rows"])
    assert not {"benchmarks/serve.py", "benchmarks/paper/*"} & set(used["rows"])
    assert {"benchmarks/paper/*", ":!benchmarks/paper/ablation.py"} <= set(used["scaling-law"])
    assert ":!benchmarks/paper/scaling_law.py" not in used["scaling-law"]
    folder = Path(__file__).parent.parent
    for name, patterns in used.items():
        files = [pattern.removeprefix(":!") for pattern in patterns if pattern != "benchmarks/paper.py"]
        assert all(any(folder.glob(pattern)) for pattern in files), name


@pytest.fixture
def commits_of(tmp_path, monkeypatch):
    """Commits changes to a repository, which ``results`` reads, and returns the commits' names.

    Each change is a dict of the path -> the text; None removes the file.
    """

    def git(*words):
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    def commit(*changes):
        names = []
        for change in changes:
            for place, text in change.items():
                (tmp_path / place).parent.mkdir(exist_ok=True)
                if text is None:
                    (tmp_path / place).unlink()
                else:
                    (tmp_path / place).write_text(text)
            git("add", ".")
            git("commit", "--quiet", "-m", "a change")
            names.append(git("rev-parse", "--short=12", "HEAD"))
        return names

    git("init", "--quiet")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    return commit


def test_a_commit_of_pages_alone_needs_no_new_measurement(commits_of):
    code, page, changed = commits_of({"src/code.py": "0"}, {"docs/page.md": "1"}, {"src/code.py": "2"})
    assert results.same_code(code, page, ["src"])
    assert not results.same_code(page, changed, ["src"])
    assert not results.same_code(code, f"{page}+", ["src"]), "changes that are not committed"
    assert results.same_code(f"{page}+", f"{page}+", ["src"])
    assert not results.same_code("version 0.1.0", page, ["src"])
    assert results.same_code(page, changed, ["src", ":!src/co*"])
    assert not results.same_code(page, changed, ["src", ":!src/other.py"])
    assert not results.same_code(code, page, ["src", "docs/pa*", "none.py"])


def test_comments_and_docstrings_are_not_code(commits_of):
    """A page stays of this code when only its documentation changes, and becomes old when a message does."""
    text = '"""A module."""\n\n\ndef double(x):\n    """Twice x."""\n    return 2 * x\n\n\nHELP = "twice"\n'
    first, documented, changed, message, removed = commits_of(
        {"src/code.py": text, "src/page.html": "<!-- a -->"},
        {"src/code.py": text.replace("Twice x.", "2 x.").replace("return", "# Why.\n    return")},
        {"src/code.py": text.replace("2 * x", "x * 2")},
        {"src/code.py": text.replace('"twice"', '"double"')},
        {"src/code.py": None},
    )
    assert results.same_code(first, documented, ["src"])
    assert not results.same_code(first, changed, ["src"])
    assert not results.same_code(first, message, ["src"])
    assert not results.same_code(first, removed, ["src"])
    (other,) = commits_of({"src/code.py": text, "src/page.html": "<!-- b -->"})
    assert not results.same_code(first, other, ["src"]), "only Python is read"


def test_the_fastest_modes_of_llama_cpp_go_beside_ours(plan, tmp_path):
    """The fastest with its defaults, and the fastest of all, over all texts; once, if they are the same."""
    step = plan(["llama_cpp"])[0]["bench-packed"]
    rates = {
        "none": (200, 200),
        "ngram-simple": (100, 130),
        "ngram-map-k": (110, 90),
        "ngram-mod 6,2,8": (90, 200),
    }
    rows = {
        name: [
            [f"llama-server, {mode}", "126", "1.00", f"{both[place]:.1f} (90–200)", ""]
            for mode, both in rates.items()
        ]
        for place, name in enumerate(("code", "sums"))
    }
    rows["code"].append(["llama-bench, plain", "128", "1.00", "300.0", "not compared"])
    page = tmp_path / "llamacpp-examples.json"
    page.write_text(json.dumps({"figures": rows}))
    server = "llamacpp-server:build/results/SmolLM2-135M.Q4_0.gguf"
    assert f" {server}:ngram-simple {server}:ngram-mod:6,2,8 openvino" in " ".join(step.chosen())
    for table in rows.values():
        del table[3]
    page.write_text(json.dumps({"figures": rows}))
    assert f" {server}:ngram-simple openvino" in " ".join(step.chosen())


def test_the_fastest_settings_of_openvino_go_beside_ours(plan, tmp_path):
    step = plan(["llama_cpp", "openvino_genai", "nncf"])[0]["bench-packed"]
    totals = {
        f"{head}:SmolLM2-135M.INT4.openvino:{each}".removesuffix(":"): {"total": 1.0}
        for head, settings in results.OPENVINO.items()
        for each in settings
    }
    totals |= {"openvino-lookup:SmolLM2-135M.INT8.openvino:3,3": {"total": 9.0}, "plain": {"total": 1.0}}
    totals["openvino-lookup:SmolLM2-135M.INT4.openvino:5,3"] = {"total": 1.5}
    totals["openvino-lookup:SmolLM2-135M.INT4.openvino:3,3"] = {"total": None}
    totals["openvino-greedy:SmolLM2-135M.INT4.openvino"] = {"total": 1.1}
    (tmp_path / "bench-openvino.json").write_text(json.dumps({"overall": totals}))
    file = "build/results/SmolLM2-135M.INT4.openvino"
    assert f"openvino-greedy:{file} openvino-lookup:{file}:5,3" in " ".join(step.chosen())
    words = step.chosen()
    command = results.command_line(list(words[2:]), f"python -m {words[1]}")
    step.page.write_text(json.dumps({"command": command, **made_here(), "figures": []}))
    assert step.is_done()
    totals["openvino-lookup:SmolLM2-135M.INT4.openvino:5,3:f32"] = {"total": 2.0}
    (tmp_path / "bench-openvino.json").write_text(json.dumps({"overall": totals}))
    assert not step.is_done(), "made with another setting"


#: Decodes on the packed, transformers and exact paths with the programs of the pages, and prints the library's files
#: that were imported. Few sizes of steps are timed, which loads the same modules.
DECODED = """
import sys
from functools import partial
from importlib import import_module
for name in sys.argv[1:]:
    import_module(name)
import lookahead
from lookahead.drafters.adaptive import measure
from lookahead.hf.paths import make_target
measure.measure = partial(measure.measure, patience=0.0)
lookahead.load().generate("Hello", max_new_tokens=4)
llm = lookahead.load("tiny", dtype="float32")
for path in ("auto", "transformers", "exact"):
    llm.target = lambda *given, path=path: make_target(llm.model.module, path=path)
    llm.generate("Hello", max_new_tokens=4)
print("FILES", *(m.__file__ for n, m in sys.modules.items() if n.startswith("lookahead") and m.__file__))
"""


@pytest.mark.slow
def test_pages_do_not_use_the_code_on_which_they_do_not_depend():
    """All programs but those of the pages that use it; what only the commands import is another test."""
    users = {user for some in results.USED_BY.values() for user in some}
    studies = [name.replace("-", "_") for name in results.STUDY if name not in users]
    programs = ["rows", "startup", "packed_step", "packed_accuracy", "dynamics", "pass_rate", "batch_size"]
    programs += ["exact_text", "llamacpp_examples", "side_by_side", *(f"paper.{name}" for name in studies)]
    done = subprocess.run(
        [sys.executable, "-c", DECODED, *(f"benchmarks.{name}" for name in programs)],
        capture_output=True,
        text=True,
        cwd=results.ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(results.ROOT / "src"), str(results.ROOT)])},
    )
    assert not done.returncode, done.stderr
    files = done.stdout.partition("FILES ")[2].split()
    used = {str(Path(file).relative_to(results.ROOT)) for file in files}
    assert "src/lookahead/hf/graph_store.py" in used, "exact mode uses it on a CPU"
    # The commands import the settings that their options come from.
    settings = {"server": "settings.py", "learning": "train_settings.py"}
    imported = {f"src/lookahead/{package}/__init__.py" for package in settings}
    imported |= {f"src/lookahead/{package}/{file}" for package, file in settings.items()}
    for pattern in results.USED_BY:
        if pattern.startswith(("src/lookahead/bench/", "src/lookahead/cli/")):
            continue
        assert list(results.ROOT.glob(pattern)), pattern
        assert not {file for file in used - imported if fnmatch(file, pattern)}, pattern


def test_the_only_commands_that_pages_run_are_generate_and_serve():
    """USED_BY says which programs run them, and leaves out the others."""
    run = {}
    for path in (results.ROOT / "benchmarks").rglob("*.py"):
        if path.stem in ("first_chat", "idle_learning"):  # they make no page
            continue
        found = re.findall(r'"-m", "lookahead", "([\w-]+)"', path.read_text())
        found += re.findall(r"sys\.argv = \['lookahead', '([\w-]+)'", path.read_text())
        for name in found:
            run.setdefault(name, set()).add(path.stem)
    assert run.keys() == {"generate", "serve"}
    for name, programs in run.items():
        users = results.USED_BY[f"src/lookahead/cli/{name}.py"]
        assert programs | {"startup", "packed_step"} == set(users), (
            "pages that time a start import all commands"
        )


def test_a_change_of_the_server_concerns_the_page_of_the_server_alone(plan, monkeypatch):
    seen = {}
    monkeypatch.setattr(results, "same_code", lambda one, other, files: seen.setdefault("files", files))
    for name, needs in (("serve", True), ("rows", False)):
        step = plan()[0][name]
        words = step.chosen()
        command = results.command_line(list(words[2:]), f"python -m {words[1]}")
        step.page.write_text(json.dumps({"command": command, **made_here(), "figures": []}))
        seen.clear()
        step.is_done()
        assert (":!src/lookahead/server/*" not in seen["files"]) == needs
        assert ":!src/lookahead/parallel/*" in seen["files"]


@pytest.fixture
def own_folders(tmp_path, monkeypatch):
    """Put pages and records into the test's folder, and run no program."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "RECORDS", tmp_path / "build")
    monkeypatch.setattr(results, "subprocess", SimpleNamespace(run=lambda *given, **named: None))


@pytest.mark.usefixtures("own_folders")
def test_the_figures_are_computed_from_the_records(tmp_path):
    store = Records(tmp_path / "build" / "bench-x")
    model, options = ModelUnderTest("fake", FakeTarget(32)), RunOptions(max_new_tokens=20, repeats=1)
    run(["prompt-lookup"], [[1, 2, 3, 1, 2, 3]], model, options, store)
    write_report(store.read(), store.folder, "a command")
    results.Step("bench-x", ("-m", "benchmarks.side_by_side"), 1).run()
    facts = (tmp_path / "bench-x.json").read_text()
    assert json.loads(facts)["command"] == "a command"
    assert results.side_by_side("bench-x") == facts


@pytest.mark.usefixtures("own_folders")
def test_records_of_other_runs_in_the_folder_are_not_on_the_page(tmp_path):
    """The folder also has records of an earlier commit and of a larger limit."""
    store = Records(tmp_path / "build" / "bench-x")
    model, options = ModelUnderTest("fake", FakeTarget(32)), RunOptions(max_new_tokens=20, repeats=1)
    old = run([], [[1, 2, 3]], model, options)
    store.append(old[0] | {"key": "earlier", "commit": "0123456789ab"})
    run([], [[1, 2, 3], [4, 5, 6]], model, options, store)
    write_report(run([], [[1, 2, 3]], model, options, store), store.folder, "a command")
    results.Step("bench-x", ("-m", "benchmarks.side_by_side"), 1).run()
    _, (record,) = results.committed.read(tmp_path / "records" / "bench-x.jsonl.gz")
    assert record["commit"] == results.commit()


def test_a_page_of_records_from_two_places_is_refused(tmp_path):
    model, options = ModelUnderTest("fake", FakeTarget(32)), RunOptions(max_new_tokens=20)
    records = run([], [[1, 2, 3], [4, 5, 6]], model, options)
    first, second = records
    other = second["machine"] | {"processor": "Abacus 7"}
    for changed, message in (
        (
            {"commit": "0123456789ab"},
            rf"one commit, got '{re.escape(first['commit'])}' and '0123456789ab'; move the records",
        ),
        ({"machine": other}, "one machine, got .* and 'Abacus 7"),
        ({"threads": 77}, rf"one number of threads, got '{first['threads']}' and '77'"),
        ({"dtype": "Q4_0"}, "one dtype, got 'float32' and 'Q4_0'"),
        ({"torch": "1.0"}, "one version of torch, got"),
        ({"transformers": "4.0"}, "one version of transformers, got .* and '4.0'"),
    ):
        mixed = [first, second | changed]
        with pytest.raises(SettingsError, match=message) as caught:
            page_of(mixed, "a command")
        assert "\n" not in str(caught.value)
        with pytest.raises(SettingsError, match=message):
            results.committed.write(tmp_path / "study.jsonl.gz", {"command": "c"}, mixed)
        assert not list(tmp_path.iterdir())


def test_committed_records_from_two_places_are_refused(tmp_path, monkeypatch):
    """Files that an earlier version wrote are checked, too."""
    path, committed = tmp_path / "study.jsonl.gz", results.committed
    with monkeypatch.context() as patched:
        patched.setattr(committed, "require_one_origin", lambda records: None)
        committed.write(path, {"command": "c"}, [{"commit": "a" * 12}, {"commit": "b" * 12}])
    with pytest.raises(
        SettingsError, match=r"study\.jsonl\.gz: the records of a page must come from one commit"
    ):
        committed.read(path)


def test_the_adaptive_drafters_figures_are_drawn_from_the_committed_ones(tmp_path, monkeypatch):
    """Compares only words and numbers, because matplotlib versions write lines differently."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("sys.argv", ["x", "--draw", "--pictures", str(tmp_path)])
    adaptive_run.main()
    drawn = sorted(tmp_path.glob("*.svg"))
    assert [path.stem for path in drawn] == ["adaptive-calibration", "adaptive-rows"]
    for path in drawn:
        ours, theirs = (
            re.findall(r"<text[^>]*>([^<]+)</text>", one.read_text())
            for one in (path, results.ROOT / "docs" / "images" / path.name)
        )
        assert len(ours) > 10
        assert ours == theirs, path.name


def test_records_that_were_edited_are_refused_in_one_line(tmp_path, monkeypatch):
    path = tmp_path / "study.jsonl.gz"
    results.committed.write(path, {"command": "c"}, [{"commit": "a" * 12}])
    path.write_bytes(path.read_bytes() + b" ")
    monkeypatch.setattr(written, "write", lambda: results.committed.read(path))
    said = results.program(["--readme"])
    assert said.startswith(f"error: {path} is not the file that was measured")


def test_a_folder_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        results.main(["--data", "no-such-folder"])
    assert "--data must be a folder of data sets" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        (KeyboardInterrupt(), "interrupted: finished pages and records are kept"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; finished pages"),
    ],
)
def test_what_ends_a_run_is_one_line_and_the_next_run_makes_the_rest(
    ends, says, tmp_path, monkeypatch, capsys
):
    made, stops = [], [True]

    def run(step):
        if step.name == "serve" and stops:
            raise ends
        made.append(step.name)
        facts = {"command": results.command_line(list(step.words[2:]), f"python -m {step.words[1]}")}
        step.page.write_text(json.dumps(facts | made_here()))

    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "steps", lambda given: planned)
    planned = [results.Step(name, ("-m", f"benchmarks.{name}"), 1) for name in ("rows", "serve", "step")]
    monkeypatch.setattr(results.Step, "run", run)
    monkeypatch.setattr(results, "require_quiet", lambda: None)
    monkeypatch.setattr(written, "write", lambda: None)
    words = ["--data", str(tmp_path)]
    assert says in str(results.program(words))
    assert made == ["rows"]
    stops.clear()
    assert results.program(words) == 0
    assert made == ["rows", "serve", "step"], "finished pages are not made again"


def test_a_page_whose_words_change_during_the_run_is_made_again(tmp_path, monkeypatch):
    """The page of OpenVINO GenAI chooses the prompt lookup on the README's page."""
    made = []
    planned = [results.Step(name, ("-m", f"benchmarks.{name}"), 1) for name in ("first", "second")]
    monkeypatch.setattr(results, "steps", lambda given: planned)
    monkeypatch.setattr(results.Step, "run", lambda step: made.append(step.name))
    monkeypatch.setattr(results.Step, "is_done", lambda step: step.name == "second" and not made)
    monkeypatch.setattr(results, "require_quiet", lambda: None)
    assert results.measure(results.Sources(tmp_path, 1)) == []
    assert made == ["first", "second"]


def test_pages_without_times_are_made_side_by_side_after_the_others(tmp_path, monkeypatch):
    made = []
    together = threading.Barrier(2, timeout=30)

    def run(step):
        if not step.is_timed:
            together.wait()
        made.append(step.name)

    names = ("kinds", "rows", "dynamics", "serve")
    planned = [results.Step(name, ("-m", f"benchmarks.{name}"), 1) for name in names]
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "steps", lambda given: planned)
    monkeypatch.setattr(results.Step, "run", run)
    monkeypatch.setattr(results, "require_quiet", lambda: None)
    monkeypatch.setattr(results.os, "cpu_count", lambda: 2)
    assert results.measure(results.Sources(tmp_path, 1)) == []
    assert made[:2] == ["rows", "serve"]
    assert set(made[2:]) == {"kinds", "dynamics"}


def test_make_results_measures_without_the_peers_that_cannot_be_installed(tmp_path):
    """Runs the Makefile with a Python that prints its words and installs nothing."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(results.ROOT / name, tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text('#!/bin/sh\n[ "$2" != pip ] && echo "$@"\n')
    python.chmod(0o755)
    (tmp_path / ".venv/.ready").touch()
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    words = ["make", "results", "PYTHON=false", "DATA=here"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("peers", "vllm"):
        line = f"make {name} failed (build/{name}.log); the pages that need it are left out\n"
        assert done.stdout.count(line) == 1
    measured = "\n-m benchmarks.results --data here --limit 8\n"
    assert done.stdout.partition(measured)[2].splitlines()[-1] == "docs/draw.py --write"


@pytest.mark.parametrize(
    "error",
    [subprocess.CalledProcessError(2, ["python", "-m", "benchmarks.serve"]), SettingsError("not quiet")],
)
def test_a_page_that_fails_does_not_stop_the_others(error, tmp_path, monkeypatch, capsys):
    made = []

    def run(step):
        if step.name == "serve":
            raise error
        made.append(step.name)

    planned = [results.Step(name, ("-m", f"benchmarks.{name}"), 1) for name in ("rows", "serve", "step")]
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "steps", lambda given: planned)
    monkeypatch.setattr(results.Step, "run", run)
    monkeypatch.setattr(results, "require_quiet", lambda: None)
    assert results.measure(results.Sources(tmp_path, 1)) == ["serve"]
    assert made == ["rows", "step"]
    assert "serve failed: " in capsys.readouterr().out


def test_a_method_of_vllm_that_fails_is_named_and_the_rest_of_the_page_is_made(tmp_path, monkeypatch, capsys):
    from benchmarks import vllm as page

    tokenizer = SimpleNamespace(from_pretrained=lambda path: None)
    monkeypatch.setattr(page, "AutoTokenizer", tokenizer)
    prompt = SimpleNamespace(tokens=lambda tokenizer: [1, 2, 3])
    monkeypatch.setattr(page, "load_workload", lambda name, limit, data: [prompt])
    monkeypatch.setattr(page, "rows_of", lambda *given: [["trees", *"1234567"]])

    def run(command, input, **named):
        given = json.loads(input)
        if (given["engine"]["speculative_config"] or {}).get("method") == "suffix":
            return SimpleNamespace(stdout="", stderr="Traceback\nImportError: no arctic\n\n", returncode=1)
        texts = [[1, 2]] * len(page.SETS)
        found = {"vllm": "1", "seconds": 1.0, "decoding": [4, 1.0], "step": 0.1, "texts": texts}
        return SimpleNamespace(
            stdout=page.RESULT + json.dumps(found | {"steps": [1] * len(texts)}), stderr="", returncode=0
        )

    monkeypatch.setattr(page, "subprocess", SimpleNamespace(run=run))
    words = ["model", "--data", "data", "--limit", "1", "--clients", "1", "--records", str(tmp_path / "r")]
    page.main([*words, "--out", str(tmp_path / "vllm")])
    text, facts = capsys.readouterr().out, json.loads((tmp_path / "vllm.json").read_text())
    assert facts["chains"] == [["trees", "7"]]
    assert "\n- suffix, 1 client failed: " in text
    assert "ended with ImportError: no arctic\n" in text
    assert "\n| ours, always drafting |" in text
    assert "suffix, 1 client" in facts["failed"]
    with pytest.raises(SystemExit):
        page.main([*words[:3], "--limit", "0"])
    assert capsys.readouterr().err.endswith("error: --limit must be at least 1, got 0\n")


def test_a_page_with_a_failed_peer_is_made_again(plan):
    step = plan()[0]["rows"]
    command = results.command_line(list(step.words[2:]), f"python -m {step.words[1]}")
    facts = {"command": command, **made_here(), "figures": []}
    step.page.write_text(json.dumps(facts))
    assert step.is_done()
    step.page.write_text(json.dumps(facts | {"failed": {"suffix": "no package"}}))
    assert not step.is_done()
