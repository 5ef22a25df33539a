"""A GGUF file loaded by llama.cpp, used instead of a transformers model."""

from __future__ import annotations

from dataclasses import replace

from ..core import Target
from ..gguf.file import GGUFFile
from ..hf.fingerprint import remember
from ..limits import NO_LIMIT, Limits, Probe
from ..model import OwnConfig, OwnModel, generation_config_of, weights_of
from ..options import MachineOptions
from ..threads import thread_count
from .contexts import Contexts
from .library import CELLS, KV_TYPE, Weights
from .target import LlamaCppTarget


class LlamaCppModel(OwnModel):
    """A llama.cpp model, used instead of a transformers model.

    Args:
        file: a GGUF file.
        options: how llama.cpp loads it.

    Raises:
        SettingsError: llama.cpp is missing or cannot load the file.
    """

    path = LlamaCppTarget.path
    bit_equal = False
    instead = "omit it, or omit engine"

    def __init__(self, file: GGUFFile, options: MachineOptions) -> None:
        options = replace(options, threads=options.threads or thread_count())
        keys, values = options.cache_type_k or KV_TYPE, options.cache_type_v or KV_TYPE
        self.loaded = Weights(file.path, options)
        self.runs_on = self.loaded.runs_on
        self.weights, self.parameter_count = weights_of(file)
        self._float32 = self.weights == "F32" and keys == values == "f32"
        metadata = file.metadata
        loaded = self.loaded
        architecture = metadata["general.architecture"]
        self.config = OwnConfig(
            model_type=architecture,
            vocab_size=loaded.vocabulary,
            max_position_embeddings=loaded.positions,
            hidden_size=metadata.get(f"{architecture}.embedding_length", 0),
            num_hidden_layers=metadata.get(f"{architecture}.block_count", 0),
            n_gpu_layers=-1 if options.n_gpu_layers is None else options.n_gpu_layers,
            threads=options.threads,
            is_encoder_decoder=False,
            _attn_implementation="llama.cpp",
        )
        self.generation_config = generation_config_of(file)
        self.facts = Limits(self.config, loaded.vocabulary, loaded.positions or NO_LIMIT)
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

    def probe(self) -> Probe:
        """Compare token trees with llama.cpp's own causal passes."""
        return remember(self, "probe", self._probe)

    def _probe(self) -> Probe:
        from .check import check  # imports torch

        ok, why, found = check(self.contexts)
        # If any dtype is shorter than float32, a row's rounding depends on the other rows of its pass.
        half = not self._float32
        if ok:
            return Probe("tree", f"{self.description} ({why})", found, self.facts, half)
        reason = f"{self.description}: {why}; decoding one row per step"
        return Probe("plain", reason, found, None, half)

    def make_target(self) -> Target:
        """A ``LlamaCppTarget``. Its capacity comes from the model's options."""
        return LlamaCppTarget(self.contexts, self.probe().reason)
