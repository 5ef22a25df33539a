"""A light head: its file, and its compiled and its torch form beside numpy."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from lookahead.core import SettingsError
from lookahead.models.head_file import HeadWeights, as_q8_0, from_q8_0, load_head
from lookahead.targets.cpu.compiled_head import MAX_ROWS, as_q4_0
from lookahead.targets.cpu.packed_model import quantize_model
from lookahead.targets.light_head import make_head, row_readers
from lookahead.targets.paths import make_target, probe
from lookahead.testing import tiny_model
from lookahead.threads import thread_count

VOCABULARY, HIDDEN, WIDTH = 96, 64, 96
RANDOM = np.random.default_rng(0)


def numbers(*shape, scale=1.0):
    return (RANDOM.standard_normal(shape) * scale).astype(np.float32)


def weights(shortlist=None, width=WIDTH, **changed):
    chosen = np.arange(3, VOCABULARY, 2, dtype=np.int32) if shortlist is None else shortlist
    fields = {
        "hidden_norm": 1 + numbers(HIDDEN, scale=0.1),
        "embedding_norm": 1 + numbers(HIDDEN, scale=0.1),
        "gate": numbers(width, 2 * HIDDEN, scale=0.1),
        "up": numbers(width, 2 * HIDDEN, scale=0.1),
        "down": numbers(HIDDEN, width, scale=0.1),
    }
    made = HeadWeights(VOCABULARY, HIDDEN, chosen, scale=0.7, levels=2, about={"tokens": 5}, **fields)
    return replace(made, **changed)


def reference(head, embeddings, output, states, tokens):
    """(next states, logits) in numpy."""

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

    z = np.concatenate([norm(states, head.hidden_norm), norm(embeddings, head.embedding_norm)], -1)
    gate, up = z @ head.gate.T, z @ head.up.T
    after = states + (gate / (1 + np.exp(-gate)) * up) @ head.down.T
    return after, head.scale * after @ output.T


@pytest.fixture(scope="module")
def models():
    model = tiny_model("llama")
    return {"packed": quantize_model(model, probe(model).facts, "q8_0"), "module": model}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "head.safetensors"
    weights().save(path)
    return path


def test_a_saved_head_is_the_same_up_to_rounding(file):
    RANDOM.bit_generator.state = np.random.default_rng(7).bit_generator.state
    made = weights()
    made.save(file)
    read = load_head(file)
    assert (read.vocabulary, read.hidden, read.width, read.levels, read.scale) == (96, 64, WIDTH, 2, 0.7)
    assert read.about == {"tokens": 5}
    assert (read.shortlist == made.shortlist).all()
    for name in ("hidden_norm", "embedding_norm", "gate", "up", "down"):
        error = np.abs(getattr(read, name) - getattr(made, name))
        assert error.max() < np.abs(getattr(made, name)).max() / 200
    assert not list(file.parent.glob("*.tmp"))


def test_blocks_of_zeros_and_of_large_numbers():
    rows = np.zeros((3, 64), np.float32)
    rows[1, 5], rows[2] = -3e4, np.linspace(-1, 1, 64)
    assert np.abs(from_q8_0(as_q8_0(rows)) - rows).max() < 3e4 / 200
    assert (from_q8_0(as_q8_0(rows))[0] == 0).all()


def damage(file, **changes):
    tensors = load_file(file)
    tensors.update(changes.pop("tensors", {}))
    meta = {"format": "lookahead light head 1", "about": "{}"}
    sizes = {"vocabulary": VOCABULARY, "hidden": HIDDEN, "levels": 2, "scale": 1.0}
    meta["numbers"] = json.dumps(sizes | changes.pop("numbers", {}))
    save_file(tensors, file, meta | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "another"}, "format"),
        ({"numbers": {"hidden": 96}}, "norm must be"),
        ({"numbers": {"hidden": 40}}, "multiples of 32"),
        ({"numbers": {"vocabulary": 50}}, "not ascending"),
        ({"numbers": {"levels": 99}}, "levels"),
        ({"numbers": {"scale": 0.0}}, "scale"),
        ({"numbers": {"scale": "x"}}, "scale"),
        ({"about": "[]"}, "report"),
        ({"tensors": {"down": np.zeros((3, 4), np.uint8)}}, "down must be"),
        ({"tensors": {"shortlist": np.array([5, 3], np.int32)}}, "not ascending"),
        ({"tensors": {"shortlist": np.zeros(0, np.int32)}}, "empty"),
        ({"tensors": {"hidden_norm": np.full(HIDDEN, np.nan, np.float32)}}, "finite"),
    ],
)
def test_a_damaged_file_is_said_in_one_line(file, changes, words):
    damage(file, **changes)
    with pytest.raises(SettingsError, match=words) as error:
        load_head(file)
    assert "\n" not in str(error.value)
    assert file.name in str(error.value)


def test_files_that_are_no_safetensors(tmp_path):
    for content in (b"", b"not a head", b"\xff" * 4096):
        path = tmp_path / "file"
        path.write_bytes(content)
        with pytest.raises(SettingsError, match="holds no light head"):
            load_head(path)
    with pytest.raises(SettingsError, match="must be a file"):
        load_head(tmp_path)


@pytest.mark.parametrize("kind", ["packed", "module"])
@pytest.mark.parametrize("rows", [1, 3, MAX_ROWS])
def test_the_compiled_head_computes_what_numpy_does(models, kind, rows):
    head, (embed, output) = weights(), row_readers(models[kind])
    compiled = make_head(models[kind], "cpu", head)
    states, tokens = numbers(rows, HIDDEN), RANDOM.integers(0, VOCABULARY, rows).tolist()
    guessed, ids, odds = compiled.guess(states, tokens, 5)
    after, logits = reference(head, embed(tokens), output(head.shortlist), states, tokens)
    assert np.abs(guessed - after).max() < 0.03 * np.abs(after).max()
    assert ids.shape == odds.shape == (rows, 5)
    assert (odds[:, 0] == 0).all()
    places = np.searchsorted(head.shortlist, ids)
    assert (head.shortlist[places] == ids).all()
    expected = np.take_along_axis(logits, places, -1) - logits.max(-1, keepdims=True)
    assert np.abs(odds - expected).max() < 0.05 * logits.std()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_rows_change_no_bit(models, threads):
    compiled = make_head(models["packed"], "cpu", weights(np.arange(VOCABULARY, dtype=np.int32)))
    states, tokens = numbers(4, HIDDEN), [5, 6, 7, 8]
    alone = [compiled.guess(states[i : i + 1], tokens[i : i + 1], 8) for i in range(4)]
    before = thread_count()
    torch.set_num_threads(threads)
    try:
        together = compiled.guess(states, tokens, 8)
    finally:
        torch.set_num_threads(before)
    for i, parts in enumerate(alone):
        for one, several in zip(parts, together, strict=True):
            assert (one[0] == several[i]).all()


def test_four_bits(models):
    head = weights()
    eight, four = (make_head(models["packed"], "cpu", head, bits) for bits in (8, 4))
    states, tokens = numbers(8, HIDDEN), list(range(8))
    (a, *_), (b, *_) = eight.guess(states, tokens, 3), four.guess(states, tokens, 3)
    assert 0 < np.abs(a - b).max() < 0.5 * np.abs(a).max()
    rows = numbers(5, 64)
    assert as_q4_0(rows).shape == (5, 36)
    with pytest.raises(SettingsError, match="4 or 8"):
        make_head(models["packed"], "cpu", head, 5)


def test_the_torch_head_computes_what_numpy_does(models):
    head, (embed, output) = weights(), row_readers(models["module"])
    made = make_head(models["module"], "transformers", head)
    states, tokens = numbers(3, HIDDEN), [9, 1, 95]
    guessed, ids, odds = made.guess(states, tokens, 4)
    after, logits = reference(head, embed(tokens), output(head.shortlist), states, tokens)
    assert np.abs(guessed - after).max() < 1e-5 * np.abs(after).max() + 1e-5
    order = np.argsort(-logits, axis=-1)[:, :4]
    assert (ids == head.shortlist[order]).all()
    assert np.allclose(odds, np.take_along_axis(logits, order, -1) - logits.max(-1, keepdims=True), atol=1e-4)


def test_a_short_shortlist_gives_fewer_tokens(models):
    head = weights(np.array([4, 9], np.int32))
    for model, path in ((models["packed"], "cpu"), (models["module"], "transformers")):
        _, ids, odds = make_head(model, path, head).guess(numbers(1, HIDDEN), [3], 8)
        assert sorted(ids[0].tolist()) == [4, 9]
        assert odds.shape == (1, 2)


def test_a_head_of_another_model_is_refused(models):
    for changed in ({"vocabulary": 97}, {"hidden": 96}):
        with pytest.raises(SettingsError, match=r"96 tokens and hidden states of 64.*train-head"):
            make_head(models["packed"], "cpu", weights(**changed))


@pytest.mark.parametrize("path", ["plain", "batch-rows", "exact", "llama.cpp"])
def test_paths_without_hidden_states_are_refused_by_name(models, path):
    with pytest.raises(SettingsError, match=path):
        make_head(models["module"], path, weights())


def test_decoded_rows_are_those_of_the_model(models):
    embed, output = row_readers(models["packed"])
    module = models["module"]
    for read, part in ((embed, module.get_input_embeddings()), (output, module.get_output_embeddings())):
        expected = part.weight.detach().numpy()[[0, 95, 31, 16]]
        assert np.abs(read([0, 95, 31, 16]) - expected).max() < 0.01 * np.abs(expected).max()
    assert make_target(models["packed"]).path == "cpu"
