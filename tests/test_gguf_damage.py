"""GGUF files with false headers: each gets a one-line error, before its counts allocate memory."""

import functools
import json
import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

import gguf_damage
import lookahead
from gguf_damage import Loader, numbers
from gguf_files import write_gguf
from lookahead.core import SettingsError
from lookahead.core.errors import Unsupported
from lookahead.gguf.file import GGUFFile
from lookahead.gguf.settings import check_file, read_settings
from lookahead.gguf.sizes import ROUTER
from lookahead.text.tokenizer import build_tokenizer
from test_cli import call, refused
from toy import CHAT

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file with seven layers, four heads of size 128, two key heads and an embedding size of 256."""
    path = tmp_path_factory.mktemp("damage") / "llama.gguf"
    write_gguf(path, "llama", ("Q8_0", "Q4_K"), chat_template=CHAT, num_hidden_layers=7)
    return path


@pytest.fixture(scope="module")
def loader(whole):
    """A process with limited memory."""
    process = Loader([(str(whole), None), (str(whole), "float32")])
    yield process
    process.close()


#: The file is written once, and read for every change.
numbers_of = functools.cache(numbers)


def changed(path, values, target):
    """A copy of a file with changed header numbers; a list gives several numbers of one name."""
    data = bytearray(path.read_bytes())
    for name, value in values.items():
        places = [number for number in numbers_of(path) if number.name == name]
        for place, each in zip(places, value if isinstance(value, list) else [value], strict=True):
            data[place.at : place.at + place.kind.itemsize] = each.to_bytes(place.kind.itemsize, "little")
    target.write_bytes(data)
    return target


UP, DOWN, QUERY = (f"blk.3.{part}.weight" for part in ("ffn_up", "ffn_down", "attn_q"))
#: Overwritten values, and the expected error.
WRONG = [
    *(({"llama.block_count": n}, f"llama.block_count must be 7, .* got {n};") for n in (0, 6, 8, 2**31)),
    *(({"llama.attention.head_count": n}, "attention.head_count") for n in (0, 1, 3, 7, 8, 2**31)),
    *(({"llama.attention.head_count_kv": n}, "attention.head_count_kv") for n in (0, 1, 4, 7, 2**31)),
    *(
        ({"llama.embedding_length": n}, f"embedding_length must be 256, .* got {n};")
        for n in (0, 1, 7, 2**31)
    ),
    *(({"llama.feed_forward_length": n}, "feed_forward_length") for n in (0, 1, 511, 2**31)),
    *(({"llama.attention.key_length": n}, "attention.key_length|value_length") for n in (0, 64, 2**31)),
    *(({"llama.attention.value_length": n}, "attention.value_length") for n in (0, 64, 2**31)),
    *(({"llama.rope.dimension_count": n}, "rope.dimension_count") for n in (0, 64, 127, 2**31)),
    *(({"llama.vocab_size": n}, f"vocab_size must be 320, .* got {n};") for n in (0, 319, 2**31)),
    *(({"llama.context_length": n}, "context_length") for n in (0, 2**31)),
    *(({f"tokenizer.ggml.{name}_token_id": 320}, f"{name}_token_id must be") for name in ("bos", "eos")),
    ({"GGUF.tensor_count": 0}, "only zeros may follow its last tensor, but"),
    ({"GGUF.tensor_count": 2**60}, "claims 1,152,921,504,606,846,976 tensors"),
    ({"GGUF.kv_count": 2**60}, "claims 1,152,921,504,606,846,976 metadata entries"),
    ({f"{UP}: shape": [512, 256]}, "ffn_up.weight' must have the shape .512, 256. .feed_forward_length, emb"),
    ({f"{DOWN}: shape": [256, 512]}, "ffn_down.weight' must have the shape .256, 512.*got .512, 256."),
    ({f"{UP}: shape": [256, 0]}, "blk.3.ffn_up.weight' must not be empty"),
    ({f"{UP}: shape": [256, 256]}, "must begin at byte .* where the one before it ends"),
    ({f"{QUERY}: shape": [256, 2**40]}, "must begin at byte|blk.3.attn_q.weight' must end within the file"),
    ({f"{QUERY}: offset": 1}, "must begin at byte"),
    ({f"{QUERY}: block type": 99}, "blk.3.attn_q.weight' has block type 99"),
]


#: With float32, transformers reads the file after the same checks.
CASES = [
    *((*case, None) for case in WRONG),
    *((*case, "float32") for case in WRONG[::20]),
]


def described(value):
    return ", ".join(f"{name} {number}" for name, number in value.items()) if isinstance(value, dict) else ""


@pytest.mark.parametrize(("values", "match", "dtype"), CASES, ids=described)
def test_a_wrong_number_is_refused(values, match, dtype, whole, loader, tmp_path):
    outcome = loader.load(changed(whole, values, tmp_path / "x.gguf"), dtype)
    assert outcome.kind == "refused", outcome
    assert re.search(match, outcome.message), outcome.message


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"llama.context_length": 200},
        {f"tokenizer.ggml.{name}_token_id": 0xFFFFFFFF for name in ("bos", "eos")},  # a missing token
    ],
    ids=described,
)
def test_a_right_number_is_not(values, whole, loader, tmp_path):
    outcome = loader.load(changed(whole, values, tmp_path / "x.gguf"))
    assert outcome == loader.expected[str(whole), None]


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"llama.block_count": 2**31}, "llama.block_count must be 7, the number of layers that have tensors"),
        ({"llama.attention.head_count_kv": 1}, "'blk.0.attn_k.weight' must have the shape .128, 256."),
        ({f"{UP}: shape": [256, 0]}, "'blk.3.ffn_up.weight' must not be empty"),
    ],
    ids=described,
)
def test_the_command_says_it_in_one_line(values, match, whole, tmp_path):
    path = changed(whole, values, tmp_path / "x.gguf")
    line = refused(match, "generate", path, "--prompt", "x")
    assert str(path) in line
    assert re.search("; (copy or download it|download or convert the file) again$", line)


def test_what_is_no_gguf_file(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4 and more")
    refused("x.gguf is not a GGUF file", "generate", tmp_path / "x.gguf", "--prompt", "x")


# ---------------------------------------------------------------- tensors


class Writer:
    """A file of one architecture with tensors removed or added."""

    def __init__(self, path, source):
        self.path, self.source = path, gguf.GGUFReader(source)
        self.added, self.left_out = {}, ()

    def write(self, architecture="llama"):
        writer = gguf.GGUFWriter(self.path, architecture)
        for key, field in self.source.fields.items():
            if key.startswith("GGUF.") or key == "general.architecture":
                continue
            items = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(
                key.replace("llama.", f"{architecture}."), field.contents(), field.types[0], items
            )
        for tensor in self.source.tensors:
            if tensor.name not in self.left_out:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for name, array in self.added.items():
            writer.add_tensor(name, array)
        for finish in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
            getattr(writer, finish)()
        return GGUFFile(self.path)


@pytest.fixture
def writer(whole, tmp_path):
    return Writer(tmp_path / "x.gguf", whole)


def test_the_same_tensors_again(writer):
    check_file(writer.write())


@pytest.mark.parametrize("name", ["blk.2.ffn_up.weight", "output_norm.weight", "token_embd.weight"])
def test_a_tensor_is_missing(name, writer):
    writer.left_out = (name,)
    with pytest.raises(SettingsError, match=f"must have the tensor '{name}'|{name} must have a row"):
        check_file(writer.write())


def test_a_layer_is_missing(writer):
    writer.left_out = tuple(
        tensor.name for tensor in writer.source.tensors if tensor.name.startswith("blk.6.")
    )
    with pytest.raises(SettingsError, match=r"block_count must be 6, .* got 7"):
        check_file(writer.write())


@pytest.mark.parametrize(
    "name", ["blk.6.attn_q.scale", "blk.6.ffn_gate_exps.weight", "token_embd.bias", "v.weight"]
)
def test_a_tensor_that_no_layer_uses(name, writer):
    writer.added = {name: np.ones(256, np.float32)}
    with pytest.raises(SettingsError, match=f"which has 7 layers, and '{name}' does not"):
        check_file(writer.write())


def test_layers_far_away(writer):
    writer.added = {"blk.99999999.ffn_up.weight": np.ones(256, np.float32)}
    with pytest.raises(SettingsError, match="layers must be numbered from 0 on, got the number 99999999"):
        check_file(writer.write())


@pytest.mark.parametrize("size", [63, 65])
def test_factors_of_frequencies(size, writer):
    writer.added = {"rope_freqs.weight": np.ones(size, np.float32)}
    with pytest.raises(SettingsError, match=r"'rope_freqs.weight' must have the shape \(64,\)"):
        check_file(writer.write())


def test_tensors_that_may_be_there(writer):
    writer.left_out = ("output.weight",)
    writer.added = {
        "rope_freqs.weight": np.ones(64, np.float32),
        "blk.3.attn_q.bias": np.ones(512, np.float32),
    }
    check_file(writer.write())


def test_an_architecture_that_only_transformers_knows(writer):
    """Layers, embedding, vocabulary and heads are checked, and that no count exceeds all dimensions."""
    writer.added = {"blk.6.more.weight": np.ones(3, np.float32)}
    file = writer.write("stablelm")
    check_file(file)
    for key, value, match in (
        ("block_count", 6, "stablelm.block_count must be 7"),
        ("embedding_length", 255, "stablelm.embedding_length must be 256"),
        ("vocab_size", 321, "stablelm.vocab_size must be 320"),
        ("feed_forward_length", 2**31, "feed_forward_length must be a number from 0 to 512"),
        (
            "attention.head_count",
            1,
            "head_count times the size of a head, 128, must be 512, the rows of blk.0.attn_q",
        ),
        (
            "attention.head_count_kv",
            4,
            "head_count_kv times the size of a head, 128, must be 256, .*, got 4 heads",
        ),
        ("attention.key_length", 64, "the size of a head, 64, must be 512"),
        ("attention.head_count", "many", "head_count must be a number from 0 to 512, got 'many'"),
        ("context_length", 2**31, "context_length must be a number from 0 to 1,073,741,824"),
        ("rope.freq_base", 0.0, "rope.freq_base must be finite and above 0, got 0.0"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "epsilon must be finite and above 0, got nan"),
        ("attention.layer_norm_epsilon", float("inf"), "epsilon must be finite and above 0, got inf"),
    ):
        metadata = dict(file.metadata)
        file.metadata[f"stablelm.{key}"] = value
        with pytest.raises(SettingsError, match=match):
            check_file(file)
        file.metadata = metadata
    # DeepSeek's keys are shorter than key_length.
    file.metadata |= {"stablelm.attention.key_length": 500, "stablelm.attention.key_length_mla": 192}
    check_file(file)
    del file.metadata["stablelm.attention.key_length_mla"]
    file.metadata["stablelm.attention.key_length"] = np.array([128, 64])  # of each layer
    check_file(file)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("attention.head_count", "4", "head_count must be one finite number for all layers, got '4'"),
        ("attention.head_count", 2.5, "head_count must be a whole number of at least 1, got 2.5"),
        ("attention.head_count_kv", 3, "must be a multiple of attention.head_count_kv, got 4 and 3"),
        ("expert_count", 8, "expert_count must be 0 without the tensor blk.0.ffn_gate_inp.weight"),
        ("attention.layer_norm_rms_epsilon", -1.0, "epsilon of norms must be 0 or more"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "must be one finite number"),
        ("rope.freq_base", 0.0, "the base and the factor of rotary positions must be above 0"),
        ("rope.freq_base", 1e300, "must be one finite number"),
    ],
)
def test_a_setting_that_cannot_be(key, value, match, whole):
    file = GGUFFile(whole)
    file.metadata[f"llama.{key}"] = value
    with pytest.raises(SettingsError, match=match):
        check_file(file)


def test_heads_that_do_not_divide_the_embedding(whole):
    file = GGUFFile(whole)
    del file.metadata["llama.attention.key_length"]
    file.metadata |= {"llama.attention.head_count": 3, "llama.attention.head_count_kv": 3}
    words = "embedding_length must be a multiple of attention.head_count, got 256 and 3"
    with pytest.raises(SettingsError, match=words):
        check_file(file)


def test_experts_are_not_compiled(whole):
    file = GGUFFile(whole)
    file.tensors[ROUTER] = file.tensors["output_norm.weight"]
    with pytest.raises(Unsupported, match="the compiled path does not support mixtures of experts"):
        read_settings(file)


WINDOW, PATTERN = "llama.attention.sliding_window", "llama.attention.sliding_window_pattern"


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({WINDOW: 6, PATTERN: 3}, (6, 6, 0, 6, 6, 0, 6)),
        ({WINDOW: 6, PATTERN: 1}, (0,) * 7),
        ({WINDOW: 6, PATTERN: np.array([True, False, False] * 2 + [True])}, (6, 0, 0, 6, 0, 0, 6)),
        ({WINDOW: 0, PATTERN: 3}, (0,) * 7),
        ({WINDOW: 256}, (0,) * 7),  # as long as the context
    ],
    ids=["a period", "a period of one", "each layer", "no window", "a long window"],
)
def test_the_layers_with_a_sliding_window(settings, windows, whole):
    file = GGUFFile(whole)
    file.metadata |= settings
    assert read_settings(file).windows == windows


def test_a_sliding_window_needs_layers(whole):
    file = GGUFFile(whole)
    file.metadata[WINDOW] = 6
    words = "the file must specify which layers of llama have the sliding window"
    with pytest.raises(Unsupported, match=words):
        read_settings(file)
    file.metadata[PATTERN] = np.array([True] * 3)
    with pytest.raises(SettingsError, match="the pattern of sliding windows must have 7 layers, got 3"):
        read_settings(file)


# ---------------------------------------------------------------- tokenizers


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("merges", ["a b", "a nonesuch"], r"merges must join two tokens .* into a third, got \('a', "),
        ("merges", "a b", "merges must be a list of strings"),
        ("tokens", [1, 2], "tokens must be a list of strings, got array"),
        ("token_type", np.ones(3, np.int32), "token_type must have a number for each of the 320 tokens"),
        ("model", 7, "tokenizer.ggml.model must be a string, got 7"),
    ],
)
def test_a_tokenizer_that_cannot_be(key, value, match, whole):
    metadata = GGUFFile(whole).metadata
    metadata[f"tokenizer.ggml.{key}"] = np.array(value) if key == "tokens" else value
    with pytest.raises(SettingsError, match=match):
        build_tokenizer(metadata)


def test_a_merge_out_of_the_vocabulary_is_said_in_one_line(whole, tmp_path):
    """A token whose text changed by one bit, as found in an audit."""
    data = bytearray(whole.read_bytes())
    token = GGUFFile(whole).metadata["tokenizer.ggml.merges"][0].replace(" ", "").encode()
    at = data.index(struct.pack("<Q", len(token)) + token) + 8
    data[at + len(token) - 1] ^= 1
    (tmp_path / "x.gguf").write_bytes(data)
    line = refused("the tokenizer of .*x.gguf is damaged", "generate", tmp_path / "x.gguf", "--prompt", "x")
    assert "must join two tokens of the vocabulary into a third, got" in line


@pytest.mark.parametrize("template", ["{% for", "{{ 1 // 0 }}", "{% for i in range(10 ** 9) %}{% endfor %}"])
def test_a_chat_template_that_fails(template, tmp_path):
    write_gguf(tmp_path / "x.gguf", "llama", chat_template=template)
    llm = lookahead.load(tmp_path / "x.gguf")
    with pytest.raises(SettingsError, match=r"the model's chat template rejects these messages: .+") as error:
        llm.encode([{"role": "user", "content": "hi"}])
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- many files


def test_a_damaged_file_is_refused_or_decodes():
    report = gguf_damage.fuzz(100)
    assert not report.found, "\n".join(report.found)
    assert report.outcomes["refused"] > 50
    assert report.outcomes["decoded"] > 5


def test_the_fuzzer_finds_what_is_not_checked(whole, tmp_path):
    """Without the checks, such files decode nonsense, end in a traceback, or exhaust memory."""
    unchecked = (
        "from lookahead.gguf import sizes; "
        "sizes._check_tensors = lambda *_: None; "
        "sizes._check_layers = lambda file, architecture: file.metadata[f'{architecture}.block_count']"
    )
    loader = Loader([(str(whole), None)], first=unchecked)
    seen = {
        name: loader.load(changed(whole, {f"llama.{name}": number}, tmp_path / "x.gguf"))
        for name, number in (
            ("block_count", 6),
            ("attention.head_count_kv", 1),
            ("attention.head_count", 8),
            ("feed_forward_length", 2**31),
        )
    }
    loader.close()
    expected = loader.expected[str(whole), None].tokens
    for name in ("block_count", "attention.head_count_kv"):
        assert seen[name].kind == "decoded"
        assert seen[name].tokens != expected
    assert seen["attention.head_count"].kind == "traceback"
    # A native library may end the process where Python would raise MemoryError.
    assert seen["feed_forward_length"].kind in ("memory", "killed")


def test_a_case_follows_from_its_number_alone():
    one, other = gguf_damage.Case.of(7), gguf_damage.Case.of(7)
    assert (str(one), one.data, one.dtype) == (str(other), other.data, other.dtype)


def test_a_whole_file_is_generated_from_by_the_command(whole):
    code, out, _ = call(
        "generate", whole, "--prompt", "the cat", "--max-new-tokens", 3, "--ignore-eos", "--json"
    )
    expected = lookahead.load(whole).generate("the cat", max_new_tokens=3, ignore_eos=True)
    assert code == 0
    assert json.loads(out)["output_ids"] == expected.tokens
    assert len(expected.tokens) == 3
