"""--remember: answers enter the table of their owner between requests, change no text, and can be forgotten."""

import json
import os
import stat
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

import lookahead
from learned import save_table
from lookahead.core import SettingsError
from lookahead.drafters import Adaptive, Plain
from lookahead.drafters.adaptive import base_files, remembered
from lookahead.drafters.adaptive.base_files import key_of, table_file
from lookahead.drafters.adaptive.remembered import Remembered, owner_of, remembering
from lookahead.drafters.adaptive.sources import base_table
from lookahead.hf.testing import tiny_model
from lookahead.learning import remembered as counting
from lookahead.learning.table import keys_of
from processes import forks
from serving import serving
from test_cli import call
from toy import VOCABULARY, save, tokenizer

PROMPTS = [[5, 9, 14, 5, 9], [7, 8, 9]]
NEW = 40
#: Nothing but the table proposes tokens.
DRAFTER = Adaptive(rows=4, sources=("base",))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty cache, in which tables are counted at once instead of in another process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remembered, "PAUSE", 0.0)
    monkeypatch.setattr(
        remembered, "run_in_background", lambda program: exec(program, {"os": SimpleNamespace(umask=int)})
    )
    base_files.warn_once.cache_clear()


@pytest.fixture
def llm():
    """A model whose tokenizer has a table of other text."""
    made = lookahead.LLM(tiny_model("llama", vocab_size=VOCABULARY, initializer_range=0.1), tokenizer())
    random = np.random.default_rng(0)
    save_table(table_file(key_of(made.model)), VOCABULARY, random.integers(3, VOCABULARY, (30, 30)).tolist())
    return made


def answers(llm, drafter):
    return [llm.generate(prompt, max_new_tokens=NEW, drafter=drafter) for prompt in PROMPTS]


def tokens(results):
    return [result.tokens for result in results]


def contexts(memory):
    """The contexts of three tokens in a table, as numbers."""
    table, _ = memory.table(VOCABULARY)
    return {
        tuple(np.unravel_index(key, (VOCABULARY,) * 3)) for key in keys_of(table.trie, VOCABULARY)[2].tolist()
    }


def test_remembered_answers_change_no_text_and_are_drafted(llm):
    plain = tokens(answers(llm, Plain()))
    drafter = remembering(DRAFTER, llm.model)
    assert str(drafter) == str(DRAFTER), "it drafts by the same settings"
    first, second = answers(llm, drafter), answers(llm, drafter)
    assert tokens(first) == tokens(second) == plain
    assert [result.stats.compression_ratio > 1.5 for result in (first[0], *second)] == [False, True, True]
    versions = [result.stats.drafter.get("remembered", 0) for result in (*first, *second)]
    assert versions[0] == 0, "nothing was remembered before the first request"
    assert 0 not in versions[1:]
    assert len(set(versions)) == len(versions), "each answer makes another table"


def test_broken_verification_of_remembered_answers_is_noticed(llm, accept_a_wrong_node):
    plain = tokens(answers(llm, Plain()))
    drafter = remembering(DRAFTER, llm.model)
    assert any(tokens(answers(llm, drafter)) != plain for _ in range(2))


def test_a_request_keeps_the_table_with_which_it_started(llm):
    drafter = remembering(DRAFTER, llm.model)
    answers(llm, drafter)
    before = drafter.remembered.table(VOCABULARY)[1]
    updates = llm.run([PROMPTS[0]], max_new_tokens=NEW, drafter=drafter)
    next(updates)
    drafter.remembered.add([1, 2, 3], [4, 5, 6, 7])
    assert drafter.remembered.table(VOCABULARY)[1] != before
    *_, last = updates
    assert last.result.stats.drafter["remembered"] == before


def test_only_the_owner_of_the_account_can_read_them(llm):
    answers(llm, remembering(DRAFTER, llm.model))
    assert stat.S_IMODE(remembered.folder().stat().st_mode) == 0o700
    assert stat.S_IMODE(Remembered("user", key_of(llm.model)).answers.stat().st_mode) == 0o600


def test_another_process_counts_them(llm, monkeypatch):
    monkeypatch.setattr(remembered, "run_in_background", base_files.run_in_background)
    drafter = remembering(DRAFTER, llm.model)
    drafter.remembered.add([1, 2, 3], [4, 5, 6])
    assert drafter.remembered._process.wait(240) == 0
    assert (2, 3, 4) in contexts(drafter.remembered)
    assert {stat.S_IMODE(file.stat().st_mode) for file in remembered.kept()} == {0o600}


def test_own_text_outweighs_the_table(llm):
    """The table of the tokenizer follows 5 with other tokens; the other contexts stay as they were."""
    memory = Remembered("user", key_of(llm.model))
    base = base_files.base_table_of(None, memory.key, VOCABULARY)
    memory.add([], [5, 6, 7, 8])
    table, _ = memory.table(VOCABULARY)
    find, candidate = base_table.find_entry, base_table.candidate
    assert candidate(table.trie, find(table.trie, 5, 6, 7), 0) == 8
    assert candidate(table.trie, find(table.trie, 0, 0, 7), 0) == 8
    for last in range(8, 60):
        old, new = find(base.trie, 0, 0, last), find(table.trie, 0, 0, last)
        assert [candidate(base.trie, old, i) for i in range(2)] == [
            candidate(table.trie, new, i) for i in range(2)
        ]


def test_the_oldest_go_when_the_room_is_full(llm, monkeypatch):
    monkeypatch.setattr(remembered, "MOST_BYTES", 2000)
    memory = Remembered("user", key_of(llm.model))
    for number in range(1000):
        monkeypatch.setattr(memory, "_started", float("inf"))  # count only once
        memory.add([], [1, number, 2, 3])
    found = [text.tolist()[1] for text in memory.texts()]
    assert found == list(range(1000 - len(found), 1000))
    assert 1000 <= sum(file.stat().st_size for file in remembered.kept()) <= 2050


def _append(number, folder):
    os.environ["XDG_CACHE_HOME"] = folder
    memory = Remembered("user", "key")
    memory._started = float("inf")
    for index in range(200):
        memory.add([], [number] * 3 + [index] * 100)


def test_two_processes_remember_at_once(monkeypatch):
    processes = [
        forks().Process(target=_append, args=(number, os.environ["XDG_CACHE_HOME"])) for number in (1, 2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    found = [text.tolist() for text in Remembered("user", "key").texts()]
    assert sorted((text[0], text[3]) for text in found) == [(n, i) for n in (1, 2) for i in range(200)]
    assert {len(text) for text in found} == {103}


def test_a_folder_that_cannot_be_written_is_one_line(llm):
    remembered.folder().parent.mkdir(parents=True, exist_ok=True)
    remembered.folder().write_text("not a folder")
    plain = tokens(answers(llm, Plain()))
    with pytest.warns(UserWarning, match="must be a writable folder to remember answers") as lines:
        assert tokens(answers(llm, remembering(DRAFTER, llm.model))) == plain
    assert len(lines) == 1


@pytest.mark.parametrize("content", [b"\xff\x00 1 2\n", b"99999999 1 2 3 4\n", b"1 x 2\n", b"\n\n"])
def test_damaged_answers_are_left_out(llm, content):
    drafter = remembering(DRAFTER, llm.model)
    remembered.make_folder()
    drafter.remembered.older.write_bytes(content)
    answers(llm, drafter)
    (first, second) = drafter.remembered.texts()
    assert len(first) == 3 + NEW
    assert len(second) == 3 + NEW
    assert drafter.remembered.table(VOCABULARY)[0] is not None


def test_a_damaged_table_is_left_out_until_the_next_answer(llm):
    plain = tokens(answers(llm, Plain()))
    drafter = remembering(DRAFTER, llm.model)
    answers(llm, drafter)
    drafter.remembered.file.write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="is not a usable base table"):
        found = answers(llm, drafter)
    assert tokens(found) == plain
    assert "remembered" not in found[0].stats.drafter
    assert "remembered" in found[1].stats.drafter


def test_nothing_is_counted_before_the_tokenizer_has_a_table(llm):
    drafter = remembering(DRAFTER, llm.model)
    own = table_file(drafter.remembered.key)
    own.rename(own.with_suffix(".later"))
    answers(llm, drafter)
    assert drafter.remembered.table(VOCABULARY) == (None, 0)
    own.with_suffix(".later").rename(own)
    counting.main("user", drafter.remembered.key)
    assert "remembered" in answers(llm, drafter)[0].stats.drafter


def test_owners_never_share_a_table(llm):
    key = key_of(llm.model)
    one, other = (Remembered(owner_of(given), key) for given in ("a key", "another key"))
    one.add([], [201, 202, 203, 204])
    other.add([], [211, 212, 213, 214])
    assert (201, 202, 203) in contexts(one)
    assert (201, 202, 203) not in contexts(other)
    assert (211, 212, 213) not in contexts(one)
    assert len({Remembered(owner, key).file for owner in ("user", owner_of(None), owner_of("a key"))}) == 3
    assert "a key" not in str(one.file), "the key is not in the name"


@pytest.mark.parametrize(
    "drafter",
    [Plain(), Adaptive(sources=("suffix",)), Adaptive(table="a file")],
    ids=["plain", "sources", "table"],
)
def test_drafters_without_the_tokenizers_table_cannot_remember(llm, drafter):
    with pytest.raises(SettingsError, match="remember needs the drafter adaptive with the source base"):
        remembering(drafter, llm.model)
    with pytest.raises(SettingsError, match="remember needs a model with a tokenizer"):
        remembering(DRAFTER, lookahead.LLM(tiny_model("llama")).model)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("toy"), chat=True, max_position_embeddings=256)


def test_commands_remember_show_and_forget(model, monkeypatch):
    key = key_of(lookahead.load(model).model)
    save_table(table_file(key), VOCABULARY, [[5, 6, 7, 8, 9] * 4] * 20)
    words = ("generate", model, "--prompt", "the cat", "--json", "--max-new-tokens", 20)
    plain = json.loads(call(*words)[1])
    assert not remembered.kept(), "off by default"
    first = json.loads(call(*words, "--remember")[1])
    monkeypatch.setenv("LOOKAHEAD_REMEMBER", "1")
    second = json.loads(call(*words)[1])
    assert plain["text"] == first["text"] == second["text"]
    assert second["stats"]["drafter"]["remembered"]
    assert call("chat", model, "--temperature", 0, "--max-new-tokens", 8, stdin="hello\n")[0] == 0
    assert len(list(Remembered("user", key).texts())) == 3
    report = json.loads(call("doctor", model, "--json")[1])["remembered"]
    assert report["files"] == [f"user-{key}.safetensors", f"user-{key}.txt"]
    assert json.loads(call("forget", "--json")[1])["removed"]
    assert not remembered.kept()
    assert "nothing was remembered" in call("forget")[2]


def test_a_server_remembers_for_its_key_until_it_forgets(model, caplog):
    llm = lookahead.load(model, dtype="float32")
    key = key_of(llm.model)
    save_table(table_file(key), VOCABULARY, [[5, 6, 7, 8, 9] * 4] * 20)
    body = {"prompt": "the cat", "max_tokens": 20, "temperature": 0, "lookahead": {"stats": True}}
    headers = {"Authorization": "Bearer secret"}

    def ask(url):
        reply = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).json()
        return reply["choices"][0]["text"], reply["choices"][0]["lookahead"]["stats"].get("remembered", 0)

    with serving(llm, api_key="secret", remember=True, drafter="adaptive:rows=4") as served:
        assert not remembered.kept(), "warming up is not remembered"
        (first, before), (second, after) = ask(served.url), ask(served.url)
        assert first == second == llm.generate("the cat", max_new_tokens=20, drafter=Plain()).text
        assert before == 0 != after
        assert {file.name.partition(".")[0] for file in remembered.kept()} == {f"{owner_of('secret')}-{key}"}
        assert remembered.forget()
        assert ask(served.url) == (first, 0), "the next request uses nothing of it"
        assert ask(served.url)[1] != 0, "and what follows is remembered again"
    assert first.strip()[:5] not in caplog.text
    assert "secret" not in caplog.text
