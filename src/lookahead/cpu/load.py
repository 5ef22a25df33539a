"""Reads a GGUF file for the compiled CPU path. Needs neither torch nor transformers."""

from __future__ import annotations

import warnings

from ..gguf.file import GGUFFile
from ..text.tokenizer import end_tokens
from .gguf_blueprint import FileReader
from .model import PackedModel


def read_model(file: GGUFFile) -> PackedModel:
    """Read a model from a GGUF file.

    Raises:
        Unsupported: the compiled path does not support the file; the message is the reason, in one line.
    """
    with FileReader(file) as reader:
        blueprint = reader.blueprint()
        model = PackedModel(
            blueprint,
            file.metadata["general.architecture"],
            end_tokens(file.metadata),
            reader.settings.max_positions,
            file.weights,
            file.parameter_count,
        )
    for kind, size in reader.decoded.items():
        warnings.warn(
            f"{file.path.name}: the compiled path does not support {kind} blocks; those tensors are decoded to "
            f"bfloat16, which takes {size / 1e6:.0f} MB",
            UserWarning,
            stacklevel=2,
        )
    return model
