"""The llama.cpp peer: passes are counted like ours, on a stub of the package, which is never a dependency."""

import sys
from importlib.metadata import PackageNotFoundError
from types import ModuleType

import numpy as np
import pytest

from benchmarks import gguf_peer
from benchmarks.convert_gguf import convert
from benchmarks.peers import make_methods
from lookahead.bench import ModelUnderTest, RunOptions, run
from lookahead.core import SettingsError
from lookahead.testing import FakeTarget


class Llama:
    """Counts 0..15 repeatedly, in the package's order: a pass, then the tokens it yields."""

    def __init__(self, path, n_ctx, n_threads, n_threads_batch, draft_model, logits_all, verbose):
        assert n_threads == n_threads_batch
        self.draft, self.positions, self.held = draft_model, n_ctx, 0

    def n_ctx(self):
        return self.positions

    def reset(self):
        self.held = 0

    def eval(self, tokens):
        self.held += len(tokens)

    def generate(self, tokens, temp, repeat_penalty):
        assert (temp, repeat_penalty, self.held) == (0.0, 1.0, 0)
        self.eval(tokens)
        last, drafted = tokens[-1], 0
        while True:
            for _ in range(1 + drafted):
                last = (last + 1) % 16
                yield last
            drafted = 0 if self.draft is None else self.draft.count
            self.eval([last] * (1 + drafted))


class Draft:
    def __init__(self, num_pred_tokens):
        self.count = num_pred_tokens


@pytest.fixture
def model(monkeypatch, tmp_path):
    """A model under test from a GGUF file, with the stub package installed."""
    package, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    package.Llama, speculative.LlamaPromptLookupDecoding = Llama, Draft
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    monkeypatch.setattr(gguf_peer, "version", lambda name: "1.2.3")
    (tmp_path / "model.BF16.gguf").touch()
    file = str(tmp_path / "model.BF16.gguf")
    return ModelUnderTest(
        "fake", FakeTarget(16, lambda text: (text[-1] + 1) % 16), max_positions=99, gguf=file
    )


def test_passes_are_counted_as_ours_are(model):
    prompts = [list(range(16)), list(range(8))]
    names = ["llamacpp-greedy", "llamacpp-lookup"]
    records = run(names, prompts, model, RunOptions(max_new_tokens=34), make=make_methods)
    by_method = {r["method"]: r for r in records[:3]}
    plain, greedy, lookup = (
        by_method[name]
        for name in ("plain", "llamacpp-greedy:model.BF16.gguf", "llamacpp-lookup:model.BF16.gguf")
    )
    figures = ("new_tokens", "prefill_tokens", "steps", "rows", "step_tokens")
    assert [greedy[name] for name in figures] == [plain[name] for name in figures]
    # One token from prefill, then ten drafted tokens and a bonus token in each of three steps.
    assert [lookup[name] for name in figures] == [34, 1, 3, 33, [11, 11, 11]]
    assert greedy["settings"] == {"llama-cpp-python": "1.2.3"}
    assert greedy["equal"] is None
    assert lookup["tokens"] == plain["tokens"]


def test_an_end_token_in_the_middle_of_a_draft_ends_the_text(model):
    model.eos = frozenset([7])
    (method,) = make_methods("llamacpp-lookup", model)
    outcome = method.decode(model, [0, 1, 2], RunOptions(max_new_tokens=34))
    assert outcome.tokens == [3, 4, 5, 6, 7]
    assert (outcome.step_tokens, outcome.step_rows) == ([4], [11])


def test_what_cannot_be_measured_is_refused_with_what_to_do(model, monkeypatch):
    with pytest.raises(
        SettingsError, match=r"needs a GGUF file, got none\.gguf; give it as llamacpp-greedy:FILE"
    ):
        make_methods("llamacpp-greedy:none.gguf", model)
    (method,) = make_methods("llamacpp-greedy", model)
    with pytest.raises(SettingsError, match=r"is greedy, got temperature 0\.7"):
        method.decode(model, [1], RunOptions(temperature=0.7))
    with pytest.raises(SettingsError, match="has 99 positions, got 80 prompt tokens and 34 new ones"):
        method.decode(model, [1] * 80, RunOptions(max_new_tokens=34))

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(gguf_peer, "version", missing)
    with pytest.raises(SettingsError, match=r"is not installed: pip install llama-cpp-python .*cmake"):
        make_methods("llamacpp-lookup", model)


def test_a_conversion_holds_the_numbers_that_were_packed(tmp_path):
    gguf = pytest.importorskip("gguf")
    quantized = gguf.GGMLQuantizationType.Q4_1
    weights = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    packed = gguf.quants.quantize(weights, quantized)
    writer = gguf.GGUFWriter(tmp_path / "in.gguf", "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=quantized)
    writer.add_tensor("output_norm.weight", weights[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for kind, tolerance in (("F32", 0), ("BF16", 2**-8), ("Q8_0", 0.02)):
        convert(tmp_path / "in.gguf", tmp_path / "out.gguf", kind)
        reader = gguf.GGUFReader(tmp_path / "out.gguf")
        assert reader.fields["general.architecture"].contents() == "llama"
        assert reader.fields["llama.block_count"].contents() == 2
        assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
        matrix, vector = reader.tensors
        assert matrix.tensor_type.name == kind
        expected = gguf.quants.dequantize(packed, quantized)
        found = gguf.quants.dequantize(matrix.data, matrix.tensor_type)
        assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
        assert vector.tensor_type.name == "F32"
        assert np.array_equal(vector.data, weights[0])
