"""Reads a GGUF file for the compiled CPU path. Needs neither torch nor transformers."""

from __future__ import annotations

import warnings

import numpy as np

from ..gguf.file import GGUFFile
from ..gguf.settings import suggested_sampling
from ..records import not_writable
from ..text.tokenizer import end_tokens
from . import weight_cache
from .blueprint import Blueprint
from .formats import ArrayMemory
from .gguf_blueprint import FileReader
from .model import PackedModel, reader_of

#: Rows of a head and of an embedding with at least this cosine are the same weights; others are nearly orthogonal.
TIED = 0.95


def read_model(file: GGUFFile, cache: bool = True) -> PackedModel:
    """Read a model from a GGUF file.

    Args:
        file: the file.
        cache: whether packed weights are kept on disk, and mapped from there (``weight_cache``).

    Raises:
        Unsupported: the compiled path does not support the file; the message is the reason, in one line.
    """
    with FileReader(file) as reader:
        blueprint, told = _blueprint(reader, cache)
        model = PackedModel(
            blueprint,
            file.metadata["general.architecture"],
            end_tokens(file.metadata),
            suggested_sampling(file.metadata),
            reader.settings.max_positions,
            file.weights,
            file.parameter_count - _counted_twice(file, blueprint),
        )
    if told:
        model.state["unwritable cache"] = {}
    for tensor_type, size in reader.decoded.items():
        warnings.warn(
            f"{file.path.name}: the compiled path does not support {tensor_type} blocks; those tensors are decoded "
            f"to bfloat16, which takes {size / 1e6:.0f} MB",
            UserWarning,
            stacklevel=2,
        )
    return model


def _counted_twice(file: GGUFFile, blueprint: Blueprint) -> int:
    """The number of weights that the file holds twice: a head that is the embedding, quantized in another way."""
    if "output.weight" not in file.tensors:
        return 0
    some = [0, blueprint.vocabulary // 2, blueprint.vocabulary - 1]
    rows, others = (reader_of(part)(some).ravel() for part in (blueprint.embedding, blueprint.head))
    alike = rows @ others >= TIED * float(np.linalg.norm(rows) * np.linalg.norm(others)) > 0
    return blueprint.vocabulary * blueprint.hidden if alike else 0


def _blueprint(reader: FileReader, cache: bool) -> tuple[Blueprint, bool]:
    """The parts of the model, with its packed weights mapped from the cache if that is possible.

    Returns:
        (the parts, whether a line has said that nothing can be written to the cache).
    """
    told = False
    if cache and weight_cache.is_on() and reader.size >= weight_cache.LEAST:
        try:
            with weight_cache.panels_of(reader.file, reader.size) as panels:
                blueprint = reader.blueprint(panels)
                reader.file.check_unchanged()
                return blueprint, told
        except OSError as error:
            instead = "this process packs the weights into its own memory; --no-weight-cache omits this line"
            warnings.warn(str(not_writable(weight_cache.folder(), error, instead)), UserWarning, stacklevel=3)
            told = True
    return reader.blueprint(ArrayMemory(reader.size)), told
