"""Quantizes the weights of a transformers model while it is loaded, for the compiled CPU path."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..core import SettingsError
from ..core.errors import Unsupported
from ..cpu.dense import Linear, floats
from ..cpu.formats import ArrayMemory, round_up
from ..cpu.gguf_blueprint import filled, new_panels
from ..cpu.model import PackedModel
from ..cpu.packed import BLOCK, GROUP, PANEL, TENSOR_TYPES, TYPE_INDEX, PackedLinear, TensorType, pack_panels
from .facts import ModelFacts
from .model import HFModel
from .module_families import blueprint_of


def quantize_model(model: HFModel, name: str) -> PackedModel:
    """Quantize the matrices of a transformers model with the reference quantizer of the package gguf.

    Args:
        model: a model of a class that the compiled path supports.
        name: q8_0, q4_0, q4_1, q5_0 or q5_1, in upper or lower case.

    Raises:
        Unsupported: the compiled path does not support the model.
        SettingsError: the type is another, or the package gguf is missing.
    """
    # The matrices to pack. An untied embedding is packed like a linear, with one output per token.
    tensor_type = quantizable(name)
    facts = model.probe.facts
    if not isinstance(facts, ModelFacts):
        raise Unsupported("it cannot evaluate token trees")
    blueprint = blueprint_of(model.module, facts)
    linears: list[Any] = [linear for layer in blueprint.layers() for linear in layer.linears.values()]
    head: Any = blueprint.head
    embedding: Any = blueprint.embedding
    heads = [head]
    if embedding.ctypes.data != head.weight.ctypes.data:
        heads.append(Linear(embedding, np.zeros(len(embedding), np.float32)))
    # Pack everything into one block of memory, the head and the embedding first.
    memory = ArrayMemory(sum(_quantized_size(linear, tensor_type) for linear in (*linears, *heads)))
    packed = [_quantized(linear, tensor_type, memory) for linear in heads]
    layers = []
    for layer in blueprint.layers():
        parts: dict[str, Any] = dict(layer.linears)
        layer.linears = {part: _quantized(linear, tensor_type, memory) for part, linear in parts.items()}
        layers.append(layer)
    # The other parts stay as they are, in fp32.
    positions = blueprint.position_embedding
    blueprint = replace(
        blueprint,
        dtype="float32",
        layers=lambda: iter(layers),
        head=packed[0],
        embedding=packed[-1],
        position_embedding=None if positions is None else floats(positions),
    )
    return PackedModel(
        blueprint,
        model.shape.family,
        model.eos,
        model.sampling,
        facts.max_positions,
        tensor_type.name,
        model.parameter_count,
    )


def quantizable(name: str) -> TensorType:
    """The type with this name.

    Raises:
        SettingsError: the package gguf cannot quantize to it, or is missing.
    """
    names = [each.name for each in TENSOR_TYPES if 4 <= each.bits <= 8 and not each.grouped]
    if name.upper() not in names:
        grouped = name.upper() in TYPE_INDEX
        why = "; the package gguf cannot quantize to it: load a file of this type" if grouped else ""
        raise SettingsError(f"weights must be one of {', '.join(names).lower()}, got {name!r}{why}")
    if find_spec("gguf") is None:
        raise SettingsError("quantizing weights needs the package gguf; pip install gguf")
    return TENSOR_TYPES[TYPE_INDEX[name.upper()]]


def _type_for(linear: Linear, tensor_type: TensorType) -> TensorType:
    """The tensor type that a linear is stored in; F32 if its inner size is not a multiple of a block."""
    return tensor_type if linear.weight.shape[1] % BLOCK == 0 else TENSOR_TYPES[TYPE_INDEX["F32"]]


def _quantized_size(linear: Linear, tensor_type: TensorType) -> int:
    outputs, inner = linear.weight.shape
    return round_up(outputs, GROUP) // PANEL * _type_for(linear, tensor_type).panel_bytes(inner) + 64


def _quantized(linear: Linear, tensor_type: TensorType, memory: ArrayMemory) -> PackedLinear:
    import gguf

    outputs, inner = linear.weight.shape
    tensor_type = _type_for(linear, tensor_type)
    order = filled(np.arange(outputs), GROUP).reshape(-1, PANEL)
    panels, table = new_panels(memory, tensor_type, len(order), inner)
    # Quantize 512 panels at a time, because the fp32 numbers are a temporary copy.
    for begin in range(0, len(order), 512):
        rows = order[begin : begin + 512]
        fp32 = np.ascontiguousarray(floats(linear.weight[begin * PANEL : (begin + 512) * PANEL]))
        raw = (
            fp32
            if tensor_type.name == "F32"
            else gguf.quantize(fp32, gguf.GGMLQuantizationType[tensor_type.name])
        )
        raw = raw.view(np.uint8).reshape(len(fp32), -1)
        local = np.where(rows >= 0, rows - begin * PANEL, -1)
        pack_panels(tensor_type, raw, local, inner, panels[begin : begin + 512])
    bias = np.zeros(order.size, np.float32)
    bias[:outputs] = linear.bias
    return PackedLinear(np.ascontiguousarray(table.reshape(-1, 2, 2)), bias, inner, memory)
