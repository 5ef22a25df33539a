"""A model's own text is written in batches, saved in parts, resumed, and equal to plain decoding."""

import numpy as np
import pytest

import lookahead
from lookahead.core import SettingsError
from lookahead.drafters import Plain
from lookahead.hf.testing import tiny_model
from lookahead.learning import text_parts
from lookahead.learning.openings import beginning, opening
from lookahead.learning.self_text import Writer, loops, text_folder
from lookahead.learning.text_parts import REQUEST, TOP, Folder


@pytest.fixture(scope="module")
def llm():
    return lookahead.load("tiny")


def write(llm, path, tokens, batch=6):
    folder = Folder(path)
    return Writer(llm, folder, batch).write(lambda new, seconds: new >= tokens), folder


def test_the_texts_are_those_of_plain_decoding(llm, tmp_path):
    new, folder = write(llm, tmp_path, 800)
    texts = list(Folder(tmp_path).read())
    assert new == folder.tokens == sum(len(text.completion) for text in texts) >= 800
    assert {text.kind for text in texts} == {0, 1, 2}
    for text in texts:
        temperature = round(text.temperature, 3)
        assert temperature in (0.0, 0.8)
        assert text.ids.shape == text.logprobs.shape == (len(text.completion), TOP)
        options = {"temperature": temperature, "seed": 3 * text.number + text.kind} if temperature else {}
        plain = llm.generate(text.prompt, max_new_tokens=len(text.completion), drafter=Plain(), **options)
        assert plain.tokens == text.completion
        if not temperature:
            assert text.ids[:, 0].tolist() == text.completion
        assert (np.exp(text.logprobs.astype(np.float64)).sum(axis=1) < 1.01).all()


def test_models_of_one_shape_have_text_of_their_own():
    first, other, again = (lookahead.LLM(tiny_model("llama", seed)).model for seed in (0, 1, 0))
    assert text_folder(first) == text_folder(again) != text_folder(other)


def test_it_goes_on_after_the_last_text(llm, tmp_path):
    _, first = write(llm, tmp_path, 300)
    new, second = write(llm, tmp_path, 300)
    assert second.tokens == first.tokens + new
    numbers = [(text.number, text.kind) for text in Folder(tmp_path).read()]
    assert len(set(numbers)) == len(numbers)
    assert second.next_number > first.next_number


def test_an_interruption_keeps_what_was_written(llm, tmp_path):
    folder = Folder(tmp_path)

    def interrupt(tokens, seconds):
        if tokens > 200:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Writer(llm, folder, 6).write(lambda new, seconds: False, interrupt)
    assert Folder(tmp_path).tokens == folder.tokens > 200


def test_a_folder_that_cannot_be_written_is_said(llm, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="must be a writable folder with free disk space"):
        write(llm, tmp_path / "file" / "folder", 50)


def test_a_full_disk_loses_nothing_that_was_saved(llm, tmp_path, monkeypatch):
    _, before = write(llm, tmp_path, 100)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(text_parts.np, "savez_compressed", full)
    with pytest.raises(
        SettingsError, match=rf"No space left on device\); the {before.tokens} tokens saved before"
    ):
        write(llm, tmp_path, 50)
    assert Folder(tmp_path).tokens == before.tokens
    assert not list(tmp_path.glob("*.tmp"))


def test_a_damaged_part_is_named(llm, tmp_path):
    write(llm, tmp_path, 100)
    (part,) = Folder(tmp_path).parts()
    part.write_bytes(part.read_bytes()[:200])
    with pytest.raises(
        SettingsError, match=r"part-000000.npz must be a part of a model's own text .*; delete it"
    ):
        Folder(tmp_path)


def test_a_model_without_tokenizer_is_refused(llm, tmp_path):
    bare = lookahead.LLM(llm.model)
    with pytest.raises(SettingsError, match="own text needs a tokenizer"):
        Writer(bare, Folder(tmp_path))


def test_repetition_is_noticed():
    assert loops([5, 6] + [1, 2, 3] * 4)
    assert loops([7] * 4)
    assert not loops([1, 2, 3] * 3 + [4])
    assert not loops(list(range(200)))


def test_openings_are_functions_of_their_number():
    texts = [opening(number) for number in range(2000)]
    assert texts == [opening(number) for number in range(2000)]
    assert len(set(texts)) > 1000
    assert not any("{" in text and "}" in text for text in texts)
    assert len({beginning(number) for number in range(200)}) > 10
    assert REQUEST == 1
