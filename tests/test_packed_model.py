"""Models with packed weights compute what transformers computes with the decoded weights; drafting leaves
completions unchanged; a one-line message names what cannot be packed."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lookahead
from gguf_files import ARCHITECTURES, MIXED, reference_model, unpermuted
from learned import with_free_head
from lookahead.core import OutOfMemory, SettingsError, TokenTree
from lookahead.cpu import formats, gguf_blueprint, load
from lookahead.cpu.formats import FP16
from lookahead.cpu.kernels.formats import CODE
from lookahead.cpu.load import read_model
from lookahead.cpu.model import PackedModel
from lookahead.drafters import Adaptive, Lookahead, Plain
from lookahead.gguf.families import GGUF_NAMES
from lookahead.gguf.file import GGUFFile
from rows import row_of
from test_cli import call, refused
from toy import VOCABULARY, save

TOKENS = torch.randint(4, VOCABULARY, (24,), generator=torch.Generator().manual_seed(5)).tolist()
#: RMS difference of the logits, in standard deviations of the logits. Products with quantized weights use
#: rows in 8-bit blocks: measured 0.015 to 0.07 (Gemma 3, which has 7 layers here), and 0.43 to 1.5 for a
#: wrong model. Products with F32, F16 and BF16 weights use fp32 rows, but keys and values are fp16: measured
#: 0.0004 to 0.0015.
QUANTIZED_LIMIT, WIDE_LIMIT = 0.1, 0.005
DRAFTERS = {
    "adaptive": (Adaptive(), {}),
    "7,5,7": (Lookahead(7, 5, 7), {}),
    "sampled": (Adaptive(rows=64), {"temperature": 0.8, "top_k": 20, "seed": 3}),
}


@pytest.fixture(scope="module")
def files(tiny_gguf):
    return tiny_gguf


def packed_logits(model):
    """Logits of all tokens but the first, the prompt; the others form a chain in one step."""
    target = model.make_target()
    target.prefill([(0, TOKENS[:1])])
    tree = TokenTree(TOKENS[1])
    for parent, token in enumerate(TOKENS[2:]):
        tree.add(token, parent, needs_logits=True)
    (scores,) = target.forward([(0, tree)])
    return torch.stack([row_of(scores, node) for node in range(len(tree))])


def logits(model):
    """The same logits from a transformers model."""
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0, 1:]


def difference(got, expected):
    return float((got - expected).square().mean().sqrt() / expected.std())


def wrong_models(model):
    """Yield the name of each fault while one layer has it: gate and up swapped, query rows reordered."""
    for name, module in model.named_modules():
        if name.endswith("layers.0.mlp") and hasattr(module, "gate_proj"):
            module.gate_proj, module.up_proj = module.up_proj, module.gate_proj
            yield "gate and up"
            module.gate_proj, module.up_proj = module.up_proj, module.gate_proj
        elif name.endswith("layers.0.mlp") and hasattr(module, "gate_up_proj"):
            weight = module.gate_up_proj.weight
            right = weight.detach().clone()
            weight.data.copy_(right.roll(len(right) // 2, 0))
            yield "gate and up"
            weight.data.copy_(right)
    for name, module in model.named_modules():
        if name.endswith("0.self_attn") and hasattr(module, "q_proj"):
            weight = module.q_proj.weight
            weight.data = torch.tensor(unpermuted(weight.detach().numpy(), model.config.num_attention_heads))
        elif name.endswith("0.self_attn"):  # Phi-3: queries, keys and values are rows of one matrix
            weight = module.qkv_proj.weight
            weight.data[: model.config.hidden_size] = weight[: model.config.hidden_size].roll(1, 0)
        elif name.endswith("h.0.attn"):  # GPT-2: the same, transposed
            weight = module.c_attn.weight
            weight.data[:, : model.config.hidden_size] = weight[:, : model.config.hidden_size].roll(1, 1)
        else:
            continue
        yield "order of a query"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_decoded_model(architecture, files):
    path = files(architecture, MIXED)
    got, reference = packed_logits(read_model(GGUFFile(path))), reference_model(path)
    assert difference(got, logits(reference)) < QUANTIZED_LIMIT
    wrong = {name: difference(got, logits(reference)) for name in wrong_models(reference)}
    assert "order of a query" in wrong
    assert ("gate and up" in wrong) == (architecture not in ("gpt2", "starcoder2"))
    assert min(wrong.values()) > 3 * QUANTIZED_LIMIT, wrong


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_of_16_and_32_bits_compute_in_fp32(architecture, files):
    path = files(architecture, ("F32", "F16", "BF16"))
    got = packed_logits(read_model(GGUFFile(path)))
    assert difference(got, logits(reference_model(path))) < WIDE_LIMIT


def test_keys_and_values_take_two_bytes_and_are_freed(files):
    model = read_model(GGUFFile(files("llama", MIXED)))
    target = model.make_target()
    target.prefill([(0, list(range(5, 305)))])
    ((keys, values), *_) = target.read(0)
    assert keys.dtype == values.dtype == np.float16
    assert np.isfinite(keys).all()
    assert keys.any()
    assert values.any()
    grown = target.cache.storage[0].nbytes
    assert grown == 512 * model.token_bytes  # room for a power of two
    target.release(0)
    assert target.cache.storage[0].nbytes == 256 * model.token_bytes


def test_numbers_become_the_nearest_fp16():
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal(3000) * 10.0 ** rng.integers(-9, 6, 3000)
    special = [0, -0.0, 65504, 65519, 65520, -1e9, np.inf, 2**-14, 2**-25, 3 * 2**-25, 1.5 * 2**-24]
    numbers = np.array([*numbers, *special], np.float32)
    with np.errstate(over="ignore"):
        expected = np.clip(numbers, -65504, 65504).astype(np.float16)
    to_fp16 = CODE[FP16].from_fp32
    found = np.array([to_fp16(number) for number in numbers], np.uint16)
    assert (found == expected.view(np.uint16)).all()
    assert np.isnan(np.uint16(to_fp16(np.float32("nan"))).view(np.float16))


# ---------------------------------------------------------------- completions


@pytest.fixture(scope="module")
def loaded(files):
    models = {}

    def load(architecture):
        if architecture not in models:
            models[architecture] = lookahead.load(files(architecture, MIXED))
        return models[architecture]

    return load


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_drafted_texts_equal_plain_decoding(architecture, drafter, loaded):
    llm, (how, options) = loaded(architecture), DRAFTERS[drafter]
    assert llm.path == "cpu"
    assert len(llm.dtype.split(" + ")) >= 10
    options = {"max_new_tokens": 48, "ignore_eos": True, **options}
    drafted, plain = (llm.generate(TOKENS * 2, drafter=each, **options) for each in (how, Plain()))
    assert drafted.tokens == plain.tokens
    assert len(plain.tokens) == 48
    if drafter != "adaptive":  # adaptive may decide that no row pays off
        assert max(drafted.stats.rows_per_step) > 1


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8, "top_k": 20, "seed": 3}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_texts_with_a_light_head_equal_plain_decoding(architecture, options, loaded, tmp_path, monkeypatch):
    llm = loaded(architecture)
    shape = llm.model.shape
    head = with_free_head(tmp_path / "head", monkeypatch, shape.vocabulary, shape.hidden, rows=8)
    options = {"max_new_tokens": 48, "ignore_eos": True, **options}
    drafted, plain = (llm.generate(TOKENS * 2, drafter=each, **options) for each in (head, Plain()))
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafter["head_calls"] > 0


def test_a_wrong_token_would_show(loaded, accept_a_wrong_node):
    llm = loaded("llama")
    drafted, plain = (
        llm.generate(TOKENS, drafter=each, max_new_tokens=48, ignore_eos=True)
        for each in (Lookahead(7, 5, 7), Plain())
    )
    assert drafted.tokens != plain.tokens


def test_several_sequences_and_exact(files):
    llm = lookahead.load(files("llama", MIXED), exact=True)
    prompts = [TOKENS[:length] for length in (3, 24, 11)]
    options = {"max_new_tokens": 16, "ignore_eos": True}
    together = llm.generate(prompts, drafter=Lookahead(5, 3, 5), **options)
    alone = [llm.generate(prompt, drafter=Plain(), **options) for prompt in prompts]
    assert [result.tokens for result in together] == [result.tokens for result in alone]


def test_other_paths_are_refused_with_what_to_do(loaded):
    with pytest.raises(SettingsError, match=r"path 'transformers' is not available.*dtype='bfloat16'"):
        loaded("llama").target("transformers")


def test_doctor_and_verify(files):
    path = files("llama", MIXED)
    code, out, _ = call("doctor", path, "--json")
    report = json.loads(out)["model"]
    assert code == 0
    assert (report["class"], report["path"], report["attention"]) == ("LlamaForCausalLM", "cpu", "compiled")
    assert report["dtype"].split(" + ")[0] in MIXED
    assert report["parameters"] == sum(p.numel() for p in reference_model(path).parameters())
    code, out, _ = call("verify", path, "--prompt", "the cat", "--max-new-tokens", 8, "--json")
    report = json.loads(out)
    assert (code, report["equal"], report["bit_equal_rows"][0]) == (0, 1, report["bit_equal_rows"][1])
    refused("--reference generate needs a transformers model", "verify", path, "--reference", "generate")


def test_verify_finds_a_wrong_token(files, accept_a_wrong_node):
    """Rounding is no excuse here: exit status 2, with the logit gap of the packed model itself."""
    code, out, _ = call("verify", files("llama", MIXED), "--prompt", "def add(a, b):\n    return", "--json")
    (run,) = json.loads(out)["prompts"]
    assert (code, run["equal"]) == (2, False)
    assert run["gap"] > 0


# ---------------------------------------------------------------- what cannot stay packed


def test_a_file_that_ends_early(files, tmp_path):
    data = files("llama", MIXED).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) * 3 // 4])
    with pytest.raises(SettingsError, match=r"must be complete.*copy or download it again"):
        lookahead.load(tmp_path / "cut.gguf")


def test_a_file_that_changes_while_it_is_read(files, tmp_path, monkeypatch):
    path = tmp_path / "x.gguf"
    path.write_bytes(files("llama", MIXED).read_bytes())
    honest = gguf_blueprint.pack_panels

    def late(*args):
        os.utime(path, ns=(0, 0))
        honest(*args)

    monkeypatch.setattr(gguf_blueprint, "pack_panels", late)
    with pytest.raises(SettingsError, match="must not change while it is read"):
        lookahead.load(path)


def test_an_architecture_that_only_transformers_knows(files, monkeypatch):
    monkeypatch.delitem(GGUF_NAMES, "qwen2")
    with pytest.warns(UserWarning, match="the architecture must be one of .*, got 'qwen2'") as warned:
        llm = lookahead.load(files("qwen2", ("Q8_0",)))
    assert len(warned) == 1
    assert "transformers decodes them to bfloat16, so memory and step time are several times as large" in str(
        warned[0].message
    )
    assert warned[0].filename == __file__
    assert (type(llm.model.module).__name__, llm.dtype) == ("Qwen2ForCausalLM", "bfloat16")


def test_an_option_for_transformers_is_not_silent(files):
    with pytest.warns(UserWarning, match=r"cannot stay packed \(attention is for transformers\)"):
        lookahead.load(files("llama", MIXED), attention="eager")


def test_weights_without_room(files, monkeypatch):
    def full(file, *arguments, **keywords):
        if file == -1:  # not the mapping of a file
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return honest(file, *arguments, **keywords)

    honest = formats.mmap.mmap
    monkeypatch.setattr(formats.mmap, "mmap", full)
    with pytest.raises(OutOfMemory, match=r"GB must fit in memory \(Cannot allocate memory\); use a smaller"):
        lookahead.load(files("llama", MIXED))


@pytest.mark.parametrize("kind", ["IQ4_NL", "Q2_K", "Q3_K"])
def test_a_block_type_without_a_kernel(kind, files):
    path = files("llama", (kind, "F32"))
    with pytest.warns(
        UserWarning, match=rf"does not support {kind} blocks; those tensors are decoded to bfloat16"
    ) as warned:
        llm = lookahead.load(path)
    assert len(warned) == 1
    weights = [tensor for tensor in GGUFFile(path).tensors.values() if tensor.type == kind]
    size = sum(2 * tensor.shape[0] * tensor.shape[1] for tensor in weights)
    assert f"takes {size / 1e6:.0f} MB" in str(warned[0].message)
    assert isinstance(llm.model, PackedModel)
    assert (
        difference(packed_logits(llm.model), logits(reference_model(path))) < 0.02
    )  # weights rounded to bf16


# ---------------------------------------------------------------- quantized while loading


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "Q5_1"])
def test_a_model_is_quantized_while_it_is_loaded(kind, tmp_path):
    folder = save(tmp_path, initializer_range=0.1)
    llm, full = lookahead.load(folder, weights=kind), lookahead.load(folder)
    assert (llm.dtype, llm.path, llm.parameter_count) == (kind.upper(), "cpu", full.parameter_count)
    off = difference(packed_logits(llm.model), logits(full.model.module))
    assert 0.001 < off < {"q8_0": 0.05, "q4_0": 0.5, "Q5_1": 0.3}[kind]
    drafted, plain = (
        llm.generate("def add(a, b):", drafter=each, max_new_tokens=40) for each in ("7,5,7", "off")
    )
    assert drafted.tokens == plain.tokens


def test_a_gguf_file_that_is_not_quantized_can_be(files):
    assert lookahead.load(files("llama", ("F32",)), weights="q8_0").dtype == "Q8_0"


def test_quantizing_on_a_machine_with_a_gpu_names_the_device_to_give(toy_plain, monkeypatch):
    monkeypatch.setattr("lookahead.loading.find_device", lambda device: "cuda" if device is None else "cpu")
    with pytest.raises(SettingsError, match="this machine's default is cuda; give device='cpu'"):
        lookahead.load(toy_plain, weights="q8_0")


def test_weights_that_cannot_be_had(files, toy_plain):
    folder, path = toy_plain, files("llama", MIXED)
    for match, model, options in (
        ("is for models that are not quantized, but .* is; leave weights out", path, {"weights": "q8_0"}),
        ("cannot quantize to it: load a file of this type", folder, {"weights": "q4_k"}),
        ("weights must be one of q4_0, .*, got 'int3'", folder, {"weights": "int3"}),
        ("dtype='auto'; leave out device and dtype", folder, {"weights": "q8_0", "dtype": "float32"}),
    ):
        with pytest.raises(SettingsError, match=match):
            lookahead.load(model, **options)


# ---------------------------------------------------------------- without torch


def test_files_of_every_type_need_neither_torch_nor_transformers(files):
    """The same tokens as in this process; what needs them says how to install them."""
    paths = [files("llama", (kind,)) for kind in ("F32", "BF16", "F16", "Q8_0")]
    program = [sys.executable, str(Path(__file__).with_name("without_torch.py")), *map(str, paths)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    sampled = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}
    for path in paths:
        llm = lookahead.load(path, drafter="7,5,7")
        assert (type(llm.model), llm.path) == (PackedModel, "cpu")
        for options in ({}, sampled):
            result = llm.generate("ab ab ab", max_new_tokens=8, ignore_eos=True, **options)
            assert result.tokens == report["tokens"].pop(0)
    assert len(report["errors"]) == 5
    for error in report["errors"]:
        assert error.endswith("; pip install 'lookahead-decoding[transformers]'"), error


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("BF16", "bfloat16")])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_plain_files_give_the_bits_of_a_transformers_model(architecture, kind, dtype, files):
    """Given the same tables of angles: the last bits of torch's cosines differ from numpy's."""
    path = files(architecture, (kind,))
    ours, theirs = (
        each.target().compiled for each in (lookahead.load(path), lookahead.load(path, dtype=dtype))
    )
    assert ours.dtype == dtype
    assert (ours.memory.used == theirs.memory.used).all()
    for one, other in zip(ours.unpacked, theirs.unpacked, strict=True):
        assert (one == other).all()
    one, other = ours.blueprint.angles(64), theirs.blueprint.angles(64)
    assert np.abs(one - other).max() < 1e-7


def test_a_head_that_is_the_embedding_in_another_type_counts_once():
    rng = np.random.default_rng(0)
    embedding = rng.normal(size=(40, 32)).astype(np.float32)
    near = embedding + 0.05 * rng.normal(size=(40, 32)).astype(np.float32)
    for tensors, head, expected in (
        (("output.weight",), near, 40 * 32),
        (("output.weight",), embedding[::-1].copy(), 0),
        ((), embedding, 0),  # the file has it once
    ):
        parts = SimpleNamespace(vocabulary=40, hidden=32, embedding=embedding, head=head)
        assert load._counted_twice(SimpleNamespace(tensors=tensors), parts) == expected
