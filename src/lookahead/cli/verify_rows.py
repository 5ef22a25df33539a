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
    """For each path of a model: how many logits differ from those of single rows, and which operations do."""
    return [path for name in _paths(llm) if (path := _compare(llm, name)) is not None]


def _paths(llm: LLM) -> tuple[str, ...]:
    """The names of the paths to try."""
    if getattr(llm.model, "module", None) is None:
        return ("auto",)
    from ..hf.paths import NAMES

    return tuple(name for name in NAMES if name != "plain")  # its steps have one row


def _compare(llm: LLM, name: str) -> dict[str, Any] | None:
    """What differs on one path; None if the model has no such path."""
    from ..equivalence import compare_rows

    try:
        target = llm.model.make_target(name)
    except SettingsError as error:
        note(first_line(error))
        return None
    with llm.model.lock(target):
        if target.path == "transformers":  # its steps run the model's own modules
            from ..hf.row_operations import RowOperations

            module: Any = getattr(llm.model, "module", None)
            watched = RowOperations(module)
            found, operations = compare_rows(target, COUNTS, watched.watched), watched.found()
        else:
            found, operations = compare_rows(target, COUNTS), None
    first = next((rows for rows, count in found.values.items() if count), None)
    return {
        "path": target.path,
        "guaranteed": target.guarantee in (BIT_EQUAL, CHECKED),
        "values_of_a_row": found.vocabulary,
        "differ": found.values,
        "bits": found.bits,
        "from_rows": first,
        "first_layer": None if first is None else found.layer[first],
        "operations": operations,
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
    for path in filter(lambda path: path["from_rows"], found):
        typer.echo(f"{path['path']}: {described(path)}")


def described(path: dict[str, Any]) -> str:
    """Where the rows of a path begin to differ, in words."""
    layer, rows, most = path["first_layer"], path["from_rows"], COUNTS[-1]
    where = "after the last keys and values" if layer is None else f"in the keys and values of layer {layer}"
    words = f"{path['bits'][most]:,} bits differ with {most} rows; with {rows}, first {where}"
    differ = [each for each in path["operations"] or () if each["differ"]]
    if path["operations"] is None:
        return f"{words}; operations are not seen separately"
    if not differ:
        return f"{words}; each of {sum(each['of'] for each in path['operations'])} operations alone is equal"
    names = (
        f"{each['differ']} of {each['of']} {each['operation']} (from {each['from_rows']} rows)"
        for each in differ
    )
    return f"{words}; operations that differ: {', '.join(names)}"
