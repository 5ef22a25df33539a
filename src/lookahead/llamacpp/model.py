"""A GGUF file loaded by llama.cpp, as a ``Model``."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from ..core import SettingsError, Target
from ..gguf.file import GGUFFile
from ..gguf.settings import suggested_sampling
from ..model import NO_LIMIT, HeadParts, Limits, Model, Probe, Shape, combined_checksum, path_error, sums_of
from ..options import MachineOptions
from ..text.tokenizer import end_tokens
from ..threads import thread_count
from .contexts import Contexts
from .library import CELLS, KV_TYPE, Weights
from .target import LlamaCppTarget

#: The tokens whose keys and values are counted; short enough for any context.
COUNTED = 8


class LlamaCppModel(Model):
    """A model that llama.cpp runs.

    Args:
        file: a GGUF file.
        options: how llama.cpp loads it.

    Raises:
        SettingsError: llama.cpp is missing or cannot load the file.
    """

    attention = "llama.cpp"

    def __init__(self, file: GGUFFile, options: MachineOptions) -> None:
        options = replace(options, threads=options.threads or thread_count())
        keys, values = options.cache_type_k or KV_TYPE, options.cache_type_v or KV_TYPE
        self.loaded = loaded = Weights(file.path, options)
        self.runs_on = loaded.runs_on
        self.weights = file.weights
        self.parameter_count = file.parameter_count
        self._float32 = self.weights == "F32" and keys == values == "f32"
        metadata = file.metadata
        architecture = metadata["general.architecture"]
        sizes = [metadata.get(f"{architecture}.{name}", 0) for name in ("embedding_length", "block_count")]
        self.shape = Shape(architecture, loaded.vocabulary, *sizes)
        self.context = loaded.positions or None
        self.eos = frozenset(end_tokens(metadata))
        self.sampling = suggested_sampling(metadata)
        self.state = {}
        self._limits = Limits(loaded.vocabulary, loaded.positions or NO_LIMIT)
        # llama.cpp chooses one of two frequency tables by context size, and a sequence must keep its table.
        original = metadata.get(f"{architecture}.rope.scaling.original_context_length", 0)
        long = "rope_factors_long.weight" in file.tensors
        asked = options.ctx_size or CELLS
        cells = max(asked, original + 256) if long else asked
        self.contexts = Contexts(loaded, cells)
        self.description = (
            f"{architecture}, {self.weights} weights, llama.cpp on {loaded.device}, "
            f"{keys} keys and {values} values"
        )

    @cached_property
    def token_bytes(self) -> int:  # type: ignore[override]
        """The difference between the states of a long and a short sequence: what grows with a sequence."""
        lease = self.contexts.lease()
        try:
            sizes = []
            for position in range(1 + COUNTED):
                lease.context.decode_one(0, position, 0)
                if position in (0, COUNTED):
                    sizes.append(len(lease.context.read(0)))
        finally:
            lease.end()
        return (sizes[1] - sizes[0]) // COUNTED

    @cached_property
    def probe(self) -> Probe:
        """The result of comparing token trees with llama.cpp's own causal passes."""
        from .check import check

        ok, why, found = check(self.contexts)
        # If any dtype is shorter than float32, a row's rounding depends on the other rows of its pass.
        half = not self._float32
        if ok:
            return Probe("tree", f"{self.description} ({why})", found, self._limits, half)
        reason = f"{self.description}: {why}; decoding one row per step"
        return Probe("plain", reason, found, None, half)

    def make_target(self, path: str = "auto", exact: bool = False) -> Target:
        """A ``LlamaCppTarget``, equal up to rounding. Its capacity comes from the model's options."""
        if path not in ("auto", LlamaCppTarget.path) or exact:
            raise path_error(self, "exact=True" if exact else path, "omit it, or omit engine")
        return LlamaCppTarget(self.contexts, self.probe.reason)

    @property
    def key(self) -> str:
        options = self.loaded.options
        names = ("n_gpu_layers", "threads", "flash_attn", "cache_type_k", "cache_type_v")
        given = [f"{name} {value}" for name in names if (value := getattr(options, name)) is not None]
        # The same options run on a GPU or not, depending on how llama.cpp was built.
        return "|".join(map(str, ("llama.cpp", *self.shape, self.weights, *given, f"on {self.runs_on}")))

    def head_parts(self) -> HeadParts:
        raise SettingsError(
            "a light head needs hidden states, which engine='llama.cpp' does not provide; omit engine"
        )

    def checksum(self, samples: int | None = None) -> int:
        """A checksum of the file's bytes."""
        return combined_checksum([sums_of(np.memmap(self.loaded.file, np.int8, "r"), samples)])
