"""Loading GGUF files: weights, tokenizer and template; a one-line error for what cannot be read."""

import json
import shutil

import gguf
import pytest
import torch

import lookahead
from lookahead.core import SettingsError
from lookahead.cpu.model import PackedModel
from lookahead.hf import gguf_decoded as ours
from lookahead.hf.testing import tiny_model
from toy import CHAT, VOCABULARY, tokenizer

KIND = gguf.GGMLQuantizationType
STRING, UINT16 = gguf.GGUFValueType.STRING, gguf.GGUFValueType.UINT16
PROMPT = "def add(a, b):\n    return a + b\ndef add(a"
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def interleaved(weight, heads):
    """Query and key rows in llama.cpp's order: pairs that rotate together are adjacent."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write(path, model, kind=KIND.F32, arch="llama", words=True, norms=KIND.F32, **strings):
    """Write a GGUF file of a tiny Llama as llama.cpp's converter would; return the linears as read back."""
    writer, config, weights = gguf.GGUFWriter(path, arch), model.config, model.state_dict()
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    for key, value in strings.items():
        writer.add_key_value(key.replace("_", "."), value, STRING if isinstance(value, str) else UINT16)
    if words:
        state = json.loads(tokenizer().backend_tokenizer.to_str())["model"]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(sorted(state["vocab"], key=state["vocab"].get))
        writer.add_token_merges([" ".join(pair) for pair in state["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(CHAT)
    read_back = {}

    def add(name, key, heads=None):
        weight = weights[key].numpy()
        data = weight if heads is None else interleaved(weight, heads)
        if data.ndim == 1:
            writer.add_tensor(name, gguf.quantize(data, norms), raw_dtype=norms)
            return
        if kind == KIND.F32:
            writer.add_tensor(name, data)
            return
        packed = gguf.quantize(data, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        if heads is None:
            read_back[key] = torch.from_numpy(gguf.dequantize(packed, kind).copy())

    add("token_embd.weight", "model.embed_tokens.weight")
    add("output_norm.weight", "model.norm.weight")
    add("output.weight", "lm_head.weight")
    for layer in range(config.num_hidden_layers):
        for name, key in LAYER.items():
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name)
            add(f"blk.{layer}.{name}.weight", f"model.layers.{layer}.{key}.weight", heads)
    for finish in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, finish)()
    return read_back


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=VOCABULARY, initializer_range=0.1)


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(path, model)
    return path


def refused(match, *args, **options):
    with pytest.raises(SettingsError, match=match) as error:
        lookahead.load(*args, **options)
    assert "\n" not in str(error.value)


def test_weights_tokenizer_and_template_come_from_the_file(model, plain):
    llm = lookahead.load(plain, dtype="float32")
    assert (llm.dtype, llm.name) == ("float32", str(plain))
    for key, weight in model.state_dict().items():
        assert torch.equal(llm.model.module.state_dict()[key], weight), key
    assert llm.encode(PROMPT) == tokenizer()(PROMPT).input_ids
    assert llm.encode([{"role": "user", "content": "hi"}]) == llm.encode("user: hi\nassistant:")
    drafted, alone = (
        llm.generate(PROMPT, max_new_tokens=30, drafter=method) for method in ("lookahead", "autoregressive")
    )
    assert drafted.tokens == alone.tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantized_weights_are_multiplied_out_where_a_dtype_is_asked_for(model, tmp_path, dtype):
    read_back = write(tmp_path / "small.gguf", model, KIND.Q8_0)
    llm = lookahead.load(tmp_path, dtype=dtype)  # a folder with one file
    assert llm.model.module.dtype is dtype
    assert llm.name == str(tmp_path / "small.gguf")
    state = llm.model.module.state_dict()
    assert len(read_back) == 12
    for key, weight in read_back.items():
        assert torch.equal(state[key], weight.to(dtype)), key
        assert not torch.equal(weight, model.state_dict()[key])


def test_quantized_weights_stay_packed_by_default(model, tmp_path):
    write(tmp_path / "small.gguf", model, KIND.Q8_0)
    llm = lookahead.load(tmp_path)
    assert isinstance(llm.model, PackedModel)
    assert (llm.dtype, llm.path, llm.name) == ("Q8_0", "cpu", str(tmp_path / "small.gguf"))
    assert llm.encode(PROMPT) == tokenizer()(PROMPT).input_ids
    assert llm.encode([{"role": "user", "content": "hi"}]) == llm.encode("user: hi\nassistant:")
    drafted, alone = (llm.generate(PROMPT, max_new_tokens=30, drafter=name) for name in ("7,5,7", "off"))
    assert drafted.tokens == alone.tokens


def test_what_is_no_gguf(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4" * 100)
    refused(r"x.gguf is not a GGUF file: its first bytes must be b'GGUF'", tmp_path / "x.gguf")
    refused(r"a \.gguf file or a hub id, got .*none.gguf", tmp_path / "none.gguf")
    refused(r"a \.gguf file or a hub id, got 'none.gguf'", "none.gguf")


def test_an_architecture_that_transformers_cannot_read(model, tmp_path):
    write(tmp_path / "x.gguf", model, arch="nonesuch")
    refused("transformers cannot read .*nonesuch", tmp_path / "x.gguf")


def test_a_quantization_that_cannot_be_read(model, plain, tmp_path, monkeypatch):
    def dequantize(data, kind):
        raise NotImplementedError(f"{kind.name} is not implemented")

    monkeypatch.setattr(gguf, "dequantize", dequantize)
    refused("transformers cannot read .*F32 is not implemented", plain, dtype="float32")


def test_one_part_of_several(model, tmp_path):
    write(tmp_path / "x.gguf", model, split_count=3)
    refused("one of 3 parts; merge them", tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("made", "match"),
    [
        ({"general_type": "adapter"}, "and x.gguf is a LoRA adapter; merge it"),
        ({"general_type": "imatrix"}, "and x.gguf is an importance matrix"),
        ({"general_type": "mmproj"}, "and x.gguf is the part of a multimodal model that reads images"),
        ({"arch": "clip"}, "and x.gguf is the part of a multimodal model that reads images"),
    ],
)
def test_what_is_no_language_model_is_named(made, match, model, tmp_path):
    write(tmp_path / "x.gguf", model, **made)
    refused(match, tmp_path / "x.gguf")


def test_the_text_of_a_file_is_cut_and_escaped_in_messages(model, tmp_path):
    write(tmp_path / "x.gguf", model, arch="\x1b[31m" * 100_000)
    with pytest.raises(
        SettingsError, match=r"general.architecture must be a name of letters and digits"
    ) as error:
        lookahead.load(tmp_path / "x.gguf")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 300 + len(str(tmp_path))


def test_norms_in_blocks(model, tmp_path):
    """llama.cpp's tools do not write such files, but nothing forbids them."""
    for name, norms in {"blocks": KIND.Q8_0, "plain": KIND.F32}.items():
        write(tmp_path / f"{name}.gguf", model, KIND.Q8_0, norms=norms)
    texts = [
        lookahead.load(tmp_path / f"{name}.gguf").generate(PROMPT, max_new_tokens=8).tokens
        for name in ("blocks", "plain")
    ]
    assert texts[0] == texts[1]  # the norms are ones


def test_a_folder_with_two_files(plain, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(plain, tmp_path / name)
    refused(r"has a.gguf, b.gguf; give the file itself", tmp_path)


def test_without_a_tokenizer_token_ids_work(model, tmp_path):
    write(tmp_path / "x.gguf", model, words=False)
    llm = lookahead.load(tmp_path / "x.gguf")
    assert len(llm.generate([5, 6, 7], max_new_tokens=4, ignore_eos=True).tokens) == 4
    with pytest.raises(SettingsError, match=r"needs a tokenizer, and .*x.gguf contains none; give token ids"):
        llm.generate("text")


def test_a_package_that_is_missing(plain, monkeypatch):
    monkeypatch.setattr(ours, "find_spec", lambda name: None)
    refused(r"gguf and accelerate must be installed.*pip install gguf accelerate", plain, dtype="float32")
