"""Convert a GGUF file to another precision, so that llama.cpp can be measured in the precision that we decode in.

    python -m benchmarks.convert_gguf IN.gguf OUT.gguf --type BF16        or F32, F16, Q8_0

The weights are IN's, dequantised as transformers does it; no original model is read. Matrices are packed again,
vectors (norms, biases) stay in float32, as llama.cpp requires.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
}


def convert(source: Path, out: Path, name: str) -> None:
    """Write ``out`` with the metadata of ``source``, its matrices in the format ``name``."""
    reader, wanted = GGUFReader(source), GGMLQuantizationType[name]
    writer = GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        own = field.name == "general.architecture" or field.name.startswith("GGUF.")
        if not own and field.name not in ("general.file_type", "general.quantization_version"):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(TYPES[name])
    if name == "Q8_0":
        writer.add_quantization_version(2)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = GGMLQuantizationType.F32 if values.ndim == 1 else wanted
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=TYPES, default="BF16")
    given = parser.parse_args()
    convert(given.source, given.out, given.type)
