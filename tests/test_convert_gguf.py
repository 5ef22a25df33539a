"""Conversions of GGUF files."""

import numpy as np
import pytest

from benchmarks.convert_gguf import convert


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
