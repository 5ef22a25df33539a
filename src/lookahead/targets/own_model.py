"""Models that are none of transformers' and evaluate their own passes: packed weights, and llama.cpp's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..core import SettingsError
from .limits import Limits

if TYPE_CHECKING:
    import torch


class OwnConfig(SimpleNamespace):
    """The few fields of a transformers config that the library reads of a model."""

    def get_text_config(self, decoder: bool = True) -> OwnConfig:
        """Itself: such models read text only."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dict(vars(self))


class NeedsModule(SettingsError, AttributeError):
    """Something asks for a part of a transformers model, and there is none.

    Args:
        name: of the part.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name!r} needs a transformers model, and packed weights have none; load the model with "
            "dtype='bfloat16' or 'float32'"
        )


class OwnModel:
    """Stands where a transformers model does elsewhere.

    Attributes:
        weights: the types of its numbers for people, those that take the most bytes first, as in "Q4_K + Q6_K".
        parameter_count: how many numbers its tensors hold.
        config, generation_config: of transformers, or as far as a file tells.
        facts: what targets must know of it.
        description: of the model and of what computes its passes, in one line.
        device: where logits are read.
        rounds_in_company: whether a row may round differently beside other rows.
    """

    weights: str
    parameter_count: int
    config: Any
    generation_config: Any
    facts: Limits
    description: str
    device = "cpu"
    rounds_in_company = False

    @property
    def dtype(self) -> torch.dtype:
        """float16 where rows round in company, else float32."""
        import torch

        return torch.float16 if self.rounds_in_company else torch.float32

    def __getattr__(self, name: str) -> Any:
        """Reached only for attributes that are not there: ``generate``, ``parameters``, hooks and other modules' own.

        Raises:
            NeedsModule: an AttributeError that says what to do.
        """
        raise NeedsModule(name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """A forward pass of transformers, which there is none of; raises NeedsModule."""
        raise NeedsModule("forward")
