"""Every program in examples/ runs as documented in its header: in this process, and one in its own too."""

import io
import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
MODEL = ["tiny"]  # not for drop_in.py, which uses this model by default


@pytest.fixture
def run(monkeypatch, capsys):
    def program(name, *arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return program


def test_every_example_is_run_here():
    covered = {"drop_in.py", "chat.py", "batch_file.py", "own_drafter.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == covered


@pytest.mark.parametrize("name", ["drop_in.py", "own_drafter.py"])
def test_a_comparison_with_plain_decoding_says_equal(name, run):
    shown = run(name, *MODEL[name == "drop_in.py" :])
    assert "equal: True" in shown
    if name == "own_drafter.py":  # it accepts tokens
        assert float(shown.split()[0]) > 1.1


@pytest.mark.parametrize("name", ["batch_file.py"])
def test_without_its_arguments_an_example_shows_how_it_is_used(name, run):
    with pytest.raises(SystemExit, match=f"usage: python examples/{name}"):
        run(name)


def test_chat_answers_every_message(run):
    shown = run("chat.py", *MODEL, stdin="def add(a, b):\nprint(\n\n")
    prompts = [line for line in shown.splitlines() if line.startswith("> ")]
    assert len(prompts) == 3
    assert len(shown) > 50


def test_a_file_of_prompts(tmp_path, run):
    source, destination = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    prompts = ["def f(x):\n", "import os\n", "for i in range(3):\n", "class A:\n", "x = 1\n"]
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    run("batch_file.py", source, destination, *MODEL)
    records = [json.loads(line) for line in destination.read_text().splitlines()]
    assert sorted(record["index"] for record in records) == list(range(5))
    assert all(record["text"] and record["finish"] in ("stop", "length") for record in records)
