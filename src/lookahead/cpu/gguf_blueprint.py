"""The parts of a model from a GGUF file.

Quantized blocks stay packed: they are copied once into the order of the kernel (``packed``), in threads, or mapped
from the cache of an earlier start (``weight_cache``). Tensors of types that the kernel does not support are decoded
to bf16. Of a file of F32 or BF16 matrices, the linears are plain arrays (``dense``), as of a transformers model of
that dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ..core.errors import Unsupported
from ..gguf.families import FREQUENCY_FACTORS
from ..gguf.file import GGUFFile, Tensor
from ..gguf.settings import read_settings
from ..threads import thread_count
from . import dense, formats
from .blueprint import ACTIVATIONS, NORMS, Blueprint, LayerParts, Norm, head_norm_of
from .dense import Linear, bf16_bits, floats
from .formats import ArrayMemory, round_up
from .packed import GROUP, PANEL, TENSOR_TYPES, TYPE_INDEX, PackedLinear, TensorType, pack_panels
from .weight_cache import MappedPanels, NewPanels

Array = np.ndarray[Any, np.dtype[Any]]


#: Bytes of panels that are packed at once, so that packing needs little memory and threads share a large matrix.
CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class _Rows:
    """Outputs of a tensor, in the order in which they are packed; -1 stands for padding."""

    name: str
    order: Array


class FileReader:
    """Reads the parts of a file.

    The model must be compiled in the ``with`` block, at whose end the file is checked for changes.

    Args:
        file: the file.

    Attributes:
        settings: its settings.
        dtype: the dtype of plain matrices, "float32" or "bfloat16"; "" if weights are packed.
        size: bytes of the packed weights.
        decoded: bytes of the tensors decoded to bf16, by type.

    Raises:
        Unsupported: the compiled path does not support the file; the message is the reason, in one line.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.settings = settings = read_settings(file)
        self.names = settings.names
        types = file.matrix_types
        if "F64" in types:
            raise Unsupported("the compiled path does not support F64")
        self.dtype = "float32" if types == {"F32"} else "bfloat16" if types <= {"F32", "BF16"} else ""
        order = formats.paired(settings.head_size, settings.rotary_size)
        # Rows permuted by the converter are already in the packed order.
        self.order = np.arange(settings.head_size) if self.names.permuted else order
        self.norm_offset = 1.0 if self.names.scaled_embedding else 0.0  # Gemma
        weights = [tensor for tensor in file.tensors.values() if len(tensor.shape) == 2 and not self.dtype]
        # Each linear that contains outputs of a tensor may pad it by up to a group.
        self.size = sum(
            round_up(tensor.shape[0] + 3 * GROUP, GROUP)
            // PANEL
            * packed_type(tensor).panel_bytes(tensor.shape[1])
            + 256
            for tensor in weights
        )
        self.decoded: dict[str, int] = {}
        for tensor in weights:
            if tensor.type not in TYPE_INDEX:
                self.decoded[tensor.type] = self.decoded.get(tensor.type, 0) + 2 * prod(tensor.shape)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.file.check_unchanged()

    def _pack(self, name: str, order: Array, panels: Array) -> None:
        """Pack outputs of a tensor.

        Args:
            name: the tensor.
            order: the outputs of each panel, (panels, 16); -1 for a missing output.
            panels: where to, (panels, bytes of a panel).
        """
        used = np.unique(order[order >= 0])
        if not len(used):
            return
        tensor = self.file.tensors[name]
        if tensor.type in TYPE_INDEX:
            raw = self.file.rows(name, used)
        else:
            decoded = self._decoded(name, self.file.bytes(name), tensor.shape)
            raw = bf16_bits(decoded)[used].view(np.uint8)
        local = np.where(order >= 0, np.searchsorted(used, order), -1)
        out = panels if panels.flags.writeable else np.zeros(panels.shape, np.uint8)
        pack_panels(packed_type(tensor), raw, local, tensor.shape[1], out)
        if isinstance(self._memory, NewPanels):
            self._memory.write(panels, out)

    def _decoded(self, name: str, raw: Array, shape: tuple[int, ...]) -> Array:
        tensor_type = self.file.tensors[name].type
        if tensor_type in ("F32", "F64", "F16"):
            values = raw.view({"F32": "<f4", "F64": "<f8", "F16": "<f2"}[tensor_type]).astype(np.float32)
        elif tensor_type == "BF16":
            values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            try:
                import gguf

                with np.errstate(all="ignore"):  # damage shows up in the logits
                    values = gguf.dequantize(
                        raw.reshape(prod(shape[:-1]), -1), gguf.GGMLQuantizationType[tensor_type]
                    )
            except (ImportError, KeyError, NotImplementedError) as error:
                raise Unsupported(
                    f"{name} is stored as {tensor_type}, which this library reads with the package gguf; "
                    f"pip install gguf, or use a file of another type ({error})"
                ) from None
        return np.ascontiguousarray(values, np.float32).reshape(shape)

    def fp32(self, name: str) -> Array:
        """A tensor, decoded to fp32."""
        return self._decoded(name, self.file.bytes(name), self.file.tensors[name].shape)

    def rounded(self, name: str, offset: float = 0.0) -> Array:
        """A norm or a bias, fp32. In a bf16 model, it is rounded to bf16, as transformers stores it.

        Args:
            offset: what the file's converter has added to the numbers, and the model adds itself.
        """
        values = self.fp32(name)
        if self.dtype != "bfloat16":
            return values
        own = floats(bf16_bits(values - np.float32(offset)))
        return own + np.float32(offset)

    def numbers(self, name: str) -> Array:
        """A plain tensor in the dtype of the model: fp32, or bf16 as int16."""
        tensor = self.file.tensors[name]
        raw = self.file.bytes(name)
        if tensor.type == "BF16":
            return raw.view("<i2").reshape(tensor.shape)
        values = raw.view("<f4").reshape(tensor.shape)
        return bf16_bits(values) if self.dtype == "bfloat16" else values

    def name(self, part: str, layer: int | None = None) -> str:
        """The name of a part's tensor, without its ending."""
        return self.names.tensors[part].format(layer=layer)

    def linear(self, panels: Sequence[_Rows], biases: Sequence[Array]) -> Linear | PackedLinear:
        """Join outputs of one or more tensors into a linear, and pack them unless they are plain.

        Args:
            panels: the outputs of each tensor, a multiple of ``PANEL``; padding, if any, comes last.
            biases: the biases of all outputs of each tensor.
        """
        if self.dtype:
            orders = [rows.order[rows.order >= 0] for rows in panels]
            weights = [self.numbers(rows.name)[order] for rows, order in zip(panels, orders, strict=True)]
            joined = [values[order] for values, order in zip(biases, orders, strict=True)]
            return Linear(np.concatenate(weights), np.concatenate(joined).astype(np.float32))
        table = []
        bias = []
        inner = 0
        for rows, values in zip(panels, biases, strict=True):
            tensor = self.file.tensors[rows.name]
            _, inner = tensor.shape
            order = rows.order.reshape(-1, PANEL)
            packed, entries = new_panels(self._memory, packed_type(tensor), len(order), inner)
            # A tensor that is decoded is decoded once.
            step = max(1, CHUNK // packed.shape[1]) if tensor.type in TYPE_INDEX else len(order)
            for begin in range(0, len(order), step):
                part = slice(begin, begin + step)
                self._to_pack.append((rows.name, order[part], packed[part]))
            table.append(entries)
            bias.append(np.where(rows.order >= 0, values[np.maximum(rows.order, 0)], 0))
        pairs = np.ascontiguousarray(np.concatenate(table).reshape(-1, 2, 2))
        return PackedLinear(pairs, np.concatenate(bias).astype(np.float32), inner, self._memory)

    def bias(self, name: str) -> Array:
        """The bias of a linear; zeros if it has none."""
        outputs = self.file.tensors[f"{name}.weight"].shape[0]
        return self.rounded(f"{name}.bias") if f"{name}.bias" in self.file.tensors else np.zeros(outputs)

    def whole(self, name: str) -> Linear | PackedLinear:
        """A linear that is a single tensor, its outputs in the order of the file."""
        if self.dtype:
            return Linear(self.numbers(f"{name}.weight"), self.bias(name).astype(np.float32))
        outputs = self.file.tensors[f"{name}.weight"].shape[0]
        return self.linear([_Rows(f"{name}.weight", filled(np.arange(outputs), GROUP))], [self.bias(name)])

    def query_key_value(self, layer: int) -> Linear | PackedLinear:
        """Queries, keys and values as a single linear in which the rotary pairs of a head are adjacent.

        Raises:
            Unsupported: the outputs of a part are not a multiple of a panel.
        """
        settings = self.settings
        size = self.settings.head_size
        heads = settings.heads
        key_heads = settings.key_heads

        def order(first: int, count: int, rotates: bool) -> Array:
            """The outputs of ``count`` heads from output ``first`` on."""
            in_head = self.order if rotates else np.arange(size)
            return (first + size * np.arange(count)[:, None] + in_head).reshape(-1)

        # The file has either one tensor for all three, or one for each.
        if "qkv" in self.names.tensors:
            name = self.name("qkv", layer)
            query, key = order(0, heads, True), order(heads * size, key_heads, True)
            rows = np.concatenate([query, key, order((heads + key_heads) * size, key_heads, False)])
            return self.linear([_Rows(f"{name}.weight", filled(rows, GROUP))], [self.bias(name)])
        parts = [("query", heads, True), ("key", key_heads, True), ("value", key_heads, False)]
        names = [self.name(part, layer) for part, _, _ in parts]
        rows_of = [order(0, count, rotates) for _, count, rotates in parts]
        if any(len(rows) % PANEL for rows in rows_of) and not self.dtype:
            raise Unsupported(
                f"queries and keys must have a multiple of {PANEL} outputs, got heads of {size}"
            )
        padding = -sum(map(len, rows_of)) % GROUP
        rows_of[-1] = np.concatenate([rows_of[-1], np.full(padding, -1)])
        return self.linear(
            [_Rows(f"{name}.weight", rows) for name, rows in zip(names, rows_of, strict=True)],
            [self.bias(name) for name in names],
        )

    def gate_and_up(self, layer: int) -> tuple[Linear | PackedLinear, bool]:
        """The first linear of the feed-forward, and whether it has gates (``LayerParts.gated``)."""
        inner = self.settings.inner
        if "gate" not in self.names.tensors and "gate_up" not in self.names.tensors:
            return self.whole(self.name("up", layer)), False
        if self.dtype:
            names = ("gate_up",) if "gate_up" in self.names.tensors else ("gate", "up")
            parts: list[Any] = [self.whole(self.name(name, layer)) for name in names]
            both = parts if len(parts) == 2 else dense.split(parts[0], inner, inner)
            return dense.gate_and_up(*both), True
        halves = filled(np.arange(inner), PANEL).reshape(-1, PANEL)
        if "gate_up" in self.names.tensors:
            name = self.name("gate_up", layer)
            ups = np.where(halves >= 0, halves + inner, -1)
            order = np.stack([halves, ups], 1).reshape(-1)
            return self.linear([_Rows(f"{name}.weight", order)], [self.bias(name)]), True
        gate, up = self.name("gate", layer), self.name("up", layer)
        linear: Any = self.linear(
            [_Rows(f"{name}.weight", halves.reshape(-1)) for name in (gate, up)],
            [self.bias(gate), self.bias(up)],
        )
        # From (all gates, then all ups) to groups of a gate panel and the matching up panel.
        linear.panels = np.ascontiguousarray(linear.panels.reshape(2, -1, 2).transpose(1, 0, 2))
        linear.bias = linear.bias.reshape(2, -1, PANEL).transpose(1, 0, 2).reshape(-1)
        return linear, True

    def norm(self, part: str, layer: int | None = None) -> Norm:
        """A norm; ``Norm.none`` if the architecture does not have it."""
        if part not in self.names.tensors:
            return Norm.none(self.settings.hidden)
        name = self.name(part, layer)
        weight = self.rounded(f"{name}.weight", self.norm_offset)
        has_bias = f"{name}.bias" in self.file.tensors
        bias = self.rounded(f"{name}.bias") if has_bias else np.zeros_like(weight)
        return Norm(weight, bias, self.settings.epsilon, self.names.norm_type)

    def head_norm(self, layer: int) -> tuple[Norm | None, bool]:
        """``LayerParts.head_norm`` and ``joint_norm``."""
        settings = self.settings
        if "query_norm" not in self.names.tensors:
            return None, False
        parts = (("query_norm", settings.heads), ("key_norm", settings.key_heads))
        weights = [
            (self.rounded(f"{self.name(part, layer)}.weight", self.norm_offset), heads)
            for part, heads in parts
        ]
        return head_norm_of(weights, self.order, settings.epsilon)

    def layers(self) -> Iterator[LayerParts]:
        """The layers, in order.

        Raises:
            Unsupported: a tensor is missing.
        """
        try:
            yield from self._layers()
        except KeyError as error:
            raise missing(error) from None

    def _layers(self) -> Iterator[LayerParts]:
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
                linears=linears,
                norms={name: self.norm(name, index) for name in NORMS},
                head_norm=head_norm,
                joint_norm=joint,
                gated=gated,
                scale=settings.scale,
                window=settings.windows[index],
                rotary=settings.rotary[index],
                cap=settings.attention_cap,
            )

    def angles(self) -> Any:
        """The function ``Blueprint.angles``; None without rotary positions."""
        settings = self.settings
        if not settings.tables:
            return None
        # Round values to fp32 where transformers does, because the model was trained that way. Compute powers,
        # cosines and sines in fp64 first, because numpy's last fp32 bit differs between processors.
        half = np.arange(0, settings.rotary_size, 2, dtype=np.float32) / np.float32(settings.rotary_size)
        frequencies = [
            (1 / (float(table.base) ** half.astype(np.float64)).astype(np.float32)) / np.float32(table.factor)
            for table in settings.tables
        ]
        if FREQUENCY_FACTORS in self.file.tensors:
            frequencies[0] = frequencies[0] / self.fp32(FREQUENCY_FACTORS)

        def angles(positions: int) -> Array:
            tables = [np.arange(positions, dtype=np.float32)[:, None] * each for each in frequencies]
            turns = np.stack(tables).astype(np.float64)
            return np.stack([np.cos(turns), np.sin(turns)], -1).astype(np.float32)

        return angles

    def blueprint(self, memory: ArrayMemory | MappedPanels) -> Blueprint:
        """The parts of the model. Weights that stay packed are complete when this returns.

        Args:
            memory: memory of ``size`` bytes for the packed weights. They are packed unless it already has them.

        Raises:
            Unsupported: the compiled path does not support the file.
            OSError: the memory is a file, and the disk is full.
        """
        self._memory = memory
        self._to_pack: list[tuple[str, Array, Array]] = []
        try:
            blueprint = self._blueprint()
        except KeyError as error:
            raise missing(error) from None
        if isinstance(memory, ArrayMemory | NewPanels):
            threads = ThreadPoolExecutor(thread_count(), "lookahead-pack")
            try:
                for job in [threads.submit(self._pack, *each) for each in self._to_pack]:
                    job.result()
            finally:
                threads.shutdown(cancel_futures=True)
        return blueprint

    def _blueprint(self) -> Blueprint:
        settings = self.settings
        layers = self.layers
        if not self.dtype:  # pack all of them at once
            packed = list(layers())
            layers = partial(iter, packed)
        head: Any = self.whole("token_embd" if settings.tied else self.name("head"))
        embedding = head.weight if self.dtype else head
        if not settings.tied:
            name = self.name("embedding")
            embedding = self.numbers(f"{name}.weight") if self.dtype else self.whole(name)
        positions = None
        if "positions" in settings.names.tensors:
            read = self.numbers if self.dtype else self.fp32
            positions = read(f"{self.name('positions')}.weight")
        return Blueprint(
            name=settings.names.model_class,
            dtype=self.dtype or "float32",
            vocabulary=settings.vocabulary,
            hidden=settings.hidden,
            heads=settings.heads,
            key_heads=settings.key_heads,
            head_size=settings.head_size,
            inner=settings.inner,
            activation=ACTIVATIONS[settings.names.activation],
            embedding=embedding,
            layer_count=settings.layer_count,
            layers=layers,
            final_norm=self.norm("norm"),
            head=head,
            embedding_factor=settings.embedding_factor,
            position_embedding=positions,
            head_factor=settings.head_factor,
            head_cap=settings.head_cap,
            residual_factor=settings.residual_factor,
            rotary_size=settings.rotary_size if settings.tables else 0,
            angles=self.angles(),
        )


def missing(error: KeyError) -> Unsupported:
    """The error for a tensor that the file does not have."""
    return Unsupported(f"the file must have the tensor {error}, and does not")


def packed_type(tensor: Tensor) -> TensorType:
    """The tensor type in which a matrix is packed."""
    return TENSOR_TYPES[TYPE_INDEX.get(tensor.type, TYPE_INDEX["BF16"])]


def filled(order: Array, multiple: int) -> Array:
    """An order, padded with -1 to a multiple."""
    return np.concatenate([order, np.full(-len(order) % multiple, -1)])


def new_panels(
    memory: ArrayMemory | MappedPanels, tensor_type: TensorType, count: int, inner: int
) -> tuple[Array, Array]:
    """Memory for panels, uint8 (count, bytes of a panel), and its ``PackedLinear.panels``."""
    size = tensor_type.panel_bytes(inner)
    panels = memory.take(count * size).reshape(count, size)
    addresses = panels.ctypes.data + size * np.arange(count)
    return panels, np.stack([addresses, np.full(count, TYPE_INDEX[tensor_type.name])], -1)
