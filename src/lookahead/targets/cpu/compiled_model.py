"""A model's weights as compiled code wants them, and its passes; ``compile_model`` is the way into this package."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import config as numba_config
from torch import nn
from transformers import PreTrainedModel

from ...threads import thread_count
from ..facts import ModelFacts
from . import formats
from .architectures import ACTIVATIONS, NORMS, Norm, Unsupported, embedding_of, linear_of, norm_of, spec_of
from .execution_plan import EVERYTHING, KEY_BLOCK, LAYER, PLAN, ExecutionState, KVCache, Segment
from .formats import GROUP, Arena, Format, Linear, format_for, round_up
from .forward_pass import pass_address
from .thread_pool import thread_pool


class CompiledModel:
    """A model whose passes are one call for each thread. Several threads may run passes at once.

    Args:
        model: a loaded model of a registered class; linears are copied, never written.
        facts: what is known of it.
        numbers: how products are computed; the best for this processor by default.

    Attributes:
        logits_strides: bytes from row to row of logits (R, width), and of peaks (R, width / 32) fp32.

    Raises:
        Unsupported: the model is not what the spec of its class assumes.
    """

    def __init__(self, model: nn.Module, facts: ModelFacts, numbers: Format | None = None) -> None:
        self._spec = spec = spec_of(model, facts)
        (shape,) = set(facts.shapes)
        assert shape is not None
        self.key_heads, self.head_size, _ = shape
        try:
            self.heads = int(facts.config.num_attention_heads)
            self.embedding, scale = embedding_of(model, spec.embedding)
            self.dtype = self.embedding.dtype
            self.numbers = numbers or format_for(self.dtype)
            self.layout = f"compiled passes on {self.numbers}"
            layers = list(model.get_submodule(spec.layers).children())
            self.padded_head = round_up(self.head_size, KEY_BLOCK * self.numbers.key_pair)
            self._rotary = model.get_submodule(spec.rotary) if spec.rotary else None
            self._rotary_types = list(getattr(self._rotary, "layer_types", [""]))
            self._angles, self._rotary_size = torch.empty(len(self._rotary_types), 0), self.head_size
            self._rotary_up_to(0)
            self._order = formats.paired(self.head_size, self._rotary_size)
            self._kept: list[torch.Tensor] = []  # what the records' addresses point to
            self._layers, self._model = np.zeros(len(layers), LAYER), np.zeros(1, PLAN)
            self._fill(model, layers, facts.config, scale)
        except AttributeError as error:
            name = type(model).__name__
            raise Unsupported(
                f"{name} is built differently from what the compiled path knows ({error})"
            ) from error
        self._job = pass_address(self.numbers)
        self._idle: deque[ExecutionState] = deque()

    def _fill(self, model: nn.Module, layers: list[nn.Module], config: Any, scale: float) -> None:
        spec, size, plan = self._spec, self.head_size, self._model[0]

        def setting(name: str, default: float) -> float:
            return float((getattr(config, name) if name else None) or default)

        a, b = ACTIVATIONS[getattr(config, spec.activation)]
        factor, cap = setting(spec.residual_multiplier, 1), setting(spec.attention_cap, 0)
        hidden, offset = self.embedding.shape[1], spec.norm_offset
        head, arena = linear_of(model, spec.head), None
        for index, (record, layer) in enumerate(zip(self._layers, layers, strict=True)):
            linears = self._linears(layer)
            if arena is None:  # every layer takes as much as the first
                sizes = (formats.packed_bytes(linear, self.numbers) for linear in linears.values())
                each = sum(round_up(size, 64) for size in sizes)
                arena = Arena(len(layers) * each + formats.packed_bytes(head, self.numbers))
            for name, linear in linears.items():
                residual = name in ("output", "down")
                record[name] = self._linear(linear, arena, factor if residual else 1.0, a, b)
            for name in NORMS:
                record[name] = self._norm(norm_of(layer, getattr(spec, name), hidden, offset))
            if spec.query_norm:
                record["head_norm"], record["joint_norm"] = self._head_norm(layer)
            attention: Any = layer.get_submodule(spec.attention)
            record["scale"], record["gated"] = attention.scaling, bool(spec.gate or spec.gate_up)
            record["window"] = spec.window(config, index) or EVERYTHING
            kind = config.layer_types[index] if len(self._rotary_types) > 1 else self._rotary_types[0]
            record["rotates"] = spec.rotates(config, index) and 1 + self._rotary_types.index(kind)
            record["cap"] = self._address(torch.tensor([cap], dtype=torch.float32)) if cap else 0
        assert arena is not None
        self.vocabulary = len(head.weight)
        plan["final_norm"] = self._norm(norm_of(model, spec.norm, hidden, offset))
        factor, cap = 1 / setting(spec.logits_divisor, 1), setting(spec.logits_cap, 0)
        # Tokens behind the vocabulary are never the best.
        plan["lm_head"] = self._linear(head, arena, factor, cap=cap, padding=float("-inf"))
        if spec.positions:
            positions, _ = embedding_of(model, spec.positions)
            plan["position_embedding"] = self._address(positions)
        plan["embedding_scale"] = scale * setting(spec.embedding_multiplier, 1)
        inner, heads_size = linears["down"].weight.shape[1], self.heads * size
        element, step, width = self.numbers.input.bytes, self.numbers.step, round_up(self.vocabulary, GROUP)
        self.logits_strides = width * self.dtype.itemsize, width // GROUP * 4
        fields = {
            "hidden": hidden, "heads": self.heads, "key_heads": self.key_heads, "head_size": size,
            "padded_head": self.padded_head, "vocabulary": self.vocabulary, "layer_count": len(layers),
            "layers": self._layers.ctypes.data, "embedding": self.embedding.data_ptr(),
            "x_stride": 4 * round_up(hidden, GROUP), "normed_stride": round_up(hidden, step) * element,
            "attended_stride": round_up(heads_size, step) * element,
            "gated_stride": round_up(round_up(inner, GROUP), step) * element,
            "qkv_stride": 4 * round_up(max(heads_size + 2 * self.key_heads * size, hidden), GROUP),
            "logits_stride": self.logits_strides[0], "peaks_stride": self.logits_strides[1],
        }  # fmt: skip
        for name, number in fields.items():
            plan[name] = number

    def _linears(self, layer: nn.Module) -> dict[str, Linear]:
        """The linears of a layer as they are packed."""
        spec, size = self._spec, self.head_size
        if spec.qkv:
            sizes = (self.heads * size, self.key_heads * size, self.key_heads * size)
            query, key, value = formats.split(linear_of(layer, spec.qkv), *sizes)
        else:
            query, key, value = (linear_of(layer, path) for path in (spec.query, spec.key, spec.value))
        down = linear_of(layer, spec.down)
        if spec.gate_up:
            up = formats.gate_and_up(
                *formats.split(linear_of(layer, spec.gate_up), *[down.weight.shape[1]] * 2)
            )
        elif spec.gate:
            up = formats.gate_and_up(linear_of(layer, spec.gate), linear_of(layer, spec.up))
        else:
            up = linear_of(layer, spec.up)
        query, key = (formats.reordered(linear, self._order) for linear in (query, key))
        qkv = formats.joined(query, key, value)
        return {"qkv": qkv, "output": linear_of(layer, spec.output), "up": up, "down": down}

    def _head_norm(self, layer: nn.Module) -> tuple[tuple[int, int, int, float], bool]:
        """The record of query and key norms, and whether they are over all heads together."""
        spec, weights = self._spec, []
        for path, heads in ((spec.query_norm, self.heads), (spec.key_norm, self.key_heads)):
            norm = norm_of(layer, path, 0, spec.norm_offset)
            joint = len(norm.weight) == heads * self.head_size
            weights.append(norm.weight.view(-1, self.head_size)[:, self._order].expand(heads, -1))
        return self._norm(norm._replace(weight=torch.cat(weights))), joint

    def _address(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def _linear(
        self, linear: Linear, arena: Arena, factor: float, a: float = 0.0, b: float = 0.0, cap: float = 0.0,
        padding: float = 0.0,
    ) -> tuple[int, int, int, int, int, int]:  # fmt: skip
        """The record ``execution_plan.LINEAR`` of packed weights."""
        weights, bias, steps = formats.pack(linear, self.numbers, arena, padding)
        groups, size = weights.shape
        numbers = self._address(torch.tensor([factor, a, b, cap], dtype=torch.float32))
        return self._address(weights), size, self._address(bias * factor), steps, groups, numbers

    def _norm(self, norm: Norm) -> tuple[int, int, int, float]:
        return self._address(norm.weight), self._address(norm.bias), norm.kind, norm.epsilon

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache of this model's shape."""
        shape = len(self._layers), self.key_heads, self.padded_head
        return KVCache(*shape, capacity, self.dtype, self.numbers.key_pair)

    def _rotary_up_to(self, position: int) -> torch.Tensor:
        """Cosine and sine of positions 0..position or more, from the model's own module.

        (types, positions, D / 2, 2); where only the first R numbers of a head rotate, the others have angle 0.
        """
        table = self._angles
        if position >= table.shape[1] and self._rotary is not None:
            places = torch.arange(1 << position.bit_length())[None]
            shape = len(self._rotary_types), places.shape[1], self.head_size // 2
            table = torch.stack([torch.ones(shape), torch.zeros(shape)], -1).float()
            for number, kind in enumerate(self._rotary_types):
                with torch.no_grad():
                    both = self._rotary(
                        torch.empty(1, dtype=torch.float32), places, *([kind] if kind else [])
                    )
                self._rotary_size = both[0].shape[-1]
                half = [x[0, :, : self._rotary_size // 2].float() for x in both]
                table[number, :, : self._rotary_size // 2] = torch.stack(half, -1)
            self._angles = table
        return table

    def run(
        self, tokens: Sequence[int], positions: Sequence[int], segments: Sequence[Segment], reads: Sequence[int],
        cache: KVCache, memory: np.ndarray[Any, Any],
    ) -> None:  # fmt: skip
        """Evaluate rows and write their keys and values behind the slots' committed tokens.

        Args:
            tokens, positions: of all rows, those of the first segment first.
            reads: the R rows whose logits are wanted.
            cache: has room for them.
            memory: uint8; takes the logits, then the peaks, R times ``logits_strides`` bytes.

        Raises:
            IndexError: a token is not in the vocabulary.
        """
        if min(tokens) < 0 or max(tokens) >= self.vocabulary:
            raise IndexError(f"tokens must be 0 to {self.vocabulary - 1}, got {max(tokens)} or {min(tokens)}")
        pool = thread_pool(thread_count())
        # Not given back where something is raised: helpers may still be at work on it after an interrupt.
        try:
            state = self._idle.pop()
        except IndexError:  # as many passes as ever are under way
            state = ExecutionState(self._model, self.numbers)
        longest = max(segment.length + segment.rows for segment in segments)
        state.reserve(len(tokens), longest, pool.size)
        state.describe(tokens, positions, segments, reads, cache)
        p, rotary = state.plan, self._rotary_up_to(max(positions))
        p["logits"] = memory.ctypes.data
        p["peaks"] = memory.ctypes.data + len(reads) * self.logits_strides[0]
        p["rotary"], p["rotary_each"] = rotary.data_ptr(), 4 * rotary.stride(0)
        state.tile_config[:] = formats.tile_config(len(tokens))
        state.holds = (self, memory, rotary, [cache.storage[segment.slot] for segment in segments])
        pool.run(self._job, state.address, state)
        state.holds = None
        self._idle.append(state)


def compile_model(model: PreTrainedModel, facts: ModelFacts) -> CompiledModel:
    """Copy a model's weights for compiled passes and compile these, or load them from disk; nothing is compared.

    Raises:
        Unsupported: with one line that says why; the model's own code serves then.
    """
    if model.device.type != "cpu":
        raise Unsupported(f"compiled passes are made for CPUs, the model is on {model.device}")
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise Unsupported(f"compiled passes know float32 and bfloat16, the model is {model.dtype}")
    settings: Any = getattr(model.config, "quantization_config", None)
    method = (
        settings.get("quant_method")
        if isinstance(settings, dict)
        else getattr(settings, "quant_method", None)
    )
    if method is not None and method != "gguf":  # whose weights have been multiplied out
        name = getattr(method, "value", method)  # an enumeration of transformers, or its word
        raise Unsupported(f"compiled passes need weights as they are, the model is quantised by {name}")
    if any(weight.device.type != "cpu" for weight in model.parameters()):
        raise Unsupported("compiled passes need every layer on the CPU")
    if numba_config.DISABLE_JIT:
        raise Unsupported(
            "numba may not compile here: NUMBA_DISABLE_JIT is set; unset it for compiled passes"
        )
    try:
        return CompiledModel(model, facts)
    except (MemoryError, Unsupported):
        raise
    except Exception as error:  # whatever numba and LLVM do on a processor or a folder that they cannot use
        first_line = (str(error).splitlines() or [""])[0][:160]
        raise Unsupported(
            f"numba cannot compile passes here ({type(error).__name__}: {first_line})"
        ) from error
