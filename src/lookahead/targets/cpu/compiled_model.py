"""A model's weights as compiled code wants them, and its passes; ``compile_model`` is the way into this package."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numba import config as numba_config
from transformers import PreTrainedModel

from ...threads import thread_count
from ..facts import ModelFacts
from .architectures import Linear, ModelParts, Norm, Unsupported, read_parts
from .buffer_pool import BufferPool
from .execution_plan import KEY_BLOCK, LAYER, PLAN, ExecutionState, Segment
from .forward_pass import pass_address
from .kv_cache import KVCache
from .microkernel import GROUP
from .numeric_format import Format, format_for
from .packed_weights import (
    Arena,
    gate_and_up,
    joined,
    pack,
    packed_bytes,
    paired,
    paired_heads,
    round_up,
    tile_config,
)  # fmt: skip
from .pass_logits import PassLogits
from .rope import RotaryTable
from .thread_pool import thread_pool


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of a pass, without what Python does before and after; gemms and attention are shares of these."""

    seconds: float
    gemm: float
    attention: float


class CompiledModel:
    """A model whose passes are one call for each thread. Several threads may run passes at once.

    Args:
        parts: tensors of a loaded model; linears are copied, never written.
        numbers: how products are computed; the best for this processor by default.

    Attributes:
        last_pass: what the last pass took, of whichever thread.
    """

    def __init__(self, parts: ModelParts, numbers: Format | None = None) -> None:
        self.dtype = parts.embedding.dtype
        self.numbers = numbers or format_for(self.dtype)
        self.layout = f"compiled passes on {self.numbers}"
        self.heads, self.key_heads, self.head_size = parts.heads, parts.key_heads, parts.head_size
        self.padded_head = round_up(parts.head_size, KEY_BLOCK * self.numbers.key_pair)
        self.vocabulary = len(parts.head.weight)
        self.embedding = parts.embedding.contiguous()
        self._job = pass_address(self.numbers)
        self._rotary = RotaryTable(parts.rotary, parts.head_size)
        self._kept: list[torch.Tensor] = []  # what the records' addresses point to
        self._layers = np.zeros(len(parts.layers), LAYER)
        self._model = np.zeros(1, PLAN)
        self._fill(parts)
        self._idle: deque[ExecutionState] = deque()
        self.buffers = BufferPool()
        self.last_pass = PassTime(0.0, 0.0, 0.0)

    def _fill(self, parts: ModelParts) -> None:
        plan, size, arena = self._model[0], self.head_size, None
        for record, layer in zip(self._layers, parts.layers, strict=True):
            of, norms = layer.linears, layer.norms
            queries, keys = paired_heads(of["query"], size), paired_heads(of["key"], size)
            linears = {
                "qkv": joined(queries, keys, of["value"]), "output": of["output"],
                "gate_up": gate_and_up(of["gate"], of["up"]), "down": of["down"],
            }  # fmt: skip
            if arena is None:  # every layer takes as much as the first
                each = sum(round_up(packed_bytes(linear, self.numbers), 64) for linear in linears.values())
                arena = Arena(len(parts.layers) * each + packed_bytes(parts.head, self.numbers))
            for name, linear in linears.items():
                record[name] = self._linear(linear, arena)
            for name in ("attention_norm", "feed_forward_norm"):
                record[name] = self._norm(norms[name])
            if "query_norm" in norms:
                query, key = norms["query_norm"], norms["key_norm"]
                weights = [query.weight[paired(size)]] * self.heads + [
                    key.weight[paired(size)]
                ] * self.key_heads
                record["head_norm"] = self._norm(Norm(torch.stack(weights), query.epsilon))
            record["window"], record["rotates"], record["scale"] = layer.window, layer.rotates, layer.scale
        assert arena is not None
        plan["final_norm"] = self._norm(parts.norm)
        # Tokens behind the vocabulary are never the best.
        plan["lm_head"] = self._linear(parts.head, arena, float("-inf"))
        hidden, inner = parts.embedding.shape[1], parts.layers[0].linears["down"].weight.shape[1]
        element, step, heads_size = self.numbers.input.bytes, self.numbers.step, self.heads * size
        logits_stride, peaks_stride = PassLogits.strides(self.vocabulary, self.dtype)
        fields = {
            "hidden": hidden, "heads": self.heads, "key_heads": self.key_heads, "head_size": size,
            "padded_head": self.padded_head, "vocabulary": self.vocabulary, "layer_count": len(parts.layers),
            "layers": self._layers.ctypes.data, "embedding": self.embedding.data_ptr(),
            "x_stride": 4 * round_up(hidden, GROUP), "normed_stride": round_up(hidden, step) * element,
            "attended_stride": round_up(heads_size, step) * element,
            "gated_stride": round_up(round_up(inner, GROUP // 2), step) * element,
            "qkv_stride": 4 * round_up(heads_size + 2 * self.key_heads * size, GROUP),
            "logits_stride": logits_stride, "peaks_stride": peaks_stride,
        }  # fmt: skip
        for name, value in fields.items():
            plan[name] = value

    def _linear(self, linear: Linear, arena: Arena, padding: float = 0.0) -> tuple[int, int, int, int, int]:
        """The record ``execution_plan.LINEAR`` of packed weights."""
        weights, bias, steps = pack(linear, self.numbers, arena, padding)
        self._kept += [weights, bias]
        groups, size = weights.shape
        return weights.data_ptr(), size, bias.data_ptr(), steps, groups

    def _norm(self, norm: Norm) -> tuple[int, float]:
        weight = norm.weight.float().contiguous()
        self._kept.append(weight)
        return weight.data_ptr(), norm.epsilon

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache of this model's shape."""
        pair = self.numbers.key_pair
        return KVCache(len(self._layers), self.key_heads, self.padded_head, capacity, self.dtype, pair)

    def run(
        self, tokens: Sequence[int], positions: Sequence[int], segments: Sequence[Segment], reads: Sequence[int],
        cache: KVCache,
    ) -> PassLogits:  # fmt: skip
        """Evaluate rows and write their keys and values behind the slots' committed tokens.

        Args:
            tokens, positions: of all rows, those of the first segment first.
            reads: the rows whose logits are wanted.
            cache: has room for them.

        Returns:
            Logits in a buffer of ``buffers``, to which the caller gives it back.

        Raises:
            IndexError: a token is not in the vocabulary.
        """
        pool = thread_pool(thread_count())
        # Not given back where something is raised: helpers may still be at work on it after an interrupt.
        try:
            state = self._idle.pop()
        except IndexError:  # as many passes as ever are under way
            state = ExecutionState(self._model, self.numbers)
        longest = max(segment.length + segment.rows for segment in segments)
        state.reserve(len(tokens), longest, pool.size)
        state.describe(tokens, positions, segments, reads)
        p, rotary = state.plan, self._rotary.up_to(max(positions))
        memory = self.buffers.acquire(len(reads) * int(p["logits_stride"] + p["peaks_stride"]) + 64)
        p["logits"] = memory.ctypes.data
        p["peaks"] = memory.ctypes.data + len(reads) * int(p["logits_stride"])
        p["rotary"], p["cache"] = rotary.data_ptr(), cache.storage.data_ptr()
        p["cache_layer"], p["cache_slot"], p["cache_head"] = cache.strides()
        state.tile_config[:] = tile_config(len(tokens))
        state.holds = (self, memory, rotary, cache.storage)
        start = perf_counter()
        pool.run(self._job, state.address, state)
        seconds, total = perf_counter() - start, int(p["total_ticks"]) or 1
        self.last_pass = PassTime(seconds, p["gemm_ticks"] / total, p["attention_ticks"] / total)
        state.holds = None
        if p["unknown_token"]:
            self._idle.append(state)
            raise IndexError(f"tokens must be 0 to {self.vocabulary - 1}, got {max(tokens)} or {min(tokens)}")
        best = state.winners[: len(reads)].tolist()
        self._idle.append(state)
        return PassLogits(memory, self.dtype, len(reads), self.vocabulary, best)


def compile_model(model: PreTrainedModel, facts: ModelFacts) -> CompiledModel:
    """Lay a model's weights out for compiled passes and compile these, or load them from disk.

    Nothing is compared with the model's own code here; ``CpuTarget`` runs the result.

    Args:
        model: is read and not changed.
        facts: of its transformers target.

    Raises:
        Unsupported: with one line that says why; the model's own code serves then.
    """
    if model.device.type != "cpu":
        raise Unsupported(f"compiled passes are made for CPUs, the model is on {model.device}")
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise Unsupported(f"compiled passes know float32 and bfloat16, the model is {model.dtype}")
    if numba_config.DISABLE_JIT:
        raise Unsupported(
            "numba may not compile here: NUMBA_DISABLE_JIT is set; unset it for compiled passes"
        )
    parts = read_parts(model, facts.config)
    try:
        return CompiledModel(parts)
    except (MemoryError, Unsupported):
        raise
    except Exception as error:  # whatever numba and LLVM do on a processor or a folder that they cannot use
        first_line = (str(error).splitlines() or [""])[0][:160]
        raise Unsupported(
            f"numba cannot compile passes here ({type(error).__name__}: {first_line})"
        ) from error
