"""Plots, step costs, and the bench commands."""

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import plots as plotting
from benchmarks.report import speeds
from gguf_files import write_gguf
from lookahead import LLM
from lookahead.bench import ModelUnderTest, Records, RunOptions, run, step_cost, summarise
from lookahead.cli import app
from lookahead.hf.testing import tiny_model
from lookahead.testing import FakeTarget

matplotlib = pytest.importorskip("matplotlib")
METHODS = ["prompt-lookup", "lookahead:2,3,2", "lookahead:4,3,4", "lookahead:4,5,4", "jacobi"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Records of a small run on a fake target."""
    path = tmp_path_factory.mktemp("records")
    prompts = [[(7 * i + start) % 32 for i in range(12)] for start in range(3)]
    run(
        METHODS,
        prompts,
        ModelUnderTest("fake", FakeTarget(32)),
        RunOptions(max_new_tokens=40, repeats=2),
        Records(path),
    )
    return path


def clipped_texts(figure):
    """Labels that leave the figure, or that are too small to read."""
    figure.canvas.draw()
    renderer, page = figure.canvas.get_renderer(), figure.bbox
    not_drawn = set()  # ticks that matplotlib keeps outside the axis limits
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            if not low <= tick.get_loc() <= high:
                not_drawn |= {tick.label1, tick.label2}
    found = []
    for text in figure.findobj(matplotlib.text.Text):
        if text in not_drawn or not text.get_visible() or not text.get_text().strip():
            continue
        box = text.get_window_extent(renderer)
        inside = (
            box.x0 >= page.x0 - 1
            and box.x1 <= page.x1 + 1
            and box.y0 >= page.y0 - 1
            and box.y1 <= page.y1 + 1
        )
        if not inside or text.get_fontsize() < 6:
            found.append(text.get_text())
    return found


def test_the_picture_is_drawn_and_can_be_read(folder):
    figure = speeds(summarise(Records(folder).read()))
    axes = figure.axes[0]
    assert axes.has_data()
    assert axes.get_title()
    assert "tokens per second" in axes.get_xlabel()
    assert not clipped_texts(figure)


def test_colours_can_be_told_apart():
    """Okabe and Ito's palette."""
    assert set(plotting.COLOURS) < {
        "#000000",
        "#E69F00",
        "#56B4E9",
        "#009E73",
        "#F0E442",
        "#0072B2",
        "#D55E00",
        "#CC79A7",
    }


@pytest.mark.parametrize("path", ["auto", "transformers"])
def test_step_costs_are_a_table(path):
    model = ModelUnderTest.of(LLM(tiny_model()), path=path)
    records = step_cost.measure(model, (16, 32, 100_000), (1, 8), lambda *told: None)
    assert [(r["context"], r["rows"]) for r in records] == [(16, 1), (16, 8), (32, 1), (32, 8)]
    assert all(r["step_ms"] > 0 and r["path"] == model.target.path for r in records)
    console = Console(width=80)
    with console.capture() as printed:
        console.print(step_cost.table([r | {"step_ms": 2.0 * r["rows"]} for r in records]))
    assert ["float32", "32", "8", "16.00", "8.00"] in map(str.split, printed.get().splitlines())


def test_contexts_with_too_few_positions_for_the_timed_steps_are_skipped():
    model = ModelUnderTest.of(LLM(tiny_model()))  # 256 positions
    records = step_cost.measure(model, (16, 240), (1, 8), lambda *told: None)
    assert [(r["context"], r["rows"]) for r in records] == [(16, 1), (16, 8)]


def test_step_costs_of_a_dtype_survive_an_interrupt_in_the_next(tmp_path, monkeypatch):
    from lookahead import bench

    def load(*args, dtype, **keywords):
        if dtype == "bfloat16":
            raise KeyboardInterrupt
        return ModelUnderTest.of(LLM(tiny_model()))

    monkeypatch.setattr(bench, "load_model", load)
    options = ("--contexts", "16", "--rows", "1,4", "--dtype", "float32,bf16", "--out", tmp_path)
    assert invoke("step-cost", *options).exit_code == 130
    kept = [json.loads(line) for line in (tmp_path / "step-cost.jsonl").read_text().splitlines()]
    assert [(r["dtype"], r["rows"]) for r in kept] == [("float32", 1), ("float32", 4)]


def test_step_costs_of_a_model_without_drafts_are_those_of_one_row():
    model = ModelUnderTest.of(LLM(tiny_model()), path="plain")
    records = step_cost.measure(model, (16, 250), (1, 8), lambda *told: None)
    assert [(r["context"], r["rows"]) for r in records] == [(16, 1)]


class Words:
    """A minimal tokenizer, so that a tiny model can be prompted."""

    chat_template = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [3 + ord(c) % 90 for c in text][-40:]}

    def decode(self, tokens, skip_special_tokens=True):
        return " ".join(map(str, tokens))


def invoke(*words):
    return CliRunner().invoke(app, ["bench", *map(str, words)])


def test_the_first_word_is_a_model_or_a_command(tmp_path):
    assert "--workload" in invoke("--help").output
    assert "--contexts" in invoke("step-cost", "--help").output
    missing = invoke(tmp_path / "no-model-here" / "x")
    assert missing.exit_code == 2
    assert "a model must be" in missing.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workload", "nothing"], "a workload must be stdlib or the path of a JSON-lines file"),
        (["--method", "nothing", "--limit", "1"], "got 'nothing'"),
        (["step-cost", "--rows", "a"], "--rows must be whole numbers"),
        (["step-cost", "--dtype", "float32,flaot16"], "dtype must be auto or one of"),
    ],
)
def test_bad_words(words, message, monkeypatch):
    from lookahead import bench

    model = ModelUnderTest("fake", FakeTarget(16))
    monkeypatch.setattr(bench, "load_model", lambda *args, **keywords: model)
    done = invoke(*words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_a_measurement_from_the_command_line(tmp_path, monkeypatch):
    from lookahead import bench

    model = ModelUnderTest.of(LLM(tiny_model(), Words()))
    monkeypatch.setattr(bench, "load_model", lambda *args, **keywords: model)
    words = [
        "--method",
        "prompt-lookup,lookahead:4,3,4",
        "--limit",
        2,
        "--max-new-tokens",
        12,
        "--repeats",
        1,
        "--out",
        tmp_path,
    ]
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert "lookahead:4,3,4" in done.output
    assert "measured earlier" not in done.output
    rows = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 4
    assert all(row["equal"] for row in rows)
    again = invoke(*words)
    assert again.exit_code == 0
    assert "8 of 8 completions were measured earlier" in " ".join(again.output.split())
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 8
    assert "lookahead:4,3,4 (warm)" in again.output


def test_pages_show_no_path_of_this_machine(monkeypatch):
    from benchmarks.report import command_line

    words = [
        "lookahead",
        "bench",
        "--data",
        "/home/me/data",
        "--workload=gsm8k=/home/me/x.jsonl",
        "--method",
        "a b",
    ]
    monkeypatch.setattr("sys.argv", words)
    assert command_line() == "lookahead bench --data data --workload=gsm8k=x.jsonl --method 'a b'"


def test_bench_decodes_in_the_dtype_that_other_commands_choose(monkeypatch, tmp_path):
    from lookahead import bench

    asked, model = [], ModelUnderTest.of(LLM(tiny_model(), Words()))

    def load(*args, **keywords):
        asked.append(keywords)
        return model

    monkeypatch.setattr(bench, "load_model", load)
    words = ["--method", "prompt-lookup", "--limit", 1, "--max-new-tokens", 8, "--repeats", 1]
    for number, dtype in enumerate(([], ["--dtype", "bfloat16"])):
        done = invoke(*words, *dtype, "--out", tmp_path / str(number))
        assert done.exit_code == 0, done.output
    assert "dtype" not in asked[0]
    assert asked[1]["dtype"] == "bfloat16"


def test_step_cost_measures_a_file_as_it_packs_its_weights(tmp_path, monkeypatch):
    """With --dtype, a message says that decoded weights are used."""
    file = tmp_path / "small.gguf"
    write_gguf(file, "llama", ("Q4_0",), seed=1)
    words = ["step-cost", file, "--contexts", "16", "--rows", "1,2", "--out", tmp_path / "out"]
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in (tmp_path / "out" / "step-cost.jsonl").read_text().splitlines()]
    assert {record["dtype"] for record in records} == {"Q4_0"}
    assert "decoded weights" not in done.output
    said = "--dtype float32 measures decoded weights"
    done = invoke(*words, "--dtype", "float32")
    assert said in " ".join(done.output.split())
    monkeypatch.setattr("lookahead.loading.default_model", lambda: (tmp_path, "small.gguf"))
    done = invoke("step-cost", *words[2:], "--dtype", "float32")  # the default model is also such a file
    assert said in " ".join(done.output.split())
    write_gguf(file, "llama", ("F32",), seed=1)
    assert "decoded weights" not in invoke(*words, "--dtype", "float32").output
