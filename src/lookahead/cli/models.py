"""``lookahead models``: the GGUF files that were downloaded from the hub, and removing them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..gguf import hub
from .console import note
from .shared import Json


def models(
    remove: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Remove this repository from the cache.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the models downloaded from the hub, or remove one.

    A model downloads when it is first used: lookahead generate OWNER/NAME-GGUF:Q4_K_M --prompt TEXT
    """
    freed = hub.remove(remove) if remove is not None else 0
    found = hub.cached_models()
    if as_json:
        listed = [
            {"model": each.repository, "files": [*map(str, each.files)], "bytes": each.size} for each in found
        ]
        typer.echo(json.dumps({"models": listed, "freed": freed}))
        return
    if remove is not None:
        note(f"removed {remove}: {freed / 1e6:,.0f} MB")
    if not found:
        note("no model has been downloaded")
        return
    table = Table("model", "GGUF files", "MB", "last used")
    for each in found:
        names = "\n".join(path.name for path in each.files)
        used = datetime.fromtimestamp(each.last_used).strftime("%Y-%m-%d")
        table.add_row(each.repository, names, f"{each.size / 1e6:,.0f}", used)
    Console().print(table)
