"""Locations of base tables, and the choice of a model's table.

A table's file name encodes the vocabulary and sizes of the model, but not its weights. A table learned from a 4-bit
file therefore serves the same model in any dtype, since a wrong guess costs a row and never changes a token. Tables
made by ``lookahead learn`` are in the user's cache folder; this package includes one. If a model has both, the one
that was built from more text is used.
"""

from __future__ import annotations

import os
import warnings
from functools import lru_cache
from pathlib import Path

from ...core import SettingsError
from ...records import cache_folder
from .sources.base_table import BaseTable, open_table

#: The tables included in this package.
INCLUDED = Path(__file__).parent / "tables"


def learned_file(name: str) -> Path:
    """The file in which ``lookahead learn`` saves the table of a model.

    Args:
        name: ``lookahead.model.Shape.name``.
    """
    return cache_folder() / "tables" / f"{name}.safetensors"


def existing_files(own: Path, included: Path) -> list[Path]:
    """Those of a model's files that exist: the one made on this machine, then the one included in the package."""
    # Path.is_file raises PermissionError before Python 3.14 if the home folder is not accessible.
    return [file for file in (own, included / own.name) if os.path.isfile(file)]


def read_tables(name: str, vocabulary: int) -> tuple[list[BaseTable], list[str]]:
    """The usable tables of a model, the one built from most text first, and why its other tables cannot be used.

    The table of a short ``lookahead learn`` gives worse guesses than an included one that was built from more text.

    Args:
        name: ``lookahead.model.Shape.name``.
        vocabulary: V of the model; 0 if unknown.
    """
    tables = list[BaseTable]()
    reasons = list[str]()
    for file in existing_files(learned_file(name), INCLUDED):
        try:
            tables.append(checked_table(file, vocabulary))
        except SettingsError as error:
            reasons.append(str(error))
    return sorted(tables, key=lambda table: -table.learned), reasons


def base_table_of(name: str, vocabulary: int) -> BaseTable | None:
    """The first of ``read_tables``; None if there is none. Warns about those that cannot be used."""
    tables, reasons = read_tables(name, vocabulary)
    for reason in reasons:
        _warn(reason)
    return tables[0] if tables else None


def usable_table(path: str | os.PathLike[str], vocabulary: int) -> BaseTable | None:
    """The table in a file. If it cannot be used, warn and return None; decoding continues without it.

    Args:
        path: the file.
        vocabulary: V of the model; 0 if unknown.
    """
    try:
        return checked_table(path, vocabulary)
    except SettingsError as error:
        _warn(str(error))
        return None


def checked_table(path: str | os.PathLike[str], vocabulary: int) -> BaseTable:
    """The table in a file.

    Args:
        path: the file.
        vocabulary: V of the model; 0 if unknown.

    Raises:
        SettingsError: the file is not a base table, or it belongs to another vocabulary.
    """
    table = open_table(path)
    if vocabulary:
        table.check(vocabulary)
    return table


@lru_cache(maxsize=64)
def _warn(message: str) -> None:
    """Warn once per process instead of once per sequence."""
    warnings.warn(f"{message}; drafting continues without this base table", UserWarning, stacklevel=2)
