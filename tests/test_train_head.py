"""``lookahead train-head`` trains a head that every command finds, and resumes after interruptions."""

import errno
import json
import os
import signal
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch

import lookahead
from learned import small_disk
from lookahead.core import SettingsError
from lookahead.cpu.target import CpuTarget
from lookahead.drafters import Adaptive, Plain
from lookahead.drafters.adaptive.heads import find_head, own_head_file
from lookahead.drafters.adaptive.sources.head_file import HeadWeights, load_head
from lookahead.hf.model import HFModel
from lookahead.hf.paths import make_target
from lookahead.hf.target import TransformersTarget
from lookahead.hf.testing import tiny_model
from lookahead.learning import hidden_states, self_text, train_head
from lookahead.learning.head_data import Positions
from lookahead.learning.head_learner import HeadLearner
from lookahead.learning.hidden_states import collect, states_of
from lookahead.learning.table import MOST_TRIALS
from lookahead.learning.text_parts import Folder
from lookahead.learning.train_head import Training
from lookahead.learning.train_settings import TrainSettings
from lookahead.testing import FakeTarget
from serving import serving
from test_cli import call, refused

TOKENS = 3000
OPTIONS = ("train-head", "--tokens", TOKENS, "--width", 64, "--epochs", 2)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def chats(toy_chat):
    return str(toy_chat)


def command(model, *more):
    return call(OPTIONS[0], model, *OPTIONS[1:], *more)


def test_a_trained_head_is_found_and_changes_no_text(chats, monkeypatch):
    code, out, err = command(chats, "--json")
    assert code == 0, err
    report = json.loads(out)
    llm = lookahead.load(chats)
    assert report["file"] == str(own_head_file(llm.model.shape.name)) == str(find_head(llm.model.shape.name))
    assert TOKENS <= report["tokens"] < TOKENS + 500
    (first, second), settings = report["accuracy"], report["settings"]
    assert all(0 <= one <= two <= four <= eight <= 1 for one, two, four, eight in (first, second))
    assert settings["width"] == 64
    assert "the shortlist is limited to the vocabulary of 320 tokens (8192 requested)" in err
    assert "hidden states" in err
    monkeypatch.setattr(HeadWeights, "parameter_count", 0)
    drafters = Adaptive(rows=4, head="auto"), Adaptive(rows=8, head="auto", chain=True)
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        for prompts in (["def add("], ["def add(", "the quick", "für 東京"]):
            plain = llm.generate(prompts, max_new_tokens=40, drafter=Plain(), **options)
            for drafter in drafters:
                with_head = llm.generate(prompts, max_new_tokens=40, drafter=drafter, **options)
                assert [text.tokens for text in with_head] == [text.tokens for text in plain]
                assert all(text.stats.drafter["head_calls"] > 0 for text in with_head)
    # The same through the server.
    with serving(llm, drafter="adaptive:rows=4:head=auto:sources=base+") as served:
        for options in ({}, {"temperature": 0.8, "seed": 3}):
            plain = llm.generate("def add(", max_new_tokens=40, drafter=Plain(), **options)
            body = {"prompt": "def add(", "max_tokens": 40, "temperature": 0, **options}
            body["lookahead"] = {"stats": True}
            answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()
            (choice,) = answer["choices"]
            assert choice["text"] == plain.text
            # There is no base table, so the rows are the head's.
            assert choice["lookahead"]["stats"]["num_draft_tokens"] > 0


def test_an_interrupted_command_goes_on_twice_and_ends_with_the_same_head(chats, tmp_path, monkeypatch):
    # Otherwise each run chooses the dtype that is faster at that moment.
    monkeypatch.setattr(train_head, "fast_dtype", lambda device: torch.float32)
    assert command(chats, "--output", tmp_path / "whole")[0] == 0
    whole = load_head(tmp_path / "whole")
    # Keep the text, and delete hidden states and checkpoint.
    folder = HeadLearner(lookahead.load(chats), TOKENS, TrainSettings()).folder
    for file in folder.iterdir():
        file.unlink()
    kept = _interrupt_after(monkeypatch, hidden_states, "_save", 0)
    code, out, err = command(chats, "--output", tmp_path / "parts")
    assert (code, out) == (130, "")
    assert f"interrupted; progress is saved in {folder}, and the same command continues" in err
    monkeypatch.setattr(hidden_states, "_save", kept)
    train = Training._gradients
    _interrupt_after(monkeypatch, Training, "_gradients", 3)
    assert command(chats, "--output", tmp_path / "parts")[0] == 130
    monkeypatch.setattr(Training, "_gradients", train)
    assert not (tmp_path / "parts").exists()
    assert command(chats, "--output", tmp_path / "parts")[0] == 0
    parts = load_head(tmp_path / "parts")
    assert parts.about["steps"] == whole.about["steps"]
    for name in ("hidden_norm", "gate", "up", "down"):
        assert np.allclose(getattr(parts, name), getattr(whole, name), atol=1e-4)


def _interrupt_after(monkeypatch, owner, name, count):
    """Raise KeyboardInterrupt in call ``count`` of a function. Returns the original."""
    function, calls = getattr(owner, name), []

    def interrupted(*args):
        if len(calls) == count:
            raise KeyboardInterrupt
        calls.append(args)
        return function(*args)

    monkeypatch.setattr(owner, name, interrupted)
    return function


def test_a_head_learns_what_follows(chats):
    learner = HeadLearner(
        lookahead.load(chats), 2 * TOKENS, TrainSettings(width=64, epochs=8, shortlist=64, levels=3)
    )
    losses = []
    head = learner.run(lambda stage, done, total, left, loss: losses.append(loss))
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < losses[0]
    assert len(head.about["accuracy"]) == head.levels == 3
    assert len(head.shortlist) == 64
    hits, trials = head.counts["greedy"]
    assert (hits <= trials).all()
    assert trials.max() <= MOST_TRIALS
    assert trials[0].sum() > 0


@pytest.mark.parametrize("path", ["cpu", "transformers"])
@pytest.mark.parametrize("prompt", [[7], [7, 8, 9]])
def test_collected_states_are_those_of_the_model(path, prompt, monkeypatch):
    monkeypatch.setattr(hidden_states, "CHUNK", 4)
    model = tiny_model("llama")
    completion = [5, 9, 14, 5, 9, 11]
    found = states_of(make_target(model, path=path), 64, prompt, completion)
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0].numpy()
    expected = states[len(prompt) - 1 : -1].copy()
    if len(prompt) == 1:
        expected[0] = 0
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_damaged_states_are_computed_again_and_a_damaged_checkpoint_is_said(chats, monkeypatch):
    learner = HeadLearner(lookahead.load(chats), TOKENS, TrainSettings(width=64, epochs=1))
    learner.run()
    (states,) = learner.folder.glob("part-*.npy")
    before = states.read_bytes()
    states.write_bytes(before[:1000])
    collect(learner._target, 64, learner.texts.parts(), learner.folder)
    assert states.read_bytes() == before
    assert not list(learner.folder.glob("checkpoint*")), "the head is saved"
    _interrupt_after(monkeypatch, Training, "_gradients", 1)
    with pytest.raises(KeyboardInterrupt):
        learner.run()
    (checkpoint,) = learner.folder.glob("checkpoint-*.safetensors")
    checkpoint.write_bytes(b"x" * 40)
    with pytest.raises(SettingsError, match=rf"{checkpoint.name} is not a valid checkpoint .*; delete it"):
        learner.run()


class Constant(FakeTarget):
    """A target whose hidden states consist of one number."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, trees):
        found = super().forward(trees)
        for scores in found:
            scores.hidden = lambda node: np.full(4, self.number, np.float32)
        return found


@pytest.mark.parametrize("number", [7e4, -7e4, np.inf, np.nan])
def test_states_that_do_not_fit_in_float16_are_refused(number):
    target, text = Constant(number), ([7, 8, 9], [5, 9, 14])
    with pytest.raises(SettingsError, match="hidden states must be finite and below 65504 to fit in float16"):
        states_of(target, 4, *text)
    assert not target.committed  # the slot is free again
    assert (states_of(Constant(6e4), 4, *text) == 6e4).all()


def drawn_positions(texts=20, length=32, vocabulary=40, hidden=32):
    """Random positions, without files of text and states."""
    draw, count = np.random.default_rng(0), texts * length
    positions = object.__new__(Positions)
    positions.states = [draw.standard_normal((count, hidden)).astype(np.float16)]
    positions.firsts = np.array([0, count])
    positions.tokens = draw.integers(0, vocabulary, count)
    positions.ids = draw.integers(0, vocabulary, (count, 4))
    positions.probabilities = np.full((count, 4), 0.2, np.float32)
    positions.bounds = np.arange(0, count, length)[:, None] + [0, length]
    positions.held_out = np.arange(texts) == 0
    return positions


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path):
    def rows(tokens):
        return np.random.default_rng(1).standard_normal((len(tokens), 32)).astype(np.float32)

    settings = TrainSettings(shortlist=16, width=32, batch=16)
    training = Training(drawn_positions(), rows, rows, 40, settings, tmp_path)
    assert np.isfinite(training._gradients(training.starts[:1]))
    with torch.no_grad():
        training.network.log_scale.fill_(100.0)
    with pytest.raises(SettingsError, match="the loss must stay finite; a smaller --rate may help"):
        training.run()
    assert training.step == 0


def test_an_interrupt_during_an_update_is_delayed_to_its_end(tmp_path, monkeypatch):
    def rows(tokens):
        return np.random.default_rng(1).standard_normal((len(tokens), 32)).astype(np.float32)

    def started():
        return Training(drawn_positions(), rows, rows, 40, settings, tmp_path)

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)  # Python handles the signal here
        update(self)

    settings = TrainSettings(shortlist=16, width=32, batch=16)
    update = Training._update
    monkeypatch.setattr(Training, "_update", interrupted)
    training = started()
    with pytest.raises(KeyboardInterrupt):
        training.run()
    again = started()
    assert again.step == training.step == 1
    assert any(state["exp_avg"].any() for state in again._optimizer.state.values())


def test_other_settings_start_from_the_beginning_and_the_first_ones_continue(chats, monkeypatch):
    train = Training._gradients
    _interrupt_after(monkeypatch, Training, "_gradients", 3)
    assert command(chats)[0] == 130
    monkeypatch.setattr(Training, "_gradients", train)
    notes = []
    learner = HeadLearner(lookahead.load(chats), 10, TrainSettings(width=64, levels=1), note=notes.append)
    assert learner.run().about["steps"] > 0
    assert "training starts from the beginning; " in notes[-1]
    assert " keeps 1 checkpoint of other text or settings, which can be deleted" in notes[-1]
    assert notes[0].startswith(
        f"training on all {learner.texts.tokens:,} tokens of earlier runs, more than the 10"
    )
    steps = []
    monkeypatch.setattr(Training, "_gradients", lambda self, starts: steps.append(self.step) or 1.0)
    code, _, err = command(chats)
    assert code == 0
    assert steps[0] == 3
    assert "from the beginning" not in err


def test_what_cannot_be_done_is_said_before_the_work(chats, tmp_path, monkeypatch):
    refused("the tokens to learn from must be at least 1, got 0", "train-head", chats, "--tokens", 0)
    refused("width must be a multiple of 32, got 33", "train-head", chats, "--width", 33)
    refused("levels must be 1 to 8, got 9", "train-head", chats, "--levels", 9)
    (tmp_path / "file").write_text("")
    refused("must be a writable folder", *OPTIONS, chats, "--output", tmp_path / "file" / "head")
    refused("--output must be a file, got the folder", *OPTIONS, chats, "--output", tmp_path)
    (tmp_path / "notes").write_text("mine")
    refused(
        "--output must not replace other files, .*notes is not a light head",
        *OPTIONS,
        chats,
        "--output",
        tmp_path / "notes",
    )
    os.mkfifo(tmp_path / "pipe")  # not a device, which a broken check would replace
    refused("--output must be a file, got the device or pipe", *OPTIONS, chats, "--output", tmp_path / "pipe")
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patched:
        patched.setattr(hidden_states.shutil, "disk_usage", lambda path: usage(1 << 30, 0, 255 << 20))
        refused("need 256 MiB in .*, but its disk has 255 MiB free; request fewer tokens", *OPTIONS, chats)
    with pytest.raises(SettingsError, match=r"training needs more text: .* increase --tokens"):
        HeadLearner(lookahead.load(chats), 300, TrainSettings(width=64)).run()
    assert Folder(HeadLearner(lookahead.load(chats), 300, TrainSettings()).texts.path).tokens >= 300


def test_a_model_without_hidden_states_is_refused(chats, monkeypatch):
    monkeypatch.setattr(CpuTarget, "gives_hidden", False)
    refused("needs hidden states, which the path 'cpu' does not provide", *OPTIONS, chats)


def test_a_hidden_size_that_is_not_whole_blocks_is_refused():
    model = HFModel(tiny_model("llama", hidden_size=48))
    llm = SimpleNamespace(model=model, target=lambda: TransformersTarget)
    with pytest.raises(SettingsError, match="a hidden size that is a multiple of 32, but this model's is 48"):
        HeadLearner(llm, TOKENS, TrainSettings())


KEPT = "; what was saved before is kept, and the same command continues"


def test_without_room_for_hidden_states_the_text_is_kept(chats, monkeypatch):
    monkeypatch.setattr(self_text, "PART_SECONDS", 1e9)  # one part, whose states are larger than its text
    with small_disk(2 * 64 * TOKENS - 10_000):
        code, out, err = command(chats)
    assert (code, out) == (2, "")
    line = err.strip().splitlines()[-1]
    file = HeadLearner(lookahead.load(chats), TOKENS, TrainSettings()).folder / "part-000000.npy"
    assert line.startswith(f"error: {file} must be a writable file with free disk space (")
    assert line.endswith(KEPT)
    assert not [left for left in file.parent.iterdir() if left.name.startswith("part-")]
    code, _, err = command(chats)
    assert code == 0
    assert "tokens of earlier runs" in err


def test_without_room_for_the_head_the_training_is_kept(chats, tmp_path, monkeypatch):
    """From the command and from Python; the next run trains no further step."""
    output = tmp_path / "head"
    write = Path.write_bytes

    def full(path, content):
        if path.name.startswith("head."):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    expected = f"{output} must be a writable file with free disk space (No space left on device){KEPT}"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        code, out, err = command(chats, "--output", output)
        assert (code, out) == (2, "")
        assert err.strip().splitlines()[-1] == f"error: {expected}"
        _interrupt_after(patched, Training, "_gradients", 0)
        with pytest.raises(SettingsError) as error:
            HeadLearner(lookahead.load(chats), TOKENS, TrainSettings(width=64), output).run()
        assert str(error.value) == expected
        assert list(tmp_path.glob("head*")) == []
    _interrupt_after(monkeypatch, Training, "_gradients", 0)
    assert command(chats, "--output", output)[0] == 0
    assert load_head(output).about["steps"] > 0


def test_a_model_without_chat_template(toy_plain):
    code, out, err = command(str(toy_plain))
    assert code == 0, err
    assert "no chat template, so it continues short openings" in err
    assert "level 2: the next held-out token is among the top 1, 2, 4, 8 guesses in" in out
    assert "for further training and can be deleted" in err
