"""The settings of a GGUF file, read and checked. Missing settings get llama.cpp's defaults.

This module does not import torch; ``gguf_blueprint`` turns the result into a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..core import SettingsError
from ..core.errors import Unsupported
from .families import FACTORS_BY_LENGTH, FREQUENCY_FACTORS, GGUF_NAMES, GGUFNames
from .file import GGUFFile
from .sizes import ROUTER, Metadata, Sizes, check_counts, contradiction, read_sizes

#: Name in ``general.sampling`` -> (the option, its value that changes nothing).
SAMPLING = {
    "temp": ("temperature", None),
    "top_k": ("top_k", 0),
    "top_p": ("top_p", 1.0),
    "min_p": ("min_p", 0.0),
    "penalty_repeat": ("repetition_penalty", 1.0),
}


def suggested_sampling(metadata: Mapping[str, Any]) -> dict[str, float]:
    """``Model.sampling`` of a file, unchecked: what it says under the names of ``SAMPLING``."""
    given = {
        option: metadata[f"general.sampling.{name}"]
        for name, (option, neutral) in SAMPLING.items()
        if metadata.get(f"general.sampling.{name}", neutral) != neutral
    }
    return {"temperature": 1.0, **given} if given else {}


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Angle i of position p is p / factor * base ** (-2 i / R), i below R / 2.

    If the file has ``FREQUENCY_FACTORS`` (R / 2,), angle i of the first table is also divided by element i.
    """

    base: float
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class GGUFSettings(Sizes):
    """The resolved settings of one file, as in ``blueprint.Blueprint`` and ``LayerParts``.

    Attributes:
        names: the names and properties of the architecture.
        epsilon: epsilon of all norms.
        scale: factor of the scores.
        attention_cap, head_cap: c in c * tanh(x / c); 0 for none.
        embedding_factor, residual_factor, head_factor: factors of the embeddings, of the outputs of attention and
            feed-forward, and of the logits.
        windows: by layer, the number of keys that a row sees, including its own; 0 for all.
        tables: tables of rotary positions.
        rotary: by layer, 0 for no rotary positions, else 1 + the index of the table.
        tied: whether the head is the embedding.
    """

    names: GGUFNames
    epsilon: float
    scale: float
    attention_cap: float
    head_cap: float
    embedding_factor: float
    residual_factor: float
    head_factor: float
    windows: tuple[int, ...]
    tables: tuple[RotaryTable, ...]
    rotary: tuple[int, ...]
    tied: bool


def check_file(file: GGUFFile) -> GGUFSettings | None:
    """Check a file that transformers will read, in full if ``read_settings`` can read its settings.

    Returns:
        The settings; None if ``read_settings`` does not support the file.

    Raises:
        SettingsError: settings and tensors contradict each other, or transformers would ignore the scaling of rotary
            positions.
    """
    try:
        return read_settings(file)
    except Unsupported:
        check_counts(file)
    scaling = f"{file.metadata.get('general.architecture')}.rope.scaling"
    scaling_type = file.metadata.get(f"{scaling}.type", "linear")
    factor = file.metadata.get(f"{scaling}.factor", 0)
    ignored = [name for name in (FREQUENCY_FACTORS, *FACTORS_BY_LENGTH) if name in file.tensors]
    unscaled = isinstance(factor, (int, float)) and factor in (0, 1)  # a damaged file may have an array here
    if (
        not isinstance(scaling_type, str)
        or scaling_type not in ("none", "linear")
        or (scaling_type == "linear" and not unscaled)
    ):
        ignored.append(scaling)
    if ignored and not scaling.startswith("gpt-oss"):  # whose scaling transformers reads
        raise SettingsError(
            f"transformers ignores {ignored[0]} and would decode {file.path.name} with wrong rotary positions; use "
            "engine='llama.cpp', or the safetensors from which the file was made"
        )
    return None


def read_settings(file: GGUFFile) -> GGUFSettings:
    """Read the settings of a file, and check its sizes.

    Raises:
        Unsupported: the architecture is not in ``GGUF_NAMES``, or a setting is not supported.
        SettingsError: settings and tensors contradict each other.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in GGUF_NAMES:
        raise Unsupported(
            f"the architecture must be one of {', '.join(GGUF_NAMES)}, got {architecture!r:.60}"
        )
    if ROUTER in file.tensors:
        raise Unsupported("the compiled path does not support mixtures of experts")
    names = GGUF_NAMES[architecture]
    read = Metadata(file, architecture, names)
    sizes = read_sizes(read)
    slides, window = _window(read, sizes)
    tables, rotary = _rotary(read, sizes, slides)
    # Files of Gemma 2 before June 2024 lack the caps, which llama.cpp then sets to these values.
    caps = (50.0, 30.0) if architecture == "gemma2" else (0.0, 0.0)
    epsilon = read.setting("norm_eps", 1e-5)
    if epsilon < 0:
        raise contradiction(file, f"the epsilon of norms must be 0 or more, got {epsilon}")
    return GGUFSettings(
        **{field.name: getattr(sizes, field.name) for field in fields(sizes)},
        names=names,
        epsilon=epsilon,
        scale=_scale(read, sizes),
        attention_cap=read.setting("attn_logit_softcapping", caps[0]),
        head_cap=read.setting("final_logit_softcapping", caps[1]),
        embedding_factor=read.setting("embedding_multiplier", 0.0)
        or (math.sqrt(sizes.hidden) if names.scaled_embedding else 1.0),
        residual_factor=read.setting("residual_multiplier", 0.0) or 1.0,
        head_factor=1.0 / (read.setting("logits_scaling", 0.0) or 1.0),
        windows=tuple(window if sliding else 0 for sliding in slides),
        tables=tables,
        rotary=rotary,
        tied="output.weight" not in file.tensors,
    )


def _scale(read: Metadata, sizes: Sizes) -> float:
    """Factor of the scores. Gemma 27B scales by hidden / heads; its layer count identifies it (as llama.cpp)."""
    if (multiplier := read.setting("attention_multiplier", 0.0)) != 0:
        return multiplier
    large = {"gemma2": 46, "gemma3": 62}.get(read.architecture) == sizes.layer_count
    return 1 / math.sqrt(sizes.hidden / sizes.heads if large else sizes.head_size)


def _window(read: Metadata, sizes: Sizes) -> tuple[list[bool], int]:
    """For each layer, whether it has a sliding window; and the window."""
    layer_count = sizes.layer_count
    default = 4096 if read.architecture == "gemma2" else 0
    window = read.whole("attention.sliding_window", default, least=0)
    if window == 0:
        return [False] * layer_count, 0
    pattern = read.get("attention.sliding_window_pattern", 0)
    if isinstance(pattern, np.ndarray):  # one truth value per layer
        if len(pattern) != layer_count:
            raise contradiction(
                read.file,
                f"the pattern of sliding windows must have {layer_count} layers, got {len(pattern)}",
            )
        return [bool(sliding) for sliding in pattern], window
    # In each run of ``pattern`` layers, all but the last slide.
    if period := read.whole("attention.sliding_window_pattern", 0, least=0):
        return [layer % period < period - 1 for layer in range(layer_count)], window
    if read.names.slides is None:
        if window >= sizes.max_positions:  # the window has no effect
            return [False] * layer_count, 0
        raise Unsupported(
            f"the file must specify which layers of {read.architecture} have the sliding window"
        )
    return [read.names.slides(layer) for layer in range(layer_count)], window


def _rotary(
    read: Metadata, sizes: Sizes, slides: list[bool]
) -> tuple[tuple[RotaryTable, ...], tuple[int, ...]]:
    """``GGUFSettings.tables`` and ``GGUFSettings.rotary``."""
    # The layers with rotary positions.
    rotates = [read.names.rotates(layer) for layer in range(sizes.layer_count)]
    if read.architecture == "granite" and not read.get("rope.scaling.finetuned", True):  # as in llama.cpp
        rotates = [False] * sizes.layer_count
    if not any(rotates):
        return (), (0,) * sizes.layer_count
    if sizes.head_size % 2:
        raise Unsupported(f"heads with rotary positions must have an even size, got {sizes.head_size}")
    scaling_type = read.get("rope.scaling.type", "linear")  # as in llama.cpp
    if not isinstance(scaling_type, str) or scaling_type not in ("none", "linear"):
        raise Unsupported(
            f"the compiled path does not support rotary positions of type {scaling_type!r:.60} in GGUF files"
        )
    for name in FACTORS_BY_LENGTH:
        if name in read.file.tensors:
            raise Unsupported(f"rotary positions that change with the sequence length ({name})")
    # The tables: one, or in Gemma 3 a second one for layers with a sliding window.
    factor = 1.0
    if scaling_type == "linear":  # old files have the second key; the factor 0 means none
        factor = float(read.number("rope.scaling.factor", 0) or read.number("rope.scale_linear", 0) or 1.0)
    tables = [RotaryTable(read.setting("rope_theta", 10000.0), factor)]
    if read.architecture == "gemma3":
        tables.append(RotaryTable(read.setting("rope_local_base_freq", 10000.0)))
    if not all(table.base > 0 and table.factor > 0 for table in tables):
        raise contradiction(
            read.file, f"the base and the factor of rotary positions must be above 0, got {tables[0]}"
        )
    if read.architecture != "gemma3":
        return tuple(tables), tuple(map(int, rotates))
    return tuple(tables), tuple(2 if sliding else 1 for sliding in slides)
