"""Loads what the adaptive drafter uses of a model: cost curve, light head and base table."""

from __future__ import annotations

from typing import Any

from ...core import Target
from ...model import Model
from ..notice import notice
from .base_files import base_table_of, key_of, tokenizer_key
from .for_model import ForModel
from .heads import head_of
from .model_curves import curve_at_hand
from .settings import AdaptiveSettings
from .sources.base_table import BaseTable


def prepare(drafter: AdaptiveSettings, model: Model, target: Target) -> ForModel:
    """What a drafter with these settings uses; arguments as for ``Drafter.prepare``.

    A head that cannot be used is reported once, and drafting continues without it.
    """
    curve = None
    head = None
    if drafter.rows is None:
        curve = curve_at_hand(model, target, notice)
    if drafter.head is not None:
        head = head_of(model, target, drafter.head, notice)
    table = table_for(drafter, model.tokenizer, key_of(model), model.shape.vocabulary)
    return ForModel(curve, head, table, key_of(model))


def table_for(
    drafter: AdaptiveSettings, tokenizer: Any, key: str | None = None, vocabulary: int = 0
) -> BaseTable | None:
    """The base table of a tokenizer, if drafters with these settings use it; see ``base_table_of``.

    Args:
        drafter: the settings.
        tokenizer: None if unknown.
        key: of the tokenizer, if it is known.
        vocabulary: V of the model; 0 if unknown.
    """
    if "base" not in drafter.sources or drafter.table is not None:
        return None
    return base_table_of(tokenizer, tokenizer_key(tokenizer) if key is None else key, vocabulary)
