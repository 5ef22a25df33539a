"""Locations of light heads, and the choice of a model's head."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ...core import NumericalError, OutOfMemory, SettingsError, Target
from ...model import Model
from ...records import cache_folder
from .model_curves import measuring
from .sources.head_file import HeadWeights, load_head
from .sources.light_head import GREEDY_GUESSES, SAMPLED_GUESSES, LightHead

#: The heads included in this package.
INCLUDED = Path(__file__).parents[2] / "heads"


def own_head_file(name: str) -> Path:
    """Where a light head trained on this machine for a model is stored.

    The name depends on the model's sizes, not on its weights, so a head trained on 4-bit weights also serves the
    same model in bf16.

    Args:
        name: ``lookahead.model.Shape.name``.
    """
    return cache_folder() / "heads" / f"{name}.safetensors"


def head_files(name: str) -> list[Path]:
    """The light heads of a model that exist: the one trained on this machine, then the included one."""
    own = own_head_file(name)
    # Path.is_file raises PermissionError before Python 3.14 if the home folder is not accessible.
    return [file for file in (own, INCLUDED / own.name) if os.path.isfile(file)]


def find_head(name: str) -> Path | None:
    """The first of ``head_files``; None if there is none."""
    return next(iter(head_files(name)), None)


def check_hidden(target: Target, what: str = "a light head") -> None:
    """Raise SettingsError, whose message begins with ``what``, unless the target provides hidden states."""
    if not target.gives_hidden:
        raise SettingsError(f"{what} needs hidden states, which the path {target.path!r} does not provide")


def make_head(model: Model, target: Target, weights: HeadWeights) -> LightHead:
    """The head of a model that this target evaluates.

    Raises:
        SettingsError: the target provides no hidden states, or the head belongs to another model or another version.
    """
    check_hidden(target)
    parts = model.head_parts()
    weights.check(parts.vocabulary, parts.hidden, name=model.description.partition(",")[0])
    for name, kinds in (("greedy", GREEDY_GUESSES), ("sampled", SAMPLED_GUESSES)):
        found = weights.counts[name][0].shape[1]
        if found != kinds:
            raise SettingsError(
                f"the light head must have counts of {kinds} kinds of {name} guesses, but it has {found}; another "
                "version trained it; train one with lookahead train-head"
            )
    head: LightHead = model.make_head(weights, target)
    head.cost = weights.parameter_count / max(1, model.parameter_count)
    return head


def head_of(model: Model, target: Target, wanted: str, notice: Callable[[str], None]) -> LightHead | None:
    """The light head that a drafter asks for, or None.

    All sequences of a model share it. The first time that a file cannot be used, ``notice`` receives the reason, in
    one line. This includes "auto" on a path without hidden states, because no drafter has a head unless it is
    requested.

    Args:
        model: a loaded model.
        target: one of its targets.
        wanted: the head's path, or "auto" for the first usable one of ``head_files``.
    """
    key = wanted, target.path
    with measuring:
        heads = model.state.setdefault("heads", {})
        if key not in heads:
            heads[key] = None
            try:
                check_hidden(target, f"head={wanted!r}")
            except SettingsError as error:
                notice(f"{error}; continuing without a light head")
                return None
            files = head_files(model.shape.name) if wanted == "auto" else [Path(wanted)]
            for number, file in enumerate(files, 1):
                try:
                    head = make_head(model, target, load_head(file))
                except (NumericalError, OutOfMemory, SettingsError) as error:
                    instead = f"with {files[number]}" if number < len(files) else "without a light head"
                    notice(f"{error}; continuing {instead}")
                    continue
                heads[key] = head
                break
        found: LightHead | None = heads[key]
        return found
