"""hub/, a ``custom_generate`` repository for the Hub, loaded by transformers from its folder."""

import importlib.metadata
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import lookahead

HUB = Path(__file__).parent.parent / "hub"


@pytest.fixture(scope="module")
def tiny():
    model = AutoModelForCausalLM.from_pretrained(lookahead.BUNDLED, dtype="float32")
    return model, AutoTokenizer.from_pretrained(lookahead.BUNDLED)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Keep the code that transformers copies out of the user's cache."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "transformers_modules":
            del sys.modules[name]


FROM_HUB = {"custom_generate": str(HUB), "trust_remote_code": True}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"stop_strings": ["return"]},
        {"return_dict_in_generate": True, "output_scores": True},
    ],
    ids=["greedy", "sampled", "stop strings", "scores"],
)
def test_the_text_is_that_of_plain_generate(tiny, options):
    model, tokenizer = tiny
    inputs = tokenizer("def add(a, b):\n", return_tensors="pt")
    if "stop_strings" in options:
        options = options | {"tokenizer": tokenizer}
    stats, texts = [], []
    for ours in ({}, FROM_HUB | {"drafter": "7,5,7", "stats": stats}):
        torch.manual_seed(3)
        texts.append(model.generate(**inputs, max_new_tokens=48, **options, **ours))
    plain, fast = texts
    if "output_scores" in options:
        likeliest = [[int(scores.argmax()) for scores in text.scores] for text in texts]
        assert likeliest[0] == likeliest[1]
        plain, fast = plain.sequences, fast.sequences
    assert fast.tolist() == plain.tolist()
    assert sum(each.rows for each in stats) > sum(each.steps for each in stats), "nothing was drafted"


def test_a_streamer_and_a_batch_arrive(tiny, capsys):
    model, tokenizer = tiny
    inputs = tokenizer("def add(", return_tensors="pt")
    shown = []
    for ours in ({}, FROM_HUB):
        model.generate(**inputs, max_new_tokens=20, streamer=TextStreamer(tokenizer), **ours)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != ""
    batch = torch.cat([inputs.input_ids, inputs.input_ids.flip(1)])
    plain, fast = (model.generate(batch, max_new_tokens=20, **ours) for ours in ({}, FROM_HUB))
    assert fast.tolist() == plain.tolist()


def test_what_cannot_work_is_refused_by_name(tiny):
    model, tokenizer = tiny
    inputs = tokenizer("def add(", return_tensors="pt")
    with pytest.raises(lookahead.SettingsError, match="num_beams"):
        model.generate(**inputs, num_beams=2, max_new_tokens=5, **FROM_HUB)
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(**inputs, max_new_tokens=5, custom_generate=str(HUB), trust_remote_code=False)


def test_a_missing_package_is_said_with_its_pip_line(tiny, monkeypatch):
    """transformers reports it from requirements.txt; the file itself does if only the import fails."""
    model, tokenizer = tiny
    inputs = tokenizer("def add(", return_tensors="pt")
    found = importlib.metadata.version

    def version(name):
        if name == "lookahead-decoding":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    with monkeypatch.context() as patched:
        patched.setattr(importlib.metadata, "version", version)
        with pytest.raises(ImportError, match="pip install lookahead-decoding"):
            model.generate(**inputs, max_new_tokens=5, **FROM_HUB)
    monkeypatch.setitem(sys.modules, "lookahead", None)
    with pytest.raises(ImportError, match=r"pip install lookahead-decoding$"):
        runpy.run_path(str(HUB / "custom_generate" / "generate.py"))


def test_the_model_cards_example_runs(tmp_path, monkeypatch, capsys):
    card = (HUB / "README.md").read_text()
    assert re.match(r"---\n.*^- custom_generate$.*?^---\n", card, re.S | re.M), "the Hub finds it by this tag"
    (block,) = re.findall(r"^```python\n(.*?)^```", card, re.S | re.M)
    for shown, here in {
        "HuggingFaceTB/SmolLM2-135M-Instruct": lookahead.BUNDLED,
        "OWNER/lookahead-decoding": HUB,
    }.items():
        assert f'"{shown}"' in block
        block = block.replace(shown, str(here))
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "hub/README.md", "exec"), {"__name__": "documentation"})
    assert capsys.readouterr().out.startswith("def add(a, b):")
