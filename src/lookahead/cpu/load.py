"""Reads a GGUF file for the compiled CPU path. Needs neither torch nor transformers."""

from __future__ import annotations

import warnings

from ..gguf.file import GGUFFile
from ..gguf.settings import suggested_sampling
from ..records import not_writable
from ..text.tokenizer import end_tokens
from . import weight_cache
from .blueprint import Blueprint
from .formats import ArrayMemory
from .gguf_blueprint import FileReader
from .model import PackedModel


def read_model(file: GGUFFile, cache: bool = True) -> PackedModel:
    """Read a model from a GGUF file.

    Args:
        file: the file.
        cache: whether packed weights are kept on disk, and mapped from there (``weight_cache``).

    Raises:
        Unsupported: the compiled path does not support the file; the message is the reason, in one line.
    """
    with FileReader(file) as reader:
        model = PackedModel(
            _blueprint(reader, cache),
            file.metadata["general.architecture"],
            end_tokens(file.metadata),
            suggested_sampling(file.metadata),
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


def _blueprint(reader: FileReader, cache: bool) -> Blueprint:
    """The parts of the model, with its packed weights mapped from the cache if that is possible."""
    if cache and weight_cache.is_on() and reader.size >= weight_cache.LEAST:
        try:
            with weight_cache.panels_of(reader.file, reader.size) as panels:
                blueprint = reader.blueprint(panels)
                reader.file.check_unchanged()
                return blueprint
        except OSError as error:
            instead = "this process packs the weights into its own memory; --no-weight-cache omits this line"
            warnings.warn(str(not_writable(weight_cache.folder(), error, instead)), UserWarning, stacklevel=3)
    return reader.blueprint(ArrayMemory(reader.size))
