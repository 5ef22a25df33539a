"""A transformers module as a ``Model``."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ..core import SettingsError, Target
from ..model import NO_LIMIT, HeadParts, Model, Probe, Shape, positions_of
from .fingerprint import checksum, current, forget, known, unchanged
from .paths import check_module, make_target, probe

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class HFModel(Model):
    """A causal language model of transformers, in evaluation mode.

    All objects of one module share its lock and what was measured (``fingerprint.known``), which ends with the
    module. The properties are read from the module each time, because others may change it.

    Args:
        module: the transformers model; this object keeps it alive.

    Raises:
        SettingsError: it is not a decoder-only language model.
    """

    gives_tensors = True

    def __init__(self, module: PreTrainedModel) -> None:
        check_module(module)
        self.module: Any = module

    # ------------------------------------------------------------------------------- properties

    @property
    def description(self) -> str:  # type: ignore[override]
        return f"{type(self.module).__name__}, {self.weights} weights, {self.device}"

    @property
    def weights(self) -> str:  # type: ignore[override]
        return str(self.module.dtype).removeprefix("torch.")

    @property
    def parameter_count(self) -> int:  # type: ignore[override]
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def device(self) -> str:  # type: ignore[override]
        return str(self.module.device)

    @property
    def runs_on(self) -> str:  # type: ignore[override]
        return str(self.module.device.type)

    @property
    def attention(self) -> str:  # type: ignore[override]
        return str(self.module.config._attn_implementation)

    @property
    def shape(self) -> Shape:  # type: ignore[override]
        return shape_of(self.module.config)

    @property
    def context(self) -> int | None:  # type: ignore[override]
        return positions_of(self._config)

    @property
    def token_bytes(self) -> int:  # type: ignore[override]
        """Read from a pass over one token: only some layers of a hybrid model have keys and values, and those of
        multi-head latent attention differ in size. 0 if no layer has any, as in Mamba."""
        from .facts import keys_and_values

        with self.lock():
            pairs = keys_and_values(self.module, self._config)
        return sum(one.nbytes for pair in pairs if pair is not None for one in pair)

    @property
    def eos(self) -> frozenset[int]:  # type: ignore[override]
        given = getattr(self.module.generation_config, "eos_token_id", None)
        return frozenset([given] if isinstance(given, int) else given or ())

    @property
    def sampling(self) -> dict[str, float]:  # type: ignore[override]
        config = self.module.generation_config
        if not getattr(config, "do_sample", False):
            return {}
        names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
        given = {name: value for name in names if (value := getattr(config, name, None)) is not None}
        return {"temperature": 1.0, **given}

    @property
    def state(self) -> dict[str, dict[Any, Any]]:  # type: ignore[override]
        return known(self.module).measured

    @property
    def _config(self) -> Any:
        return self.module.config.get_text_config(decoder=True)

    # ------------------------------------------------------------------------------- evaluating steps

    @property
    def probe(self) -> Probe:
        return probe(self.module)

    def make_target(self, path: str = "auto", exact: bool = False) -> Target:
        """See ``hf.paths.make_target``."""
        return make_target(self.module, path, exact)

    @property
    def rope_boundary(self) -> int:
        facts = self.probe.facts
        return facts.rope_boundary if facts is not None else NO_LIMIT

    def lock(self, target: Target | None = None) -> AbstractContextManager[Any]:
        """The module's lock, unless the target runs nothing of the module.

        Without a target, the module's fingerprint is computed once for the whole block.
        """
        if target is None:
            return unchanged(self.module)
        lock: AbstractContextManager[Any] = known(self.module).lock
        return lock if target.shares_module else nullcontext()

    def device_memory(self) -> int:
        from .cuda import is_gpu, memory

        return int(memory(self.module.device)[0]) if is_gpu(self.module.device) else 0

    # ------------------------------------------------------------------------------- identity

    @property
    def key(self) -> str:
        parts = [type(self.module).__name__, config_key(self.module.config), self.weights, self.device]
        return "|".join(parts)

    @property
    def version(self) -> Hashable:
        return current(self.module), known(self.module).refreshes

    def forget(self) -> None:
        forget(self.module)

    def checksum(self, samples: int | None = None) -> int:
        tensors = [weight.detach() for weight in self.module.parameters()]
        if samples is not None:
            tensors = [weight.reshape(-1)[:: weight.numel() // samples + 1] for weight in tensors]
        return checksum(tensors)

    # ------------------------------------------------------------------------------- light heads

    def head_parts(self) -> HeadParts:
        name = type(self.module).__name__
        embeddings, outputs = self.module.get_input_embeddings(), self.module.get_output_embeddings()
        if outputs is None:
            raise SettingsError(
                f"a light head needs a model with output embeddings, and {name} has none; decode without one"
            )
        rows, hidden = outputs.weight.shape
        if embeddings.weight.shape[1] != hidden:
            raise SettingsError(
                f"a light head needs embeddings of the size of hidden states, and those of {name} have "
                f"{embeddings.weight.shape[1]} and {hidden} numbers; decode without one"
            )
        return HeadParts(rows, hidden, _reader(embeddings.weight), _reader(outputs.weight))

    def make_head(self, weights: Any, target: Target) -> Any:
        """Compiled if the target's passes are, else in torch on the module's device."""
        parts = self.head_parts()
        shortlist = weights.shortlist.tolist()
        if target.runs_compiled:
            from ..cpu.compiled_head import CompiledHead

            return CompiledHead(weights, parts.output(shortlist), parts.embed)
        from .head_network import TorchHead

        rows = self.module.get_output_embeddings().weight.detach()[shortlist]
        embeddings = self.module.get_input_embeddings().weight.detach()
        return TorchHead(weights, rows, lambda tokens: embeddings[list(tokens)])


def _reader(weight: torch.Tensor) -> Callable[[Sequence[int]], Any]:
    def rows(tokens: Sequence[int]) -> Any:
        return weight.detach()[list(tokens)].float().cpu().numpy()

    return rows


def shape_of(config: Any) -> Shape:
    """The shape of a model with this transformers config."""
    text = config.get_text_config(decoder=True)
    names = ("vocab_size", "hidden_size", "num_hidden_layers")
    return Shape(text.model_type, *(int(getattr(text, name, 0) or 0) for name in names))


def config_key(config: Any) -> str:
    """The sizes of a model as JSON: the integers of its transformers config, and how its weights are quantized."""
    entries = config.get_text_config(decoder=True).to_dict().items()
    sizes: dict[str, Any] = {
        key: value for key, value in entries if isinstance(value, int) and key != "eos_token_id"
    }
    quantization = getattr(config, "quantization_config", None)  # a dict or an object of transformers
    if quantization is not None:
        sizes["quantization_config"] = dict(quantization)
    return json.dumps(sizes, sort_keys=True, default=str)


def generate_greedily(
    module: Any, prompt: Sequence[int], max_new_tokens: int, eos: Sequence[int]
) -> list[int]:
    """The greedy completion of transformers' own ``model.generate``, as an independent reference."""
    import torch
    from transformers import GenerationConfig

    ids = torch.tensor([prompt], device=module.device)
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=eos[0] if eos else 0,
    )
    # transformers fills unset options, such as penalties, from the checkpoint's generation config.
    own = module.generation_config
    module.generation_config = settings
    try:
        with torch.no_grad():
            output = module.generate(ids, attention_mask=torch.ones_like(ids))
    finally:
        module.generation_config = own
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
