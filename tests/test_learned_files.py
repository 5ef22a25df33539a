"""Files of learning, without a model: text that processes share, damage, full disks."""

import errno
import fcntl
import os
import stat
import struct
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lookahead.cli import console
from lookahead.core import OutOfMemory, SettingsError
from lookahead.cpu.target import CpuTarget
from lookahead.drafters.adaptive.heads import make_head
from lookahead.drafters.adaptive.sources import base_table
from lookahead.drafters.adaptive.sources.base_table import BASE_AXES, NO_TRIE, save_table
from lookahead.drafters.adaptive.sources.head_file import HeadWeights
from lookahead.drafters.adaptive.sources.light_head import GREEDY_GUESSES
from lookahead.learning import table_learner, text_parts, train_head
from lookahead.learning.head_data import Positions
from lookahead.learning.openings import CODE_FRAMES, CODE_TASKS, FRAMES, OTHERS, SHARES, TOPICS, opening
from lookahead.learning.self_text import Writer
from lookahead.learning.table_learner import Goal, Learner
from lookahead.learning.text_parts import ANSWER, LOCK_FILE, OWN_ANSWER, REQUEST, Folder, Text
from lookahead.learning.train_head import Training
from lookahead.learning.train_settings import TrainSettings
from lookahead.model import HeadParts

HIDDEN = 32
#: A model without a chat template.
LLM = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None), tokenizer_error="")


def text(number=0, kind=ANSWER, temperature=0.0, length=8):
    tokens = [(number + i) % 16 for i in range(length)]
    ids = np.array([[token, 17] for token in tokens], np.int32)
    return Text(number, kind, temperature, [1, 2, 3], tokens, ids, np.full((length, 2), -1, np.float16))


def full(*given, **named):
    raise OSError(28, "No space left on device")


def spoil(file):
    """Make the first compressed byte of a zip archive one with which no compressed data begins."""
    content = bytearray(file.read_bytes())
    begin = 30 + int.from_bytes(content[26:28], "little") + int.from_bytes(content[28:30], "little")
    content[begin] = 0xFF
    file.write_bytes(content)


def test_one_process_at_a_time_writes_text(tmp_path):
    lock = os.open(tmp_path / LOCK_FILE, os.O_RDWR | os.O_CREAT)  # as another process
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(SettingsError, match=r"another process writes text to .*; wait for it to end"):
        Writer(LLM, Folder(tmp_path))
    fcntl.flock(lock, fcntl.LOCK_UN)
    first, second = Writer(LLM, Folder(tmp_path)), Writer(LLM, Folder(tmp_path))
    first.close()
    with pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second.close()
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(SettingsError, match="another process"):
        first.write(lambda tokens, seconds: True)
    os.close(lock)
    assert Folder(tmp_path).parts() == []


def test_a_file_system_that_cannot_lock_files_excludes_no_process(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    lock = os.open(tmp_path / LOCK_FILE, os.O_RDWR | os.O_CREAT)  # as another process
    fcntl.flock(lock, fcntl.LOCK_EX)
    monkeypatch.setattr(fcntl, "flock", flock)
    Writer(LLM, Folder(tmp_path)).close()
    os.close(lock)


def test_a_writer_continues_after_the_parts_of_another_process(tmp_path):
    folder = Folder(tmp_path)
    Folder(tmp_path).save([text(7)])
    Writer(LLM, folder)
    assert (folder.next_number, folder.tokens) == (8, 8)


def test_no_part_is_replaced(tmp_path, monkeypatch):
    """Not even one that was added while this one was compressed; nor do other names of parts matter."""
    (tmp_path / "part-old.npz").write_bytes(b"old")
    writing = np.savez_compressed

    def slow(*given, **named):
        (tmp_path / "part-000000.npz").write_bytes(b"of another process")
        writing(*given, **named)

    monkeypatch.setattr(text_parts.np, "savez_compressed", slow)
    Folder(tmp_path, scan=False).save([text(7)])
    assert (tmp_path / "part-000000.npz").read_bytes() == b"of another process"
    assert [each.number for each in text_parts.read_part(tmp_path / "part-000001.npz")] == [7]
    assert list(tmp_path.glob("*.tmp")) == []


def test_damage_inside_compressed_data_is_said(tmp_path):
    Folder(tmp_path).save([text()])
    (part,) = Folder(tmp_path).parts()
    spoil(part)
    with pytest.raises(
        SettingsError, match=r"part-000000.npz must be a part of a model's own text .*; delete it"
    ):
        Folder(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({1 << 40},)}}",
        "{'descr': '<i4,(', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '''",
        "-" * 9000 + "1",
        "{'descr': '<i4', 'fortran_order': False, 'shape': (2,)}\n" + "x" * 8,
    ],
    ids=["MemoryError", "SyntaxError", "TokenError", "MemoryError-in-the-parser", "TypeError"],
)
def test_a_malformed_header_is_one_line(header, tmp_path):
    file = tmp_path / "part-000000.npz"
    text, _, data = header.partition("\n")
    member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + data.encode()
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("format", "lengths"):
            archive.writestr(f"{name}.npy", member)
    with pytest.raises(SettingsError, match=r"part-000000.npz must be a part .*\(.+\); delete it"):
        Folder(tmp_path)


def test_a_template_that_rejects_or_drops_a_lone_user_turn_is_one_line(tmp_path):
    def reject(chat, tokenize):
        raise ValueError("a system turn must come first")

    def drop(chat, tokenize):
        parts = [part["text"] for turn in chat for part in turn["content"] if isinstance(part, dict)]
        return f"<user>{''.join(parts)}<assistant>"

    for template, message in (
        (reject, "rejects a chat of one user message: a system turn must come first"),
        (drop, "must repeat the text of a user message, and it gave '<user><assistant>'; its messages may"),
    ):
        tokenizer = SimpleNamespace(chat_template="x", apply_chat_template=template)
        with pytest.raises(SettingsError, match=message):
            Writer(SimpleNamespace(tokenizer=tokenizer), Folder(tmp_path))


class SmallEngine:
    """An engine in whose memory three sequences fit; of more, each step ends one."""

    waiting = 0

    def __init__(self, room):
        self.room = room
        self.sequences = []

    @property
    def running(self):
        return len(self.sequences)

    def step(self):
        if self.running <= self.room:
            return [SimpleNamespace(tokens=[1], result=None) for _ in self.sequences]
        error = OutOfMemory("too many")

        def checked():
            raise error

        result = SimpleNamespace(tokens=[], error=error, checked=checked)
        return [SimpleNamespace(tokens=[], result=result, sequence=self.sequences.pop())]

    def close(self):
        pass


def test_fewer_texts_are_written_together_if_they_do_not_fit_in_memory(tmp_path, monkeypatch):
    def add(self, engine, number):
        engine.sequences.append(SimpleNamespace(tokens=[], request=SimpleNamespace(tag=number)))

    monkeypatch.setattr(Writer, "_add", add)
    llm = SimpleNamespace(**vars(LLM), engine=lambda max_sequences, prefix_cache: SmallEngine(3))
    writer = Writer(llm, Folder(tmp_path), 8)
    assert writer.write(lambda tokens, seconds: tokens >= 30) == 30
    assert 1 <= writer.batch <= 3
    llm.engine = lambda max_sequences, prefix_cache: SmallEngine(0)
    with pytest.raises(OutOfMemory):
        writer.write(lambda tokens, seconds: False)


def kind_of(words):
    """The kind of an opening: code, other language, English, or else a sum."""
    kinds = {frame.format(task): "code" for frame in CODE_FRAMES for task in CODE_TASKS}
    kinds |= {
        frame.format(topic): "other" for frames, topics in OTHERS for frame in frames for topic in topics
    }
    kinds |= {frame.format(topic): "English" for frame in FRAMES for topic in TOPICS}
    return kinds.get(words, "sum")


def test_openings_that_are_used_are_of_all_kinds(tmp_path, monkeypatch):
    """With about the shares that they should have, greedy and sampled."""
    used = {0.0: [], 0.8: []}

    def submit(self, engine, job, prompt):
        if job.kind == ANSWER:
            used[job.temperature].append(prompt)

    monkeypatch.setattr(Writer, "_submit", submit)
    tokenizer = SimpleNamespace(chat_template=None)
    writer = Writer(SimpleNamespace(tokenizer=tokenizer), Folder(tmp_path))
    writer.llm.tokenizer = lambda *given, **named: SimpleNamespace(input_ids=[1])
    for number in range(4000):
        writer._add(None, number)
    shares = dict(zip(("code", "sum", "other"), (share / 10 for share in SHARES), strict=True))
    shares["English"] = 1 - sum(shares.values())
    kinds = {words: kind_of(words) for words in {*used[0.0], *used[0.8]}}
    for words in used.values():
        assert len(words) == 800
        found = Counter(kinds[each] for each in words)
        assert {kind: found[kind] / 800 for kind in shares} == pytest.approx(shares, abs=0.06)


def head_positions(tmp_path, texts, states=None):
    """The texts in one part, with their hidden states, random unless given."""
    Folder(tmp_path).save(list(texts))
    (part,) = Folder(tmp_path).parts()
    count = sum(len(each.completion) for each in text_parts.read_part(part))
    if states is None:
        states = np.random.default_rng(0).normal(size=(count, HIDDEN))
    np.save(tmp_path / "states.npy", states.astype(np.float16))
    return Positions([(part, tmp_path / "states.npy")])


def test_held_out_texts_are_of_all_kinds(tmp_path):
    """Texts numbered as ``Writer`` numbers them."""
    texts = []
    for number in range(1000):
        temperature = 0.8 if number % 2 else 0.0
        kinds = (ANSWER,) if number // 2 % 5 < 2 else (REQUEST, OWN_ANSWER)
        texts += [text(number, kind, 0.8 if kind == REQUEST else temperature, length=2) for kind in kinds]
    held_out = head_positions(tmp_path, texts).held_out
    out = [each for each, held in zip(texts, held_out, strict=True) if held]
    assert {each.kind for each in out} == {ANSWER, REQUEST, OWN_ANSWER}
    for kind in (ANSWER, OWN_ANSWER):
        assert {each.temperature for each in out if each.kind == kind} == {0.0, 0.8}
    assert {kind_of(opening(each.number)) for each in out if each.kind == ANSWER} == {
        "code",
        "sum",
        "other",
        "English",
    }


def training(tmp_path, positions):
    rows = np.random.default_rng(1).normal(size=(16, HIDDEN)).astype(np.float32)
    settings = TrainSettings(shortlist=16, width=32, levels=1, epochs=0.2, batch=8, run=4)
    return Training(
        positions, lambda tokens: rows[tokens], lambda tokens: rows[tokens], 18, settings, tmp_path
    )


def test_a_checkpoint_belongs_to_its_states_and_keeps_its_dtype(tmp_path, monkeypatch):
    """It is readable for others as far as the umask allows, and a full disk is one line."""
    positions = head_positions(tmp_path, [text(number) for number in range(40)])
    monkeypatch.setattr(train_head, "fast_dtype", lambda device: train_head.torch.float32)
    before = os.umask(0o022)
    try:
        first = training(tmp_path, positions)
        first.run()
    finally:
        os.umask(before)
    assert stat.S_IMODE(first.file.stat().st_mode) == 0o644
    monkeypatch.setattr(train_head, "fast_dtype", lambda device: train_head.torch.bfloat16)
    second = training(tmp_path, positions)
    assert (second.step, second._dtype, second.notes[1:]) == (first.steps, train_head.torch.float32, [])
    kept = first.file.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(
            SettingsError, match=r"must be a writable file with free disk space .*No space left"
        ):
            second._save()
    assert first.file.read_bytes() == kept
    assert list(tmp_path.glob("*.tmp")) == []
    other = training(tmp_path, head_positions(tmp_path / "other", [text(number) for number in range(60)]))
    assert other.step == 0
    assert f"from the beginning; {tmp_path} keeps 1 checkpoint of other text or settings" in other.notes[-1]
    other._save()
    assert first.file.read_bytes() == kept, "an interrupt at once must not replace the other's work"
    assert training(tmp_path, positions).notes[1:] == []


def head(kinds=GREEDY_GUESSES):
    counts = {name: (np.zeros((1, kinds), np.float32),) * 2 for name in ("greedy", "sampled")}
    parts = np.ones((2, HIDDEN)), np.zeros((2, 32, 2 * HIDDEN)), np.zeros((HIDDEN, 32))
    return HeadWeights(8, HIDDEN, np.arange(4), *parts[0], *parts[1], parts[2], 1.0, 1, counts)


def test_a_head_is_written_as_other_files_are(tmp_path, monkeypatch):
    before = os.umask(0o022)
    try:
        head().save(tmp_path / "head")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "head").stat().st_mode) == 0o644
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        head().save(tmp_path / "head")
    assert [file.name for file in tmp_path.iterdir()] == ["head"]


def test_a_head_with_other_buckets_is_refused():
    parts = HeadParts(8, HIDDEN, None, None)
    model = SimpleNamespace(head_parts=lambda: parts, description="a model")
    for kinds, name in ((GREEDY_GUESSES - 1, "greedy"), (GREEDY_GUESSES, "sampled")):
        with pytest.raises(
            SettingsError, match=rf"kinds of {name} guesses, but it has {kinds}; .* train one with"
        ):
            make_head(model, CpuTarget, head(kinds))


def test_a_table_that_no_reader_accepts_replaces_none(tmp_path, monkeypatch):
    sizes = dict(zip(("greedy", "sampled"), (int(np.prod(axes)) for axes in BASE_AXES), strict=True))
    counts = {name: (np.zeros(size),) * 2 for name, size in sizes.items()}
    file = tmp_path / "table"
    file.write_bytes(b"an older table")
    monkeypatch.setattr(base_table, "LARGEST_FILE", 1000)
    with pytest.raises(SettingsError, match="a base table must have at most 1000 bytes, but this one has"):
        save_table(file, NO_TRIE, counts, 8, "a model", 5)
    assert file.read_bytes() == b"an older table"


def test_the_contexts_of_a_table_are_limited(monkeypatch, tmp_path):
    """To as many as fit in the largest file with all of their parents, and a large vocabulary."""
    given = []
    monkeypatch.setattr(table_learner, "build", lambda *arguments: given.extend(arguments) or (None, {}, 0))
    for name in ("save_table", "open_table"):
        monkeypatch.setattr(table_learner, name, lambda *arguments: None)
    learner = object.__new__(Learner)
    learner.__dict__.update(
        folder=SimpleNamespace(path=tmp_path / "own"),
        output=None,
        _llm=SimpleNamespace(vocabulary=8, tokenizer=None),
        _key="",
        _corpus=None,
    )
    learner.build()
    assert 2 * 44 * given[2] + 4 * 1_000_000 < base_table.LARGEST_FILE


def test_the_time_left_counts_only_this_run():
    assert Goal(tokens=1000).left(900, 50, 10.0) == 10
    assert Goal(tokens=1000).left(900, 0, 1.0) is None
    assert Goal(60.0).left(900, 50, 10.0) == 50
    assert Goal(60.0, 1000).left(0, 500, 10.0) == 10
    assert Goal(60.0).left(0, 5, 61.0) == 0


def test_progress_without_a_terminal_is_a_line_from_time_to_time(monkeypatch):
    lines = []
    monkeypatch.setattr(console, "note", lines.append)
    with console.LongProgress() as progress:
        progress.show(0.25, "5 of 20", 90.0)
        progress.show(0.5, "text: 10 of 20", None, "text")
        progress.show(0.6, "text: 12 of 20", None, "text")
        progress.LINES = -1.0
        progress.show(1.5, "30 of 20", -1.0, "text")
    assert lines == ["text: 10 of 20, 50 %", "30 of 20, 100 %, 0.0 minutes left"]
