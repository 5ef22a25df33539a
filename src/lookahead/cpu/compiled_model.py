"""A model's weights in the order that compiled code reads them, and its passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..core import LookaheadError, SettingsError
from ..core.errors import Unsupported, summary
from ..machine_code import address
from ..threads import thread_count
from . import formats, packed
from .blueprint import NORMS, Blueprint, LayerParts, Norm
from .dense import Linear, pack, packed_bytes
from .execution_plan import (
    EVERYTHING,
    KEY_BLOCK,
    LAYER,
    PLAN,
    ExecutionState,
    KVCache,
    LinearRecord,
    NormRecord,
    Segment,
)
from .formats import FORMATS, ArrayMemory, Format, format_for, round_up
from .packed import GROUP, PackedLinear, decoder_address, kernel_address
from .thread_pool import thread_pool

Array = np.ndarray[Any, np.dtype[Any]]
#: Best tokens per row that every pass finds; as many as the adaptive drafter reads, even when sampling.
TOP = 24


class Rotary(NamedTuple):
    """Cosine and sine of rotary angles: (tables, positions, D / 2, 2) fp32, its address, and its strides in bytes."""

    table: Array
    positions: int
    address: int
    each: int

    @classmethod
    def of(cls, table: Array) -> Rotary:
        return cls(table, table.shape[1], table.ctypes.data, table.strides[0])


class CompiledModel:
    """A model with a compiled forward pass. Several threads may run passes at the same time.

    Args:
        blueprint: its parts. Weights that are not packed are copied; the originals are never written.
        fmt: how products are computed; None for the best format on this processor.

    Attributes:
        memory: the memory of all weights of linears.
        top: the number of best tokens that a pass finds for each row that is read.
        logits_strides: row strides, in bytes, of the logits (R, width), the peaks (R, width / 32) fp32, the best
            tokens (R, top) int32, and their log-odds against the best (R, top) fp32.
        states_stride: row stride, in bytes, of the hidden states (R, hidden), in the input type of a product.

    Raises:
        Unsupported: the model does not match the spec of its class.
    """

    def __init__(self, blueprint: Blueprint, fmt: Format | None = None) -> None:
        self.blueprint = blueprint
        self.dtype = blueprint.dtype
        self.vocabulary = blueprint.vocabulary
        self.head_size = blueprint.head_size
        self.key_heads = blueprint.key_heads
        packed = isinstance(blueprint.head, PackedLinear)
        self.fmt = fmt or (FORMATS["packed", self.dtype] if packed else format_for(self.dtype))
        self.layout = f"compiled passes on {self.fmt}"
        self.padded_head = round_up(self.head_size, KEY_BLOCK * self.fmt.key_pair)
        self._rotary = Rotary.of(np.empty((0, 0), np.float32))
        self._kept: list[Any] = []  # owners of the memory that the records point to
        self._layers = np.zeros(blueprint.layer_count, LAYER)
        self._model = np.zeros(1, PLAN)
        self._fill()
        # The layers have been read. Drop the function that reads them, which would keep the transformers model alive.
        self.blueprint = replace(blueprint, layers=lambda: iter(()))
        self._job = address(f"pass_{self.fmt.name}")
        self._idle: deque[ExecutionState] = deque()

    def _fill(self) -> None:
        blueprint = self.blueprint
        plan = self._model[0]
        fmt = self.fmt
        hidden = blueprint.hidden
        heads_size = blueprint.heads * blueprint.head_size
        # The layers. Outputs of a residual branch are scaled by the residual factor.
        a, b = blueprint.activation
        head = blueprint.head
        memory: ArrayMemory | None = head.memory if isinstance(head, PackedLinear) else None
        for record, layer in zip(self._layers, blueprint.layers(), strict=True):
            if memory is None:
                assert isinstance(head, Linear)
                memory = self._dense_memory(layer, head)
            for name, linear in layer.linears.items():
                factor = blueprint.residual_factor if name in ("output", "down") else 1.0
                record[name] = self._linear(linear, memory, factor, a, b)
            for name in NORMS:
                record[name] = self._norm(layer.norms[name])
            if layer.head_norm is not None:
                record["head_norm"] = self._norm(layer.head_norm)
                record["joint_norm"] = layer.joint_norm
            record["scale"] = layer.scale
            record["gated"] = layer.gated
            record["window"] = layer.window or EVERYTHING
            record["rotates"] = layer.rotary
            record["cap"] = layer.cap or 0.0
        assert memory is not None
        self.memory = memory
        # The final norm and the head. Outputs that pad the vocabulary are never the best token.
        plan["final_norm"] = self._norm(blueprint.final_norm)
        plan["lm_head"] = self._linear(
            blueprint.head, memory, blueprint.head_factor, cap=blueprint.head_cap, padding=float("-inf")
        )
        # The embeddings.
        self._position_count = 0  # no learned positions
        if blueprint.position_embedding is not None:
            plan["position_embedding"] = self._address(blueprint.position_embedding)
            self._position_count = len(blueprint.position_embedding)
        plan["embedding_scale"] = blueprint.embedding_factor
        embedding = blueprint.embedding
        self._token_count = self.vocabulary
        if isinstance(embedding, PackedLinear):
            self._kept.append(embedding)
            plan["embedding"] = self._address(embedding.with_code(decoder_address))
        else:
            plan["embedding"] = self._address(embedding)
            self._token_count = min(self.vocabulary, len(embedding))  # the head may have more rows
        # Sizes and strides. First the strides of logits, of the largest logits of groups, and of the best tokens and
        # their log-odds.
        self.top = min(TOP, self.vocabulary)
        self.logits_strides = (
            round_up(self.vocabulary, GROUP) * fmt.stored.bytes,
            -(-self.vocabulary // GROUP) * 4,
            4 * self.top,
            4 * self.top,
        )
        self.states_stride = hidden * fmt.input.bytes
        fields = {
            "hidden": hidden,
            "heads": blueprint.heads,
            "key_heads": self.key_heads,
            "head_size": self.head_size,
            "padded_head": self.padded_head,
            "vocabulary": self.vocabulary,
            "layer_count": blueprint.layer_count,
            "layers": self._layers.ctypes.data,
            "x_stride": 4 * round_up(hidden, GROUP),
            "normed_stride": fmt.row_bytes(hidden),
            "attended_stride": fmt.row_bytes(heads_size),
            "gated_stride": fmt.row_bytes(round_up(blueprint.inner, GROUP)),
            "qkv_stride": 4 * round_up(max(heads_size + 2 * self.key_heads * self.head_size, hidden), GROUP),
            "logits_stride": self.logits_strides[0],
            "peaks_stride": self.logits_strides[1],
            "top": self.top,
            "states_stride": self.states_stride,
        }
        for name, number in fields.items():
            plan[name] = number

    @property
    def unpacked(self) -> list[Array]:
        """Norms, biases and factors, fp32, in a fixed order."""
        return [kept for kept in self._kept if isinstance(kept, np.ndarray) and kept.dtype == np.float32]

    def _dense_memory(self, layer: LayerParts, head: Linear) -> ArrayMemory:
        """Memory for all weights of an unpacked model, in which every layer needs as much as this one."""
        linears = [linear for linear in layer.linears.values() if isinstance(linear, Linear)]
        layer_bytes = sum(round_up(packed_bytes(linear, self.fmt), 64) for linear in linears)
        return ArrayMemory(self.blueprint.layer_count * layer_bytes + packed_bytes(head, self.fmt))

    def _address(self, array: Array) -> int:
        """The address of an array, or of a copy if it is not contiguous. The array is kept alive."""
        self._kept.append(np.ascontiguousarray(array))
        return int(self._kept[-1].ctypes.data)

    def _linear(
        self,
        linear: Linear | PackedLinear,
        memory: ArrayMemory,
        factor: float,
        a: float = 0.0,
        b: float = 0.0,
        cap: float = 0.0,
        padding: float = 0.0,
    ) -> LinearRecord:
        """The record of a linear; its weights are packed if they are not yet."""
        # Packed weights are used in place. The kernel multiplies sums by the factor, but not the bias.
        self._kept.append(np.array((factor, a, b, cap), np.float32))
        if isinstance(linear, PackedLinear):
            self._kept.append(linear)
            bias = linear.bias * np.float32(factor)
            if padding:
                bias[self.vocabulary :] = padding
            table = linear.with_code(kernel_address)
            self._kept.append(table)
            return LinearRecord(
                weights=table.ctypes.data,
                group_bytes=table.strides[0],
                bias=self._address(bias),
                steps=-(-linear.inner // packed.BLOCK),
                groups=len(table),
                factor=factor,
                a=a,
                b=b,
                cap=cap,
            )
        # Other weights are copied into the order of the format.
        weights, bias, steps = pack(linear, self.fmt, memory, padding)
        groups, size = weights.shape
        return LinearRecord(
            weights=self._address(weights),
            group_bytes=size,
            bias=self._address(bias * np.float32(factor)),
            steps=steps,
            groups=groups,
            factor=factor,
            a=a,
            b=b,
            cap=cap,
        )

    def _norm(self, norm: Norm) -> NormRecord:
        return NormRecord(self._address(norm.weight), self._address(norm.bias), norm.type, norm.epsilon)

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token."""
        return len(self._layers) * 2 * self.key_heads * self.padded_head * self.fmt.cached.bytes

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache of this model's shape."""
        shape = len(self._layers), self.key_heads, self.padded_head
        return KVCache(*shape, capacity, self.fmt)

    def read(self, cache: KVCache, slot: int, length: int) -> list[tuple[Array, Array]]:
        """A slot's first ``length`` keys and values in the model's own order, per layer, each (1, K, length, D)."""
        size = self.head_size
        order = np.argsort(formats.paired(size, self.blueprint.rotary_size))
        return [(keys[..., order], values[..., :size].copy()) for keys, values in cache.read(slot, length)]

    def _rotary_up_to(self, position: int) -> Rotary:
        """Cosine and sine of positions 0 .. position or more.

        If only the first R numbers of a head rotate, the others have the angle 0.
        """
        rotary = self._rotary  # read once, since another thread may replace it
        known = rotary.table
        if position >= rotary.positions and self.blueprint.angles is not None:
            angles = self.blueprint.angles(1 << position.bit_length())
            shape = *angles.shape[:2], self.head_size // 2
            table = np.stack([np.ones(shape, np.float32), np.zeros(shape, np.float32)], -1)
            table[:, :, : angles.shape[2]] = angles
            if known.size:
                table[:, : known.shape[1]] = known  # no bit of a position ever changes
            self._rotary = rotary = Rotary.of(table)
        return rotary

    def run(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        segments: Sequence[Segment],
        reads: Sequence[int],
        cache: KVCache,
        memory: np.ndarray[Any, Any],
        address: int,
        hidden: bool = False,
    ) -> None:
        """Evaluate rows, and write their keys and values after the slots' committed tokens.

        Args:
            tokens, positions: tokens and positions of all rows, segment by segment.
            segments: the sequences, with their slots and trees.
            reads: the R rows whose logits are read.
            cache: must have room for the rows.
            memory: uint8; receives the logits, the peaks, the best tokens and their log-odds, R times
                ``logits_strides`` bytes; then, if ``hidden``, the hidden states, R times ``states_stride`` bytes.
            address: its address.
            hidden: whether to keep the hidden states of the rows that are read.

        Raises:
            IndexError: a token has no embedding, or a position has no learned embedding.
        """
        # Compiled code reads both tables without a check.
        if min(tokens) < 0 or max(tokens) >= self._token_count:
            raise IndexError(
                f"tokens must be 0 to {self._token_count - 1}, got {max(tokens)} or {min(tokens)}"
            )
        if self._position_count and max(positions) >= self._position_count:
            raise IndexError(
                f"the model has learned positions for {self._position_count} tokens, "
                f"got {max(positions) + 1}; shorten the prompt or generate fewer tokens"
            )
        pool = thread_pool(thread_count())
        # If anything raises, the state is not reused, because after an interrupt helpers may still be working on it.
        try:
            state = self._idle.pop()
        except IndexError:  # all states are in use
            state = ExecutionState(self._model, self.fmt)
        longest = max(segment.length + segment.rows for segment in segments)
        # Describe the step, and point the plan to the caller's memory.
        state.reserve(len(tokens), longest, pool.size)
        rotary = self._rotary_up_to(max(positions))
        places = list[int]()
        for stride in self.logits_strides:
            places.append(address)
            address += len(reads) * stride
        places.append(address if hidden else 0)
        state.describe(tokens, positions, segments, reads, cache, rotary.address, rotary.each, *places)
        if self.fmt.product == "tiles":
            state.tile_config[:] = formats.tile_config(min(16, len(tokens)))
        state.owners = (self, memory, rotary.table, [cache.storage[segment.slot] for segment in segments])
        pool.run(self._job, state.address, state)
        state.owners = None
        self._idle.append(state)


def checked(make: Callable[[], CompiledModel]) -> CompiledModel:
    """The result of ``make``. If there is no machine code for this processor, or an unexpected error, such as one of
    numba or LLVM, it is raised as ``Unsupported``."""
    try:
        address("serve")
        return make()
    except SettingsError as error:
        raise Unsupported(str(error)) from None
    except (MemoryError, Unsupported, LookaheadError):
        raise
    except Exception as error:  # the errors of numba and LLVM have no common class
        raise Unsupported(f"numba cannot compile passes here ({summary(error)})") from error
