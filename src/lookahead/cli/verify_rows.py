"""``lookahead verify --rows``: from how many rows on do the logits of a step differ from those of single rows?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core import SettingsError
from ..core.errors import first_line
from ..core.target import BIT_EQUAL, CHECKED
from ..records import as_line
from .console import note

if TYPE_CHECKING:
    from ..llm import LLM

#: Rows of the steps that are compared with single rows.
COUNTS = (2, 3, 4, 8, 16, 32, 64)


def verify_rows(llm: LLM, as_json: bool) -> int:
    """Compare every path of a model. Returns the exit status: 2 if bits differ on a path that promises equal ones."""
    found = compare_paths(llm)
    if as_json:
        typer.echo(as_line({"model": llm.name, "dtype": llm.dtype, "paths": found}), nl=False)
    else:
        _show(found)
        typer.echo(f"values of logits that differ in any bit from single rows: {llm.name}, {llm.dtype}")
    return 2 * any(path["guaranteed"] and path["from_rows"] for path in found)


def compare_paths(llm: LLM) -> list[dict[str, Any]]:
    """For each path of a model: for each number of rows, the values of logits that differ from single rows."""
    return [path for name in _paths(llm) if (path := _compare(llm, name)) is not None]


def _paths(llm: LLM) -> tuple[str, ...]:
    """The names of the paths to try."""
    if getattr(llm.model, "module", None) is None:
        return ("auto",)
    from ..hf.paths import NAMES

    return tuple(name for name in NAMES if name != "plain")  # its steps have one row


def _compare(llm: LLM, name: str) -> dict[str, Any] | None:
    """The values that differ on one path; None if the model has no such path."""
    from ..equivalence import values_that_differ

    try:
        target = llm.model.make_target(name)
    except SettingsError as error:
        note(first_line(error))
        return None
    with llm.model.lock(target):
        differ, vocabulary = values_that_differ(target, COUNTS)
    return {
        "path": target.path,
        "guaranteed": target.guarantee in (BIT_EQUAL, CHECKED),
        "values_of_a_row": vocabulary,
        "differ": differ,
        "from_rows": next((rows for rows, count in differ.items() if count), None),
    }


def _show(found: list[dict[str, Any]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("path")
    for rows in COUNTS:
        table.add_column(f"{rows} rows", justify="right")
    for path in found:
        cells = (Text(f"{count:,}", "red" if count else "green") for count in path["differ"].values())
        table.add_row(path["path"], *cells)
    Console(highlight=False).print(table)
