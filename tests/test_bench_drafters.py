"""Drafters used only for comparison (``benchmarks/drafters``): none of them changes the output."""

import json
import re
import sys
from argparse import Namespace
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import lookahead
from benchmarks import adaptive_run, departures, dynamics, rows, trained
from benchmarks.chain_s import variants
from benchmarks.drafters import eagle as eagle_program
from benchmarks.drafters import medusa as medusa_program
from benchmarks.drafters import places_in
from benchmarks.drafters.eagle import Eagle, EagleDrafter, EagleState, Layer
from benchmarks.drafters.medusa import RANKS, Heads, Medusa, MedusaDrafter
from benchmarks.drafters.rest import AHEAD, END, Datastore, Rest
from benchmarks.drafters.static_tree import SHAPES, StaticTree
from benchmarks.trained import Run
from lookahead.bench.workloads import Prompt
from lookahead.core import Drafter
from lookahead.drafters import Plain, PromptLookup
from lookahead.drafters.adaptive.sources.head_file import HeadWeights
from lookahead.hf.testing import tiny_model
from lookahead.learning.text_parts import TOP, Folder, Text
from lookahead.testing import FakeModel
from test_light_head import weights

PROMPTS = ([5, 6, 7], [9, 1, 44, 9, 1])
#: Vocabulary size and hidden size of the tiny model.
VOCABULARY, HIDDEN = 96, 64


@pytest.fixture(scope="module")
def llm():
    return lookahead.LLM(tiny_model("llama"))


@pytest.fixture(scope="module")
def medusa(tmp_path_factory):
    torch.manual_seed(0)
    heads = Heads(torch.randn(VOCABULARY - 3, HIDDEN), 3)
    accuracy = np.sort(np.random.default_rng(0).random((3, RANKS)))[:, ::-1] / 2
    file = tmp_path_factory.mktemp("medusa") / "heads"
    Medusa(heads, np.arange(3, VOCABULARY), accuracy.copy()).save(file)
    return Medusa.load(file)


def texts(llm, drafter, **options):
    return [llm.generate(prompt, drafter=drafter, max_new_tokens=40, **options) for prompt in PROMPTS]


def check(llm, drafter, rows):
    """Compare with plain decoding, greedy and sampled; return the greedy completions."""
    for options in ({"temperature": 0.8, "seed": 3}, {}):
        plain, drafted = texts(llm, Plain(), **options), texts(llm, drafter, **options)
        assert [text.tokens for text in drafted] == [text.tokens for text in plain]
        assert all(max(text.stats.rows_per_step) <= rows for text in drafted)
    return drafted


@pytest.mark.parametrize("rows", [2, 8, 64])
def test_medusa_is_exact(llm, medusa, rows):
    drafted = check(llm, MedusaDrafter(rows, medusa), rows)
    assert all(max(text.stats.rows_per_step) == rows for text in drafted)


def test_the_tree_of_medusa_has_the_likeliest_nodes(medusa):
    nodes = medusa.tree(16)
    values = [np.prod([medusa.accuracy[depth][rank] for depth, rank in enumerate(node)]) for node in nodes]
    assert len(nodes) == 15
    assert values == sorted(values, reverse=True)
    assert all(node[:-1] in [(), *nodes[:place]] for place, node in enumerate(nodes))


@pytest.mark.parametrize("rows", list(SHAPES))
def test_a_static_tree_is_exact(llm, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(HeadWeights, "parameter_count", 0)
    weights().save(tmp_path / "head")
    drafted = check(llm, StaticTree(SHAPES[rows], str(tmp_path / "head")), rows)
    assert all(max(text.stats.rows_per_step) > rows - 2 for text in drafted)


@pytest.mark.parametrize("rows", [2, 8, 64])
def test_rest_is_exact(llm, rows):
    stored = [text.tokens for text in texts(llm, Plain())]
    drafted = check(llm, Rest(rows, Datastore(stored)), rows)
    assert all(text.stats.compression_ratio > 1.5 for text in drafted)  # found in the datastore


def test_the_datastore_finds_the_longest_suffix():
    generator = np.random.default_rng(0)
    stored = [generator.integers(0, 6, 200).tolist() for _ in range(3)]
    datastore = Datastore(stored)
    text = generator.integers(0, 6, 30).tolist()
    for end in range(1, 30):
        found = datastore.continuations(text[:end])
        for length in range(min(16, end), 0, -1):
            suffix = text[end - length : end]
            expected = [
                (each + [END] * AHEAD)[at + length : at + length + AHEAD]
                for each in stored
                for at in range(len(each) - length + 1)
                if each[at : at + length] == suffix
            ]
            if expected:
                break
        until_end = [row[: row.index(END) if END in row else AHEAD] for row in found.tolist()]
        assert sorted(until_end) == sorted([t for t in row if t != END] for row in expected)
    assert datastore.continuations([7]).shape == (0, AHEAD)


@pytest.fixture(scope="module")
def eagle(llm, tmp_path_factory):
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("eagle") / "layer"
    parts = llm.model.head_parts()
    Eagle(Layer(HIDDEN), np.arange(3, VOCABULARY), parts.embed, parts.output).save(file)
    return Eagle.load(file, llm.model)


@pytest.mark.parametrize("program", [medusa_program, eagle_program])
def test_a_drafter_is_trained_on_the_first_parts_of_the_text(tmp_path, monkeypatch, program):
    """20 texts of 140 tokens in each of two parts; 100 tokens are asked for, and a part is read as a whole."""
    random = np.random.default_rng(0)
    folder = Folder(tmp_path / "text")
    for first in (0, 20):
        ids = random.integers(3, 90, (20, 140, TOP))
        logs = np.full((140, TOP), -3, np.float16)
        folder.save([Text(first + i, 0, 0.0, [1, 2], ids[i, :, 0].tolist(), ids[i], logs) for i in range(20)])
    out = tmp_path / "drafter.safetensors"
    paths = ["--text", folder.path, "--states", tmp_path / "states", "--out", out]
    words = ["tiny", *map(str, paths), "--tokens", "100", "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", ["drafter", *words])
    program.main()
    with safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["about"])["tokens"] == 20 * 140
    assert len(list((tmp_path / "states").glob("*.npy"))) == 1


@pytest.mark.parametrize("rows", list(SHAPES))
def test_eagle_is_exact(llm, eagle, rows):
    drafted = check(llm, EagleDrafter(rows, eagle), rows)
    assert all(max(text.stats.rows_per_step) > rows - 2 for text in drafted)


def test_rows_of_a_tree_read_what_they_read_in_a_text(eagle):
    """Chunked reads with cached keys and values match one pass over the whole text."""
    generator = torch.Generator().manual_seed(1)
    states, tokens = torch.randn(1, 6, HIDDEN, generator=generator), [7, 8, 9, 10, 11, 12]
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    whole, _ = eagle.layer(states, eagle.embedded(tokens), torch.arange(6), None, mask)
    state = EagleState(eagle, (1,), 7)
    for begin, end in ((0, 4), (4, 6)):
        state._unread = list(zip(tokens[begin:end], states[0, begin:end].numpy(), strict=True))
        last = state._read()
    assert torch.allclose(last, whole[0, -1:], atol=1e-5)


def test_variants_for_vllm_have_the_rows_in_their_names():
    made = variants(5)
    assert {made[name].most_rows for name in ("trees of 64 rows", "chains of up to 63 tokens")} == {64}
    assert {made[name].most_rows for name in ("chains of up to 5 tokens", "the same, from text alone")} == {6}


def test_drafters_of_departures_get_what_those_of_a_user_get(llm, monkeypatch):
    tables = []

    @dataclass(frozen=True)
    class Watched(Drafter):
        table: str = ""

        def prepare(self, model, target):
            assert model is llm.model
            return replace(self, table="the model's table")

        def start(self, sequence):
            tables.append(self.table)
            return Plain().start(sequence)

    monkeypatch.setattr(departures, "PROMPTS", [([5, 9, 14], False)])
    departures.measure(llm, 1, 4, lambda line: None, {"watched": Watched()})
    assert tables == ["the model's table"]


def test_completions_of_adaptive_run_end_at_the_end_token(llm, monkeypatch, tmp_path):
    tokens = llm.generate([5, 9, 14], drafter=Plain(), max_new_tokens=12).tokens
    monkeypatch.setattr(type(llm), "eos", frozenset({tokens[4]}))
    monkeypatch.setattr(lookahead, "load", lambda *given, **named: llm)
    prompt = Prompt("0", "code", ("",), ids=(5, 9, 14))
    monkeypatch.setattr(adaptive_run, "load_workload", lambda *given, **named: [prompt])
    monkeypatch.setattr(adaptive_run, "draw", lambda *given: None)
    out = tmp_path / "run.json"
    words = ["--data", "x", "--prompts", "1", "--new-tokens", "12", "--temperatures", "0", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["adaptive_run", *words])
    adaptive_run.main()
    runs = json.loads(out.read_text())["runs"]
    assert [1 + sum(run["tokens"]) for run in runs] == [1 + tokens.index(tokens[4])] * len(
        adaptive_run.WORKLOADS
    )


@pytest.mark.parametrize(
    "changed", [{"new_tokens": 9}, {"rounds": 1}, {"fixed": [2]}, {"longest": 5}, {}], ids=str
)
def test_sequences_measured_with_other_settings_are_measured_again(monkeypatch, tmp_path, changed):
    decoded = []
    result = SimpleNamespace(tokens=[1, 2], stats=SimpleNamespace(steps=1, rows=1))
    model = SimpleNamespace(
        name="m", path="cpu", dtype="Q4", tokenizer=None, generate=lambda *given, **named: None
    )
    monkeypatch.setattr(lookahead, "load", lambda *given, **named: model)
    monkeypatch.setattr(rows, "environment", lambda: {"commit": "c"})
    monkeypatch.setattr(rows, "require_quiet", lambda: None)
    monkeypatch.setattr(rows.fit_priors, "prompts", lambda *given: [])
    monkeypatch.setattr(rows, "load_workload", lambda *given, **named: [Prompt("0", "w", ("",), ids=(1, 2))])
    monkeypatch.setattr(rows, "decode", lambda *given: decoded.append(given) or (1.0, result))
    given = {"new_tokens": 8, "rounds": 2, "fixed": [2, 3], "longest": 9, "prompts": 1, "workloads": ["w"]}
    given |= {
        "model": None,
        "dtype": "auto",
        "data": tmp_path,
        "temperatures": [0.0],
        "records": tmp_path / "r",
    }
    rows.measure(Namespace(**given))
    first = len(decoded)
    rows.measure(Namespace(**given | changed))
    assert (len(decoded) > first) == bool(changed)


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ({"new_tokens": 9}, True),
        ({"weights": "f0"}, True),
        ({}, False),
    ],
    ids=str,
)
def test_results_of_other_weights_and_lengths_are_measured_again(monkeypatch, tmp_path, changed, again):
    decoded = []
    drafted = Run([1, 2, 3], 2, 4)

    def run(given):
        model = SimpleNamespace(
            llm=SimpleNamespace(name="m", dtype="Q4"),
            weights={"medusa": {"weights": given["weights"], "training": "7 tokens"}},
            decode=lambda *given: decoded.append(given) or drafted,
        )
        monkeypatch.setattr(trained, "Measurement", lambda args: model)
        args = Namespace(**given)
        return trained.body(trained.measure(args), args)

    monkeypatch.setattr(trained, "environment", lambda: {"commit": "c"})
    monkeypatch.setattr(trained, "prompts_of", lambda *given: {"prose": ["a prompt"]})
    given = {"new_tokens": 8, "weights": "e1", "prompts": 1, "rows": [4], "methods": ["medusa"]}
    given |= {"data": tmp_path, "records": tmp_path / "r"}
    page = run(given)
    assert any("| three heads (15.2M) | 7 tokens |" in part for part in page)
    cells = [part.splitlines()[-1] for part in page if part.startswith("| method | 4 rows |")]
    assert cells == ["| Medusa-1 | 1.00 |", "| Medusa-1 | - |"]
    decoded.clear()
    run(given | changed)
    assert len(decoded) == again


@pytest.fixture
def measurement(monkeypatch):
    """Prompt lookup on a model whose text repeats seven tokens on every processor: 6 0 1 2 3 4 5, 6 0 ...

    The first 5 of the text was followed by a 9 in the prompt, so one draft is wrong.
    """
    made = object.__new__(trained.Measurement)
    made.llm = lookahead.LLM(FakeModel(next_token=lambda prefix: len(prefix) % 7))
    made._plain = {}
    made.methods = {"prompt lookup": lambda rows: PromptLookup(max_drafted=rows - 1)}
    monkeypatch.setattr(lookahead.LLM, "encode", lambda *given: [5, 9, 5, 9, 5, 9])
    return made


def test_trained_methods_are_compared_with_plain_decoding(measurement):
    """Each prompt is decoded without drafts once."""
    decoded = []
    decode = measurement._decode
    measurement._decode = lambda *given: decoded.append(given[1].name) or decode(*given)
    prompt = Prompt("0", "w", ("",))
    runs = [measurement.decode("prompt lookup", rows, prompt, 24) for rows in (4, 8)]
    assert decoded == ["plain", "prompt-lookup", "prompt-lookup"]
    assert runs[0].tokens == runs[1].tokens
    assert 23 > runs[0].steps > runs[1].steps
    assert runs[0].rows > runs[0].steps


def test_another_text_ends_the_measurement(measurement, accept_a_wrong_node):
    with pytest.raises(SystemExit, match="the text of 0 differs from plain decoding"):
        measurement.decode("prompt lookup", 4, Prompt("0", "w", ("",)), 24)


def test_the_draft_model_is_a_copy_with_fewer_layers(tmp_path):
    """Assisted generation of transformers, with as many tokens drafted as the rows say."""
    tiny_model("llama", num_hidden_layers=3, seed=3).save_pretrained(tmp_path)
    whole = trained.DraftModel(str(tmp_path), share=1.0)
    plain, drafted = whole.decode([5, 9, 5, 9, 5, 9], 4, 24)
    assert drafted.tokens == plain
    assert drafted.rows == 4 * drafted.steps  # every draft is accepted
    assert drafted.steps <= -(-23 // 4)
    part = trained.DraftModel(str(tmp_path), share=1 / 3)
    assert part._draft.config.num_hidden_layers == 1
    plain, drafted = part.decode([5, 9, 5, 9, 5, 9], 4, 24)
    assert drafted.tokens == plain


def test_what_a_file_of_weights_says_about_its_training(tmp_path):
    about = {"tokens": 501_085, "seconds": 1777, "settings": {"epochs": 4}}
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    save_file({"x": torch.zeros(1)}, first, {"about": json.dumps(about)})
    save_file({"x": torch.ones(1)}, second)
    assert trained.weights_of(first)["training"] == "501,085 tokens, 4 epochs, 1,777 s"
    save_file({"x": torch.ones(1)}, third, {"about": json.dumps({**about, "settings": {"epochs": 1.0}})})
    assert trained.weights_of(third)["training"] == "501,085 tokens, 1 epoch, 1,777 s"
    assert trained.weights_of(second)["training"] == trained.weights_of(None)["weights"] == ""
    assert trained.weights_of(first)["weights"] != trained.weights_of(second)["weights"] != ""


def test_the_text_on_convergence_follows_from_the_counts():
    ages = len(dynamics.AGES)
    text = {"seen": [100 - 5 * age for age in range(ages)], "emitted": [5 * age for age in range(ages)]}
    text |= {"right": [3 + age for age in range(ages)], "new_tokens": 41, "steps": 40}
    said = dynamics.convergence_text({"code": [text], "maths": [text | {"new_tokens": 61}]})
    assert "here it is 9 % and 39 %." in said
    assert "S is 1.00 to 1.50. From 0 to 7 iterations" in said
    assert "grows by 42 percentage points, that of emitted tokens among them by 35." in said


def test_missing_weights_are_said_before_the_measurement(tmp_path):
    file = tmp_path / "file"
    with pytest.raises(
        SystemExit, match=r"medusa needs a file of trained weights, got .*file; train it or leave it"
    ):
        trained.require_weights({"medusa": file})
    file.write_text("")
    trained.require_weights({"medusa": file})


def test_other_text_is_another_datastore(tmp_path, monkeypatch):
    model = SimpleNamespace(learned=lambda: {"table": "t"})
    monkeypatch.setattr(trained.ModelUnderTest, "of", lambda llm: model)
    first = trained.reads_of(None, tmp_path)
    assert first["adaptive"] == "t"
    (tmp_path / "part-000000.npz").write_text("more")
    assert trained.reads_of(None, tmp_path)["rest"] != first["rest"]
    assert "reads" in trained.KEYS


def test_a_sampled_token_may_be_larger_than_all_best_tokens():
    positions = SimpleNamespace(ids=np.array([[2, 1]]), tokens=np.array([5, 2]))
    assert places_in(np.array([2, 5]), positions).tolist() == [-1, -1, 0, -1, -1, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "adaptive,medussa"], "--methods must be some of adaptive, .*, got medussa"),
        (["--rows", "4,5"], "--rows must be some of 4, 8, 16, 64, got 5"),
    ],
)
def test_an_unknown_method_or_number_of_rows_is_one_line(words, message, capsys):
    with pytest.raises(SystemExit):
        trained.main(["--data", "data", "--text", "text", *words])
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])
