"""Models whose weights stay packed.

From a GGUF file (``read_model``) neither a module of transformers nor a second copy is made. The file's blocks are
copied once into the order of the kernel (``packed``), by as many threads as torch has, and the file's pages are given
back. Tensors of types that the kernel does not know are decoded to bf16. Any model of transformers that the compiled
path knows can be quantized while it is loaded (``quantize_model``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core import SettingsError
from ...files.gguf import GGUFFile
from ...threads import thread_count
from ..limits import Limits
from ..own_model import OwnConfig, OwnModel
from . import formats
from .blueprint import ACTIVATIONS, NORMS, Blueprint, LayerParts, Norm, Unsupported
from .compiled_model import CompiledModel, checked
from .formats import Arena, round_up
from .gguf_names import FREQUENCY_FACTORS, GGUFSettings, UnsupportedFile, read_settings
from .packed import GROUP, KINDS, PANEL, PLACE, Kind, PackedLinear, pack_panels

if TYPE_CHECKING:
    from .dense import Linear

Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the file: (outputs, bytes of an output), and how its numbers are stored."""

    raw: Numbers
    kind: Kind
    inner: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """Outputs of one tensor in the order in which they are wanted, -1 for places without one."""

    name: str
    order: Numbers


class _Reader:
    """Reads the parts of one file.

    Args:
        file: its tensors are mapped.
        settings: of the file.
    """

    def __init__(self, file: GGUFFile, settings: GGUFSettings) -> None:
        self.file, self.settings, self.names = file, settings, settings.names
        order = formats.paired(settings.head_size, settings.rotary_size)
        # Rows that the converter has permuted lie in this order already.
        self.order = np.arange(settings.head_size) if self.names.permuted else order
        self.decoded: dict[str, int] = {}
        self._sources: dict[str, _Source] = {}
        weights = [name for name, tensor in file.tensors.items() if len(tensor.shape) == 2]
        # A tensor may be padded by up to a group of panels for each linear that it is part of.
        self.arena = Arena(sum(self._packed_size(name) for name in weights))
        self._packing = ThreadPoolExecutor(thread_count(), "lookahead-pack")
        self._jobs: list[Any] = []

    def _packed_size(self, name: str) -> int:
        source = self.source(name)
        return (
            round_up(len(source.raw) + 3 * GROUP, GROUP) // PANEL * source.kind.panel_bytes(source.inner)
            + 256
        )

    def source(self, name: str) -> _Source:
        """A tensor with two dimensions, decoded to bf16 where the kernel does not know its type."""
        if name not in self._sources:
            tensor, raw = self.file.tensors[name], self.file.bytes(name)
            outputs, inner = tensor.shape
            place = PLACE.get(tensor.type)
            if place is None:
                raw, place = self._as_bf16(name, raw, (outputs, inner)), PLACE["BF16"]
                self.decoded[tensor.type] = self.decoded.get(tensor.type, 0) + 2 * outputs * inner
            self._sources[name] = _Source(raw.reshape(outputs, -1), KINDS[place], inner)
        return self._sources[name]

    def _as_bf16(self, name: str, raw: Numbers, shape: tuple[int, ...]) -> Numbers:
        values = self._decoded(name, raw, shape)
        bits = values.view(np.uint32)
        nearest = bits + (0x7FFF + (bits >> 16 & 1)).astype(np.uint32)  # ties to even
        return (nearest >> 16).astype(np.uint16).view(np.uint8)

    def _decoded(self, name: str, raw: Numbers, shape: tuple[int, ...]) -> Numbers:
        kind = self.file.tensors[name].type
        if kind in ("F32", "F64", "F16"):
            values = raw.view({"F32": "<f4", "F64": "<f8", "F16": "<f2"}[kind]).astype(np.float32)
        elif kind == "BF16":
            values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            try:
                import gguf

                values = gguf.dequantize(raw.reshape(shape[0], -1), gguf.GGMLQuantizationType[kind])
            except (ImportError, KeyError, NotImplementedError) as error:
                raise Unsupported(
                    f"{name} is stored as {kind}, which this library reads through the package gguf; "
                    f"pip install gguf, or take a file of another type ({error})"
                ) from None
        return np.ascontiguousarray(values, np.float32).reshape(shape)

    def numbers(self, name: str) -> Numbers:
        """A small tensor, fp32."""
        return self._decoded(name, self.file.bytes(name), self.file.tensors[name].shape)

    def name(self, part: str, layer: int | None = None) -> str:
        """Of the tensor that holds a part, without its ending."""
        return self.names.tensors[part].format(layer=layer)

    def linear(self, panels: Sequence[_Rows], biases: Sequence[Numbers]) -> PackedLinear:
        """A linear of rows of one tensor or several; each ``_Rows`` is a whole number of panels.

        Args:
            biases: of all outputs of each of the tensors, by the order of ``panels``.
        """
        table, bias, inner = [], [], 0
        for rows, values in zip(panels, biases, strict=True):
            source = self.source(rows.name)
            inner = source.inner
            places = rows.order.reshape(-1, PANEL)
            size = source.kind.panel_bytes(inner)
            memory = self.arena.take(len(places) * size).reshape(len(places), size)
            place = PLACE[source.kind.name]
            self._jobs.append(self._packing.submit(pack_panels, place, source.raw, places, inner, memory))
            table.append(
                np.stack(
                    [memory.ctypes.data + size * np.arange(len(places)), np.full(len(places), place)], -1
                )
            )
            bias.append(np.where(rows.order >= 0, values[np.maximum(rows.order, 0)], 0))
        joined = np.ascontiguousarray(np.concatenate(table).reshape(-1, 2, 2))
        return PackedLinear(joined, np.concatenate(bias).astype(np.float32), inner, self.arena)

    def bias(self, name: str) -> Numbers:
        """Of a linear; zeros where it has none."""
        outputs = self.file.tensors[f"{name}.weight"].shape[0]
        return self.numbers(f"{name}.bias") if f"{name}.bias" in self.file.tensors else np.zeros(outputs)

    def whole(self, name: str) -> PackedLinear:
        """A linear that is one tensor, its outputs as they are."""
        outputs = self.file.tensors[f"{name}.weight"].shape[0]
        return self.linear([_Rows(f"{name}.weight", _filled(np.arange(outputs), GROUP))], [self.bias(name)])

    def query_key_value(self, layer: int) -> PackedLinear:
        """All three as one linear, rotary pairs of queries and keys side by side."""
        settings, size = self.settings, self.settings.head_size
        heads, key_heads = settings.heads, settings.key_heads

        def order(first: int, count: int, rotates: bool) -> Numbers:
            inside = self.order if rotates else np.arange(size)
            return (first + size * np.arange(count)[:, None] + inside).reshape(-1)

        if "qkv" in self.names.tensors:
            name = self.name("qkv", layer)
            rows = np.concatenate(
                [
                    order(0, heads, True),
                    order(heads * size, key_heads, True),
                    order((heads + key_heads) * size, key_heads, False),
                ]
            )
            return self.linear([_Rows(f"{name}.weight", _filled(rows, GROUP))], [self.bias(name)])
        parts = [("query", heads, True), ("key", key_heads, True), ("value", key_heads, False)]
        names = [self.name(part, layer) for part, _, _ in parts]
        rows_of = [order(0, count, rotates) for _, count, rotates in parts]
        if any(len(rows) % PANEL for rows in rows_of):
            raise Unsupported(
                f"queries and keys must have a multiple of {PANEL} outputs, got heads of {size}"
            )
        rows_of[-1] = np.concatenate([rows_of[-1], _missing(sum(map(len, rows_of)))])
        return self.linear(
            [_Rows(f"{name}.weight", rows) for name, rows in zip(names, rows_of, strict=True)],
            [self.bias(name) for name in names],
        )

    def gate_and_up(self, layer: int) -> tuple[PackedLinear, bool]:
        """The first linear of a feed-forward; with gates, each group of outputs is 16 gates and their 16 ups."""
        inner = self.settings.inner
        if "gate" not in self.names.tensors and "gate_up" not in self.names.tensors:
            return self.whole(self.name("up", layer)), False
        halves = _filled(np.arange(inner), PANEL).reshape(-1, PANEL)
        if "gate_up" in self.names.tensors:
            name = self.name("gate_up", layer)
            ups = np.where(halves >= 0, halves + inner, -1)
            both = np.stack([halves, ups], 1).reshape(-1)
            return self.linear([_Rows(f"{name}.weight", both)], [self.bias(name)]), True
        gate, up = self.name("gate", layer), self.name("up", layer)
        linear = self.linear(
            [_Rows(f"{name}.weight", halves.reshape(-1)) for name in (gate, up)],
            [self.bias(gate), self.bias(up)],
        )
        # From all gates and then all ups to a gate's panel and its up's in each group.
        linear.panels = np.ascontiguousarray(linear.panels.reshape(2, -1, 2).transpose(1, 0, 2))
        linear.bias = linear.bias.reshape(2, -1, PANEL).transpose(1, 0, 2).reshape(-1)
        return linear, True

    def norm(self, part: str, layer: int | None = None) -> Norm:
        """A norm; one that changes nothing where the architecture has none."""
        if part not in self.names.tensors:
            return Norm.none(self.settings.hidden)
        name = self.name(part, layer)
        weight = self.numbers(f"{name}.weight")
        bias = f"{name}.bias"
        shift = self.numbers(bias) if bias in self.file.tensors else np.zeros_like(weight)
        return Norm(weight, shift, self.settings.epsilon, self.names.norm_kind)

    def head_norm(self, layer: int) -> tuple[Norm | None, bool]:
        """Query and key norms, and whether each is over all heads together (OLMo 2)."""
        settings, weights, joint = self.settings, [], False
        if "query_norm" not in self.names.tensors:
            return None, False
        for part, heads in (("query_norm", settings.heads), ("key_norm", settings.key_heads)):
            weight = self.numbers(f"{self.name(part, layer)}.weight").reshape(-1, settings.head_size)
            joint = joint or len(weight) > 1
            weights.append(np.broadcast_to(weight[:, self.order], (heads, settings.head_size)))
        joined = np.concatenate(weights)
        return Norm(joined, np.zeros_like(joined), settings.epsilon, 1), joint

    def layers(self) -> Iterable[LayerParts]:
        settings = self.settings
        for index in range(settings.layer_count):
            up, gated = self.gate_and_up(index)
            linears: dict[str, Linear | PackedLinear] = {
                "qkv": self.query_key_value(index),
                "output": self.whole(self.name("output", index)),
                "up": up,
                "down": self.whole(self.name("down", index)),
            }
            head_norm, joint = self.head_norm(index)
            yield LayerParts(
                linears,
                {name: self.norm(name, index) for name in NORMS},
                head_norm,
                joint,
                gated,
                settings.scale,
                settings.windows[index],
                settings.rotary[index],
                settings.attention_cap,
            )

    def angles(self) -> Any:
        """``Blueprint.angles``; None without rotary positions."""
        settings = self.settings
        if not settings.tables:
            return None
        # In fp32, as transformers computes them: the model was trained with these roundings.
        half = np.arange(0, settings.rotary_size, 2, dtype=np.float32) / np.float32(settings.rotary_size)
        frequencies = [
            np.float32(1) / np.float32(table.base) ** half / np.float32(table.factor)
            for table in settings.tables
        ]
        if FREQUENCY_FACTORS in self.file.tensors:
            frequencies[0] = frequencies[0] / self.numbers(FREQUENCY_FACTORS)

        def angles(positions: int) -> Numbers:
            turns = [np.arange(positions, dtype=np.float32)[:, None] * each for each in frequencies]
            return np.stack([np.stack([np.cos(turn), np.sin(turn)], -1) for turn in turns])

        return angles

    def finish(self) -> None:
        """Wait until everything is packed; the file's pages are not needed any more."""
        for job in self._jobs:
            job.result()
        self._packing.shutdown()
        self._sources.clear()
        self.file.check_unchanged()
        self.file.release()


def _filled(order: Numbers, multiple: int) -> Numbers:
    """An order with -1 up to a multiple."""
    return np.concatenate([order, np.full(-len(order) % multiple, -1)])


def _missing(count: int) -> Numbers:
    """What fills ``count`` outputs up to whole groups."""
    return np.full(-count % GROUP, -1)


def blueprint_of(file: GGUFFile) -> tuple[Blueprint, GGUFSettings, dict[str, int]]:
    """The parts of a file, packed; its settings; and bytes by type of what was decoded to bf16.

    Raises:
        Unsupported: with one line that says why; transformers' own reader serves then.
    """
    try:
        settings = read_settings(file)
        reader = _Reader(file, settings)
        layers = list(reader.layers())
        head = reader.whole("token_embd" if settings.tied else reader.name("head"))
        embedding = head if settings.tied else reader.whole(reader.name("embedding"))
        positions = None
        if "positions" in settings.names.tensors:
            positions = reader.numbers(f"{reader.name('positions')}.weight")
        blueprint = Blueprint(
            settings.names.model_class,
            "float32",
            settings.vocabulary,
            settings.hidden,
            settings.heads,
            settings.key_heads,
            settings.head_size,
            settings.inner,
            ACTIVATIONS[settings.names.activation],
            embedding,
            settings.layer_count,
            lambda: iter(layers),
            reader.norm("norm"),
            head,
            embedding_factor=settings.embedding_factor,
            position_embedding=positions,
            head_factor=settings.head_factor,
            head_cap=settings.head_cap,
            residual_factor=settings.residual_factor,
            rotary_size=settings.rotary_size if settings.tables else 0,
            angles=reader.angles(),
        )
        reader.finish()
    except UnsupportedFile as error:
        raise Unsupported(str(error)) from None
    except KeyError as error:
        raise Unsupported(f"the file must hold the tensor {error}, and does not") from None
    return blueprint, settings, reader.decoded


class PackedModel(OwnModel):
    """A model with packed weights only.

    Args:
        blueprint: its parts, packed.
        config, generation_config: of transformers, or as far as a file tells.
        max_positions: positions that the model was made for.
        weights: types of its numbers for people, those that take the most bytes first, as in "Q4_K + Q6_K".
        parameter_count: how many numbers its tensors hold.

    Attributes:
        compiled: its passes.
        facts: what targets must know of it.

    Raises:
        Unsupported: numba cannot compile here.
    """

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
        self.config, self.generation_config, self.weights = config, generation_config, weights
        self.parameter_count = parameter_count
        self.facts = Limits()
        self.facts.config = config.get_text_config(decoder=True)
        self.facts.vocabulary, self.facts.max_positions = blueprint.vocabulary, max_positions
        self.description = f"{blueprint.name}, {weights} weights, {self.compiled.layout}"


def read_model(file: GGUFFile) -> PackedModel:
    """A model from a GGUF file.

    Raises:
        Unsupported: with one line that says why; transformers' own reader serves then.
    """
    blueprint, settings, decoded = blueprint_of(file)
    for kind, size in decoded.items():
        warnings.warn(
            f"{file.path.name}: the compiled path has no {kind} blocks; those tensors are decoded to bfloat16, "
            f"which takes {size / 1e6:.0f} MB",
            UserWarning,
            stacklevel=2,
        )
    metadata, sizes = file.metadata, dict[str, int]()
    for tensor in file.tensors.values():
        if len(tensor.shape) == 2:
            sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.nbytes
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ends = {int(metadata[key]) for key in keys if key in metadata}
    config = OwnConfig(
        model_type=metadata["general.architecture"],
        vocab_size=settings.vocabulary,
        max_position_embeddings=settings.max_positions,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layer_count,
        num_attention_heads=settings.heads,
        intermediate_size=settings.inner,
        is_encoder_decoder=False,
    )
    ending = SimpleNamespace(eos_token_id=sorted(ends) or None)
    weights = " + ".join(sorted(sizes, key=lambda kind: -sizes[kind]))
    count = sum(prod(tensor.shape) for tensor in file.tensors.values())
    return PackedModel(blueprint, config, ending, settings.max_positions, weights, count)


def quantize_model(model: Any, facts: Any, name: str) -> PackedModel:
    """A transformers model with its matrices quantized by the reference quantizer of the package gguf.

    Args:
        facts: of the model (``facts.ModelFacts``).
        name: a type that the package can quantize to, in any case: q8_0, q4_0, q4_1, q5_0 or q5_1.

    Raises:
        Unsupported: the model is not one of the compiled path.
        SettingsError: the type is none of these, or the package is missing.
    """
    import torch

    from .architectures import blueprint_of as parts_of
    from .dense import Linear, tensor_of

    kind = quantizable(name)
    blueprint = parts_of(model, facts)
    linears: list[Any] = [linear for layer in blueprint.layers() for linear in layer.linears.values()]
    head: Any = blueprint.head
    embedding: Any = blueprint.embedding
    heads = [head]
    if embedding.ctypes.data != head.weight.data_ptr():
        heads.append(Linear(tensor_of(embedding), torch.zeros(len(embedding))))
    arena = Arena(sum(_quantized_size(linear, kind) for linear in (*linears, *heads)))
    packed = [_quantized(linear, kind, arena) for linear in heads]
    layers = []
    for layer in blueprint.layers():
        parts: dict[str, Any] = dict(layer.linears)
        layer.linears = {part: _quantized(linear, kind, arena) for part, linear in parts.items()}
        layers.append(layer)
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
    """The type of that name, which the package gguf must be able to quantize to.

    Raises:
        SettingsError: it is not, or the package is missing.
    """
    names = [kind.name for kind in KINDS if 4 <= kind.bits <= 8 and not kind.grouped]
    if name.upper() not in names:
        grouped = name.upper() in PLACE
        why = "; the package gguf has no quantizer for it: give a file that has it" if grouped else ""
        raise SettingsError(f"weights must be one of {', '.join(names).lower()}, got {name!r}{why}")
    if find_spec("gguf") is None:
        raise SettingsError("to quantize weights the package gguf must be installed; pip install gguf")
    return KINDS[PLACE[name.upper()]]


def _kind_for(linear: Linear, kind: Kind) -> Kind:
    """F32 where the inner size is no multiple of a block."""
    return kind if linear.weight.shape[1] % kind.unit == 0 else KINDS[PLACE["F32"]]


def _quantized_size(linear: Linear, kind: Kind) -> int:
    outputs, inner = linear.weight.shape
    return round_up(outputs, GROUP) // PANEL * _kind_for(linear, kind).panel_bytes(inner) + 64


def _quantized(linear: Linear, kind: Kind, arena: Arena) -> PackedLinear:
    import gguf

    outputs, inner = linear.weight.shape
    kind = _kind_for(linear, kind)
    order, place = _filled(np.arange(outputs), GROUP).reshape(-1, PANEL), PLACE[kind.name]
    size = kind.panel_bytes(inner)
    memory = arena.take(len(order) * size).reshape(len(order), size)
    for begin in range(0, len(order), 512):  # some at a time, so that no fp32 copy of a large matrix is made
        rows = order[begin : begin + 512]
        some = linear.weight[begin * PANEL : (begin + 512) * PANEL].float().contiguous().numpy()
        raw = some if kind.name == "F32" else gguf.quantize(some, gguf.GGMLQuantizationType(kind.number))
        local = np.where(rows >= 0, rows - begin * PANEL, -1)
        pack_panels(
            place, raw.view(np.uint8).reshape(len(some), -1), local, inner, memory[begin : begin + 512]
        )
    bias = np.zeros(order.size, np.float32)
    bias[:outputs] = linear.bias.float().numpy()
    table = np.stack([memory.ctypes.data + size * np.arange(len(memory)), np.full(len(memory), place)], -1)
    return PackedLinear(np.ascontiguousarray(table.reshape(-1, 2, 2)), bias, inner, arena)
