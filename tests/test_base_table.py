"""The base table: built from a model's own text, found by the last tokens, and validated when loaded."""

import errno
import json
import os
from collections import defaultdict

import numpy as np
import pytest

import lookahead
from lookahead.core import Request, SettingsError
from lookahead.drafters import Adaptive, Plain, as_drafter
from lookahead.drafters.adaptive import base_files, heads
from lookahead.drafters.adaptive.sources import base_table
from lookahead.drafters.adaptive.sources.base_table import ABSENT, NO_TRIE, STEP, open_table, save_table
from lookahead.learning import table as learned
from lookahead.learning.table import (
    LEAST,
    SHORTER,
    WIDTH,
    Places,
    build,
    count_kinds,
    joined,
    levels_in,
    levels_of,
    trie_of,
)
from lookahead.learning.text_parts import Text
from lookahead.sampling.processors import Temperature
from lookahead.testing import FakeTarget, assert_same_as_autoregressive, repetitive_text, run

V = 70_000  # needs more than 16 bits
COMMON = [3, 4, 5, 69_000, 69_001, 6]


def texts(count=30, seed=0, length=40):
    """Random texts over few tokens, with made-up distributions."""
    random = np.random.default_rng(seed)
    for number in range(count):
        ids = np.stack([random.permutation(COMMON)[:4] for _ in range(length)]).astype(np.int32)
        probabilities = random.dirichlet(np.ones(5), length)[:, :4]
        order = np.argsort(-probabilities, axis=1)
        ids, probabilities = np.take_along_axis(ids, order, 1), np.take_along_axis(probabilities, order, 1)
        prompt = random.choice(COMMON, random.integers(1, 6)).tolist()
        completion = [int(random.choice(row)) for row in ids]
        kind, temperature = 0, 0.8 * (number % 2)
        yield Text(
            number, kind, temperature, prompt, completion, ids, np.log(probabilities).astype(np.float16)
        )


def slow_entries(given):
    """context -> (count, token -> probability), computed naively with dictionaries."""
    sums, counts = defaultdict(lambda: defaultdict(float)), defaultdict(int)
    for text in given:
        whole = [*text.prompt, *text.completion]
        for place in range(len(text.completion)):
            at = len(text.prompt) + place
            if at < 3:
                continue
            for length in (1, 2, 3):
                context = tuple(whole[at - length : at])
                counts[context] += 1
                for token, log in zip(text.ids[place].tolist(), text.logprobs[place].tolist(), strict=True):
                    sums[context][token] += float(np.exp(np.float32(log)))
    entries = {}
    for context in sorted(counts, key=len):
        own, count = sums[context], counts[context]
        if len(context) > 1:
            for token, probability in best(entries[context[1:]][1], WIDTH).items():
                own[token] += SHORTER * probability
            entries[context] = count, {token: p / (count + SHORTER) for token, p in own.items()}
        else:
            entries[context] = count, {token: p / count for token, p in own.items()}
    return entries


def best(entry, width):
    return dict(sorted(entry.items(), key=lambda item: -item[1])[:width])


def read(trie, node):
    """token -> probability of a stored entry."""
    return {
        base_table.candidate(trie, node, i): float(np.exp(-STEP * int(trie.logs[node, i])))
        for i in range(trie.logs.shape[1])
        if trie.logs[node, i] != ABSENT
    }


@pytest.fixture(scope="module")
def given():
    return list(texts())


@pytest.fixture(scope="module")
def trie(given):
    return trie_of(levels_of([Places.of(given)], V), V)


def test_the_entry_is_that_of_the_longest_known_context(given, trie):
    entries = slow_entries(given)
    random = np.random.default_rng(1)
    found = {0: 0, 1: 0, 2: 0}
    for context in [
        *random.choice([*COMMON, 7], (300, 3)).tolist(),
        [69_999, 1, 3],
        [0, 0, 0],
        [-1, V, 2 * V],
    ]:
        known = [length for length in (3, 2, 1) if tuple(context[-length:]) in entries]
        node = base_table.find_entry(trie, *context)
        if not known:
            assert node == -1
            continue
        count, expected = entries[tuple(context[-known[0] :])]
        found[known[0] - 1] += 1
        assert base_table.order_of(trie, node) == known[0] - 1
        assert base_table.token_of(trie, node) == context[-1]
        assert trie.counts[node] == min(count, 255)
        stored = read(trie, node)
        assert stored == pytest.approx(
            {t: p for t, p in best(expected, WIDTH).items() if p >= LEAST}, rel=0.02
        )
    assert min(found.values()) > 0


def test_compiled_code_finds_the_same(trie):
    from numba import njit

    from lookahead.builder import register

    register()

    @njit
    def find(trie, before, previous, last):
        return base_table.find_entry(trie, before, previous, last)

    for context in np.random.default_rng(2).choice([*COMMON, 7, V, -1], (200, 3)).tolist():
        assert find(trie, *context) == base_table.find_entry(trie, *context)
        assert find(NO_TRIE, *context) == -1


def test_a_smaller_table_keeps_the_contexts_that_say_most(given, trie):
    levels = levels_of([Places.of(given)], V)
    smaller = trie_of(levels, V, 30)
    counts = [int((t.counts > 0).sum()) for t in (trie, smaller)]
    assert counts[0] > 60
    assert 20 <= counts[1] <= 40
    kept, left = [], []
    for order, level in enumerate(levels[1:], 1):
        for key, gain in zip(level.keys.tolist(), level.gains.tolist(), strict=True):
            digits = [key // V**i % V for i in (2, 1, 0)][-order - 1 :]
            node = base_table.find_entry(smaller, *[-1] * (2 - order), *digits)
            (kept if base_table.order_of(smaller, node) == order else left).append(gain)
    assert min(kept) >= max(left)


def test_hits_are_counted_on_texts_that_were_held_out(given):
    many = list(texts(200))
    trie, counts, learned = build(many, V)
    places = Places.of(many)
    assert learned == len(places)
    assert 0 < places.held_out.sum() < learned / 5
    for hits, trials in counts.values():
        assert trials.sum() > 100
        assert (hits <= trials).all()
        assert 0 < hits.sum() < trials.sum() / 2
    everything, _ = count_kinds(trie, places)["greedy"]
    assert everything.sum() > 0


def test_own_text_outweighs_a_corpus(given):
    """Three tokens that occur once in own text have an entry, and two occurrences in a corpus do not displace it."""
    context, own, common = [40_001, 40_002, 40_003], 40_004, 40_005
    best, odds = np.array([[own, 1, 2, 3]], np.int32), np.array([[0, -30, -30, -30]], np.float16)
    once = Text(0, 0, 0.0, context, [own], best, odds)
    for times, expected in ((2, own), (9, common)):
        known = Places.of_corpus([np.array([*context, common])] * times)
        trie = build([*given, once], V, corpus=known)[0]
        node = base_table.find_entry(trie, *context)
        assert base_table.order_of(trie, node) == 2
        assert base_table.candidate(trie, node, 0) == expected


@pytest.fixture
def saved(tmp_path, given):
    trie, counts, learned = build(given, V)
    file = tmp_path / "table.safetensors"
    save_table(file, trie, counts, V, "a key", learned)
    return file


def test_a_saved_table_is_the_same_and_read_only(saved, given):
    trie, counts, learned = build(given, V)
    table = open_table(saved)
    assert (table.vocabulary, table.tokenizer, table.learned) == (V, "a key", learned)
    for name, array in trie._asdict().items():
        assert np.array_equal(array, getattr(table.trie, name))
        assert not getattr(table.trie, name).flags.writeable
    for name, part in counts.items():
        assert np.allclose(part, table.counts[name])
    assert sum(table.contexts) == (trie.counts > 0).sum()
    assert open_table(saved) is table
    table.check(V)
    with pytest.raises(SettingsError, match=r"must have the model's vocabulary of 9 tokens, .* has 70000"):
        table.check(9)


def header_of(file):
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def rewrite(file, header, data):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def changed(file, name, change):
    """Change an array of a file."""
    header, data = header_of(file)
    begin, end = header[name]["data_offsets"]
    array = np.frombuffer(data[begin:end], base_table.ARRAYS[name]).reshape(header[name]["shape"]).copy()
    change(array)
    rewrite(file, header, data[:begin] + array.tobytes() + data[end:])


DAMAGES = {
    "roots out of order": ("roots", lambda a: a.__setitem__(np.flatnonzero(a >= 0)[:2], [1, 0])),
    "roots out of order ": ("roots", lambda a: a.__setitem__(0, 99)),
    "children out of order": ("children", lambda a: a.__setitem__(1, 1 << 30)),
    "children out of range": ("children", lambda a: a.__setitem__(0, -4)),
    "tokens out of order": ("low", lambda a: a.__setitem__(slice(None), 0)),
    "tokens out of order ": ("high", lambda a: a.__setitem__(-1, 200)),
    "a token out of range": ("ids_high", lambda a: a.__setitem__((0, 0), 200)),
    "probabilities out of order": ("logs", lambda a: a.__setitem__((0, 1), 0)),
    "an entry without tokens": ("logs", lambda a: a.__setitem__(0, ABSENT)),
    "hits above trials": ("greedy_hits", lambda a: a.__setitem__(0, 1e9)),
    "hits above trials ": ("sampled_trials", lambda a: a.__setitem__(0, np.nan)),
}


@pytest.mark.parametrize("says", DAMAGES)
def test_a_damaged_file_is_refused(saved, says):
    changed(saved, *DAMAGES[says])
    with pytest.raises(SettingsError, match=f"not a usable base table: {says.strip()}; learn it again"):
        open_table(saved)


@pytest.mark.parametrize("size", [0, 5000, None])
def test_a_table_whose_file_is_changed_in_place_stays_as_it_was(saved, size):
    """cp and rsync --inplace write into the file. A mapped file that becomes shorter would kill the process."""
    table = open_table(saved)
    before = {name: array.copy() for name, array in table.trie._asdict().items()}
    with saved.open("r+b") as file:
        file.write(b"\xff" * saved.stat().st_size)
        if size is not None:
            file.truncate(size)
    assert all(np.array_equal(array, before[name]) for name, array in table.trie._asdict().items())
    with pytest.raises(SettingsError, match="not a usable base table"):
        open_table(saved)


def test_other_files_are_refused_in_one_line(saved, tmp_path, monkeypatch):
    header, data = header_of(saved)

    def refusal():
        with pytest.raises(SettingsError) as caught:
            open_table(saved)
        assert "\n" not in str(caught.value)
        assert str(saved) in str(caught.value)
        return str(caught.value)

    whole = saved.read_bytes()
    for part in (b"", whole[:5], whole[: len(whole) // 2], whole[:-1], b"x" * 1000, whole + b"more"):
        saved.write_bytes(part)
        assert "is not a usable base table" in refusal()
    rewrite(saved, header | {"__metadata__": {"format": "0"}}, data)
    assert "its format is 0, but this version reads 1" in refusal()
    rewrite(saved, header | {"__metadata__": {"format": "1"}}, data)
    assert "is missing" in refusal()
    rewrite(saved, {name: entry for name, entry in header.items() if name != "logs"}, data)
    refusal()
    rewrite(saved, header | {"roots": header["roots"] | {"dtype": "F32"}}, data)
    assert "roots has the wrong type" in refusal()
    saved.write_bytes(whole)
    monkeypatch.setattr(base_table, "LARGEST_FILE", 100)
    assert "at most 100" in refusal()
    with pytest.raises(SettingsError, match=r"a base table must be a file, got .*missing \(No such file"):
        open_table(tmp_path / "missing")


def test_a_folder_that_cannot_be_written_is_said(tmp_path, given):
    trie, counts, learned = build(given, V)
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="must be a writable folder with free disk space"):
        save_table(tmp_path / "file" / "table", trie, counts, V, "a key", learned)


def test_without_text_there_is_no_table(tmp_path):
    for few in ([], list(texts(1))[:0], [text for text in texts(100) if text.number == 95]):
        with pytest.raises(SettingsError, match="a table needs more of the model's own text"):
            build(few, V)


def own_text(target, count=20, length=40):
    """A target's plain completions, as a model's own text."""
    for number in range(count):
        prompt = [number % 32, (7 * number + 3) % 32, (5 * number + 1) % 32]
        (sequence,) = run(target, [Request(prompt, Plain(), length)])
        ids = np.array(sequence.tokens, np.int32)[:, None]
        yield Text(number, 0, 0.0, prompt, sequence.tokens, ids, np.zeros((length, 1), np.float16))


@pytest.fixture(scope="module")
def own_table(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "table"
    save_table(file, *build(own_text(FakeTarget(32)), 32)[:2], 32, "fake", 800)
    return file


PROMPTS = [[31, 2, 5], [9], [4, 4, 4, 1]]


@pytest.mark.parametrize("rows", [2, 4, 64])
def test_texts_with_a_table_are_those_of_plain_decoding(own_table, rows):
    target, drafter = FakeTarget(32), Adaptive(rows=rows, table=own_table)
    with_table = assert_same_as_autoregressive(target, PROMPTS, drafter)
    assert sum(sequence.stats.drafter["accepted_by_base"] for sequence in with_table) > 20
    without = assert_same_as_autoregressive(target, PROMPTS, Adaptive(rows=rows))
    assert sum(s.stats.steps for s in with_table) < 0.9 * sum(s.stats.steps for s in without)


def test_the_comparison_finds_a_wrong_text(own_table, accept_a_wrong_node):
    other = FakeTarget(32, repetitive_text(32, seed=8))  # the best guess is wrong in some steps
    with pytest.raises(AssertionError):
        assert_same_as_autoregressive(other, PROMPTS, Adaptive(rows=64, table=own_table))


def test_sampled_texts_with_a_table_are_those_of_plain_decoding(own_table):
    from lookahead.hf.paths import make_target
    from lookahead.hf.testing import tiny_model
    from lookahead.sampling.choose import Chooser
    from lookahead.sampling.noise import SeededNoise

    model = tiny_model(vocab_size=32)
    tokens = []
    for drafter in (Plain(), Adaptive(rows=8, table=own_table)):
        requests = []
        for number, prompt in enumerate(PROMPTS):
            noise = SeededNoise(number, len(prompt), 32, 0.8)
            requests.append(
                Request(prompt, drafter, 30, Chooser(prompt, Temperature(0.8), noise), noise=noise)
            )
        tokens.append([sequence.tokens for sequence in run(make_target(model), requests)])
    assert tokens[0] == tokens[1]


def test_a_table_that_was_named_and_cannot_be_used_is_refused(saved, tmp_path):
    from lookahead.hf.testing import tiny_model

    llm = lookahead.LLM(tiny_model(vocab_size=32))
    for file, says in ((saved, "vocabulary of 32 tokens"), (tmp_path / "none", "must be a file")):
        drafter = Adaptive(rows=8, table=file)
        with pytest.raises(SettingsError, match=says):
            llm.generate([5, 6, 7], max_new_tokens=5, drafter=drafter)
        (sequence,) = run(FakeTarget(32), [Request([5, 6, 7], drafter, 5)])
        assert (type(sequence.error), says in str(sequence.error)) == (SettingsError, True)
    with pytest.raises(SettingsError, match="must be a file"):
        lookahead.load("tiny", drafter=drafter)


def test_a_text_names_the_table(own_table):
    drafter = as_drafter(f"adaptive:rows=4:table={own_table}")
    assert drafter == Adaptive(rows=4, table=own_table) == Adaptive(rows=4, table=str(own_table))
    assert as_drafter(str(drafter)) == drafter
    assert as_drafter({"table": str(own_table), "rows": 4}) == drafter
    for wrong in (3, ""):
        with pytest.raises(SettingsError, match="table must be the path of a base table or none"):
            Adaptive(table=wrong)
    with pytest.raises(SettingsError, match="table needs the source base, which sources leaves out"):
        Adaptive(table=own_table, sources=("suffix", "logits"))


def test_the_table_of_a_tokenizer_is_found_by_its_key(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert base_files.base_table_of(None, "a key", V) is None
    learned = base_files.table_file("a key")
    learned.parent.mkdir(parents=True)
    learned.write_bytes(saved.read_bytes())
    assert base_files.base_table_of(None, "a key", V).path == learned
    assert base_files.base_table_of(None, "", V) is None


def test_a_table_serves_models_with_more_unused_tokens_but_no_other_tokenizer(saved):
    table = open_table(saved)
    table.check(V + 64, "a key")
    for vocabulary, key, says in (
        (V, "other", "the model's tokenizer .other., but .* is for another .a key."),
        (V - 1, "a key", f"vocabulary of {V - 1} tokens"),
        (V + 64, "", f"vocabulary of {V + 64} tokens"),
    ):
        with pytest.raises(SettingsError, match=says):
            table.check(vocabulary, key)


def test_a_home_folder_that_is_not_accessible_has_no_files(monkeypatch):
    home, look = "/root/.cache", os.stat

    def refused(path, *more, **named):
        if os.fspath(path).startswith(home):
            raise PermissionError(errno.EACCES, "Permission denied")
        return look(path, *more, **named)

    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setattr(os, "stat", refused)
    assert base_files.base_table_of(None, "a key", V) is None
    assert heads.find_head("v96-h0-l0") is None


def test_a_damaged_table_is_not_used(saved, tmp_path, monkeypatch):
    base_files.warn_once.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = base_files.table_file("a key")
    file.parent.mkdir(parents=True)
    file.write_bytes(saved.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="drafting continues without a base table"):
        assert base_files.base_table_of(None, "a key", V) is None


def test_entries_of_a_wider_table_join_new_ones(monkeypatch):
    """Earlier versions saved eight tokens in an entry."""
    monkeypatch.setattr(learned, "WIDTH", 2 * WIDTH)
    wide = build(texts(200), V)[0]
    monkeypatch.undo()
    assert wide.logs.shape[1] == 2 * WIDTH
    assert (wide.logs[:, WIDTH] != ABSENT).any()
    own = levels_of([Places.of_corpus([np.array([7, 8, 9, 10, 11])])], V)
    trie = trie_of(joined(levels_in(wide, V), own), V)
    assert trie.logs.shape[1] == WIDTH
    for context in ((4, 3, 5), (5, 6, 69_000)):
        old, new = (base_table.find_entry(table, *context) for table in (wide, trie))
        assert old >= 0
        assert (wide.logs[old, :WIDTH] == trie.logs[new]).all()
    assert base_table.candidate(trie, base_table.find_entry(trie, 7, 8, 9), 0) == 10
