"""JSON lines to resume a run from: torn lines, repeated ids, a full disk; files that are replaced.

Killed processes: test_soak.py.
"""

import json
import os
import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save as save_arrays
from typer.testing import CliRunner

from lookahead import records
from lookahead.cli import app
from lookahead.core import SettingsError
from lookahead.drafters.adaptive.sources.base_table import open_table
from lookahead.drafters.adaptive.sources.head_file import load_head
from lookahead.records import RecordWriter, drop_torn_line, read_arrays, read_records, replacing

PROMPT = "def add(a, b):\n    return a + b\ndef add(a"


def read(path):
    return read_records(path, "id", "a test")


def test_a_record_is_a_line_and_a_torn_one_is_none(tmp_path):
    path = tmp_path / "records.jsonl"
    assert read(path) == []
    with RecordWriter(path) as writer:
        writer.write({"id": 1, "text": "für 東京\n"})
        writer.write({"id": 2, "text": "\ud800"})
        writer.write({"id": 3, "seconds": [float("nan"), float("inf"), 1.5]})
    assert path.read_bytes().count(b"\n") == 3
    assert read(path) == [
        {"id": 1, "text": "für 東京\n"},
        {"id": 2, "text": "\ud800"},
        {"id": 3, "seconds": [None, None, 1.5]},
    ]
    whole = path.read_bytes()
    for cut in range(1, len(whole) + 1):
        path.write_bytes(whole[:cut])
        finished = whole[:cut].count(b"\n")
        assert len(read(path)) == finished
        assert path.read_bytes() == whole[:cut]  # reading changes nothing
        with RecordWriter(path, append=True) as writer:
            writer.write({"id": "next"})
        assert [r["id"] for r in read(path)] == [*range(1, finished + 1), "next"]


def test_a_long_torn_line_is_found(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"id": 1}\n{"id": "' + b"x" * 200_000)
    drop_torn_line(path)
    assert path.read_bytes() == b'{"id": 1}\n'
    path.write_bytes(b'{"id": "' + b"x" * 200_000)
    drop_torn_line(path)
    assert path.read_bytes() == b""


def test_a_record_that_another_process_adds_meanwhile_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"id": 1}\n')
    read_bytes = Path.read_bytes

    def slowly(self):
        content = read_bytes(self)
        with open(path, "ab") as other:
            other.write(b'{"id": 2}\n')
        return content

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", slowly)
        drop_torn_line(path)
    assert path.read_bytes() == b'{"id": 1}\n{"id": 2}\n'


@pytest.mark.parametrize(
    "text", ["precious\n", "precious", '{"id": 1}\nprecious', '{"di": 1}\n', "[1]\n", "3\n"]
)
def test_a_file_of_something_else_is_refused_and_kept(text, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"line [12] of .*records\.jsonl is not a record of a test"):
        read(path)
    assert path.read_text() == text


def test_files_that_cannot_be_written(tmp_path):
    with pytest.raises(SettingsError, match="must be a writable file"):
        RecordWriter(tmp_path / "no" / "folder")
    with pytest.raises(SettingsError, match="must be a writable file"):
        RecordWriter(tmp_path, append=True)
    if os.path.exists("/dev/full"):
        with (
            RecordWriter("/dev/full", append=True) as writer,
            pytest.raises(SettingsError, match="No space left"),
        ):
            writer.write({"id": 1})


# ---------------------------------------------------------------- lookahead generate --input --resume


@pytest.fixture(scope="module")
def model(toy_plain):
    return str(toy_plain)


def write(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def results(path):
    """Input line -> its record, without times and what depends on them; fails if a line has two records."""
    found = {}
    for record in lines(path):
        assert record["line"] not in found, f"line {record['line']} has two results"
        found[record["line"]] = {
            key: value for key, value in record.items() if key not in ("seconds", "steps", "rows")
        }
    return found


def generate(*words):
    done = CliRunner().invoke(app, ["generate", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


ROWS = [
    {"id": "same", "prompt": PROMPT},
    {"id": "same", "prompt": "x"},
    {"id": None, "prompt": PROMPT[3:]},
    "not JSON\n",
    {"id": None, "prompt": "y"},
    {"id": "same", "prompt": PROMPT[7:]},
    {"prompt": "z"},
    {"id": 1, "prompt": PROMPT[2:]},
]


@pytest.mark.parametrize("size", [1, 3])
def test_resume_with_repeated_and_absent_ids_loses_and_doubles_nothing(size, model, tmp_path):
    source = write(tmp_path / "in.jsonl", ROWS)
    whole = tmp_path / "whole.jsonl"
    base = [model, "--input", source, "--batch-size", size, "--max-new-tokens", 12, "--ignore-eos"]
    base += ["--temperature", 1, "--seed", 3]
    assert generate(*base, "--output", whole).exit_code == 1  # one line is not JSON
    expected = results(whole)
    assert sorted(expected) == list(range(1, len(ROWS) + 1))
    written = whole.read_text().splitlines(keepends=True)
    chooser = random.Random(size)
    for keep in (1, 2, 4, 6):  # any of those in flight may finish first
        kept = chooser.sample(written, keep)
        out = tmp_path / f"{keep}.jsonl"
        out.write_text("".join(kept) + '{"id": "same", "outp')
        done = generate(*base, "--output", out, "--resume")
        assert done.exit_code == 1
        good = sum("error" not in json.loads(line) for line in kept)  # errors are tried again
        assert not good or f"{good} of {len(ROWS)} prompts have results" in done.stderr
        assert results(out) == expected


def test_resume_after_the_input_has_grown_at_its_beginning(model, tmp_path):
    rows = [{"id": f"p{i}", "prompt": PROMPT[i:]} for i in range(3)]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    base = (model, "--input", source, "--output", out, "--max-new-tokens", 4)
    assert generate(*base).exit_code == 0
    write(source, [{"id": "new", "prompt": "x"}, *rows])
    assert "3 of 4 prompts have results" in generate(*base, "--resume").stderr
    assert [r["id"] for r in lines(out)] == ["p0", "p1", "p2", "new"]


def test_records_that_name_no_line(model, tmp_path):
    """Outputs of earlier versions are matched by id if it is unique; repeated ids are refused."""
    source = write(tmp_path / "in.jsonl", [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"}])
    out = write(tmp_path / "out.jsonl", [{"id": "b", "output_ids": []}])
    base = (model, "--input", source, "--output", out, "--max-new-tokens", 4, "--resume")
    assert generate(*base).exit_code == 0
    assert [r["id"] for r in lines(out)] == ["b", "a"]
    write(source, [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}, {"id": "b", "prompt": "y"}])
    write(out, [{"id": "a", "output_ids": []}])
    refused = generate(*base)
    assert refused.exit_code == 2
    assert '--resume cannot tell which of the prompts with id "a" (lines 1, 2)' in " ".join(
        refused.stderr.split()
    )
    assert lines(out) == [{"id": "a", "output_ids": []}]


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_an_id_that_is_no_json(name, model, tmp_path):
    source = write(tmp_path / "in.jsonl", [f'{{"id": {name}, "prompt": "x"}}\n'])
    out = tmp_path / "out.jsonl"
    assert generate(model, "--input", source, "--output", out).exit_code == 1
    (record,) = lines(out)
    assert record["id"] is None
    assert f"{name} is not JSON" in record["error"]


def test_a_file_is_replaced_as_a_whole_or_kept(tmp_path):
    path = tmp_path / "state.npz"
    with replacing(path) as temporary:
        temporary.write_text("old")

    def interrupted():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["state.npz"]


class Runs:
    """A pickle that would run code if it were loaded."""

    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was loaded')",)


@pytest.mark.parametrize("kind", ["pickle", "folder", "pipe", "empty", "large", "cut", "deep", "other types"])
def test_files_of_the_cache_folder_that_are_not_arrays(kind, tmp_path):
    path = tmp_path / "file.safetensors"
    whole = save_arrays({"a": np.arange(100)}, {"format": "1"})
    header = b'{"a":' * 5000 + b"1" + b"}" * 5000
    content = {
        "pickle": pickle.dumps(Runs()),
        "empty": b"",
        "large": bytes(2000),
        "cut": whole[:-1],
        "deep": len(header).to_bytes(8, "little") + header,
        "other types": whole.replace(b'"I64"', b'"X64"'),
    }
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(content[kind])
    largest = 1000 if kind == "large" else 1 << 20
    with pytest.raises((ValueError, OSError)):
        read_arrays(path, largest)
    for use in (open_table, load_head):
        with pytest.raises(SettingsError) as error:
            use(path)
        assert "\n" not in str(error.value)


def test_arrays_are_those_that_were_saved(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(save_arrays({"a": np.arange(100)}, {"format": "1"}))
    about, arrays = read_arrays(path, 1 << 20)
    assert (about, arrays["a"].tolist()) == ({"format": "1"}, list(range(100)))


def test_no_decision_depends_on_the_wall_clock():
    """It may jump. Only dates that are shown may come from it."""
    shown = {"responses.py", "logs.py", "chat.py", "run.py"}  # of answers, log lines, templates and records
    source = Path(records.__file__).parent
    uses = re.compile(r"from time import (?:[^\n]*, )?time\b|\btime\.time\(|datetime\.now|utcnow")
    found = {path.name for path in source.rglob("*.py") if uses.search(path.read_text())}
    assert found <= shown, found - shown
