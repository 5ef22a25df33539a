"""Where base tables are, and which one belongs to a model.

The name of a table's file says the vocabulary and the sizes of the model, and nothing of its weights: a table that
was learned from a 4-bit file serves the same model in any dtype, since a wrong guess costs a row and never a token.
Tables that ``lookahead learn`` has made are in the user's cache folder; one comes with this package.
"""

from __future__ import annotations

import os
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...core import SettingsError
from ...records import cache_folder
from .sources.base_table import BaseTable, open_table

#: The tables that come with this package.
INCLUDED = Path(__file__).parent / "tables"


def table_name(config: Any) -> str:
    """The name of the table of a model, without its suffix.

    Args:
        config: the model's config, of transformers or with the same fields.
    """
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    fields = ("vocab_size", "hidden_size", "num_hidden_layers")
    vocabulary, hidden, layers = (int(getattr(text, name, 0) or 0) for name in fields)
    return f"v{vocabulary}-h{hidden}-l{layers}"


def learned_file(config: Any) -> Path:
    """Where ``lookahead learn`` keeps the table of a model."""
    return cache_folder() / "tables" / f"{table_name(config)}.safetensors"


def find_base_table(config: Any) -> Path | None:
    """The table of a model: the learned one, else the one of this package; None if there is neither."""
    name = f"{table_name(config)}.safetensors"
    for file in (learned_file(config), INCLUDED / name):
        if file.is_file():
            return file
    return None


def usable_table(path: str | os.PathLike[str] | None, vocabulary: int) -> BaseTable | None:
    """The table of a file; None, and a warning, if it cannot be used. Decoding then goes on without one.

    Args:
        path: the file; None for no table.
        vocabulary: V of the model; 0 if unknown.
    """
    if path is None:
        return None
    try:
        table = open_table(path)
        if vocabulary:
            table.check(vocabulary)
    except SettingsError as error:
        _warn(str(error))
        return None
    return table


@lru_cache(maxsize=64)
def _warn(message: str) -> None:
    """Warn once per process: every sequence would say the same."""
    warnings.warn(f"{message}; drafting goes on without a base table", UserWarning, stacklevel=2)
