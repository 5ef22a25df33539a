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
    table = None
    if _finds_table(drafter):
        table = base_table_of(model.tokenizer, key_of(model), model.shape.vocabulary)
    return ForModel(curve, head, table, key_of(model))


def expect(drafter: AdaptiveSettings, tokenizer: Any) -> None:
    """Start to build the base table of a tokenizer while a model loads, if drafters with these settings use it."""
    if _finds_table(drafter):
        base_table_of(tokenizer, tokenizer_key(tokenizer), 0, decodes=False)


def _finds_table(drafter: AdaptiveSettings) -> bool:
    return "base" in drafter.sources and drafter.table is None
