"""The README says what the committed records say, and `make results` goes on where it was."""

import json
import re

import pytest

from benchmarks import results

TEXT = results.README.read_text()


def test_every_figure_of_the_readme_is_read_out_of_the_records():
    assert results.readme(TEXT) == TEXT, "run python -m benchmarks.results --readme"


def line(workload, method, rate, s, equal=2, compared=2):
    figures = {"rate": rate, "s_steps": s, "equal": equal, "compared": compared}
    return {"workload": workload, "method": method, "state": "", "all": figures}


def test_a_figure_that_no_record_has_is_seen_and_put_right(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    figures = [
        line("code", "plain", 100.4, 1.0),
        line("sums", "plain", 90.2, 1.0),
        line("code", "llamacpp-lookup:SmolLM2.BF16.gguf", 55.5, 1.25, 0, 0),
        line("sums", "llamacpp-lookup:SmolLM2.BF16.gguf", 44.4, 1.75, 0, 0),
        line("code", "adaptive", 160.0, 2.0),
        line("sums", "adaptive", 151.0, 1.5, 1),
    ]
    facts = {"command": "bench --limit 2", "where": "a machine", "busy": "", "figures": figures}
    (tmp_path / f"{results.IN_README}.json").write_text(json.dumps(facts))
    text = results.readme(TEXT)
    assert "| ours, adaptive, the default | 160 | 151 | 1.75 | 3 of 4 |" in text
    assert "| llama.cpp prompt lookup, BF16 | 56 | 44 | 1.50 | – |" in text
    assert results.readme(text) == text
    assert results.readme(text.replace("| 160 |", "| 161 |")) == text


def test_no_measured_number_stands_outside_the_blocks():
    """Speeds, ratios and shares; not numbers in names, versions and links, nor the size of a download."""
    text = re.sub(r"<!-- measured: .*?<!-- end -->", "", TEXT, flags=re.S)
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|Python 3\.\d+|[\d.]+ GB", "", text, flags=re.S)
    assert not re.findall(r"(?<![\w-])\d+\.\d+|\d+ ?%|\d+ (?:times|tokens|ms|s)\b", text)


def test_a_page_is_made_once_by_a_commit_and_command(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    planned = results.steps(tmp_path / "data", 10, None)
    names = ["bench-bfloat16", "serve", "batch-size", "accuracy", *results.STUDY, "bench-float32"]
    names += ["step", "host-cost", "adaptive", "adaptive-run", "controller"]
    assert [step.name for step in planned] == names
    first, last = (planned[names.index(name)] for name in ("bench-bfloat16", "parallel"))
    assert not first.is_done()
    command = "python -m benchmarks.side_by_side --dtype bfloat16 " + " ".join(
        f"--workload {name}" for name in results.SETS
    )
    command += " --data data --limit 10 --repeats 2 --no-warm --method "
    command += f"'{' '.join(results.METHODS)}' --out build/results/bench-bfloat16"
    facts = {"command": command, "where": f"a machine, commit {results.commit()}, a model"}
    first.page.write_text(json.dumps(facts))
    assert first.is_done()
    assert not results.steps(tmp_path / "data", 1, None)[0].is_done()
    first.page.write_text(json.dumps(facts | {"where": "a machine, commit 0123456789ab, a model"}))
    assert not first.is_done()
    facts["command"] = (
        "python -m benchmarks.paper parallel --data data --dtype bfloat16 --limit 10 --records "
    )
    facts["command"] += "build/results/parallel"
    last.page.write_text(json.dumps(facts))
    assert last.is_done()


def test_a_folder_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        results.main(["--data", "no-such-folder"])
    assert "--data must be a folder of data sets" in capsys.readouterr().err
