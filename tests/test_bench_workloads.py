"""Loaders on small files, the standard library as a workload, and invalid input."""

import json

import pytest

from benchmarks.datasets import SOURCES, load_workload
from lookahead.bench import Prompt
from lookahead.bench import load_workload as load_any
from lookahead.core import SettingsError

ROWS = {
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass"},
    "gsm8k": {"question": "2 + 2?", "answer": "#### 4"},
    "mbpp": {"task_id": 7, "text": "Add.", "code": "x", "test_list": ["assert f() == 1"]},
    "mt-bench": {"question_id": 81, "category": "writing", "turns": ["First.", "Second."]},
    "classeval": {"task_id": "ClassEval_0", "skeleton": "class A:\n", "solution_code": "class A: pass"},
    "spec-bench": {"question_id": 161, "category": "translation", "turns": ["Hallo"], "reference": ["Hello"]},
    "xsum": {"document": "Long.", "summary": "Short.", "id": "1"},
    "cnn-dailymail": {"article": "Long.", "highlights": "Short.", "id": "1"},
}


def lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_known_data_set_has_a_loader_and_a_row_here():
    assert set(ROWS) == set(SOURCES)


@pytest.mark.parametrize("name", ROWS)
def test_every_data_set_becomes_prompts(name, tmp_path):
    path = lines(tmp_path / "file.jsonl", ROWS[name])
    (prompt,) = load_workload(f"{name}={path}")
    assert prompt.workload == name
    assert prompt.turns
    assert prompt.plain
    expected = {
        "humaneval": "    pass",
        "gsm8k": "#### 4",
        "mbpp": "x",
        "mt-bench": None,
        "classeval": "class A: pass",
        "spec-bench": "Hello",
    }
    assert prompt.reference == expected.get(name, "Short.")
    assert len(prompt.turns) == (2 if name == "mt-bench" else 1)


@pytest.mark.parametrize("file", ["mt_bench/question.jsonl", "mt-bench.json"])
def test_a_data_folder_is_searched_by_name(file, tmp_path):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([ROWS["mt-bench"]] if file.endswith("json") else ROWS["mt-bench"])
    path.write_text(text)
    assert load_workload("mt-bench", data=tmp_path)[0].id == "81"


def test_the_test_split_comes_first(tmp_path):
    lines(tmp_path / "gsm8k" / "train.jsonl", ROWS["gsm8k"], ROWS["gsm8k"])
    lines(tmp_path / "gsm8k" / "test.jsonl", ROWS["gsm8k"])
    assert len(load_workload("gsm8k", data=tmp_path)) == 1


def test_few_prompts_cover_all_categories(tmp_path):
    rows = [{"question_id": i, "category": "ab"[i > 4], "turns": ["x"]} for i in range(8)]
    path = lines(tmp_path / "q.jsonl", *rows)
    assert [p.id for p in load_workload(f"spec-bench={path}", 4)] == ["0", "5", "1", "6"]
    rows = [{"question_id": i, "category": "ab"[i > 2], "turns": ["x"]} for i in range(8)]
    path = lines(tmp_path / "larger_last.jsonl", *rows)
    assert [p.id for p in load_workload(f"spec-bench={path}", 4)] == ["3", "0", "4", "1"]


def test_any_json_lines_file(tmp_path):
    path = lines(
        tmp_path / "mine.jsonl",
        {"prompt": "one", "id": "a"},
        {"prompt": "two {x}\n"},
        {"turns": ["four", "five"], "reference": ["x", "y"]},
    )
    a, b, c = load_any(str(path))
    assert load_workload(str(path)) == [a, b, c]
    assert (a.id, a.workload, a.turns) == ("a", "mine", ("one",))
    assert (b.id, b.turns, b.plain) == ("1", ("two {x}\n",), None)
    assert c.turns == ("four", "five")
    assert c.reference == "y"


class Tokenizer:
    """Characters as tokens."""

    chat_template = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def text_of(prompt, tokenizer, answers=()):
    return "".join(map(chr, prompt.tokens(tokenizer, answers)))


def test_a_chat_template_is_applied_where_there_is_one():
    prompt = Prompt("1", "x", ("one", "two"), plain="ONE")
    plain, chat = Tokenizer(), Tokenizer()
    chat.chat_template = "yes"
    assert text_of(prompt, plain) == "ONE"
    assert text_of(prompt, plain, ["answer"]) == "ONEanswer\n\ntwo\n"
    assert text_of(prompt, chat) == "<user>one<assistant>"
    assert text_of(prompt, chat, ["answer"]) == "<user>one<assistant>answer<user>two<assistant>"


def test_the_standard_library_is_a_workload():
    prompts = load_workload("stdlib", 5, seed=3)
    assert prompts == load_workload("stdlib", 5, seed=3)
    assert prompts != load_workload("stdlib", 5, seed=4)
    assert len({p.id for p in prompts}) == 5
    for prompt in prompts:
        assert prompt.plain.lstrip().startswith("def ")
        assert prompt.plain == prompt.plain.rstrip()
        assert prompt.reference.strip()
        compile(f"{prompt.plain}\n{prompt.reference}", prompt.id, "exec", dont_inherit=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "a", "answer": "b"}\n{"question": \n', r"file\.jsonl, line 2: not JSON"),
        (
            '{"question": "a", "answer": "b"}\n\n[1]\n',
            r"file\.jsonl, line 3: a row must be an object with question, answer",
        ),
        ('{"question": "a"}\n', r"line 1: a row of gsm8k must have question, answer .*this row has question"),
        ('[{"question": "a", "answer": "b"}, 3]', r"file\.jsonl, entry 2: a row must be an object"),
        ('[{"question":\n "a" "b"}]', r"file\.jsonl, line 2: not JSON"),
        ("", "has no rows"),
    ],
)
def test_malformed_lines_are_named(text, message, tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load_workload(f"gsm8k={path}")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": ""}, "must be a non-empty string"),
        ({"prompt": 3}, "must be a non-empty string"),
        ({"turns": "text"}, "list of at least one"),
        ({"turns": ["text", 3]}, "must be a non-empty string, got 3"),
        ({"nothing": 1}, "must have prompt or turns"),
    ],
)
def test_malformed_rows_of_any_file(row, message, tmp_path):
    path = lines(tmp_path / "mine.jsonl", {"prompt": "good"}, row)
    with pytest.raises(SettingsError, match=rf"mine\.jsonl, line 2: .*{message}"):
        load_workload(str(path))


def test_two_rows_of_one_id(tmp_path):
    path = lines(tmp_path / "mine.jsonl", {"prompt": "a", "id": 1}, {"prompt": "b", "id": 1})
    with pytest.raises(SettingsError, match=r"line 2: the id '1' is already used at .*line 1"):
        load_workload(str(path))


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="cannot be read as UTF-8"):
        load_workload(f"gsm8k={path}")


def test_an_unknown_workload_lists_the_known_ones():
    with pytest.raises(
        SettingsError, match=r"unknown workload 'humanevil'; known are humaneval, gsm8k, .*stdlib"
    ):
        load_workload("humanevil")


def test_a_missing_file_says_where_to_put_it_and_where_it_comes_from(tmp_path):
    with pytest.raises(
        SettingsError, match=r"there is nothing for spec-bench in .*--data as spec-bench/.*Spec-Bench"
    ):
        load_workload("spec-bench", data=tmp_path)
    with pytest.raises(
        SettingsError, match=r"^put the file of gsm8k .*give gsm8k=PATH; it comes from https://github"
    ):
        load_workload("gsm8k")
    with pytest.raises(SettingsError, match="there is no file"):
        load_workload(f"gsm8k={tmp_path / 'absent.jsonl'}")
    with pytest.raises(SettingsError, match="a workload must be stdlib or the path of a JSON-lines file"):
        load_any("gsm8k")
    with pytest.raises(SettingsError, match=r"data folder .* does not exist"):
        load_workload("gsm8k", data=tmp_path / "absent")


def test_a_reference_may_be_a_string_and_a_file_may_begin_with_a_mark(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"turns": ["a", "b"], "reference": "the end"}).encode())
    (prompt,) = load_any(str(path))
    assert prompt.reference == "the end"


@pytest.mark.parametrize("row", ['{"prompt": "\\ud83d"}', '{"prompt": %s}' % ("9" * 5000), "[" * 100_000])
def test_rows_that_cannot_be_read_are_refused(row, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(row)
    with pytest.raises(SettingsError, match=r"rows\.jsonl, "):
        load_any(str(path))
