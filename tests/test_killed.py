"""``kill -9`` in the middle of ``learn`` and ``train-head``: files on disk are usable, and the next run continues."""

import os
import signal
from fnmatch import fnmatch
from pathlib import Path

import pytest

import lookahead
from lookahead.drafters.adaptive.base_files import key_of, read_table, table_file
from lookahead.drafters.adaptive.heads import own_head_file
from lookahead.drafters.adaptive.sources.head_file import load_head
from lookahead.learning.self_text import text_folder
from lookahead.learning.text_parts import Folder
from processes import _command, forks

TEXT = "part-*.npz"


def _run(arguments, environment, name, finished):
    """Run the command, and kill it when it is about to give a file of this name its content, or has just done so."""
    replace = os.replace

    def killing(source, destination):
        if not fnmatch(Path(destination).name, name):
            replace(source, destination)
            return
        if finished:
            replace(source, destination)
        else:
            os.truncate(source, Path(source).stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    os.replace = killing
    _command(arguments, os.devnull, environment["SAID"], environment, os.getcwd())


@pytest.mark.slow
@pytest.mark.parametrize("command", ["learn", "train-head"])
def test_a_command_killed_while_it_writes_any_file_continues(command, toy_chat, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = tmp_path / "said"
    monkeypatch.setenv("SAID", str(said))
    llm = lookahead.load(toy_chat)
    key, name = key_of(llm.model), llm.model.shape.name
    made = table_file(key) if command == "learn" else own_head_file(name)
    files = [TEXT, made.name] if command == "learn" else [TEXT, "part-*.npy", "checkpoint-*", made.name]
    more = [] if command == "learn" else ["--width", "64", "--epochs", "1"]
    arguments = [command, str(toy_chat), "--tokens", "3000", *more]

    def run(file, finished):
        process = forks().Process(
            target=_run, args=(arguments, dict(os.environ), file, finished), daemon=True
        )
        process.start()
        process.join(120)
        return process.exitcode

    tokens = 0
    for file in files:
        for finished in (False, True):
            assert run(file, finished) == -signal.SIGKILL, (file, finished, said.read_text())
            # Nothing that was complete is lost, and nothing else is found.
            texts = Folder(text_folder(llm.model))
            assert texts.tokens >= tokens
            tokens = texts.tokens
            assert (tokens > 0) == (file != TEXT or finished)
            assert made.exists() == (file == made.name and finished)
    assert run("", False) == 0, said.read_text()
    assert "Traceback" not in said.read_text()
    if command == "learn":
        assert read_table(key, llm.vocabulary).path == made
    else:
        assert load_head(made).about["tokens"] == tokens
