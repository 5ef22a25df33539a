"""S by kind of text (``benchmarks.kinds``): its prompts, its counts, and what is not measured again."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

import lookahead
from benchmarks import kinds
from lookahead.hf.testing import tiny_model

#: The categories of SPEED-Bench (arXiv 2604.09557).
CATEGORIES = [
    *("coding", "humanities", "math", "multilingual", "qa", "rag"),
    *("reasoning", "roleplay", "stem", "summarization", "writing"),
]


@pytest.fixture
def runner(monkeypatch):
    """The tiny model, for which every prompt is a text that repeats itself."""
    made = object.__new__(kinds.Runner)
    made.llm = lookahead.LLM(tiny_model("llama"))
    made.new_tokens = 24
    made.tables = {"cold": None}
    made._plain = {}
    monkeypatch.setattr(type(made.llm), "encode", lambda *given: [5, 9, 5, 9, 5, 9])
    return made


def test_every_category_has_two_prompts():
    assert list(kinds.PROMPTS) == CATEGORIES
    assert all(len(set(prompts)) == 2 for prompts in kinds.PROMPTS.values())


def test_steps_and_their_tokens_are_counted(runner):
    found = runner.measure("cold", 8, ["a prompt", "another"])
    assert found["prompts"] == 2
    assert found["new"] == 2 * 23  # the prefill's token is no step's
    assert 2 <= found["steps"] < found["new"]


def test_another_text_ends_the_measurement(runner, accept_a_wrong_node):
    with pytest.raises(SystemExit, match="cold, 8 rows: the output differs from plain decoding"):
        runner.measure("cold", 8, ["a prompt"])


def test_lines_of_this_commit_are_not_measured_again(tmp_path, monkeypatch):
    asked = []

    def measure(state, rows, prompts):
        asked.append((state, rows, len(prompts)))
        return {"prompts": len(prompts), "new": 3 * rows, "steps": rows}

    origin = {"model": "A-1B.gguf", "commit": "c", "new_tokens": 64}
    made = SimpleNamespace(origin=origin, tables={"cold": None}, measure=measure)
    monkeypatch.setattr(kinds, "Runner", lambda *given: made)
    given = Namespace(model=[None], threads=None, new_tokens=64, records=tmp_path / "r")
    lines = kinds.measure(given)
    assert len(lines) == len(asked) == len(kinds.ROWS) * len(CATEGORIES)
    assert {(rows, count) for _, rows, count in asked} == {(n, 2) for n in kinds.ROWS}
    assert "| A-1B.gguf | cold | 3.00 |" in kinds.body(lines)[0]
    asked.clear()
    assert kinds.measure(given) == lines
    assert not asked
    made.origin = origin | {"commit": "d"}
    assert len(kinds.measure(given)) == len(asked) == len(lines)
