"""A light head for a loaded model: the file's weights, with the model's own embeddings and output rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .core import NumericalError, OutOfMemory, SettingsError, Target
from .drafters.adaptive.base_files import existing_files, table_name
from .drafters.adaptive.model_curves import cost_path, head_cost, measuring
from .drafters.adaptive.sources.head_file import HeadWeights, load_head
from .model import OwnModel
from .records import cache_folder

Array = np.ndarray[Any, np.dtype[Any]]
#: The heads included in this package.
INCLUDED = Path(__file__).parent / "heads"
#: Heads by model; the key is (requested head, target path).
_of_models: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], Any]] = weakref.WeakKeyDictionary()


def sizes_of(model: Any) -> tuple[int, int]:
    """(vocabulary size, hidden size) of a model.

    Raises:
        SettingsError: its engine provides no hidden states, or it has no output embeddings.
    """
    compiled = getattr(model, "compiled", None) if isinstance(model, OwnModel) else None
    if compiled is not None:
        return compiled.vocabulary, compiled.blueprint.hidden
    if isinstance(model, OwnModel):
        raise SettingsError(
            f"a light head needs hidden states, which engine={model.path!r} does not provide; omit engine"
        )
    if model.get_output_embeddings() is None:
        raise SettingsError(
            f"a light head needs a model with output embeddings, and {_name(model)} has none; decode without one"
        )
    rows, hidden = model.get_output_embeddings().weight.shape
    return rows, hidden


def row_readers(model: Any) -> tuple[Callable[[Sequence[int]], Array], Callable[[Sequence[int]], Array]]:
    """Two functions (tokens) -> fp32 (n, hidden): their embeddings and their rows of the output matrix.

    Raises:
        SettingsError: the model provides no hidden states, or these rows have other sizes.
    """
    sizes_of(model)
    if isinstance(model, OwnModel):
        blueprint = model.compiled.blueprint
        return blueprint.embedding.rows, blueprint.head.rows
    parts = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if parts[0].shape[1] != parts[1].shape[1]:
        raise SettingsError(
            f"a light head needs embeddings of the size of hidden states, and those of {_name(model)} have "
            f"{parts[0].shape[1]} and {parts[1].shape[1]} numbers; decode without one"
        )

    def reader(weight: Any) -> Callable[[Sequence[int]], Array]:
        def rows(tokens: Sequence[int]) -> Array:
            array: Array = weight.detach()[list(tokens)].float().cpu().numpy()
            return array

        return rows

    return reader(parts[0]), reader(parts[1])


def check_hidden(target: Target, what: str = "a light head") -> None:
    """Raise SettingsError, whose message begins with ``what``, unless the target provides hidden states."""
    if not target.gives_hidden:
        raise SettingsError(f"{what} needs hidden states, which the path {target.path!r} does not provide")


def make_head(model: Any, target: Target, weights: HeadWeights) -> Any:
    """The head of a model that this target evaluates: compiled if the target is, else in torch.

    Raises:
        SettingsError: the target provides no hidden states, or the head belongs to another model or another version.
    """
    from .drafters.adaptive.calibration import GREEDY_GUESSES, SAMPLED_GUESSES

    check_hidden(target)
    weights.check(*sizes_of(model), name=_name(model))
    for name, kinds in (("greedy", GREEDY_GUESSES), ("sampled", SAMPLED_GUESSES)):
        found = weights.counts[name][0].shape[1]
        if found != kinds:
            raise SettingsError(
                f"the light head must have counts of {kinds} kinds of {name} guesses, but it has {found}; another "
                "version trained it; train one with lookahead train-head"
            )
    embed, output = row_readers(model)
    if target.runs_compiled:
        from .cpu.compiled_head import CompiledHead

        embedding = model.compiled.blueprint.embedding if isinstance(model, OwnModel) else embed
        return CompiledHead(weights, output(weights.shortlist.tolist()), embedding)
    from .hf.head_network import TorchHead

    rows = model.get_output_embeddings().weight.detach()[weights.shortlist.tolist()]
    embeddings = model.get_input_embeddings().weight.detach()
    return TorchHead(weights, rows, lambda tokens: embeddings[list(tokens)])


def own_head_file(model: Any) -> Path:
    """Where a light head trained on this machine for a model is stored.

    The name depends on the model's sizes, not on its weights, so a head trained on 4-bit weights also serves the
    same model in bf16.
    """
    return cache_folder() / "heads" / f"{table_name(model.config)}.safetensors"


def head_files(model: Any) -> list[Path]:
    """The light heads of a model that exist: the one trained on this machine, then the included one."""
    return existing_files(own_head_file(model), INCLUDED)


def find_head(model: Any) -> Path | None:
    """The first of ``head_files``; None if there is none."""
    return next(iter(head_files(model)), None)


def head_of(
    model: Any, target: Target, wanted: str, make_target: Callable[[], Target], notice: Callable[[str], None]
) -> Any:
    """The light head that a drafter asks for, or None.

    All sequences of a model share it. The first time that a file cannot be used, ``notice`` receives the reason, in
    one line. This includes "auto" on a path without hidden states, because no drafter has a head unless it is
    requested.

    Args:
        model: a loaded model.
        target: one of its targets.
        wanted: the head's path, or "auto" for the first usable one of ``head_files``.
        make_target: makes a target, to measure the cost of a head call if it is not known.
    """
    key = wanted, target.path
    with measuring:
        heads = _of_models.setdefault(model, {})
        if key not in heads:
            heads[key] = None
            try:
                check_hidden(target, f"head={wanted!r}")
            except SettingsError as error:
                notice(f"{error}; continuing without a light head")
                return None
            files = head_files(model) if wanted == "auto" else [Path(wanted)]
            for number, file in enumerate(files, 1):
                try:
                    head = make_head(model, target, load_head(file))
                    head.cost = head_cost(head, model, cost_path(target), make_target, notice)
                except (NumericalError, OutOfMemory, SettingsError) as error:
                    instead = f"with {files[number]}" if number < len(files) else "without a light head"
                    notice(f"{error}; continuing {instead}")
                    continue
                heads[key] = head
                break
        return heads[key]


def _name(model: Any) -> str:
    return str(getattr(model, "description", "") or type(model).__name__).partition(",")[0]
