"""Models that are not transformers modules: packed weights, and models run by llama.cpp."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from types import SimpleNamespace
from typing import Any, ClassVar

from .core import SettingsError, Target
from .gguf.file import GGUFFile
from .limits import Limits, Probe
from .text.tokenizer import end_tokens


class OwnConfig(SimpleNamespace):
    """The fields of a transformers config that this library reads."""

    def get_text_config(self, decoder: bool = True) -> OwnConfig:
        """The config itself, because such models are text-only."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dict(vars(self))


def weights_of(file: GGUFFile) -> tuple[str, int]:
    """``OwnModel.weights`` and ``OwnModel.parameter_count`` for a GGUF file."""
    sizes = dict[str, int]()
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.nbytes
    types = " + ".join(sorted(sizes, key=lambda kind: -sizes[kind]))
    return types, sum(prod(tensor.shape) for tensor in file.tensors.values())


def generation_config_of(file: GGUFFile) -> SimpleNamespace:
    """The end tokens of a GGUF file, as in a generation config of transformers."""
    return SimpleNamespace(eos_token_id=end_tokens(file.metadata) or None)


class NeedsModule(SettingsError, AttributeError):
    """An ``OwnModel`` does not have this part of a transformers model.

    Args:
        name: the missing attribute.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name!r} needs a transformers model, and packed weights and llama.cpp have none; load the model with "
            "dtype='bfloat16' or 'float32', and without engine"
        )


class OwnModel(ABC):
    """A model used instead of a transformers model, with its own path.

    Attributes:
        path: ``Target.path`` of its targets.
        bit_equal: whether drafting changes no bit of its logits.
        instead: how to use another path, for error messages.
        weights: the types of its weights, for display, those with the most bytes first, as in "Q4_K + Q6_K".
        parameter_count: the number of its weights.
        config, generation_config: as in transformers, or objects with the fields found in the file.
        facts: properties that targets need.
        description: one line about the model and its backend.
        device: the device of the logits.
    """

    path: ClassVar[str]
    bit_equal: ClassVar[bool]
    instead: ClassVar[str]
    weights: str
    parameter_count: int
    config: Any
    generation_config: Any
    facts: Limits
    description: str
    device = "cpu"

    @abstractmethod
    def probe(self) -> Probe:
        """The result of its probe: which steps its passes can evaluate."""

    @abstractmethod
    def make_target(self) -> Target:
        """A fresh target."""

    def __getattr__(self, name: str) -> Any:
        """Called for missing attributes only, such as ``generate``, ``parameters`` and hooks.

        Raises:
            NeedsModule: always.
        """
        raise NeedsModule(name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise NeedsModule: there is no transformers forward pass."""
        raise NeedsModule("forward")
