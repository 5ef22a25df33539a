"""A GGUF file that llama.cpp has loaded, used in place of a transformers model."""

from __future__ import annotations

from dataclasses import replace

from ...models.gguf import GGUFFile
from ...targets.limits import NO_LIMIT, Limits
from ...targets.own_model import OwnConfig, OwnModel, generation_config_of, weights_of
from ...threads import thread_count
from .library import Context, Settings, Weights

#: Number of idle contexts that are kept for later engines on the model.
KEPT = 2


class Lease:
    """A context lent to one target. The target may replace it with a larger one, and returns it at its end."""

    def __init__(self, idle: list[Context], context: Context) -> None:
        self._idle, self.context = idle, context

    def end(self) -> None:
        """Return the context."""
        if len(self._idle) < KEPT:
            self.context.clear()
            self._idle.append(self.context)
        else:
            self.context.close()


class LlamaCppModel(OwnModel):
    """A model of llama.cpp, used in place of a transformers model.

    Args:
        file: a GGUF file.
        settings: how llama.cpp loads it.

    Raises:
        SettingsError: llama.cpp is missing or cannot load the file.
    """

    def __init__(self, file: GGUFFile, settings: Settings) -> None:
        settings = replace(settings, threads=settings.threads or thread_count())
        self.loaded = Weights(file.path, settings)
        self.weights, self.parameter_count = weights_of(file)
        # If anything is shorter than float32, a row's rounding depends on the other rows of its pass.
        whole = self.weights == "F32" and settings.cache_type_k == settings.cache_type_v == "f32"
        self.rows_interact = not whole
        metadata, loaded = file.metadata, self.loaded
        architecture = metadata["general.architecture"]
        self.config = OwnConfig(
            model_type=architecture,
            vocab_size=loaded.vocabulary,
            max_position_embeddings=loaded.positions,
            hidden_size=metadata.get(f"{architecture}.embedding_length", 0),
            num_hidden_layers=metadata.get(f"{architecture}.block_count", 0),
            n_gpu_layers=-1 if settings.n_gpu_layers is None else settings.n_gpu_layers,
            threads=settings.threads,
            is_encoder_decoder=False,
            _attn_implementation="llama.cpp",
        )
        self.generation_config = generation_config_of(file)
        self.facts = Limits(self.config, loaded.vocabulary, loaded.positions or NO_LIMIT)
        # llama.cpp chooses one of two frequency tables by the size of the context, and a text must keep its table.
        original = metadata.get(f"{architecture}.rope.scaling.original_context_length", 0)
        long = "rope_factors_long.weight" in file.tensors
        self._cells = max(settings.ctx_size, original + 256) if long else settings.ctx_size
        self._idle: list[Context] = []
        self.description = (
            f"{architecture}, {self.weights} weights, llama.cpp on {loaded.device}, "
            f"{settings.cache_type_k} keys and {settings.cache_type_v} values"
        )

    def lease(self) -> Lease:
        """Lend a context without rows: an idle one, or a new one."""
        try:
            context = self._idle.pop()
        except IndexError:
            context = Context(self.loaded, self._cells)
        return Lease(self._idle, context)
