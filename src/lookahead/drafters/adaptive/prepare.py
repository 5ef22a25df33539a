"""Loads what the adaptive drafter uses of a model: cost curve, light head and base table."""

from __future__ import annotations

from typing import Any

from ...core import Target
from ...model import Model
from ..notice import notice
from .base_files import base_table_of, checked_table, key_of, tokenizer_key
from .for_model import ForModel
from .heads import head_of
from .model_curves import curve_at_hand
from .settings import AdaptiveSettings
from .sources.base_table import open_table


def prepare(drafter: AdaptiveSettings, model: Model, target: Target) -> ForModel:
    """What a drafter with these settings uses; arguments as for ``Drafter.prepare``.

    A head that cannot be used is reported once, and drafting continues without it.

    Raises:
        SettingsError: the table that the settings name cannot be used.
    """
    curve = None
    head = None
    if drafter.rows is None:
        curve = curve_at_hand(model, target, notice)
    if drafter.head is not None:
        head = head_of(model, target, drafter.head, notice)
    table = None
    if _finds_table(drafter):
        table = base_table_of(model.tokenizer, key_of(model), model.shape.vocabulary)
    elif drafter.table is not None:
        table = checked_table(drafter.table, model.shape.vocabulary, key_of(model))
    return ForModel(curve, head, table, key_of(model))


def expect(drafter: AdaptiveSettings, tokenizer: Any) -> None:
    """Start to build the base table of a tokenizer, if drafters with these settings use it and there is none.

    Raises:
        SettingsError: the settings name a table, and it is not one, or it is for another tokenizer.
    """
    if _finds_table(drafter):
        base_table_of(tokenizer, tokenizer_key(tokenizer), 0, decodes=False)
    elif drafter.table is not None:
        table = open_table(drafter.table)
        table.check(table.vocabulary, tokenizer_key(tokenizer))


def _finds_table(drafter: AdaptiveSettings) -> bool:
    return "base" in drafter.sources and drafter.table is None
