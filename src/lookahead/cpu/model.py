"""Models whose weights stay packed.

``read_model`` reads a GGUF file (``gguf_blueprint``). ``quantize_model`` packs the weights of a transformers model of
any class that the compiled path supports.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core import SettingsError, Target
from ..gguf.file import GGUFFile
from ..limits import Limits, Probe
from ..model import OwnConfig, OwnModel, generation_config_of, weights_of
from .blueprint import Blueprint
from .compiled_model import CompiledModel, checked
from .gguf_blueprint import blueprint_of_file, filled, new_panels
from .kernels.formats import ArrayMemory, round_up
from .packed import BLOCK, GROUP, KIND_INDEX, KINDS, PANEL, Kind, PackedLinear, pack_panels
from .target import CpuTarget

if TYPE_CHECKING:
    import torch

    from .dense import Linear


class PackedModel(OwnModel):
    """A model of packed weights.

    Args:
        blueprint: its packed parts.
        config, generation_config: as in transformers, or objects with the fields found in a GGUF file.
        max_positions: positions that the model was trained for.
        weights, parameter_count: see ``OwnModel``.

    Attributes:
        compiled: its compiled pass.

    Raises:
        Unsupported: numba cannot compile here.
    """

    path = CpuTarget.path
    bit_equal = True
    instead = "load the model with dtype='bfloat16' or 'float32' for other paths"

    def __init__(
        self,
        blueprint: Blueprint,
        config: Any,
        generation_config: Any,
        max_positions: int,
        weights: str,
        parameter_count: int,
    ) -> None:
        self.compiled = checked(lambda: CompiledModel(blueprint))
        self.config = config
        self.generation_config = generation_config
        self.weights = weights
        self.parameter_count = parameter_count
        self.facts = Limits(config.get_text_config(decoder=True), blueprint.vocabulary, max_positions)
        self.description = f"{blueprint.name}, {weights} weights, {self.compiled.layout}"

    def probe(self) -> Probe:
        """Mode "tree", without a comparison: there is one kind of pass, and it is bit-identical in any tree."""
        return Probe("tree", self.description, None, self.facts)

    def make_target(self) -> Target:
        """A ``CpuTarget``."""
        return CpuTarget(self.compiled, self.facts, reason=self.description)

    def parameters(self) -> list[torch.Tensor]:
        """All weights, for ranks to check that they have the same model.

        The first tensor is the memory of all packed weights, uint8 (bytes,); the others are norms, biases and
        factors, fp32.
        """
        import torch

        head = self.compiled.blueprint.head
        assert isinstance(head, PackedLinear)  # all packed weights share its memory
        return [torch.from_numpy(array) for array in (head.memory.used, *self.compiled.unpacked)]


def read_model(file: GGUFFile) -> PackedModel:
    """Read a model from a GGUF file.

    Raises:
        Unsupported: transformers' reader must load the file; the message is the reason, in one line.
    """
    blueprint, settings, decoded = blueprint_of_file(file)
    for kind, size in decoded.items():
        warnings.warn(
            f"{file.path.name}: the compiled path does not support {kind} blocks; those tensors are decoded to "
            f"bfloat16, which takes {size / 1e6:.0f} MB",
            UserWarning,
            stacklevel=2,
        )
    config = OwnConfig(
        model_type=file.metadata["general.architecture"],
        vocab_size=settings.vocabulary,
        max_position_embeddings=settings.max_positions,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layer_count,
        num_attention_heads=settings.heads,
        intermediate_size=settings.inner,
        is_encoder_decoder=False,
    )
    return PackedModel(
        blueprint, config, generation_config_of(file), settings.max_positions, *weights_of(file)
    )


def quantize_model(model: Any, facts: Any, name: str) -> PackedModel:
    """Quantize the matrices of a transformers model with the reference quantizer of the package gguf.

    Args:
        model: a model of a class that the compiled path supports.
        facts: its sizes (``facts.ModelFacts``).
        name: q8_0, q4_0, q4_1, q5_0 or q5_1, in upper or lower case.

    Raises:
        Unsupported: the compiled path does not support the model.
        SettingsError: the type is another, or the package gguf is missing.
    """
    import torch

    from ..hf.module_families import blueprint_of
    from .dense import Linear, tensor_of

    # The matrices to pack. An untied embedding is packed like a linear, with one output per token.
    kind = quantizable(name)
    blueprint = blueprint_of(model, facts)
    linears: list[Any] = [linear for layer in blueprint.layers() for linear in layer.linears.values()]
    head: Any = blueprint.head
    embedding: Any = blueprint.embedding
    heads = [head]
    if embedding.ctypes.data != head.weight.data_ptr():
        heads.append(Linear(tensor_of(embedding), torch.zeros(len(embedding))))
    # Pack everything into one block of memory, the head and the embedding first.
    memory = ArrayMemory(sum(_quantized_size(linear, kind) for linear in (*linears, *heads)))
    packed = [_quantized(linear, kind, memory) for linear in heads]
    layers = []
    for layer in blueprint.layers():
        parts: dict[str, Any] = dict(layer.linears)
        layer.linears = {part: _quantized(linear, kind, memory) for part, linear in parts.items()}
        layers.append(layer)
    # The other parts stay as they are, in fp32.
    positions = blueprint.position_embedding
    blueprint = replace(
        blueprint,
        dtype="float32",
        layers=lambda: iter(layers),
        head=packed[0],
        embedding=packed[-1],
        position_embedding=None if positions is None else tensor_of(positions).float().numpy(),
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    return PackedModel(
        blueprint, model.config, model.generation_config, facts.max_positions, kind.name, count
    )


def quantizable(name: str) -> Kind:
    """The type with this name.

    Raises:
        SettingsError: the package gguf cannot quantize to it, or is missing.
    """
    names = [kind.name for kind in KINDS if 4 <= kind.bits <= 8 and not kind.grouped]
    if name.upper() not in names:
        grouped = name.upper() in KIND_INDEX
        why = "; the package gguf cannot quantize to it: load a file of this type" if grouped else ""
        raise SettingsError(f"weights must be one of {', '.join(names).lower()}, got {name!r}{why}")
    if find_spec("gguf") is None:
        raise SettingsError("quantizing weights needs the package gguf; pip install gguf")
    return KINDS[KIND_INDEX[name.upper()]]


def _kind_for(linear: Linear, kind: Kind) -> Kind:
    """The kind that a linear is stored in; F32 if its inner size is not a multiple of a block."""
    return kind if linear.weight.shape[1] % BLOCK == 0 else KINDS[KIND_INDEX["F32"]]


def _quantized_size(linear: Linear, kind: Kind) -> int:
    outputs, inner = linear.weight.shape
    return round_up(outputs, GROUP) // PANEL * _kind_for(linear, kind).panel_bytes(inner) + 64


def _quantized(linear: Linear, kind: Kind, memory: ArrayMemory) -> PackedLinear:
    import gguf

    outputs, inner = linear.weight.shape
    kind = _kind_for(linear, kind)
    order = filled(np.arange(outputs), GROUP).reshape(-1, PANEL)
    panels, table = new_panels(memory, kind, len(order), inner)
    # Quantize 512 panels at a time, because the fp32 numbers are a temporary copy.
    for begin in range(0, len(order), 512):
        rows = order[begin : begin + 512]
        fp32 = linear.weight[begin * PANEL : (begin + 512) * PANEL].float().contiguous().numpy()
        raw = fp32 if kind.name == "F32" else gguf.quantize(fp32, gguf.GGMLQuantizationType[kind.name])
        raw = raw.view(np.uint8).reshape(len(fp32), -1)
        local = np.where(rows >= 0, rows - begin * PANEL, -1)
        pack_panels(kind, raw, local, inner, panels[begin : begin + 512])
    bias = np.zeros(order.size, np.float32)
    bias[:outputs] = linear.bias.float().numpy()
    return PackedLinear(np.ascontiguousarray(table.reshape(-1, 2, 2)), bias, inner, memory)
