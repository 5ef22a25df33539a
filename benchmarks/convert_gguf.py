"""Convert a GGUF file to another precision, so that all libraries can be measured in the same one.

    python -m benchmarks.convert_gguf IN.gguf OUT.gguf --type BF16        or F32, F16, Q8_0, Q4_0, Q4_K_M, IQ4_NL
    python -m benchmarks.convert_gguf IN.gguf FOLDER --type INT4          or INT8: OpenVINO's own format

The weights are IN's, dequantized as in transformers; no original model is read. Matrices are packed again; vectors
(norms, biases) stay in float32, as llama.cpp requires. Q4_K_M and IQ4_NL are made by llama.cpp's quantizer, from F16;
INT4 and INT8 by NNCF, the quantizer of OpenVINO, from F16 too.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q4_K_M": LlamaFileType.MOSTLY_Q4_K_M,
    "IQ4_NL": LlamaFileType.MOSTLY_IQ4_NL,
}
#: Formats that llama.cpp's quantizer makes.
BY_LLAMA_CPP = ("Q4_K_M", "IQ4_NL")
#: Formats that NNCF makes -> its mode and other settings. Like Q4_0, INT4 is symmetric, and embeddings and output
#: rows are in 4 bits too. Its groups are of 64 weights, because rows of the default model have 576, which is no
#: multiple of 128.
BY_NNCF = {
    "INT4": ("int4_sym", {"group_size": 64, "all_layers": True}),
    "INT8": ("int8_sym", {}),
}


def convert(source: Path, out: Path, name: str) -> None:
    """Write ``out`` with the metadata of ``source``, its matrices in the format ``name``.

    ``out`` is a file, or a folder if NNCF makes the format.
    """
    if name in BY_LLAMA_CPP:
        return _quantized(source, out, TYPES[name])
    if name in BY_NNCF:
        return _compressed(source, out, name)
    reader = GGUFReader(source)
    wanted = GGMLQuantizationType[name]
    writer = GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        own = field.name == "general.architecture" or field.name.startswith("GGUF.")
        if not own and field.name not in ("general.file_type", "general.quantization_version"):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(TYPES[name])
    if name.startswith("Q"):
        writer.add_quantization_version(2)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = GGMLQuantizationType.F32 if values.ndim == 1 else wanted
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def export(source: Path, out: Path) -> None:
    """Write a folder of transformers in bfloat16: configuration, weights and tokenizer."""
    from transformers import AutoTokenizer

    import lookahead

    model = lookahead.load(source, dtype="bfloat16").model.module
    # The weights are decoded; transformers would refuse to write them otherwise.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(out)


@cache
def _silent() -> Any:
    """A callback that drops llama.cpp's messages; kept, because llama.cpp calls it from now on."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda level, text, data: None)


def _quantized(source: Path, out: Path, kind: LlamaFileType) -> None:
    """Convert with llama.cpp's quantizer, which chooses the format of each tensor."""
    import llama_cpp

    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "wide.gguf"
        convert(source, wide, "F16")
        llama_cpp.llama_log_set(_silent(), ctypes.c_void_p(0))  # otherwise it prints a line for each tensor
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = int(kind)
        if llama_cpp.llama_model_quantize(str(wide).encode(), str(out).encode(), ctypes.byref(settings)):
            raise SystemExit(f"error: llama.cpp cannot quantize {source} to {kind.name}")


def _compressed(source: Path, out: Path, name: str) -> None:
    """Write OpenVINO's model, compressed by NNCF, and its tokenizer into the folder ``out``."""
    import nncf
    import openvino
    from openvino_genai import LLMPipeline

    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "wide.gguf"
        convert(source, wide, "F16")
        LLMPipeline(str(wide), "CPU", enable_save_ov_model=True)  # writes the model beside the file
        model = openvino.Core().read_model(wide.with_name("openvino_model.xml"))
        mode, settings = BY_NNCF[name]
        model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode(mode), **settings)
        out.mkdir(exist_ok=True)
        openvino.save_model(model, out / "openvino_model.xml")
        for file in Path(folder).glob("openvino_*tokenizer.*"):
            shutil.copy(file, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=[*TYPES, *BY_NNCF], default="BF16")
    given = parser.parse_args()
    convert(given.source, given.out, given.type)
