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
from .architectures import Norm, Unsupported, linear_of, norm_of, plain, spec_of
from .execution_plan import EVERYTHING, KEY_BLOCK, LAYER, PLAN, ExecutionState, KVCache, Segment
from .formats import GROUP, Arena, Format, Linear, format_for, round_up
from .forward_pass import pass_address
from .thread_pool import thread_pool


class CompiledModel:
    """A model whose passes are one call for each thread. Several threads may run passes at once.

    Args:
        model: a loaded model of a registered class; linears are copied, never written.
        config: its text config.
        numbers: how products are computed; the best for this processor by default.

    Attributes:
        logits_strides: bytes from row to row of logits (R, width), and of peaks (R, width / 32) fp32.

    Raises:
        Unsupported: the model is not what the spec of its class assumes.
    """

    def __init__(self, model: nn.Module, config: Any, numbers: Format | None = None) -> None:
        self._spec = spec = spec_of(model, config)
        try:
            self.embedding = plain(model, spec.embedding, nn.Embedding).weight.detach().contiguous()
            layers = list(model.get_submodule(spec.layers).children())
            self.dtype = self.embedding.dtype
            self.numbers = numbers or format_for(self.dtype)
            self.layout = f"compiled passes on {self.numbers}"
            self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
            attention: Any = layers[0].get_submodule(spec.attention)
            self.head_size = int(attention.head_dim)
            self.padded_head = round_up(self.head_size, KEY_BLOCK * self.numbers.key_pair)
            self._rotary = model.get_submodule(spec.rotary)
            self._angles = torch.empty(0)
            self._kept: list[torch.Tensor] = []  # what the records' addresses point to
            self._layers, self._model = np.zeros(len(layers), LAYER), np.zeros(1, PLAN)
            self._fill(model, layers, config)
        except AttributeError as error:
            name = type(model).__name__
            raise Unsupported(
                f"{name} is built differently from what the compiled path knows ({error})"
            ) from error
        self._job = pass_address(self.numbers)
        self._idle: deque[ExecutionState] = deque()

    def _fill(self, model: nn.Module, layers: list[nn.Module], config: Any) -> None:
        spec, size, arena = self._spec, self.head_size, None
        head = linear_of(model, spec.head)
        for index, (record, layer) in enumerate(zip(self._layers, layers, strict=True)):
            query, key, value = (linear_of(layer, path) for path in (spec.query, spec.key, spec.value))
            query, key = formats.paired_heads(query, size), formats.paired_heads(key, size)
            linears = {
                "qkv": formats.joined(query, key, value), "output": linear_of(layer, spec.output),
                "gate_up": formats.gate_and_up(linear_of(layer, spec.gate), linear_of(layer, spec.up)),
                "down": linear_of(layer, spec.down),
            }  # fmt: skip
            if arena is None:  # every layer takes as much as the first
                sizes = (formats.packed_bytes(linear, self.numbers) for linear in linears.values())
                each = sum(round_up(size, 64) for size in sizes)
                arena = Arena(len(layers) * each + formats.packed_bytes(head, self.numbers))
            for name, linear in linears.items():
                record[name] = self._linear(linear, arena)
            record["attention_norm"] = self._norm(norm_of(layer, spec.attention_norm))
            record["feed_forward_norm"] = self._norm(norm_of(layer, spec.feed_forward_norm))
            if spec.query_norm:
                order = formats.paired(size)
                of_query, of_key = norm_of(layer, spec.query_norm), norm_of(layer, spec.key_norm)
                weights = [of_query.weight[order]] * self.heads + [of_key.weight[order]] * self.key_heads
                record["head_norm"] = self._norm(Norm(torch.stack(weights), of_query.epsilon))
            record["window"] = spec.window(config, index) or EVERYTHING
            record["rotates"] = spec.rotates(config, index)
            record["scale"] = layer.get_submodule(spec.attention).scaling
        assert arena is not None
        plan, self.vocabulary = self._model[0], len(head.weight)
        plan["final_norm"] = self._norm(norm_of(model, spec.norm))
        # Tokens behind the vocabulary are never the best.
        plan["lm_head"] = self._linear(head, arena, float("-inf"))
        hidden, inner = self.embedding.shape[1], linears["down"].weight.shape[1]
        element, step, heads_size = self.numbers.input.bytes, self.numbers.step, self.heads * size
        width = round_up(self.vocabulary, GROUP)
        self.logits_strides = width * self.dtype.itemsize, width // GROUP * 4
        fields = {
            "hidden": hidden, "heads": self.heads, "key_heads": self.key_heads, "head_size": size,
            "padded_head": self.padded_head, "vocabulary": self.vocabulary, "layer_count": len(layers),
            "layers": self._layers.ctypes.data, "embedding": self.embedding.data_ptr(),
            "x_stride": 4 * round_up(hidden, GROUP), "normed_stride": round_up(hidden, step) * element,
            "attended_stride": round_up(heads_size, step) * element,
            "gated_stride": round_up(round_up(inner, GROUP // 2), step) * element,
            "qkv_stride": 4 * round_up(heads_size + 2 * self.key_heads * size, GROUP),
            "logits_stride": self.logits_strides[0], "peaks_stride": self.logits_strides[1],
        }  # fmt: skip
        for name, number in fields.items():
            plan[name] = number

    def _linear(self, linear: Linear, arena: Arena, padding: float = 0.0) -> tuple[int, int, int, int, int]:
        """The record ``execution_plan.LINEAR`` of packed weights."""
        weights, bias, steps = formats.pack(linear, self.numbers, arena, padding)
        self._kept += [weights, bias]
        groups, size = weights.shape
        return weights.data_ptr(), size, bias.data_ptr(), steps, groups

    def _norm(self, norm: Norm) -> tuple[int, float]:
        weight = norm.weight.float().contiguous()
        self._kept.append(weight)
        return weight.data_ptr(), norm.epsilon

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache of this model's shape."""
        shape = len(self._layers), self.key_heads, self.padded_head
        return KVCache(*shape, capacity, self.dtype, self.numbers.key_pair)

    def _rotary_up_to(self, position: int) -> torch.Tensor:
        """Cosine and sine of positions 0..position or more, from the model's own module: (positions, D / 2, 2)."""
        table = self._angles
        if position >= len(table):
            with torch.no_grad():
                places = torch.arange(1 << position.bit_length())[None]
                both = self._rotary(torch.empty(1, dtype=torch.float32), places)
                half = self.head_size // 2
                self._angles = table = torch.stack([x[0, :, :half].float() for x in both], -1).contiguous()
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
        state.describe(tokens, positions, segments, reads)
        p, rotary = state.plan, self._rotary_up_to(max(positions))
        p["logits"] = memory.ctypes.data
        p["peaks"] = memory.ctypes.data + len(reads) * self.logits_strides[0]
        p["rotary"], p["cache"] = rotary.data_ptr(), cache.storage.data_ptr()
        strides = (stride * cache.storage.element_size() for stride in cache.storage.stride()[:3])
        p["cache_layer"], p["cache_slot"], p["cache_head"] = strides
        state.tile_config[:] = formats.tile_config(len(tokens))
        state.holds = (self, memory, rotary, cache.storage)
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
        raise Unsupported(f"compiled passes need weights as they are, the model is quantised by {method}")
    if any(weight.device.type != "cpu" for weight in model.parameters()):
        raise Unsupported("compiled passes need every layer on the CPU")
    if numba_config.DISABLE_JIT:
        raise Unsupported(
            "numba may not compile here: NUMBA_DISABLE_JIT is set; unset it for compiled passes"
        )
    try:
        return CompiledModel(model, facts.config)
    except (MemoryError, Unsupported):
        raise
    except Exception as error:  # whatever numba and LLVM do on a processor or a folder that they cannot use
        first_line = (str(error).splitlines() or [""])[0][:160]
        raise Unsupported(
            f"numba cannot compile passes here ({type(error).__name__}: {first_line})"
        ) from error
