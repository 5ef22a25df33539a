"""The command line on a tiny checkpoint: what it prints, what it writes, and its error messages."""

import dataclasses
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

import lookahead
from families import tiny_model
from gguf_files import write_gguf
from lookahead.cli import app
from lookahead.cli.adapter import with_options
from lookahead.cli.bench import progress
from lookahead.cli.command import Command as HelpCommand
from lookahead.cli.console import LongProgress
from lookahead.cli.demo import ROUNDS
from lookahead.core.target import BIT_EQUAL
from lookahead.drafters import METHODS
from lookahead.drafters.adaptive import base_files
from lookahead.option import option
from lookahead.options import DraftOptions, LoadOptions, Options
from processes import Command
from toy import save

RESULT = {"output_ids", "text", "new_tokens", "steps", "rows", "seconds", "finish_reason"}
FIELDS = {"id", "line", "prompt_hash", *RESULT}
PROMPT = "def add(a, b):\n    return a + b\ndef add(a"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def model(toy_chat):
    return str(toy_chat)


@pytest.fixture(scope="module")
def llm(model):
    return lookahead.load(model)


def call(*args, stdin=None):
    """(exit status, stdout, stderr without colours)."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, ANSI.sub("", result.stderr)


def refused(match, *args, status=2, **kwargs):
    """Expect only one line, ``error: ...``, and return it."""
    code, out, err = call(*args, **kwargs)
    assert code == status, err
    assert out == ""
    (line,) = err.strip().splitlines()
    assert line.startswith("error: ")
    assert re.search(match, line), line
    return line


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prompts(path, *records):
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return path


def without_time(records):
    return [{k: v for k, v in r.items() if k not in ("seconds", "plain_seconds")} for r in records]


# ---------------------------------------------------------------- one prompt


@pytest.mark.parametrize("method", METHODS)
def test_generate_prints_the_text_alone_on_stdout(model, llm, method):
    code, out, err = call("generate", model, "--prompt", PROMPT, "--max-new-tokens", 30, "--drafter", method)
    expected = llm.generate(PROMPT, max_new_tokens=30, drafter="off")
    assert (code, out) == (0, expected.text + "\n")
    assert f"{len(expected.tokens)} tokens, {len(expected.tokens) - 1} of them in " in err
    assert method in err


def test_a_prompt_without_its_option(model):
    code, out, err = call("generate", model, PROMPT)
    assert (code, out) == (2, "")
    assert "a prompt is given with --prompt" in err


def test_settings_reach_the_drafter(model):
    def steps(*options):
        _, out, _ = call(
            "generate", model, "--prompt", PROMPT, "--ignore-eos", "--max-new-tokens", 40, "--json", *options
        )
        record = json.loads(out)
        return record["output_ids"], record["rows"]

    one = steps("--drafter", "3,4,2")
    two = steps("--window-size", 3, "--ngram-size", 4, "--guess-set-size", 2)
    preset = steps("--drafter", "7b")
    off = steps("--drafter", "off")
    assert one == two
    assert one[0] == preset[0] == off[0]
    assert off[1] == 39 < one[1] < preset[1]
    most = steps("--rows", 12)
    alone = steps("--rows", 12, "--sources", "suffix")
    assert most[0] == alone[0] == one[0]
    assert 39 <= alone[1] < most[1] <= 12 * 39


def test_sampling_options_reach_the_engine(model, llm):
    options = {
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 5,
        "seed": 3,
        "max_new_tokens": 30,
    }
    flags = [part for name, value in options.items() for part in ("--" + name.replace("_", "-"), value)]
    _, out, _ = call("generate", model, "--prompt", PROMPT, *flags, "--stop", "zz", "--stop", "qq", "--json")
    record = json.loads(out)
    expected = llm.generate(PROMPT, stop=["zz", "qq"], **options)
    assert record["output_ids"] == expected.tokens
    assert record["seed"] == 3


def test_generate_prints_one_json_object(model, llm):
    code, out, err = call(
        "generate", model, "--prompt", PROMPT, "--json", "--compare", "--max-new-tokens", 20
    )
    record = json.loads(out)
    assert (code, err) == (0, "")
    assert set(record) >= RESULT
    assert record["prompt"] == PROMPT
    assert record["text"] == llm.generate(PROMPT, max_new_tokens=20).text
    assert record["compare"]["equal"] is True
    assert record["compare"]["plain_steps"] == record["new_tokens"] - 1
    assert record["stats"]["path"] == llm.target().path
    assert set(record["stats"]["seconds"]) >= {"prefill", "draft", "forward", "verify", "commit"}


def test_colour_codes_of_a_completion_are_kept(capsys):
    from lookahead.cli.generate import print_text

    result = SimpleNamespace(checked=lambda: None)
    print_text([SimpleNamespace(piece="\x1b[31mred\x1b[0m", result=result)], color=False)
    assert capsys.readouterr().out == "\x1b[31mred\x1b[0m\n"


def test_what_an_encoding_lacks_is_escaped_and_a_record_is_utf8(llm, monkeypatch):
    """An encoding error would cut a completion short."""
    from lookahead.cli import main

    monkeypatch.setattr(sys.modules["lookahead.cli.generate"], "load_model", lambda *_: llm)

    def printed(*words):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
            patched.setattr(sys, "argv", ["lookahead", "generate", "tiny", "--max-new-tokens", "2", *words])
            with pytest.raises(SystemExit):
                main()
            return sys.stdout.buffer.getvalue()

    def update(text):
        result = SimpleNamespace(checked=lambda: result, text=text)
        return SimpleNamespace(piece=text, result=result)

    record = json.loads(printed("--prompt", "東京", "--json").decode("utf-8"))
    assert record["prompt"] == "東京"
    monkeypatch.setattr(lookahead.LLM, "run", lambda *_, **__: [update("é東")])
    monkeypatch.setattr(sys.modules["lookahead.cli.generate"], "summary", lambda *_: "")
    assert printed("--prompt", "x") == b"\xe9\\u6771\n"


def test_a_closed_stdin_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    for words in (["chat"], ["generate", "tiny", "--prompt-file", "-"], ["generate", "tiny", "--input", "-"]):
        with pytest.raises(SystemExit) as ended:
            app(words)
        (line,) = capsys.readouterr().err.splitlines()
        assert (ended.value.code, line[:33]) == (2, "error: stdin must be open, but it")


def test_prompt_from_a_file_and_from_stdin(model, llm, tmp_path):
    (tmp_path / "p.txt").write_text("für 東京\n", encoding="utf-8")
    expected = llm.generate("für 東京\n", max_new_tokens=10).text + "\n"
    args = ("generate", model, "--max-new-tokens", 10, "--prompt-file")
    assert call(*args, tmp_path / "p.txt")[1] == expected
    assert call(*args, "-", stdin="für 東京\n")[1] == expected


def test_generate_reports_a_text_that_differs(model, accept_a_wrong_node):
    code, _, err = call(
        "generate", model, "--prompt", PROMPT, "--ignore-eos", "--compare", "--drafter", "5,4,7"
    )
    assert code == 1
    assert re.search(
        r"NOT equal to plain decoding from token \d+ on, where the two best logits are [\d.e-]+ apart", err
    )


def test_compare_of_equal_texts(model):
    code, _, err = call(
        "generate", model, "--prompt", PROMPT, "--ignore-eos", "--compare", "--max-new-tokens", 40
    )
    assert code == 0
    assert re.search(r"equal to plain decoding · steps \d+ vs 39 · seconds", err)


def test_tokens_of_a_step_share_a_colour(model, llm):
    options = {"max_new_tokens": 30, "ignore_eos": True, "drafter": {"rows": 64}}
    args = ("generate", model, "--prompt", PROMPT, "--ignore-eos", "--max-new-tokens", 30, "--rows", 64)
    _, out, _ = call(*args, "--color")
    assert ANSI.sub("", out) == llm.generate(PROMPT, **options).text + "\n"
    coloured = re.findall(r"(\x1b\[3\dm)(.*?)\x1b\[0m", out, re.DOTALL)
    pieces = [update.piece for update in llm.run([PROMPT], **options)]
    assert [piece for _, piece in coloured] == [piece for piece in pieces if piece]
    colours = [colour for colour, _ in coloured]
    assert len(set(colours)) > 1


def test_demo_streams_texts_and_prints_a_table(model, llm, tmp_path, monkeypatch):
    """A completion per prompt file, then a table without empty cells; before them, each drafter compiles."""
    for name, text in (("1-one", PROMPT), ("2-two", "hello\nyou")):
        (tmp_path / f"{name}.txt").write_text(text)
    options = ("--max-new-tokens", 12, "--dtype", "float32")
    order = []

    def record(name):
        method = getattr(lookahead.LLM, name)

        def recorded(self, *given, **keywords):
            order.append((name, keywords.get("drafter")))
            return method(self, *given, **keywords)

        return recorded

    with monkeypatch.context() as patched:
        for name in ("generate", "run"):
            patched.setattr(lookahead.LLM, name, record(name))
        code, out, err = call("demo", model, "--prompts", tmp_path, *options)
    assert code == 0, err
    names = ["generate", *["run"] * 2 * ROUNDS]
    assert order == [(name, drafter) for name in names for drafter in (None, lookahead.Plain())]
    texts = [
        llm.generate([{"role": "user", "content": t}], max_new_tokens=12).text for t in (PROMPT, "hello\nyou")
    ]
    assert f"1-one: def add(a, b):\n{texts[0]}\n" in out
    assert f"2-two: hello\n{texts[1]}\n" in out
    rows = [line.split() for line in out.splitlines() if line.endswith("yes")]
    assert [(row[0], len(row)) for row in rows] == [("1-one", 6), ("2-two", 6)]
    assert all(float(cell) > 0 for row in rows for cell in row[1:3])
    assert "Next: " in err.splitlines()[-1]
    assert "bench --workload" in err.splitlines()[-1]
    assert "ready after" in err
    refused("--prompts must be a folder of text files", "demo", model, "--prompts", tmp_path / "none")
    (tmp_path / ".hidden").write_text("")
    (tmp_path / "2-two.md").write_text("\n")
    refused("must not be empty, but 2-two.md is", "demo", model, "--prompts", tmp_path)


def test_demo_does_not_wait_for_a_count_that_other_programs_delay(model, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text(PROMPT)
    waited = []
    monkeypatch.setattr(base_files, "is_building", lambda: True)
    monkeypatch.setattr(base_files, "wait_for_tables", waited.append)
    code, _, err = call("demo", model, "--prompts", tmp_path, "--max-new-tokens", 4, "--dtype", "float32")
    assert (code, waited) == (0, [30.0])
    assert err.index("counting what follows") < err.index("other programs use the processor")


def test_demo_says_where_a_text_differs(model, tmp_path, accept_a_wrong_node, monkeypatch):
    drafting = lookahead.load(model, drafter=lookahead.Adaptive(rows=64))
    monkeypatch.setattr(sys.modules["lookahead.cli.demo"], "load_model", lambda load: drafting)
    (tmp_path / "p.txt").write_text(PROMPT)
    code, out, _ = call("demo", model, "--prompts", tmp_path, "--max-new-tokens", 40, "--dtype", "float32")
    assert code == 1
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("p  ")] == ["no"]


# ---------------------------------------------------------------- many prompts


def test_a_file_of_prompts_gives_a_json_line_each(model, llm, tmp_path):
    source = prompts(
        tmp_path / "in.jsonl",
        {"id": "a", "prompt": PROMPT},
        {"id": 2, "input_ids": [5, 6, 7, 5, 6]},
        "\n",
        {"id": [3], "messages": [{"role": "user", "content": "hi"}]},
        {"prompt": "x"},
    )
    out = tmp_path / "out.jsonl"
    code, stdout, _ = call("generate", model, "--input", source, "--output", out, "--max-new-tokens", 20)
    records = lines(out)
    assert (code, stdout) == (0, "")
    assert [r["id"] for r in records] == ["a", 2, [3], 5]
    given = [PROMPT, [5, 6, 7, 5, 6], [{"role": "user", "content": "hi"}], "x"]
    for record, prompt in zip(records, given, strict=True):
        assert set(record) == FIELDS
        plain = llm.generate(prompt, max_new_tokens=20, drafter="off")
        assert (record["output_ids"], record["text"]) == (plain.tokens, plain.text)
        assert record["new_tokens"] == len(plain.tokens)
        assert record["finish_reason"] == plain.finish_reason
        assert record["steps"] == llm.generate(prompt, max_new_tokens=20).stats.steps
        assert record["seconds"] > 0


def test_with_chat_a_text_is_a_message_of_the_user(model, llm, tmp_path):
    message = [{"role": "user", "content": "hi"}]
    words = ("--chat", "--max-new-tokens", 20)
    expected = llm.generate(message, max_new_tokens=20, drafter="off").tokens
    assert expected != llm.generate("hi", max_new_tokens=20, drafter="off").tokens
    _, out, _ = call("generate", model, "--prompt", "hi", "--json", *words)
    assert (json.loads(out)["prompt"], json.loads(out)["output_ids"]) == ("hi", expected)
    source = prompts(tmp_path / "in.jsonl", {"prompt": "hi"}, {"messages": message}, {"prompt": ""})
    code, out, _ = call("generate", model, "--input", source, *words)
    one, other, empty = map(json.loads, out.splitlines())
    assert code == 1
    assert one["output_ids"] == other["output_ids"] == expected
    assert one["prompt_hash"] == other["prompt_hash"]
    assert "must not be empty" in empty["error"]


def test_chat_needs_a_chat_template(tmp_path):
    refused("need a chat template", "generate", "tiny", "--prompt", "hi", "--chat")


def test_bad_lines_get_an_error_line_and_the_run_goes_on(model, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(
        b'\xef\xbb\xbf{"id": 1, "prompt": "x"}\n'
        b"not json\n"
        b'{"id": 3, "prompt": ""}\n'
        b'{"id": 4}\n'
        b'{"id": 5, "prompt": "x", "input_ids": [1]}\n'
        b'{"id": 6, "input_ids": "x"}\n'
        b'{"id": 7, "input_ids": [100000]}\n'
        b"[8]\n"
        b'{"id": 9, "prompt": "\xff"}\n'
        b'{"id": 10, "prompt": "\\ud800"}\n'
        b'{"id": 11, "prompt": "' + b"x" * 300 + b'"}\n'
        b'{"id": 12, "prompt": "y"}'
    )
    out = tmp_path / "out.jsonl"
    code, _, err = call("generate", model, "--input", source, "--output", out, "--max-new-tokens", 4)
    records = lines(out)
    assert code == 1
    assert [r["id"] for r in records] == [1, None, 3, 4, 5, 6, 7, None, None, 10, 11, 12]
    assert [r["id"] for r in records if "error" not in r] == [1, 12]
    assert all(r["line"] == i for i, r in enumerate(records, 1) if "error" in r)
    assert "12 prompts, 10 with an error" in err
    messages = {record["line"]: record.get("error", "") for record in records}
    assert messages[6] == 'line 6: "input_ids" must be a list, got a string'
    assert messages[8] == "line 8 must be a JSON object, got a list"


def test_several_at_once_give_the_same(model, tmp_path):
    source = prompts(tmp_path / "in.jsonl", *[{"id": i, "prompt": PROMPT[i:]} for i in range(7)])
    outputs = []
    for number, options in enumerate(([], ["--batch-size", 3], ["--drafter", "plain"])):
        out = tmp_path / f"{number}.jsonl"
        base = ("generate", model, "--input", source, "--output", out, "--max-new-tokens", 15)
        assert call(*base, "--temperature", 1, "--seed", 5, *options)[0] == 0
        outputs.append({r["id"]: (r["output_ids"], r["seed"]) for r in lines(out)})
    assert outputs[0] == outputs[1] == outputs[2]
    assert [seed for _, seed in outputs[0].values()] == list(range(5, 12))


def test_resume_drops_a_torn_line_and_gives_what_one_run_gives(model, tmp_path):
    source = prompts(
        tmp_path / "in.jsonl",
        *[{"id": "same", "prompt": PROMPT[i:]} for i in range(4)],
        "bad\n",
        {"prompt": "x"},
    )
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    base = ("generate", model, "--input", source, "--max-new-tokens", 10, "--temperature", 1, "--seed", 1)
    assert call(*base, "--output", whole)[0] == 1
    rows = whole.read_text().splitlines(keepends=True)
    for keep in (0, 2, 5, 6):
        out.write_text("".join(rows[:keep]) + '{"id": "same", "outp')
        code, _, err = call(*base, "--output", out, "--resume")
        assert code == 1
        records = sorted(lines(out), key=lambda record: record["line"])  # the error was tried again
        assert without_time(records) == without_time(lines(whole))
        assert keep == 0 or f"{keep - (keep > 4)} of 6 prompts have results" in err
    out.unlink()
    call(*base, "--output", out, "--resume")
    assert len(lines(out)) == 6


def test_resume_refuses_other_settings_by_name(model, tmp_path):
    source = prompts(tmp_path / "in.jsonl", {"id": 1, "prompt": PROMPT}, {"id": 2, "prompt": "x"})
    out = tmp_path / "out.jsonl"
    base = ("generate", model, "--input", source, "--output", out)
    assert call(*base, "--max-new-tokens", 5, "--temperature", 1, "--seed", 1)[0] == 0
    first = out.read_text().splitlines(keepends=True)[0]
    out.write_text(first)
    other = ("--max-new-tokens", 6, "--temperature", 1, "--stop", "z", "--resume")
    refused(
        r"--resume needs the settings of the earlier run: --max-new-tokens was 5 and is 6, --seed was 1 and is not "
        r"given, --stop was not given and is \['z'\]; use the same, or --mix-settings",
        *base,
        *other,
    )
    refused("--device was not given and is cpu, --max-new", *base, *other, "--device", "cpu")
    assert out.read_text() == first
    assert call(*base, *other, "--mix-settings")[0] == 0
    assert lines(out)[0]["new_tokens"] == 5
    assert len(lines(out)) == 2
    out.write_text(first)
    # Settings that affect no result may differ; from now on the latest run's settings apply.
    assert call(*base, *other, "--threads", 1)[0] == 0
    refused("--mix-settings needs --resume", *base, "--mix-settings")


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]"], ids=["torn", "not UTF-8", "a list"])
def test_resume_refuses_settings_that_cannot_be_read(content, tmp_path):
    source = prompts(tmp_path / "in.jsonl", {"id": 1, "prompt": "x"}, {"id": 2, "prompt": "y"})
    out = tmp_path / "out.jsonl"
    out.write_text('{"id": 1, "line": 1}\n')
    settings = tmp_path / "out.jsonl.settings.json"
    settings.write_bytes(content)
    command = ("generate", "tiny", "--input", source, "--output", out, "--resume")
    refused(
        r"out\.jsonl\.settings\.json must have the settings of the earlier run, but cannot be read \(.+\); ",
        *command,
    )
    assert settings.read_bytes() == content
    assert len(lines(out)) == 1
    assert call(*command, "--mix-settings")[0] == 0
    assert json.loads(settings.read_text())


def test_settings_that_cannot_be_written_are_said(tmp_path):
    source, out = prompts(tmp_path / "in.jsonl", {"id": 1, "prompt": "x"}), tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.settings.json").mkdir()
    command = ("generate", "tiny", "--input", source, "--output", out)
    refused(r"the settings of .*out\.jsonl cannot be written to .*\(.*Is a directory", *command)


def test_resume_refuses_a_result_of_another_prompt(model, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    base = ("generate", model, "--input", source, "--output", out, "--max-new-tokens", 3)
    a, b, c = ({"prompt": text} for text in ("a b", "b c", "c d"))
    prompts(source, a, b)
    assert call(*base)[0] == 0
    for changed in ((a, c), (c, a, b), (b,)):  # edited, inserted, removed
        prompts(source, *changed)
        refused(r"another prompt with id \d \(line \d\) .*; give every prompt a unique id", *base, "--resume")
    prompts(source, a, b, c)
    assert call(*base, "--resume")[0] == 0
    assert [record["id"] for record in lines(out)] == [1, 2, 3]
    # Records of earlier versions have no hash, and are compared as before.
    old = [{name: value for name, value in record.items() if name != "prompt_hash"} for record in lines(out)]
    out.write_text("".join(json.dumps(record) + "\n" for record in old))
    prompts(source, a, c)
    assert call(*base, "--resume")[0] == 0
    assert lines(out) == old
    # With ids, prompts may move, but not change.
    a, b, c = ({"id": name, "prompt": f"{name} x"} for name in "abc")
    prompts(source, a, b)
    assert call(*base, "--overwrite")[0] == 0
    prompts(source, c, b, a)
    assert call(*base, "--resume")[0] == 0
    assert [record["id"] for record in lines(out)] == ["a", "b", "c"]
    prompts(source, c, b | {"prompt": "z"}, a)
    refused('another prompt with id "b"', *base, "--resume")


def test_results_are_not_overwritten_unasked(model, tmp_path):
    source = prompts(tmp_path / "in.jsonl", {"id": 1, "prompt": "x"})
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    base = ("generate", model, "--input", source, "--output", out, "--max-new-tokens", 3)
    refused("already has results; give --resume .* or --overwrite", *base)
    refused("line 1 of .* is not a record", *base, "--resume")
    assert out.read_text() == "precious\n"
    assert call(*base, "--overwrite")[0] == 0
    assert [r["id"] for r in lines(out)] == [1]


def test_batch_to_stdout_with_compare(model, tmp_path):
    source = prompts(tmp_path / "in.jsonl", {"id": 1, "prompt": PROMPT}, {"id": 2, "prompt": "y"})
    code, out, err = call("generate", model, "--input", source, "--compare", "--max-new-tokens", 12)
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(r["id"], r["equal"], r["plain_steps"]) for r in records] == [
        (r["id"], True, r["new_tokens"] - 1) for r in records
    ]
    assert "2 of 2 equal to plain decoding" in err


def test_a_file_with_texts_that_differ_is_reported_in_red(model, tmp_path, accept_a_wrong_node, monkeypatch):
    notes = []
    monkeypatch.setattr(sys.modules["lookahead.cli.batch"], "note", lambda *given: notes.append(given))
    source = prompts(tmp_path / "in.jsonl", {"id": 1, "prompt": PROMPT})
    words = ("--ignore-eos", "--compare", "--drafter", "5,4,7")
    assert call("generate", model, "--input", source, *words)[0] == 1
    assert ("0 of 1 equal to plain decoding", "red") in notes


def test_an_input_without_prompts(model, tmp_path):
    source = prompts(tmp_path / "in.jsonl", "\n")
    code, _, err = call("generate", model, "--input", source, "--output", tmp_path / "out.jsonl")
    assert code == 0
    assert "has no prompts" in err
    assert (tmp_path / "out.jsonl").read_text() == ""


def test_an_interrupt_leaves_whole_lines_and_resume_goes_on(model, tmp_path):
    source = prompts(tmp_path / "in.jsonl", *[{"id": i, "prompt": PROMPT[i % 20 :]} for i in range(400)])
    out, said = tmp_path / "out.jsonl", tmp_path / "said"
    command = [
        "generate",
        model,
        "--input",
        str(source),
        "--output",
        str(out),
        "--max-new-tokens",
        "60",
        "--ignore-eos",
    ]
    process = Command(command, stderr=said)
    while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") >= 1):
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    stderr = (process.wait(), said.read_text())[1]
    assert process.returncode == 130, stderr
    done = lines(out)
    assert 1 <= len(done) < 400
    assert out.read_bytes().endswith(b"\n")
    vocabulary, line = stderr.strip().splitlines()
    assert vocabulary.startswith("note: a base table needs a vocabulary")
    assert f"interrupted: {len(done)} of 400 prompts have results in {out}" in line
    # Resume with a shorter input to keep the test short.
    prompts(source, *[{"id": i, "prompt": PROMPT[i % 20 :]} for i in range(len(done) + 2)])
    assert call(*command, "--resume")[0] == 0
    assert lines(out)[: len(done)] == done
    assert [r["id"] for r in lines(out)] == list(range(len(done) + 2))


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ([], "got none; an argument without a name is the model, not the prompt"),
        (["--prompt", "x", "--prompt-file", "y"], "got --prompt and --prompt-file"),
        (["--prompt", ""], "must not be empty"),
        (["--prompt", "x", "--output", "y"], "--output needs --input"),
        (["--prompt", "x", "--resume"], "--resume needs --input"),
        (["--prompt", "x", "--batch-size", 2], "--batch-size needs --input"),
        (["--prompt", "x", "--overwrite"], "--overwrite needs --input or --trace, and neither is given"),
        (
            ["--prompt", "x", "--parallel-timeout", 5],
            "--parallel-timeout only applies under torchrun; omit it otherwise",
        ),
        (["--input", "x", "--output", "y", "--mix-settings"], "--mix-settings needs --resume"),
        (["--input", "x", "--resume"], "--resume needs --output"),
        (["--input", "x", "--output", "y", "--resume", "--overwrite"], "--resume and --overwrite"),
        (["--input", "x", "--color"], "--color and --input"),
        (["--input", "x", "--json"], "--json and --input"),
        (["--prompt", "x", "--json", "--color"], "--color and --json"),
        (["--prompt", "x", "--drafter", "5,5"], "W,N,G"),
        (
            ["--prompt", "x", "--drafter", "5,600,5"],
            "ngram_size must be a whole number between 2 and 512, got 600",
        ),
        (
            ["--prompt", "x", "--window-size", 0],
            "window_size must be a whole number between 1 and 512, got 0",
        ),
        (["--prompt", "x", "--guess-set-size", -1], "guess_set_size"),
        (["--prompt", "x", "--drafter", "poetry"], "drafter must be one of .* got 'poetry'"),
        (["--prompt", "x", "--drafter", "medusa"], "drafter must be one of lookahead"),
        (
            ["--prompt", "x", "--drafter", "plain", "--window-size", 5],
            "plain has no setting 'window_size'; it has none",
        ),
        (["--prompt", "x", "--drafter", "jacobi", "--ngram-size", 4], "jacobi has no setting 'ngram_size'"),
        (["--prompt", "x", "--max-rows", 5, "--drafter", "7b"], "lookahead has no setting 'max_rows'"),
        (
            ["--prompt", "x", "--drafter", "adaptive", "--guess-set-size", 4],
            "no setting 'guess_set_size'",
        ),
        (["--prompt", "x", "--max-rows", 0], "max_rows must be a whole number between 1 and 512, got 0"),
        (["--prompt", "x", "--sources", "suffix,stars"], "unknown sources stars; known are suffix"),
        (["--prompt", "x", "--drafter", "plain", "--compare"], "--compare"),
        (["--prompt", "x", "--max-new-tokens", 0], "max_new_tokens .* at least 1, got 0"),
        (["--prompt", "x", "--max-new-tokens", -3], "got -3"),
        (["--prompt", "x", "--max-new-tokens", "many"], "--max-new-tokens.*valid integer"),
        (["--prompt", "x", "--top-p", 0.5], "top_p needs a temperature above 0"),
        (["--prompt", "x", "--temperature", -1], "temperature"),
        (["--prompt", "x", "--stop", ""], "stop must be a non-empty string"),
        (["--prompt", "x", "--dtype", "int3"], "dtype must be auto"),
        (["--prompt", "x", "--device", "quantum"], "device must be"),
        (["--prompt", "x", "--threads", 0], "threads must be a whole number of at least 1"),
        (["--prompt", "x" * 300], "context of 256 tokens, got 300"),
        (["--prompt", "x", "--bogus"], "--bogus"),
        (["--prompt-file", "/no/such/file"], "--prompt-file must be a readable file"),
        (["--input", "/no/such/file"], "--input must be a readable file"),
    ],
    ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, list) else "",
)
def test_wrong_options_are_one_red_line(model, options, match):
    refused(match, "generate", model, *options)


def test_mistakes_with_files(model, tmp_path):
    binary = tmp_path / "latin1.txt"
    binary.write_bytes("für".encode("latin-1"))
    refused("must be UTF-8 text; .* is not", "generate", model, "--prompt-file", binary)
    source = prompts(tmp_path / "in.jsonl", {"id": 1, "prompt": "x"})
    base = ("generate", model, "--input", source)
    refused("must be two files", *base, "--output", source, "--overwrite")
    refused("a folder that exists", *base, "--output", tmp_path / "no" / "out")
    refused("must be a file, got the folder", *base, "--output", tmp_path)
    refused("--batch-size must be at least 1", *base, "--batch-size", 0)
    assert len(lines(source)) == 1


def test_unusable_models_are_refused_in_one_line(tmp_path):
    ask = ("--prompt", "x")
    refused("a directory that exists", "generate", tmp_path / "none", *ask)
    refused("has no config.json", "generate", tmp_path, *ask)
    folder = save(tmp_path / "m")
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:999])
    refused("complete safetensors files", "generate", folder, *ask)
    weights.unlink()
    refused("has no weights", "generate", folder, *ask)
    weights.write_bytes(data)
    for path in folder.glob("token*"):
        path.unlink()
    refused("has no tokenizer files", "generate", folder, *ask)
    for command in ("verify", "doctor", "chat"):
        refused("a directory that exists", command, tmp_path / "none")
    refused("a model must be a directory that exists.* too long", "doctor", "x" * 300)
    refused("a model must be a directory that exists", "doctor", "a\0b")


def test_nan_is_status_1_and_what_was_shown_stays(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save(tmp_path)
    first = lookahead.load(folder).generate("x", max_new_tokens=1, ignore_eos=True)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][first.tokens[0]] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    code, out, err = call("generate", folder, "--prompt", "x", "--ignore-eos")
    assert code == 1
    assert out.strip("\n") == first.text.strip("\n")
    assert err.startswith("error: ")
    assert "NaN" in err


def test_a_model_without_trees_says_so_in_one_line(tmp_path):
    tiny_model("mamba").save_pretrained(tmp_path)
    source = prompts(tmp_path / "in.jsonl", {"id": 1, "input_ids": [5, 6, 7]})
    code, out, err = call("generate", tmp_path, "--input", source, "--max-new-tokens", 5)
    record = json.loads(out)
    assert (code, record["steps"], record["rows"], record["text"]) == (0, 4, 4, "")
    assert sum("decoding one row per step" in line for line in err.splitlines()) == 1
    assert not any("Warning" in line for line in err.splitlines())


# ---------------------------------------------------------------- verify, doctor, chat, the rest


def test_verify(model):
    code, out, _ = call("verify", model, "--max-new-tokens", 16)
    assert code == 0
    assert "8 of 8 runs equal to plain decoding" in out
    code, out, _ = call("verify", model, "--max-new-tokens", 16, "--json", "--reference", "generate")
    report = json.loads(out)
    assert (code, report["equal"], report["runs"], report["dtype"]) == (0, 8, 8, "float32")
    assert report["tokens"] > 8


def test_verify_own_prompts(model):
    code, out, _ = call("verify", model, "--prompt", "x", "--prompt", PROMPT, "--max-new-tokens", 8, "--json")
    assert (code, json.loads(out)["runs"]) == (0, 2)
    code, out, _ = call("verify", model, "--prompt", "y", "--temperature", 1, "--max-new-tokens", 8)
    assert code == 0
    assert "1 of 1 runs equal" in out
    refused("--reference must be plain or generate", "verify", model, "--reference", "gpt")
    refused(
        "--reference generate is for greedy", "verify", model, "--reference", "generate", "--temperature", 1
    )


@pytest.mark.parametrize(
    ("dtype", "reference", "status"),
    [
        ("float32", "plain", 2),
        ("bfloat16", "plain", 2),
        ("float32", "generate", 2),
        ("bfloat16", "generate", 2),
    ],
)
def test_verify_finds_a_wrong_token(model, accept_a_wrong_node, dtype, reference, status):
    """The path promises bits that equal its own plain decoding; transformers rounds bfloat16 differently, but not by
    this much."""
    words = ("--prompt", PROMPT, "--dtype", dtype, "--reference", reference, "--json")
    code, out, _ = call("verify", model, *words)
    assert json.loads(out)["guarantee"] == BIT_EQUAL
    (run,) = json.loads(out)["prompts"]
    assert code == status
    assert run["equal"] is False
    assert run["first_divergence"] >= 1
    assert run["gap"] > 0


@pytest.mark.parametrize("fault", [False, True])
def test_verify_compares_rows_on_every_path(model, monkeypatch, fault):
    """On the compiled path no bit differs, unless a row is off by one bit in steps of eight and more rows."""
    equivalence = importlib.import_module("lookahead.equivalence")
    honest = equivalence.forward

    def off(target, trees, repeats=1):
        rows = honest(target, trees, repeats)
        if fault and target.path == "cpu" and len(rows) >= 8:
            rows[3].view("u4")[5] ^= 1
        return rows

    monkeypatch.setattr(equivalence, "forward", off)
    code, out, _ = call("verify", model, "--rows", "--dtype", "float32", "--json")
    paths = {path["path"]: path for path in json.loads(out)["paths"]}
    assert {"cpu", "transformers"} <= paths.keys()
    assert (code, paths["cpu"]["from_rows"]) == ((2, 8) if fault else (0, None))
    assert set(paths["cpu"]["differ"].values()) == ({0, 1} if fault else {0})
    assert list(paths["transformers"]["differ"]) == ["2", "3", "4", "8", "16", "32", "64"]
    if not fault:
        code, out, _ = call("verify", model, "--rows")
        assert code == 0
        assert "values of logits that differ" in out


def test_doctor_survives_a_package_without_a_name(tmp_path, monkeypatch):
    """An interrupted installation leaves a folder without metadata."""
    (tmp_path / "broken-1.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert sys.modules["lookahead.cli.doctor"].versions()["torch"]


def test_doctor_describes_machine_and_model(model):
    code, out, _ = call("doctor", model, "--json")
    report = json.loads(out)
    assert code == 0
    number = torch.__version__.partition("+")[0]  # PyPI's CUDA builds omit +cu130 from their metadata
    assert report["versions"]["torch"] in (torch.__version__, number)
    assert report["versions"]["huggingface-hub"]  # its metadata has an underscore
    assert report["machine"]["threads"] == torch.get_num_threads()
    assert (report["model"]["probe"], report["model"]["context"]) == ("tree", 256)
    assert report["model"]["path"] == lookahead.load(model).path
    assert report["weight_cache"]["in_use"]
    assert report["weight_cache"]["folder"].endswith("weights")
    seconds = report["seconds_of_a_start"]
    assert list(seconds)[-3:] == ["load the model", "first 8 tokens", "next 8 tokens"]
    assert seconds["load the model"] > 0
    code, out, _ = call("doctor", model)
    assert code == 0
    assert "probe reason" in out
    assert "seconds of a start" in out


def test_chat_keeps_the_conversation(model, llm):
    typed = "hello\n\n/stats\nmore\n/nonsense\n/help\n/reset\nhello\n/usr/bin is a folder\n/exit\nnot read\n"
    words = ("--max-new-tokens", 8, "--system", "s", "--temperature", 0)
    code, out, err = call("chat", model, *words, stdin=typed)
    system, first = {"role": "system", "content": "s"}, {"role": "user", "content": "hello"}

    def answer(*messages):
        return llm.generate([system, *messages], max_new_tokens=8).text

    one = answer(first)
    history = [first, {"role": "assistant", "content": one}]
    two = answer(*history, {"role": "user", "content": "more"})
    three = answer(*history, {"role": "user", "content": "/usr/bin is a folder"})
    assert (code, out) == (0, f"{one}\n{two}\n{one}\n{three}\n")
    assert "8 tokens, 7 of them in " in err
    assert "unknown command '/nonsense'" in err
    assert "the answer was cut after 8 tokens; /set max_new_tokens N and /again allow more" in err


def test_chat_changes_what_was_said_and_how_it_answers(model, llm, tmp_path):
    """/undo, /again, /set, /system, /save and /load."""
    file = tmp_path / "talk.json"
    typed = [
        *(
            "/undo",
            "/again",
            "hello",
            "/again",
            "more",
            "/undo",
            "/set max_new_tokens 4",
            "/again",
            f"/save {file}",
        ),
        *(
            "/set",
            "/set max_new_tokens none",
            "/set nonsense 1",
            "/reset",
            "/reset now",
            f"/load {file}",
            "more",
        ),
        *("/system s", "/reset", "hello", f"/load {tmp_path}", f"/load {tmp_path / 'none'}"),
    ]
    words = ("--max-new-tokens", 8, "--temperature", 0)
    code, out, err = call("chat", model, *words, stdin="\n".join(typed) + "\n")
    first, more = {"role": "user", "content": "hello"}, {"role": "user", "content": "more"}
    one, short = (llm.generate([first], max_new_tokens=n).text for n in (8, 4))
    two = llm.generate([first, {"role": "assistant", "content": one}, more], max_new_tokens=8).text
    three = llm.generate([first, {"role": "assistant", "content": short}, more], max_new_tokens=4).text
    four = llm.generate([{"role": "system", "content": "s"}, first], max_new_tokens=4).text
    assert (code, out) == (0, f"{one}\n{one}\n{two}\n{short}\n{three}\n{four}\n")
    assert json.loads(file.read_text()) == [first, {"role": "assistant", "content": short}]
    for said in (
        "there is nothing to remove",
        "there is no message to answer again",
        "removed: more",
        "/set takes NAME VALUE, got 'nothing'",
        "max_new_tokens must be a whole number of at least 1, got 'none'",
        "/set takes a name and a value; names are max_new_tokens, ",
        "/reset takes nothing, got 'now'",
        "/load must be a readable file, got ",
    ):
        assert said in " ".join(err.split()), said


def test_chat_samples_unless_told_otherwise(model, llm, monkeypatch):
    chat = sys.modules["lookahead.cli.chat"]
    sampled = llm.generate(
        [{"role": "user", "content": "hello"}],
        max_new_tokens=12,
        seed=3,
        temperature=0.7,
        top_p=0.95,
        repetition_penalty=1.1,
    ).text
    words = ("chat", model, "--max-new-tokens", 12, "--seed", 3)
    assert call(*words, stdin="hello\n")[:2] == (0, f"{sampled}\n")
    asked = []
    monkeypatch.setattr(
        chat, "Chat", lambda llm, system, options, more: asked.append(options) or SimpleNamespace(run=int)
    )
    for given, expected in (
        ((), (0.7, 0.95, 1.1)),
        (("--temperature", 0), (0, None, None)),
        (("--temperature", 1), (1, None, None)),
        (("--top-p", 0.5), (0.7, 0.5, None)),
    ):
        assert call("chat", model, *given)[0] == 0
        assert (asked[-1].temperature, asked[-1].top_p, asked[-1].repetition_penalty) == expected


@pytest.mark.parametrize(
    ("suggested", "expected", "said"),
    [
        ({"temperature": 0.5, "top_k": 9}, {"temperature": 0.5, "top_k": 9}, ""),
        ({"temperature": 0.0, "top_k": 9, "repetition_penalty": 1.3}, {"repetition_penalty": 1.3}, ""),
        (
            {"temperature": -1.0},
            {"temperature": 0.7, "top_p": 0.95, "repetition_penalty": 1.1},
            "temperature",
        ),
        ({"temperature": "\x1b[31m"}, {"temperature": 0.7}, "cannot be used (temperature"),
    ],
)
def test_chat_samples_as_the_model_suggests(suggested, expected, said, capsys):
    chat = sys.modules["lookahead.cli.chat"]
    llm = SimpleNamespace(model=SimpleNamespace(sampling=suggested), parameter_count=1)
    options = chat.with_suggested_sampling(Options(), llm)
    assert {name: getattr(options, name) for name in expected} == expected
    err = capsys.readouterr().err
    assert said in err
    assert bool(err) == bool(said)
    assert "\x1b[31m" not in err


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ("[", "is not JSON"),
        ("[1]", "messages of user and assistant in turn"),
        ('[{"role": "user", "content": "x"}]', "messages of user and assistant in turn"),
        ('[{"role": "user", "content": 1}, {"role": "assistant", "content": ""}]', "in turn"),
        ('{"a": 1}', "in turn"),
    ],
)
def test_chat_loads_only_conversations(model, tmp_path, messages, why):
    file = tmp_path / "talk.json"
    file.write_text(messages)
    code, out, err = call("chat", model, stdin=f"/load {file}\n")
    assert (code, out) == (0, "")
    assert why in " ".join(err.split())


@pytest.mark.parametrize(
    ("pieces", "said"),
    [([], "the message is not answered"), (["a"], "the partial answer stays in the conversation")],
)
def test_an_interrupted_answer_of_chat_stays_if_it_has_begun(pieces, said, capsys, llm):
    from lookahead.cli.chat import Chat
    from lookahead.options import Options

    class Interrupted:
        def say(self, line, **options):
            yield from pieces
            raise KeyboardInterrupt

    chat = Chat(llm, None, Options(), {})
    chat._conversation = Interrupted()
    chat._answer("hello")
    assert capsys.readouterr().err == f"interrupted; {said}\n"


def test_chat_without_a_template_continues_the_text(llm, toy_plain):
    code, out, err = call("chat", toy_plain, "--max-new-tokens", 6, "--temperature", 0, stdin="  x\ny\n")
    one = llm.generate("  x", max_new_tokens=6).text
    two = llm.generate(f"  x{one}\ny", max_new_tokens=6).text
    assert (code, out) == (0, f"{one}\n{two}\n")
    assert "no chat template" in err


def test_chat_needs_text_in_utf8(model, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda: b"caf\xe9".decode())
    code, _, err = call("chat", model)
    assert code == 2
    assert err.splitlines()[-1] == "error: the input must be UTF-8 text; convert it first"


def test_results_that_cannot_be_written_are_said_before_the_work(model, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["lookahead.cli.bench"], "_load", None)
    (tmp_path / "file").write_text("")
    for words in (("bench",), ("bench", "step-cost")):
        refused("--out .*file must be a writable folder", *words, model, "--out", tmp_path / "file")


def test_workloads_of_one_name_are_refused_before_the_work(model, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["lookahead.cli.bench"], "_load", None)
    files = []
    for name in ("a/test.jsonl", "b/test.jsonl", "c/stdlib.jsonl"):
        files.append(tmp_path / name)
        files[-1].parent.mkdir()
        files[-1].write_text('{"prompt": "x"}\n')
    for pair, name in ((files[:2], "test"), ((files[0], files[0]), "test"), (("stdlib", files[2]), "stdlib")):
        words = [word for file in pair for word in ("--workload", file)]
        refused(
            f"must have a different name, got '{name}' twice",
            "bench",
            model,
            *words,
            "--out",
            tmp_path / "out",
        )


def test_tune_needs_a_model_that_drafts(monkeypatch):
    probe = SimpleNamespace(drafts=False, reason="its state is recurrent")
    recurrent = SimpleNamespace(model=SimpleNamespace(probe=probe))
    monkeypatch.setattr(sys.modules["lookahead.cli.tune"], "load_model", lambda load, drafter: recurrent)
    refused(
        "this model decodes one row at a time, so there is nothing to tune: its state is recurrent$",
        "tune",
        "tiny",
    )


def test_chat_goes_on_after_a_prompt_that_is_too_long(model, llm):
    code, out, err = call(
        "chat", model, "--max-new-tokens", 4, "--temperature", 0, stdin="z" * 300 + "\nhello\n"
    )
    answer = llm.generate([{"role": "user", "content": "hello"}], max_new_tokens=4).text
    assert (code, out) == (0, f"{answer}\n")
    assert "error: the prompt must be shorter" in err


def test_help_and_version_exit_with_0():
    code, out, _ = call("--help")
    assert code == 0
    assert all(name in out for name in ("generate", "chat", "verify", "doctor"))
    assert call()[1] == out
    assert call("--version")[1] == f"lookahead {lookahead.__version__}\n"
    refused("nonsense", "nonsense")
    for command in ("generate", "chat", "verify", "doctor"):
        code, out, _ = call(command, "--help")
        assert code == 0
        assert "--dtype" in out


@pytest.mark.parametrize(
    "words", ["", "generate", "chat", "demo", "verify", "doctor", "tune", "serve", "bench", "bench step-cost"]
)
def test_help_shows_what_an_option_takes_in_words_and_nothing_for_a_flag(words):
    shown = CliRunner().invoke(app, [*words.split(), "--help"], env={"COLUMNS": "100"}).stdout
    options = re.findall(r"^│ --\S.*$", ANSI.sub("", shown), re.MULTILINE)
    assert options
    for line in options:
        assert not re.search(r"<\w+|BOOLEAN|INTEGER", line), line
    assert not re.search(r"^ \S.* {30,}\n \S", shown, re.MULTILINE), "a line ends early"


def test_serve_without_its_extra():
    """--help includes the pip command for the missing extra; without --help, the error message does."""
    code = (
        "import sys\nsys.modules['fastapi'] = None\nfrom lookahead.cli import app\n"
        "for words in (['--help'], []):\n"
        "    try:\n        app(['serve', *words])\n"
        "    except SystemExit as end:\n        print('status', end.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown, status, more = done.stdout.partition("status 0\n")
    assert (status, more) == ("status 0\n", "status 2\n"), done.stderr
    assert "serve [OPTIONS] [MODEL]" in shown
    for text in (shown, done.stderr):
        assert "pip install '.[serve]'" in " ".join(text.split())
    assert "(import of fastapi halted" in done.stderr  # a clash of versions would name both


def test_a_shell_completes_commands_and_options():
    def completed(words):
        asked = {"_LOOKAHEAD_COMPLETE": "complete_bash", "COMP_WORDS": f"lookahead {words}"}
        asked["COMP_CWORD"] = str(len(words.split()))
        return CliRunner().invoke(app, [], env=asked, prog_name="lookahead").stdout.split()

    assert completed("gen") == ["generate"]
    assert completed("generate --max-n") == ["--max-new-tokens"]


def test_a_field_of_the_options_is_an_option_of_the_commands():
    """A field declared in a dataclass appears in the help and reaches the command."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class More(Options):
        some_limit: int = option(3, "A limit of some kind.", metavar="LIMIT")

    @with_options(some_limit=5, without=("top_k",))
    def command(*, options: More, plain: bool = False) -> None:
        typer.echo(f"{options.some_limit} {options.keywords()} {plain}")

    own = typer.Typer()
    own.command(cls=HelpCommand)(command)
    short, text = (
        ANSI.sub("", CliRunner().invoke(own, [flag], env={"COLUMNS": "200"}).stdout)
        for flag in ("--help", "--help-all")
    )
    assert re.search(r"--some-limit +LIMIT +A limit of some kind. +\[default: 5\]", text)
    assert "--top-p" in text
    assert "--top-k" not in text
    assert "--temperature" in short
    assert re.search(r"--help-all +Show all options, including \d+ less common ones\.", text)
    assert "--some-limit" not in short
    assert CliRunner().invoke(own, []).stdout == "5 {'some_limit': 5} False\n"
    assert CliRunner().invoke(own, ["--some-limit", "3", "--seed", "2"]).stdout == "3 {'seed': 2} False\n"


def test_every_option_of_the_python_api_that_text_can_say_is_in_help_all():
    for command in ("generate", "chat", "verify"):
        text = ANSI.sub("", CliRunner().invoke(app, [command, "--help-all"], env={"COLUMNS": "400"}).stdout)
        for options in (Options, LoadOptions, DraftOptions):
            for field in dataclasses.fields(options):
                flag = f"--{field.name.replace('_', '-')} "
                offered = field.metadata["text"] and field.kw_only
                if command != "generate" and field.name == "parallel_timeout":
                    continue
                if command == "verify" and field.name == "rows":  # it has a flag of that name
                    continue
                assert (flag in text and field.metadata["help"] in text) == offered, flag


def test_the_help_of_generate_has_four_groups_and_twelve_options():
    def groups(flag):
        text = ANSI.sub("", CliRunner().invoke(app, ["generate", flag], env={"COLUMNS": "200"}).stdout)
        parts = re.findall(r"^╭─ (.*?) ─+╮\n(.*?)^╰", text, re.S | re.M)
        return {title: re.findall(r"^│ --(\S+)", body, re.M) for title, body in parts}

    short, whole = groups("--help"), groups("--help-all")
    assert (
        list(short)
        == list(whole)
        == [
            *("Arguments", "Prompt and output", "Generation", "Drafting", "Model and machine"),
        ]
    )
    assert sum(map(len, short.values())) == 12 + len(("--help", "--help-all"))
    assert "top-p" in short["Generation"]
    assert sum(map(len, whole.values())) > 50
    assert groups("--help") == short, "the help stays short after a long one"


def test_the_command_itself_in_a_process():
    """No traceback on an error, nor when the reader has closed the pipe."""
    command = [sys.executable, "-m", "lookahead", "generate"]
    wrong = subprocess.run([*command, "--prompt", "x", "--drafter", "1,2"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: ")
    assert wrong.stderr.count("\n") == 1
    reader, writer = os.pipe()
    os.close(reader)
    gone = subprocess.run([*command, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (1, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("words", "stdout"),
    [("--help", ">&-"), ("generate MODEL --prompt x --max-new-tokens 2", ">/dev/full")],
)
def test_an_output_that_cannot_be_written_is_one_line(words, stdout, tmp_path):
    model = tmp_path / "model.gguf"  # starts faster than a transformers model
    write_gguf(model, "llama", "Q4_0")
    command = f"{sys.executable} -m lookahead {words.replace('MODEL', str(model))} {stdout}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    other = re.compile("tokens/s|a base table needs a vocabulary")
    lines = [line for line in done.stderr.splitlines() if not other.search(line)]
    assert (done.returncode, len(lines)) == (2, 1), done.stderr
    assert lines[0].startswith("error: ")


def test_help_loads_no_torch():
    code = (
        "import sys, contextlib\nfrom lookahead.cli import main\nsys.argv = ['lookahead', 'generate', '--help']\n"
        "with contextlib.suppress(SystemExit):\n    main()\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch is asked for GPUs")
def test_a_gguf_file_is_decoded_without_needless_imports(tmp_path):
    """torch or transformers would add a second to the start, others tenths."""
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", "Q4_0")
    code = (
        "import contextlib, sys\nfrom lookahead.cli import main\n"
        f"sys.argv = ['lookahead', 'generate', {str(path)!r}, '--prompt', 'a', '--max-new-tokens', '4']\n"
        "with contextlib.suppress(SystemExit):\n    main()\n"
        "needless = {'torch', 'transformers', 'numba', 'scipy', 'matplotlib', 'asyncio', 'lookahead.cli.chat'}\n"
        "assert not needless & set(sys.modules) and 'lookahead.cpu.packed' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_results_are_replaced_only_once_the_model_is_loaded(model, tmp_path):
    source, out = prompts(tmp_path / "in.jsonl", {"id": 1, "prompt": "x"}), tmp_path / "out.jsonl"
    base = ("--input", source, "--output", out, "--max-new-tokens", 3)
    assert call("generate", model, *base)[0] == 0
    settings = tmp_path / "out.jsonl.settings.json"
    before = out.read_bytes(), settings.read_bytes()
    refused("a directory that exists", "generate", tmp_path / "typo", *base, "--seed", 3, "--overwrite")
    assert (out.read_bytes(), settings.read_bytes()) == before
    assert call("generate", model, *base, "--overwrite")[0] == 0
    assert len(lines(out)) == 1


def test_resume_tries_prompts_with_errors_again(model, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    base = ("generate", model, "--input", source, "--output", out, "--max-new-tokens", 3)
    prompts(source, {"id": "a", "prompt": "x"}, {"id": "b", "prompt": ""})
    assert call(*base)[0] == 1
    assert ["error" in record for record in lines(out)] == [False, True]
    prompts(source, {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"})
    code, _, err = call(*base, "--resume")
    assert code == 0
    assert "1 of 2 prompts have results; continuing with 1" in err
    assert [(record["id"], "error" in record) for record in lines(out)] == [("a", False), ("b", False)]


def test_resume_keeps_a_link_and_the_permissions_of_the_output(model, tmp_path):
    source = prompts(tmp_path / "in.jsonl", {"id": "a", "prompt": "x"}, {"id": "b", "prompt": ""})
    real, out = tmp_path / "real.jsonl", tmp_path / "out.jsonl"
    real.touch(0o600)
    out.symlink_to(real)
    base = ("generate", model, "--input", source, "--output", out, "--max-new-tokens", 3)
    for more in ((), ("--resume",)):
        assert call(*base, *more)[0] == 1
        assert out.is_symlink()
        assert real.stat().st_mode & 0o777 == 0o600
        assert len(lines(real)) == 2


def test_half_an_emoji_is_printed_escaped(model, tmp_path):
    source = prompts(tmp_path / "in.jsonl", '{"id": "\\ud83d", "prompt": "x"}\n')
    code, text, _ = call("generate", model, "--input", source, "--max-new-tokens", 3)
    assert code == 0
    assert json.loads(text)["id"] == "\ud83d"


def test_show_replaces_no_other_page(tmp_path):
    trace, page = tmp_path / "report.jsonl", tmp_path / "report.html"
    assert call("generate", "tiny", "--prompt", "x", "--max-new-tokens", 3, "--trace", trace)[0] == 0
    page.write_text("<h1>Quarterly report</h1>")
    refused("exists and is not a page of a trace", "show", trace, "--output", page)
    page.unlink()
    for _ in range(2):
        assert call("show", trace, "--output", page)[0] == 0


def test_the_reference_of_verify_has_no_penalties_of_the_checkpoint(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    settings = folder / "generation_config.json"
    content = json.loads(settings.read_text()) if settings.is_file() else {}
    settings.write_text(json.dumps(content | {"repetition_penalty": 1.9, "no_repeat_ngram_size": 2}))
    words = ("verify", folder, "--reference", "generate", "--max-new-tokens", 24, "--dtype", "float32")
    code, out, err = call(*words)
    assert code == 0, out + err


def test_a_log_gets_lines_of_progress(capsys, monkeypatch):
    monkeypatch.setattr(LongProgress, "LINES", -1)
    with progress() as show:
        show(3, 40, "stdlib/2, adaptive cold")
    assert capsys.readouterr().err == "3 of 40, now stdlib/2, adaptive cold\n"
