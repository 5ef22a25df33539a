"""``lookahead learn``: build a table that every command finds, interrupt the run and continue it."""

import json
import os
import re
import signal
import threading
import time

import pytest

import lookahead
from learned import save_table, small_disk
from lookahead.core import SettingsError
from lookahead.drafters import Adaptive, Plain
from lookahead.drafters.adaptive import base_files
from lookahead.drafters.adaptive.base_files import key_of, read_table, table_file
from lookahead.drafters.adaptive.sources.base_table import find_entry, open_table, order_of
from lookahead.learning import corpus, self_text, text_parts
from lookahead.learning.self_text import Writer
from lookahead.learning.table_learner import Goal, Learner
from lookahead.learning.text_parts import Folder
from test_cli import call, refused
from toy import VOCABULARY, save

NONE = (
    "none (a base table needs a vocabulary of at least 8000 tokens, this has 309); "
    "lookahead learn makes a better one"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def chats(toy_chat):
    return str(toy_chat)


def test_what_was_learned_is_found_and_changes_no_text():
    code, out, err = call("learn", "tiny", "--tokens", 3000, "--json")
    assert code == 0, err
    assert "no chat template, so it continues short openings" in err
    report = json.loads(out)
    llm = lookahead.load("tiny")
    used = read_table(key_of(llm.model), llm.vocabulary)
    assert report["file"] == str(table_file(key_of(llm.model))) == str(used.path)
    assert 2900 < report["tokens"] < 3500
    assert not report["interrupted"]
    prompts = ["def is_prime(n):\n", "class Stack:\n", "import os\n"]
    plain = llm.generate(prompts, max_new_tokens=60, drafter=Plain())
    drafted = llm.generate(prompts, max_new_tokens=60, drafter=Adaptive(rows=4))
    assert [text.tokens for text in drafted] == [text.tokens for text in plain]
    assert sum(text.stats.drafter["accepted_by_base"] for text in drafted) > 3
    without = llm.generate(prompts, max_new_tokens=60, drafter=Adaptive(rows=4, sources=("suffix", "logits")))
    assert sum(text.stats.drafter["accepted_by_base"] for text in without) == 0
    _, out, _ = call("doctor", "tiny", "--json")
    assert json.loads(out)["model"]["base_table"].startswith(report["file"])


def test_doctor_says_that_there_is_none(chats):
    _, out, _ = call("doctor", chats, "--json")
    assert json.loads(out)["model"]["base_table"] == NONE


@pytest.mark.filterwarnings("ignore:.*base table:UserWarning")
def test_doctor_names_a_damaged_table(chats):
    file = table_file(key_of(lookahead.load(chats).model))
    save_table(file, VOCABULARY, [[token, 7, 8, 9, token, 10] for token in range(3, 60)])
    file.write_bytes(file.read_bytes()[:-1])
    _, out, _ = call("doctor", chats, "--json")
    assert json.loads(out)["model"]["base_table"].startswith(f"none ({file} is not a usable base table: ")


def test_a_damaged_table_is_learned_again(chats):
    learned = table_file(key_of(lookahead.load(chats).model))
    learned.parent.mkdir(parents=True)
    learned.write_bytes(b"x" * 40)
    _, out, _ = call("doctor", chats, "--json")
    assert "learn it again" in json.loads(out)["model"]["base_table"]
    code, _, err = call("learn", chats, "--tokens", 900)
    assert code == 0, err
    assert open_table(learned).learned >= 900


def test_a_second_run_continues_the_first(chats, tmp_path):
    file = tmp_path / "table"
    assert call("learn", chats, "--tokens", 900, "--output", file)[0] == 0
    before = file.read_bytes()
    code, out, err = call("learn", chats, "--tokens", 1500, "--output", file)
    assert code == 0
    assert "tokens of earlier runs" in err
    assert f"saved to {file}" in out
    assert file.read_bytes() != before
    llm = lookahead.load(chats)
    with_table = llm.generate([5, 6, 7], max_new_tokens=30, drafter=Adaptive(rows=4, table=file))
    assert with_table.tokens == llm.generate([5, 6, 7], max_new_tokens=30, drafter=Plain()).tokens


def test_an_interruption_ends_the_writing_and_another_leaves_the_table_for_later(chats, monkeypatch):
    def interrupt(self, goal, progress):
        Writer(self._llm, self.folder, 4).write(lambda tokens, seconds: tokens > 800)
        raise KeyboardInterrupt

    def again(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Learner, "write", interrupt)
    code, out, err = call("learn", chats, "--minutes", 5, "--json")
    assert code == 0
    assert json.loads(out)["interrupted"]
    assert "interrupted: building the table from the text so far" in err
    kept = Learner(lookahead.load(chats)).folder.tokens
    monkeypatch.setattr(Learner, "build", again)
    code, out, err = call("learn", chats)
    assert code == 130
    assert out == ""
    assert "tokens are kept, and another run continues" in err
    assert Learner(lookahead.load(chats)).folder.tokens > kept


def test_a_part_is_saved_whole_when_it_is_interrupted(chats, tmp_path, monkeypatch):
    llm = lookahead.load(chats)
    writing = text_parts.np.savez_compressed

    def slow(*arguments, **arrays):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        writing(*arguments, **arrays)

    monkeypatch.setattr(text_parts.np, "savez_compressed", slow)
    with pytest.raises(KeyboardInterrupt):
        Writer(llm, Folder(tmp_path), 4).write(lambda tokens, seconds: tokens > 200)
    assert Folder(tmp_path).tokens > 200
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    thread = threading.Thread(target=Folder(tmp_path).save, args=(list(Folder(tmp_path).read()),))
    monkeypatch.setattr(text_parts.np, "savez_compressed", writing)
    thread.start()
    thread.join()
    assert len(Folder(tmp_path).parts()) == 2


def test_what_cannot_be_done_is_said_before_the_work(chats, tmp_path, monkeypatch):
    refused("the time to learn must be above 0, got -60 seconds", "learn", chats, "--minutes", -1)
    refused("the tokens to learn from must be at least 1, got 0", "learn", chats, "--tokens", 0)
    (tmp_path / "file").write_text("")
    refused("must be a writable folder", "learn", chats, "--output", tmp_path / "file" / "table")
    refused("--output must be a file, got the folder", "learn", chats, "--output", tmp_path)
    (tmp_path / "notes").write_text("mine")
    refused(
        "must not replace other files, .*notes is not a base table",
        "learn",
        chats,
        "--output",
        tmp_path / "notes",
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refused("must be a writable folder .*; set XDG_CACHE_HOME", "learn", chats)
    with pytest.raises(SettingsError, match="needs a limit in minutes or in tokens"):
        Goal()
    assert Goal(10.0, 1000).share(500, 100, 1.0) == pytest.approx(0.6)


def test_text_of_models_with_one_tokenizer_makes_one_table(chats, tmp_path):
    first = Learner(lookahead.load(chats))
    first.write(Goal(tokens=600), lambda *progress: None)
    other = tmp_path / "other"
    save(other, chat=True, seed=7, num_hidden_layers=1)
    second = Learner(lookahead.load(other))
    assert second.folder.path != first.folder.path
    second.write(Goal(tokens=300), lambda *progress: None)
    assert second.output == first.output
    assert second.build().learned > 800


def test_a_learned_table_counts_the_corpus_too(chats, tmp_path, monkeypatch):
    """The estimates begin with those of the corpus, because little text is held out."""
    monkeypatch.setattr(base_files, "SMALLEST_VOCABULARY", 300)
    monkeypatch.setattr(corpus, "texts", lambda: ["def add(a, b):\n    return a + b\n"] * 50)
    llm = lookahead.load(chats, drafter="plain")
    learner = Learner(llm)
    learner.write(Goal(tokens=600), lambda *progress: None)
    with_corpus = learner.build()
    trials = with_corpus.counts["greedy"][1]
    assert corpus.TRIALS <= trials.min() <= trials.max() <= 100
    monkeypatch.setattr(base_files, "SMALLEST_VOCABULARY", 8000)
    alone = Learner(llm).build()
    assert alone.counts["greedy"][1].min() == 0
    assert alone.learned == with_corpus.learned
    # Three tokens of the corpus have an entry of their own only if it is counted.
    text = "def add(a, b):\n    return a + b"
    before = llm.tokenizer(text, add_special_tokens=False).input_ids[-3:]
    orders = [order_of(table.trie, find_entry(table.trie, *before)) for table in (alone, with_corpus)]
    assert orders[0] < orders[1] == 2


def test_an_interrupt_during_a_save_stores_no_text_twice(chats, tmp_path, monkeypatch):
    writing = text_parts.np.savez_compressed
    saves = []

    def interrupted(*arguments, **arrays):
        saves.append(1)
        if len(saves) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        writing(*arguments, **arrays)

    monkeypatch.setattr(text_parts.np, "savez_compressed", interrupted)
    monkeypatch.setattr(self_text, "PART_SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        Writer(lookahead.load(chats), Folder(tmp_path), 4).write(lambda tokens, seconds: tokens > 2000)
    found = [(text.number, text.kind) for text in Folder(tmp_path).read()]
    assert len(found) == len(set(found)) > 0


def test_without_room_for_the_table_the_text_is_kept(tmp_path):
    file, size = tmp_path / "table", 60_000
    words = ("learn", "tiny", "--tokens", 900, "--output", file)
    with small_disk(size):
        code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert re.search("with free disk space .*; the text is kept, and the next run continues from it", err)
    assert list(tmp_path.glob("table*")) == []
    code, _, err = call(*words)
    assert code == 0
    assert "tokens of earlier runs" in err
    assert file.stat().st_size > size


def test_a_table_of_another_tokenizer_is_refused(chats, tmp_path):
    file = tmp_path / "table"
    call("learn", "tiny", "--tokens", 600, "--output", file)
    words = "generate", chats, "--prompt", "def add(", "--max-new-tokens", 4, "--table", file
    refused("a base table must be for .*, but .* is for", *words)


def test_a_damaged_corpus_is_found_before_text_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(base_files, "SMALLEST_VOCABULARY", 1000)
    monkeypatch.setattr(corpus, "CORPUS", tmp_path / "corpus.jsonl.xz")
    refused("corpus.jsonl.xz is damaged", "learn", "tiny", "--tokens", 600)
    assert not list(tmp_path.glob("**/self-text/**/*.*"))


@pytest.mark.filterwarnings("always:.*base table:UserWarning")
def test_a_command_reads_the_table_of_a_file(tmp_path):
    file, damaged = tmp_path / "table", tmp_path / "damaged"
    assert call("learn", "tiny", "--tokens", 3000, "--output", file)[0] == 0
    damaged.write_bytes(file.read_bytes()[:-1])
    words = (
        "generate",
        "tiny",
        "--prompt",
        "def is_prime(n):\n",
        "--rows",
        4,
        "--max-new-tokens",
        40,
        "--json",
    )
    found = {}
    for name, more in {
        "without": (),
        "given": ("--table", file),
        "as text": ("--drafter", f"adaptive:table={file}"),
    }.items():
        code, out, err = call(*words, *more)
        assert code == 0, err
        found[name] = json.loads(out), err
    assert len({answer["text"] for answer, _ in found.values()}) == 1
    steps = {name: answer["stats"]["steps"] for name, (answer, _) in found.items()}
    assert steps["given"] == steps["as text"] < steps["without"]
    refused("is not a usable base table", *words, "--table", damaged)
    refused("jacobi has no setting .table.", *words[:4], "--drafter", "jacobi", "--table", file)
