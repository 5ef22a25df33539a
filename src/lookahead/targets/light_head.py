"""A light head for a loaded model: the file's weights, with the model's own embeddings and output rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core import SettingsError
from ..models.head_file import HeadWeights
from .own_model import OwnModel

Array = np.ndarray[Any, np.dtype[Any]]
#: Paths whose targets give hidden states (``Scores.hidden``).
PATHS = ("cpu", "transformers", "cuda-graph")


def sizes_of(model: Any) -> tuple[int, int]:
    """(tokens of the vocabulary, numbers of a hidden state) of a model."""
    compiled = getattr(model, "compiled", None) if isinstance(model, OwnModel) else None
    if compiled is not None:
        return compiled.vocabulary, compiled.blueprint.hidden
    if isinstance(model, OwnModel) or model.get_output_embeddings() is None:
        raise SettingsError(f"a light head needs hidden states, and {_name(model)} does not give them")
    rows, hidden = model.get_output_embeddings().weight.shape
    return rows, hidden


def row_readers(model: Any) -> tuple[Callable[[Sequence[int]], Array], Callable[[Sequence[int]], Array]]:
    """Two functions (tokens) -> fp32 (n, hidden): their embeddings, and their rows of the output matrix.

    Raises:
        SettingsError: the model does not give hidden states, or these rows have other sizes.
    """
    sizes_of(model)
    if isinstance(model, OwnModel):
        blueprint = model.compiled.blueprint
        return blueprint.embedding.rows, blueprint.head.rows
    parts = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if parts[0].shape[1] != parts[1].shape[1]:
        raise SettingsError(
            f"a light head needs embeddings of the size of hidden states, and those of {_name(model)} have "
            f"{parts[0].shape[1]} and {parts[1].shape[1]} numbers"
        )

    def reader(weight: Any) -> Callable[[Sequence[int]], Array]:
        def rows(tokens: Sequence[int]) -> Array:
            array: Array = weight.detach()[list(tokens)].float().cpu().numpy()
            return array

        return rows

    return reader(parts[0]), reader(parts[1])


def make_head(model: Any, path: str, weights: HeadWeights, bits: int = 8) -> Any:
    """The head of a model whose target has this path: compiled on a CPU, in torch elsewhere.

    Args:
        bits: 4 or 8, of the compiled head's weights.

    Raises:
        SettingsError: the path gives no hidden states, or the head is of another model.
    """
    if path not in PATHS:
        raise SettingsError(f"a light head needs hidden states, and the path {path!r} does not give them")
    weights.check(*sizes_of(model), name=_name(model))
    embed, output = row_readers(model)
    if path == "cpu":
        from .cpu.compiled_head import CompiledHead

        return CompiledHead(weights, output(weights.shortlist.tolist()), embed, bits)
    from .head_network import TorchHead

    rows = model.get_output_embeddings().weight.detach()[weights.shortlist.tolist()]
    embeddings = model.get_input_embeddings().weight.detach()
    return TorchHead(weights, rows, lambda tokens: embeddings[list(tokens)])


def _name(model: Any) -> str:
    return str(getattr(model, "description", "") or type(model).__name__).partition(",")[0]
